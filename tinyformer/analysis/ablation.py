"""Head ablation: the change of the loss without a head."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinyformer.analysis.charts import head_grid
from tinyformer.analysis.pair_probe import queries_of_pairs
from tinyformer.analysis.subject import CHANGE_COLUMNS, Change, Findings, Losses, Subject, by_layer, head_pairs
from tinyformer.errors import ArgumentError, require_at_least, require_choice
from tinyformer.nn import BaseAttention


@contextmanager
def ablated(
    layer: BaseAttention, heads: Sequence[int], replacement: Callable[[Tensor], Tensor] | None = None
) -> Iterator[None]:
    """Ablate heads of a layer inside the block.

    Args:
        layer: the attention layer.
        heads: indices of the heads within the layer.
        replacement: makes the replacement of the heads' outputs from the outputs of all heads; zero by default.
    """
    gate = layer.head_gate
    before = gate.factors, gate.replacement
    factors = torch.ones(layer.num_heads, device=layer.o_proj.weight.device) if before[0] is None else before[0].clone()
    factors[..., list(heads)] = 0.0
    gate.factors = factors
    if replacement is not None:
        # Only for these heads: those that were ablated before stay at zero.
        chosen = torch.zeros(layer.num_heads, 1, 1, device=factors.device)
        chosen[list(heads)] = 1.0
        gate.replacement = lambda outputs: chosen.to(outputs.dtype) * replacement(outputs)
    try:
        yield
    finally:
        gate.factors, gate.replacement = before


def mean_outputs(subject: Subject) -> list[Tensor]:
    """The mean output of each head over all tokens: one tensor `heads 1 v_head_dim` for each layer.

    The padding of pairs is left out.
    """
    sums: list[Tensor] = [torch.zeros(()) for _ in subject.layers]
    counts = [0] * len(subject.layers)
    is_query: dict[str, Tensor] = {}

    def record(index: int, kind: str) -> Callable[..., None]:
        def add(gate: Any, args: tuple[Tensor, ...]) -> None:
            outputs = args[0].float()
            if kind in is_query:
                outputs = outputs * is_query[kind][:, None, :, None]
            sums[index] = sums[index].to(outputs.device) + outputs.sum(dim=(0, 2))
            counts[index] += int(is_query[kind].sum()) if kind in is_query else outputs.shape[0] * outputs.shape[2]

        return add

    layers = enumerate(zip(subject.layers, subject.addresses, strict=True))
    hooks = [
        layer.head_gate.register_forward_pre_hook(record(index, str(address[0]))) for index, (layer, address) in layers
    ]
    try:
        for batch in subject.batches:
            is_query = queries_of_pairs(batch)
            with torch.no_grad(), subject.precision():
                subject.task.forward(subject.network, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return [(total / count).unsqueeze(1) for total, count in zip(sums, counts, strict=True)]


def _zero(subject: Subject) -> list[Callable[[Tensor], Tensor] | None]:
    return [None for _ in subject.layers]


def _mean(subject: Subject) -> list[Callable[[Tensor], Tensor] | None]:
    return [lambda heads, mean=mean: mean.to(heads.dtype) for mean in mean_outputs(subject)]


def _resample(subject: Subject) -> list[Callable[[Tensor], Tensor] | None]:
    if min(len(batch["inputs"]) for batch in subject.batches) < 2:
        row = subject.row
        reason = f"needs at least two {row}s in every batch, since the output of another {row} replaces the head's"
        raise ArgumentError("mode", "resample", reason, {"mode": "mean"})
    return [lambda heads: heads.roll(1, dims=0) for _ in subject.layers]


MODES: dict[str, Callable[[Subject], list[Callable[[Tensor], Tensor] | None]]] = {
    "zero": _zero,
    "mean": _mean,
    "resample": _resample,
}
"""By name, what replaces the output of an ablated head of each layer."""


def losses_without(
    subject: Subject, head_sets: Sequence[tuple[int, Sequence[int]]], mode: str = "zero"
) -> list[Losses]:
    """The losses after ablating each set of heads separately.

    Args:
        subject: the model and its data.
        head_sets: a layer's index and the indices of heads within it.
        mode: a name in `MODES`.
    """
    replacements, losses = MODES[mode](subject), []
    for index, heads in head_sets:
        with ablated(subject.layers[index], heads, replacements[index]):
            losses.append(subject.losses())
    return losses


def head_changes(subject: Subject) -> list[float]:
    """The increase of the loss by zero ablation of each of `head_pairs`, in nats per target."""
    base = subject.losses().mean
    return [losses.mean - base for losses in losses_without(subject, _single_heads(head_pairs(subject.layers)))]


class HeadAblation:
    """Ablation of each head, and of each group of heads that share a K/V head.

    The increase of the loss is what no other head can supply (Michel et al. 2019, arXiv 1905.10650).

    Args:
        mode: what replaces the head's output: `zero`; its `mean` over all tokens (Wang et al. 2022, arXiv 2211.00593),
            which removes what differs between tokens and keeps the constant part; or `resample`, its output for
            another window (Chan et al. 2022, causal scrubbing), which keeps the output's distribution. Where another
            pair is shorter, its output for the padding is taken.
        num_windows: number of windows, or pairs, of the evaluated split.
        num_resamples: number of bootstrap resamples of the windows.

    Raises:
        ArgumentError: the mode is unknown, or a number is below 1.
    """

    needs_gradient = False

    def __init__(self, mode: str = "zero", num_windows: int = 32, num_resamples: int = 1000) -> None:
        require_choice("mode", mode, MODES)
        require_at_least(
            1, {"num_windows": 32, "num_resamples": 1000}, num_windows=num_windows, num_resamples=num_resamples
        )
        self.mode, self.num_windows, self.num_resamples = mode, num_windows, num_resamples

    def __call__(self, subject: Subject, folder: Path) -> Findings:
        layers, pairs, base = subject.layers, head_pairs(subject.layers), subject.losses()
        unit, changes = subject.task.unit, self._changes(subject, base, _single_heads(pairs))
        ranked = sorted(zip(pairs, changes, strict=True), key=lambda pair: -pair[1].mean)
        findings = Findings(
            scalars={"analysis/loss": base.mean},
            lines={
                "ablation": f"{self.mode}; {len(base.nats)} {subject.row}s with a loss of {base.mean:.4f} nats per "
                f"{unit}; change of the loss [95 % interval]:",
                **{f"  {subject.head_title(i, head)}": str(change) for (i, head), change in ranked[:5]},
            },
            tables={
                "heads": (
                    [*subject.address_columns, "head", "kv_head", *CHANGE_COLUMNS],
                    [
                        [*subject.head_address(index, head), layers[index].head_map.kv_heads[head], *change.row(base)]
                        for (index, head), change in zip(pairs, changes, strict=True)
                    ],
                )
            },
            figures={
                "heads": head_grid(
                    by_layer(layers, [change.mean for change in changes]),
                    [[str(head) for head in layer.head_map.ids] for layer in layers],
                    f"Change of the loss without the head ({self.mode} ablation), nats per {unit}",
                    diverging=True,
                    layers=subject.addresses,
                )
            },
        )
        # A head that alone uses its K/V head is in the table of heads already.
        groups = [(index, group) for index, layer in enumerate(layers) for group in kv_groups(layer) if len(group) > 1]
        if groups:
            findings.tables["kv_groups"] = (
                [*subject.address_columns, "heads", *CHANGE_COLUMNS],
                [
                    [
                        *subject.addresses[index],
                        " ".join(str(layers[index].head_map.ids[head]) for head in group),
                        *change.row(base),
                    ]
                    for (index, group), change in zip(groups, self._changes(subject, base, groups), strict=True)
                ],
            )
        return findings

    def _changes(self, subject: Subject, base: Losses, head_sets: Sequence[tuple[int, Sequence[int]]]) -> list[Change]:
        losses = losses_without(subject, head_sets, self.mode)
        return [after.change_from(base, self.num_resamples) for after in losses]


def kv_groups(layer: BaseAttention) -> list[list[int]]:
    """The query heads that share each K/V head, as indices within the layer."""
    groups: list[list[int]] = [[] for _ in range(layer.num_kv_heads)]
    for head, kv_head in enumerate(layer.head_map.kv_heads):
        groups[kv_head].append(head)
    return groups


def _single_heads(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, list[int]]]:
    return [(index, [head]) for index, head in pairs]
