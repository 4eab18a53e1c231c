"""Heads without which the loss is computed: ablation of each head, and importance, its estimate by gradients."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tinyformer.analysis.context import AnalysisContext, Head, Trained, changed, require_positive
from tinyformer.batch import Batch
from tinyformer.errors import ArgumentError, require_choice
from tinyformer.measures.capture import running_hooks
from tinyformer.measures.inputs import queries_by_kind
from tinyformer.measures.intervals import CHANGE_COLUMNS, Change, Losses
from tinyformer.nn import BaseAttention, Network
from tinyformer.report.result import AnalysisResult

Result = TypeVar("Result")

Replacement: TypeAlias = Callable[[Tensor], Tensor]
"""Maps the outputs of a layer's heads, `batch heads seq v_head_dim`, to a replacement that broadcasts to them."""

ReplacementOf: TypeAlias = Callable[[Batch, int], Replacement | None]
"""Makes the replacement for a batch in a layer, given its index; None for zero."""

Outputs: TypeAlias = tuple[Float[Tensor, "batch heads seq v_head_dim"], Bool[Tensor, "batch seq"]]
"""The outputs of a layer's heads for a batch, and which of them are those of tokens and not of padding."""


@contextmanager
def ablated(layer: BaseAttention, heads: Sequence[int], replacement: Replacement | None = None) -> Iterator[None]:
    """Ablate heads of a layer inside the block, given their indices and the replacement of their outputs."""
    gate = layer.head_gate
    factors, earlier = gate.factors, gate.replacement
    factors = torch.ones(layer.num_heads, device=layer.o_proj.weight.device) if factors is None else factors.clone()
    factors[..., list(heads)] = 0.0
    if earlier is None and replacement is None:
        replaced = None
    else:
        chosen = torch.zeros(layer.num_heads, 1, 1, dtype=torch.bool, device=factors.device)
        chosen[list(heads)] = True

        def replaced(outputs: Tensor) -> Tensor:
            now, before = (torch.zeros_like(outputs) if of is None else of(outputs) for of in (replacement, earlier))
            return torch.where(chosen, now, before)  # heads that were ablated before keep their replacement

    with changed([gate], factors=factors, replacement=replaced):
        yield


@contextmanager
def gated(
    network: Network, heads: Sequence[Head], replacement_of: Callable[[int], Replacement | None] = lambda layer: None
) -> Iterator[None]:
    """Ablate heads inside the block, with a replacement by the index of the layer; None for zero."""
    with ExitStack() as stack:
        for index, layer in enumerate(network.attentions()):
            if of_layer := [head for at, head in heads if at == index]:
                stack.enter_context(ablated(layer, of_layer, replacement_of(index)))
        yield


def outputs_by_head(context: AnalysisContext, batch: Batch, reduce: Callable[[Outputs], Result]) -> list[Result]:
    """The reduction by `reduce` of the outputs of each layer's heads for a batch, as if no head were ablated."""
    is_token, layers, reduced = queries_by_kind(batch), context.network.attentions(), dict[int, Result]()

    def record(index: int, gate: Any, args: tuple[Tensor, ...]) -> None:
        reduced[index] = reduce((args[0], is_token[context.kinds[index]]))

    with ExitStack() as hooks, torch.no_grad(), context.precision(), running_hooks(context.network):
        for index, layer in enumerate(layers):
            hooks.enter_context(layer.head_gate.register_forward_pre_hook(partial(record, index)))
        context.task.forward(context.network, batch)
    return [reduced[index] for index in range(len(layers))]


def mean_outputs(context: AnalysisContext) -> list[Tensor]:
    """The mean output of each head over all tokens, without padding: `heads 1 v_head_dim` for each layer."""

    def summed(of_layer: Outputs) -> tuple[Tensor, int]:
        outputs, is_token = of_layer
        return outputs.float().masked_fill(~is_token[:, None, :, None], 0).sum(dim=(0, 2)), int(is_token.sum())

    of_batches = [outputs_by_head(context, batch, summed) for batch in context.batches]
    layers = (zip(*of_layer, strict=True) for of_layer in zip(*of_batches, strict=True))
    return [(torch.stack(sums).sum(dim=0) / sum(counts)).unsqueeze(1) for sums, counts in layers]


