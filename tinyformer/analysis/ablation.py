"""Head ablation: the change of the loss without a head."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tinyformer.analysis.measures.capture import running_hooks
from tinyformer.analysis.measures.padding import queries_by_kind
from tinyformer.analysis.subject import (
    CHANGE_COLUMNS,
    Change,
    Findings,
    Losses,
    Subject,
    Trained,
    head_pairs,
    living_heads,
    naming_ablated,
)
from tinyformer.batch import Batch
from tinyformer.errors import ArgumentError, require_at_least, require_choice
from tinyformer.nn import BaseAttention, Network

Result = TypeVar("Result")

Heads: TypeAlias = Sequence[tuple[int, int]]
"""Some of `head_pairs`: the index of each head's layer, and its index within the layer."""

Replacement: TypeAlias = Callable[[Tensor], Tensor]
"""Maps the outputs of a layer's heads, `batch heads seq v_head_dim`, to a replacement that broadcasts to them."""

ReplacementOf: TypeAlias = Callable[[Batch, int], Replacement | None]
"""Makes the replacement for a batch in a layer, given its index; None for zero."""


@contextmanager
def ablated(layer: BaseAttention, heads: Sequence[int], replacement: Replacement | None = None) -> Iterator[None]:
    """Ablate heads of a layer inside the block.

    Args:
        layer: the attention layer.
        heads: indices of the heads within the layer.
        replacement: maps the outputs of all heads to their replacements; zero by default.
    """
    gate = layer.head_gate
    before = gate.factors, gate.replacement
    factors = torch.ones(layer.num_heads, device=layer.o_proj.weight.device) if before[0] is None else before[0].clone()
    factors[..., list(heads)] = 0.0
    gate.factors = factors
    if before[1] is not None or replacement is not None:
        chosen = torch.zeros(layer.num_heads, 1, 1, dtype=torch.bool, device=factors.device)
        chosen[list(heads)] = True

        def replaced(outputs: Tensor) -> Tensor:
            own, others = (torch.zeros_like(outputs) if of is None else of(outputs) for of in (replacement, before[1]))
            return torch.where(chosen, own, others)  # heads that were ablated before keep their replacement

        gate.replacement = replaced
    try:
        yield
    finally:
        gate.factors, gate.replacement = before


@contextmanager
def gated(
    network: Network,
    heads: Heads,
    replacement_of: Callable[[int], Replacement | None] = lambda layer: None,
) -> Iterator[None]:
    """Ablate heads inside the block, with a replacement by the index of the layer; None for zero."""
    with ExitStack() as stack:
        for index, layer in enumerate(network.attentions()):
            if of_layer := [head for at, head in heads if at == index]:
                stack.enter_context(ablated(layer, of_layer, replacement_of(index)))
        yield


Outputs: TypeAlias = tuple[Float[Tensor, "batch heads seq v_head_dim"], Bool[Tensor, "batch seq"]]
"""The outputs of a layer's heads for a batch, and which of them are those of tokens and not of padding."""


