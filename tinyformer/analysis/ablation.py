"""Does a head matter? Take it away, and see what the loss does."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinyformer.analysis.charts import head_grid
from tinyformer.analysis.subject import (
    CHANGE_COLUMNS,
    Change,
    Findings,
    Losses,
    Subject,
    at_least_one,
    by_layer,
    head_pairs,
)
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
    gate.factors = factors
    if replacement is not None:
        # What was taken away before stays away: nothing stands in for it.
        chosen = torch.zeros(layer.num_heads, 1, 1, device=factors.device)
        chosen[list(heads)] = 1.0
        gate.replacement = lambda outputs: chosen.to(outputs.dtype) * replacement(outputs)
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
            "analysis.mode=resample takes a head's output from another window of its batch, and a batch has one alone; "
            "data.batch_size=8 analysis.num_windows=32 works where the text has more, analysis.mode=mean everywhere."
        )
    return [lambda heads: heads.roll(1, dims=0) for _ in subject.layers]


MODES: dict[str, Callable[[Subject], list[Callable[[Tensor], Tensor] | None]]] = {
    "zero": _zero,
    "mean": _mean,
    "resample": _resample,
}
"""What stands in for a head that is taken away, by `analysis.mode`."""


def losses_without(subject: Subject, sets: Sequence[tuple[int, Sequence[int]]], mode: str = "zero") -> list[Losses]:
    """The losses without each set of heads alone.

    Args:
        subject: the model and the text.
        sets: the index of a layer and those of heads within it.
        mode: of `MODES`.
    """
    replacements, losses = MODES[mode](subject), []
    for index, heads in sets:
        with ablated(subject.layers[index], heads, replacements[index]):
            losses.append(subject.losses())
    return losses


def head_changes(subject: Subject) -> list[float]:
    """How much larger the loss is without each of `head_pairs` (zero ablation), in nats per token."""
    base = subject.losses().mean
    return [losses.mean - base for losses in losses_without(subject, _single(head_pairs(subject.layers)))]


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
        self.mode, self.num_windows = mode, at_least_one("num_windows", num_windows, 32)
        self.num_resamples = at_least_one("num_resamples", num_resamples, 1000)

    def __call__(self, subject: Subject, folder: Path) -> Findings:
        layers, pairs, base = subject.layers, head_pairs(subject.layers), subject.losses()
        changes = self._changes(subject, base, _single(pairs))
        ranked = sorted(zip(pairs, changes, strict=True), key=lambda pair: -pair[1].mean)
        findings = Findings(
            scalars={"analysis/loss": base.mean},
            lines={
                "ablation": f"{self.mode}, over {len(base.nats)} {subject.row}s whose loss is {base.mean:.4f} nats per "
                f"{subject.unit}",
                **{f"  layer {i} head {layers[i].head_ids[head]}": str(change) for (i, head), change in ranked[:5]},
            },
            tables={
                "heads": (
                    ["layer", "head", "kv_head", *CHANGE_COLUMNS],
                    [
                        [index, layers[index].head_ids[head], layers[index].kv_of_head[head], *change.row(base)]
                        for (index, head), change in zip(pairs, changes, strict=True)
                    ],
                )
            },
            figures={
                "heads": head_grid(
                    by_layer(layers, [change.mean for change in changes]),
                    [[str(head) for head in layer.head_ids] for layer in layers],
                    f"Change of the loss without the head ({self.mode} ablation), nats per {subject.unit}",
                    diverging=True,
                )
            },
        )
        # A head that is the only reader of its K/V head is its group.
        groups = [(index, group) for index, layer in enumerate(layers) for group in kv_groups(layer) if len(group) > 1]
        if groups:
            findings.tables["kv_groups"] = (
                ["layer", "heads", *CHANGE_COLUMNS],
                [
                    [index, " ".join(str(layers[index].head_ids[head]) for head in group), *change.row(base)]
                    for (index, group), change in zip(groups, self._changes(subject, base, groups), strict=True)
                ],
            )
        return findings

    def _changes(self, subject: Subject, base: Losses, sets: Sequence[tuple[int, Sequence[int]]]) -> list[Change]:
        return [losses.change_from(base, self.num_resamples) for losses in losses_without(subject, sets, self.mode)]


def kv_groups(layer: BaseAttention) -> list[list[int]]:
    """The heads that read each K/V head, as indices within the layer."""
    readers: list[list[int]] = [[] for _ in range(layer.num_kv_heads)]
    for head, kv_head in enumerate(layer.kv_of_head):
        readers[kv_head].append(head)
    return readers


def _single(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, list[int]]]:
    return [(index, [head]) for index, head in pairs]