def resampled_positions(lengths: Int[Tensor, " batch"], num_positions: int) -> Int[Tensor, "batch positions"]:
    """For each position of a row, the position in another row whose output replaces its own.

    It is the same position or, beyond the end of the other row, whose number of tokens is in `lengths`, that of one of
    its tokens, drawn at random.
    """
    ends, place = lengths.clamp(min=1).unsqueeze(1), torch.arange(num_positions, device=lengths.device)
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(len(lengths), num_positions, generator=generator, dtype=torch.float64)
    return torch.where(place < ends, place, (draws.to(place.device) * ends).long())


def _mean(context: AnalysisContext) -> ReplacementOf:
    means = mean_outputs(context)
    return lambda batch, layer: lambda heads: means[layer].to(heads.dtype)


def _resample(context: AnalysisContext) -> ReplacementOf:
    if min(len(batch["inputs"]) for batch in context.batches) < 2:
        row = context.row
        reason = f"needs at least two {row}s in every batch, since the output of another {row} replaces the head's"
        raise ArgumentError("mode", "resample", reason, {"mode": "mean"})

    def replacement_of(batch: Batch, layer: int) -> Replacement:
        is_token = queries_by_kind(batch)[context.kinds[layer]]
        positions = resampled_positions(is_token.sum(dim=1).roll(1), is_token.shape[1])[:, None, :, None]
        return lambda heads: heads.roll(1, dims=0).take_along_dim(positions, dim=2)

    return replacement_of


MODES: dict[str, Callable[[AnalysisContext], ReplacementOf]] = {
    "zero": lambda context: lambda batch, layer: None,
    "mean": _mean,
    "resample": _resample,
}
"""By name, what replaces the output of an ablated head."""


def losses_without(context: AnalysisContext, head_sets: Sequence[Sequence[Head]], mode: str = "zero") -> list[Losses]:
    """The losses after ablating each set of heads separately, with a mode of `MODES`."""
    replacement_of = MODES[mode](context)
    return [
        context.losses(lambda batch, heads=heads: gated(context.network, heads, partial(replacement_of, batch)))
        for heads in head_sets
    ]


def head_changes(context: AnalysisContext) -> list[float]:
    """The increase of the loss after zero ablation of each of the context's heads, in nats per target."""
    base = context.losses().mean
    return [losses.mean - base for losses in losses_without(context, [[head] for head in context.heads])]


def head_importance(context: AnalysisContext) -> list[float]:
    """I_h = mean over windows of |∂L/∂g_h|, where g_h is the head's gate (Michel et al. 2019, arXiv 1905.10650, eq. 2).

    L is the mean loss of a window, in nats per target. Each window has its own gates, so one forward and one backward
    pass give the gradients of all windows of a batch.
    """
    totals = [torch.zeros(layer.num_heads) for layer in context.layers]
    for batch in context.batches:
        gates = []
        with ExitStack() as stack, torch.enable_grad(), context.precision():
            for layer in context.layers:
                shape, factors = (len(batch["inputs"]), layer.num_heads), layer.head_gate.factors
                gate = torch.ones(shape, device=layer.o_proj.weight.device, requires_grad=True)
                # An ablated head stays ablated, and its gate has no gradient.
                stack.enter_context(changed([layer.head_gate], factors=gate if factors is None else factors * gate))
                gates.append(gate)
            nats, targets = context.task.nats(context.network, batch)
            gradients = torch.autograd.grad((nats / targets.clamp(min=1)).sum(), gates)
        totals = [total + each.abs().sum(dim=0).cpu() for total, each in zip(totals, gradients, strict=True)]
    return (torch.cat(totals) / context.num_windows).tolist()