def outputs_by_head(subject: Subject, batch: Batch, reduce: Callable[[Outputs], Result]) -> list[Result]:
    """The outputs of the heads of each layer for a batch; those of an ablated head are its own, as if it were not.

    Only what `reduce` makes of the outputs of a layer is kept.
    """
    is_token, layers, found = queries_by_kind(batch), subject.network.attentions(), dict[int, Result]()

    def record(index: int, gate: Any, args: tuple[Tensor, ...]) -> None:
        found[index] = reduce((args[0], is_token[subject.kinds[index]]))

    hooks = [at.head_gate.register_forward_pre_hook(partial(record, index)) for index, at in enumerate(layers)]
    try:
        with torch.no_grad(), subject.precision(), running_hooks(subject.network):
            subject.task.forward(subject.network, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return [found[index] for index in range(len(layers))]


def mean_outputs(subject: Subject) -> list[Tensor]:
    """The mean output of each head over all tokens, without padding: `heads 1 v_head_dim` for each layer."""

    def summed(of_layer: Outputs) -> tuple[Tensor, int]:
        outputs, is_token = of_layer
        return outputs.float().masked_fill(~is_token[:, None, :, None], 0).sum(dim=(0, 2)), int(is_token.sum())

    of_batches = [outputs_by_head(subject, batch, summed) for batch in subject.batches]
    layers = (zip(*of_layer, strict=True) for of_layer in zip(*of_batches, strict=True))
    return [(torch.stack(sums).sum(dim=0) / sum(counts)).unsqueeze(1) for sums, counts in layers]


def resampled_positions(
    lengths: Int[Tensor, " batch"], num_positions: int, seed: int = 0
) -> Int[Tensor, "batch positions"]:
    """For each position of a row, the position in another row whose output replaces its own.

    It is the same position or, beyond the end of the other row, that of one of its tokens, drawn at random.

    Args:
        lengths: the number of tokens of the other row, for each row.
        num_positions: the number of positions of the rows.
        seed: seed of the draws.
    """
    ends, place = lengths.clamp(min=1).unsqueeze(1), torch.arange(num_positions, device=lengths.device)
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(len(lengths), num_positions, generator=generator, dtype=torch.float64)
    return torch.where(place < ends, place, (draws.to(place.device) * ends).long())


def _zero(subject: Subject) -> ReplacementOf:
    return lambda batch, layer: None


def _mean(subject: Subject) -> ReplacementOf:
    means = mean_outputs(subject)
    return lambda batch, layer: lambda heads: means[layer].to(heads.dtype)


def _resample(subject: Subject) -> ReplacementOf:
    if min(len(batch["inputs"]) for batch in subject.batches) < 2:
        row = subject.row
        reason = f"needs at least two {row}s in every batch, since the output of another {row} replaces the head's"
        raise ArgumentError("mode", "resample", reason, {"mode": "mean"})

    def replacement_of(batch: Batch, layer: int) -> Replacement:
        is_token = queries_by_kind(batch)[subject.kinds[layer]]
        positions = resampled_positions(is_token.sum(dim=1).roll(1), is_token.shape[1])[:, None, :, None]
        return lambda heads: heads.roll(1, dims=0).take_along_dim(positions, dim=2)

    return replacement_of


MODES: dict[str, Callable[[Subject], ReplacementOf]] = {
    "zero": _zero,
    "mean": _mean,
    "resample": _resample,
}
"""By name, what replaces the output of an ablated head."""


def losses_without(subject: Subject, head_sets: Sequence[Heads], mode: str = "zero") -> list[Losses]:
    """The losses after ablating each set of heads separately, with a mode of `MODES`."""
    replacement_of = MODES[mode](subject)

    def without(heads: Heads, batch: Batch) -> AbstractContextManager[None]:
        return gated(subject.network, heads, partial(replacement_of, batch))

    return [subject.losses_within(partial(without, heads)) for heads in head_sets]


def head_changes(subject: Subject) -> list[float]:
    """The increase of the loss after zero ablation of each of `head_pairs`, in nats per target."""
    base = subject.losses().mean
    return [losses.mean - base for losses in losses_without(subject, [[pair] for pair in head_pairs(subject.layers)])]


class HeadAblation:
    """Ablation of each head, and of each group of heads that share a K/V head.

    The increase of the loss measures what no other head can supply (Michel et al. 2019, arXiv 1905.10650).

    Args:
        mode: what replaces the head's output: `zero`; its `mean` over all tokens (Wang et al. 2022, arXiv 2211.00593),
            which removes what differs between tokens and keeps the constant part; or `resample`, its output at the
            same position of another window (Chan et al. 2022, causal scrubbing), which keeps the output's distribution.
            Where that window is shorter, the output is that of a random token of it; the draw is the same for every
            head. The modes of `tinyformer.Model.ablated` are the same.
        num_windows: number of windows, examples or pairs, drawn at random from the evaluated split.
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

    def __call__(self, model: Trained, folder: Path = Path()) -> Findings:
        subject = model.sample(self.num_windows)
        layers, living, base = subject.layers, living_heads(subject.layers), subject.losses()
        changes = dict.fromkeys(head_pairs(layers), Change(0.0, 0.0, 0.0))
        changes |= zip(living, self._changes(subject, base, [[pair] for pair in living]), strict=True)
        unit, ranked = subject.task.unit, sorted(living, key=lambda pair: -changes[pair].mean)
        findings = Findings(
            scalars={"analysis/loss": base.mean},
            lines={
                "ablation": f"{self.mode}; {len(base.nats)} {subject.row}s with a loss of {base.mean:.4f} nats per "
                f"{unit}; change of the loss [95 % interval]:",
                **{f"  {subject.head_title(*pair)}": str(changes[pair]) for pair in ranked[:5]},
            },
            tables={
                "ablation": naming_ablated(
                    [*subject.address_columns, "head", "kv_head", *CHANGE_COLUMNS],
                    [
                        [*subject.head_address(index, head), layers[index].head_map.kv_heads[head], *change.row(base)]
                        for (index, head), change in changes.items()
                    ],
                    [pair not in living for pair in changes],
                )
            },
            figures={
                "ablation": subject.head_grid(
                    [change.mean for change in changes.values()],
                    f"Change of the loss without the head ({self.mode} ablation)",
                    f"change of the loss, nats per {unit}",
                    diverging=True,
                )
            },
        )
        # A head that does not share its K/V head is in the table of heads already.
        groups = [group for index, layer in enumerate(layers) for group in kv_groups(index, layer) if len(group) > 1]
        if groups:
            findings.tables["kv_groups"] = (
                [*subject.address_columns, "heads", *CHANGE_COLUMNS],
                [
                    [
                        *subject.addresses[group[0][0]],
                        " ".join(str(subject.head_address(*pair)[-1]) for pair in group),
                        *change.row(base),
                    ]
                    for group, change in zip(groups, self._changes(subject, base, groups), strict=True)
                ],
            )
        return findings

    def _changes(self, subject: Subject, base: Losses, head_sets: Sequence[Heads]) -> list[Change]:
        losses = losses_without(subject, head_sets, self.mode)
        return [after.change_from(base, self.num_resamples) for after in losses]


def kv_groups(index: int, layer: BaseAttention) -> list[list[tuple[int, int]]]:
    """The query heads of a layer that share each K/V head and are not ablated; `index` is the layer's."""
    groups: list[list[tuple[int, int]]] = [[] for _ in range(layer.num_kv_heads)]
    for head, (kv_head, is_ablated) in enumerate(zip(layer.head_map.kv_heads, layer.ablated(), strict=True)):
        groups[kv_head] += [] if is_ablated else [(index, head)]
    return groups
