"""Does a head matter? Take it away, and see what the loss does."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinyformer.analysis.charts import head_grid
from tinyformer.analysis.subject import Change, Findings, Subject, by_layer, check_windows, head_pairs
from tinyformer.nn import BaseAttention


@contextmanager
def ablated(
    layer: BaseAttention, heads: Sequence[int], replacement: Callable[[Tensor], Tensor] | None = None
) -> Iterator[None]:
    """Take heads of a layer away inside the block.

    Args:
        layer: whose heads.
        heads: their indices within the layer.
        replacement: makes what stands in for the heads' outputs; zero unless given.
    """
    gate = layer.head_gate
    before = gate.factors, gate.replacement
    factors = torch.ones(layer.num_heads, device=layer.o_proj.weight.device) if before[0] is None else before[0].clone()
    factors[..., list(heads)] = 0.0
    gate.factors, gate.replacement = factors, replacement
    try:
        yield
    finally:
        gate.factors, gate.replacement = before


def mean_outputs(subject: Subject) -> list[Tensor]:
    """The mean output of each head over all tokens, `heads 1 v_head_dim` for each layer."""
    sums: list[Tensor] = [torch.zeros(()) for _ in subject.layers]

    def record(index: int) -> Callable[..., None]:
        def add(gate: Any, args: tuple[Tensor, ...]) -> None:
            sums[index] = sums[index].to(args[0].device) + args[0].float().sum(dim=(0, 2))

        return add

    hooks = [layer.head_gate.register_forward_pre_hook(record(index)) for index, layer in enumerate(subject.layers)]
    try:
        subject.losses()
    finally:
        for hook in hooks:
            hook.remove()
    tokens = sum(batch["inputs"].numel() for batch in subject.batches)
    return [(total / tokens).unsqueeze(1) for total in sums]


def _zero(subject: Subject) -> list[Callable[[Tensor], Tensor] | None]:
    return [None for _ in subject.layers]


def _mean(subject: Subject) -> list[Callable[[Tensor], Tensor] | None]:
    return [lambda heads, mean=mean: mean.to(heads.dtype) for mean in mean_outputs(subject)]


def _resample(subject: Subject) -> list[Callable[[Tensor], Tensor] | None]:
    if min(len(batch["inputs"]) for batch in subject.batches) < 2:
        raise ValueError(
            "analysis.mode=resample takes a head's output from another window of the batch, and there is one alone; "
            "data.batch_size=8 analysis.num_windows=32 works."
        )
    return [lambda heads: heads.roll(1, dims=0) for _ in subject.layers]


MODES: dict[str, Callable[[Subject], list[Callable[[Tensor], Tensor] | None]]] = {
    "zero": _zero,
    "mean": _mean,
    "resample": _resample,
}
"""What stands in for a head that is taken away, by `analysis.mode`."""


class HeadAblation:
    """Each head alone is taken away, and each group of heads that share a K/V head.

    The change of the loss says what the head gives that no other gives (Michel et al. 2019, arXiv 1905.10650).

    Args:
        mode: what stands in for its output: `zero`; its `mean` over all tokens (Wang et al. 2022, arXiv 2211.00593),
            which takes what the head tells apart and leaves what it always says; or `resample`, its output for another
            window (Chan et al. 2022, causal scrubbing), which keeps its distribution.
        num_windows: of the evaluated split.
        num_resamples: of the bootstrap over windows.

    Raises:
        ValueError: there is no such mode, or a number is too small.
    """

    needs_gradient = False

    def __init__(self, mode: str = "zero", num_windows: int = 32, num_resamples: int = 1000) -> None:
        if mode not in MODES:
            raise ValueError(f"analysis.mode={mode}: choose one of {', '.join(MODES)}.")
        if num_resamples < 1:
            raise ValueError(f"analysis.num_resamples={num_resamples}: at least one, analysis.num_resamples=1000.")
        self.mode, self.num_windows, self.num_resamples = mode, check_windows(num_windows), num_resamples

    def __call__(self, subject: Subject, folder: Path) -> Findings:
        layers = subject.layers
        base, replacements = subject.losses(), MODES[self.mode](subject)
        pairs = head_pairs(layers)
        # A head that is the only reader of its K/V head is its group.
        groups = [(index, group) for index, layer in enumerate(layers) for group in kv_groups(layer) if len(group) > 1]
        changes: list[Change] = []
        for index, heads in [(index, [head]) for index, head in pairs] + groups:
            with ablated(layers[index], heads, replacements[index]):
                changes.append(subject.losses().change_from(base, self.num_resamples))
        of_heads, of_groups = changes[: len(pairs)], changes[len(pairs) :]
        rows = [
            [
                index,
                layers[index].head_ids[head],
                kv_head_of(layers[index], head),
                base.mean + c.mean,
                c.mean,
                c.low,
                c.high,
            ]
            for (index, head), c in zip(pairs, of_heads, strict=True)
        ]
        columns = ["layer", "head", "kv_head", "loss", "change", "low", "high"]
        ranked = sorted(zip(pairs, of_heads, strict=True), key=lambda pair: -pair[1].mean)
        findings = Findings(
            scalars={"analysis/loss": base.mean},
            lines={
                "ablation": f"{self.mode}, over {len(base.nats)} windows whose loss is {base.mean:.4f} nats per token",
                **{
                    f"  layer {index} head {layers[index].head_ids[head]}": str(change)
                    for (index, head), change in ranked[:5]
                },
            },
            tables={"heads": (columns, rows)},
            figures={
                "heads": head_grid(
                    by_layer(layers, [change.mean for change in of_heads]),
                    [[str(head) for head in layer.head_ids] for layer in layers],
                    f"Change of the loss without the head ({self.mode} ablation), nats per token",
                    diverging=True,
                )
            },
        )
        if groups:
            findings.tables["kv_groups"] = (
                ["layer", "heads", "loss", "change", "low", "high"],
                [
                    [index, _numbers(layers[index], group), base.mean + c.mean, c.mean, c.low, c.high]
                    for (index, group), c in zip(groups, of_groups, strict=True)
                ],
            )
        return findings


def kv_groups(layer: BaseAttention) -> list[list[int]]:
    """The heads that read each K/V head, as indices within the layer."""
    readers: list[list[int]] = [[] for _ in range(layer.num_kv_heads)]
    for head in range(layer.num_heads):
        readers[kv_head_of(layer, head)].append(head)
    return readers


def kv_head_of(layer: BaseAttention, head: int) -> int:
    """The K/V head that a head reads, both as indices within the layer."""
    if layer.kv_index is not None:
        return int(layer.kv_index[head])
    return head // (layer.num_heads // layer.num_kv_heads)


def _numbers(layer: BaseAttention, heads: Sequence[int]) -> str:
    return " ".join(str(layer.head_ids[head]) for head in heads)