@dataclass(eq=False)
class HeadAblation:
    """Ablation of each head, and of each group of heads that share a K/V head.

    The increase of the loss measures what no other head can supply (Michel et al. 2019, arXiv 1905.10650).

    Args:
        mode: what replaces the head's output: `zero`; its `mean` over all tokens (Wang et al. 2022, arXiv 2211.00593),
            which removes what differs between tokens and keeps the constant part; or `resample`, its output at the
            same position of another window (Chan et al. 2022, causal scrubbing), which keeps the output's distribution.
            Where that window is shorter, the output is that of a random token of it; the draw is the same for every
            head. The modes of `tinyformer.Model.ablated` are the same.
    """

    mode: str = "zero"
    num_windows: int = 32
    num_resamples: int = 1000  # bootstrap resamples of the windows
    needs_gradient = False

    def __post_init__(self) -> None:
        require_choice("mode", self.mode, MODES)
        require_positive(self, "num_windows", "num_resamples")

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        living, base, unit = context.active_heads, context.losses(), context.task.unit
        changes = dict.fromkeys(context.heads, Change(0.0, 0.0, 0.0))
        changes |= zip(living, self._changes(context, base, [[head] for head in living]), strict=True)
        kv_heads = {(index, head): context.layers[index].head_map.kv_heads[head] for index, head in changes}
        worst = sorted(living, key=lambda head: -changes[head].mean)[:5]
        of_heads = {head: [kv_heads[head], *change.row(base)] for head, change in changes.items()}
        tables = {"ablation": context.head_table(["kv_head", *CHANGE_COLUMNS], of_heads)}
        sharing = defaultdict[tuple[int, int], list[Head]](list)
        for layer, head in living:
            sharing[layer, kv_heads[layer, head]].append((layer, head))
        # A head that does not share its K/V head is in the table of heads already.
        if groups := [group for group in sharing.values() if len(group) > 1]:
            rows = []
            for group, change in zip(groups, self._changes(context, base, groups), strict=True):
                numbers = " ".join(str(context.head_address(*head)[-1]) for head in group)
                rows.append([*context.addresses[group[0][0]], numbers, *change.row(base)])
            tables["kv_groups"] = [*context.address_columns, "heads", *CHANGE_COLUMNS], rows
        return AnalysisResult(
            scalars={"analysis/loss": base.mean},
            lines={
                "ablation": f"{self.mode}; {context.describe_losses(base)}",
                **{f"  {context.head_title(*head)}": str(changes[head]) for head in worst},
            },
            tables=tables,
            figures={
                "ablation": context.head_grid(
                    {head: change.mean for head, change in changes.items()},
                    f"Change of the loss without the head ({self.mode} ablation)",
                    f"change of the loss, nats per {unit}",
                    diverging=True,
                )
            },
        )

    def _changes(self, context: AnalysisContext, base: Losses, head_sets: Sequence[Sequence[Head]]) -> list[Change]:
        losses = losses_without(context, head_sets, self.mode)
        return [after.change_from(base, self.num_resamples) for after in losses]


@dataclass(eq=False)
class HeadImportance:
    """The importance of each head by gradient, and optionally its rank correlation with ablation."""

    num_windows: int = 32
    compare: bool = True  # also ablate each head, and report Spearman's ρ of importance and change of the loss
    needs_gradient = True

    def __post_init__(self) -> None:
        require_positive(self, "num_windows")

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        importance = dict(zip(context.heads, head_importance(context), strict=True))
        living = context.active_heads
        most = sorted(living, key=lambda head: -importance[head])[:5]
        label = f"mean |∂ loss / ∂ gate|, nats per {context.task.unit}"
        findings = AnalysisResult(
            lines={
                "importance": label,
                **{f"  {context.head_title(*head)}": f"{importance[head]:.4f}" for head in most},
            },
            figures={"importance": context.head_grid(importance, "Importance of each head", label)},
        )
        columns, rows = ["importance"], {head: [value] for head, value in importance.items()}
        if self.compare:
            changes = dict(zip(context.heads, head_changes(context), strict=True))
            columns, rows = [*columns, "change"], {head: [*row, changes[head]] for head, row in rows.items()}
            rho = rank_correlation([importance[head] for head in living], [changes[head] for head in living])
            findings.scalars["analysis/rank_correlation"] = rho
            sentence = "none: needs at least two heads"
            if rho is not None:
                sentence = f"{rho:.3f} with the loss change of ablating the head"
            findings.lines["rank correlation"] = sentence
        findings.tables["importance"] = context.head_table(columns, rows)
        return findings


def rank_correlation(x: list[float], y: list[float]) -> float | None:
    """Spearman's ρ: 1 for the same order, -1 for the opposite order; None for fewer than two values."""
    if len(x) < 2:
        return None
    # Takes a second to import, which the other analyses need not pay.
    from torchmetrics.functional.regression import spearman_corrcoef  # noqa: PLC0415

    return float(spearman_corrcoef(torch.tensor(x), torch.tensor(y)))
