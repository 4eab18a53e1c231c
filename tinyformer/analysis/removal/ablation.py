"""Removal of heads: replacements of their outputs, losses without them, and the analyses of ablation and importance."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tinyformer.analysis.context import AnalysisContext, Head, Trained, changed
from tinyformer.data.batches.windows import Batch
from tinyformer.errors import ArgumentError, require_choice
from tinyformer.measures.batches import queries_by_kind
from tinyformer.measures.capture import running_hooks
from tinyformer.measures.intervals import CHANGE_COLUMNS, STATES_COLUMNS, Change, Losses
from tinyformer.nn import BaseAttention, Network
from tinyformer.report.result import AnalysisResult

MAX_POINTS = 17  # points of the curve of the loss by number of removed heads, in addition to the chosen number
NUM_PRINTED = 5  # heads

Heads: TypeAlias = tuple[Head, ...]

Replacement: TypeAlias = Callable[[Any, int, Tensor], Tensor]
"""A function of a batch, a layer's index and its heads' outputs, `batch heads seq v_head_dim`, to their replacement.

The batch is None if the replacement does not depend on it. The replacement may broadcast.
"""


def ablated(
    layer: BaseAttention, heads: Sequence[int], replacement: Callable[[Tensor], Tensor] = torch.zeros_like
) -> AbstractContextManager[None]:
    """Ablate the given heads of a layer inside a `with` statement; `replacement` maps outputs to new outputs."""
    gate, chosen = layer.head_gate, torch.zeros(layer.num_heads, dtype=torch.bool, device=layer.o_proj.weight.device)
    chosen[list(heads)] = True
    factors = torch.ones(chosen.shape, device=chosen.device) if gate.factors is None else gate.factors
    earlier = gate.replacement or torch.zeros_like  # the replacement of heads that are already ablated

    def replaced(outputs: Tensor) -> Tensor:
        return torch.where(chosen.view(-1, 1, 1), replacement(outputs), earlier(outputs))

    return changed([gate], factors=factors.masked_fill(chosen, 0.0), replacement=replaced)


def _zero(batch: Batch | None, layer: int, outputs: Tensor) -> Tensor:
    return torch.zeros_like(outputs)


@contextmanager
def gated(
    network: Network, heads: Sequence[Head], batch: Batch | None = None, replacement: Replacement = _zero
) -> Iterator[None]:
    """Ablate heads inside a `with` statement, in which the network processes the batch."""
    with ExitStack() as stack:
        for index, layer in enumerate(network.attentions()):
            if of_layer := [head for at, head in heads if at == index]:
                stack.enter_context(ablated(layer, of_layer, partial(replacement, batch, index)))
        yield


@contextmanager
def gates_on(layers: Sequence[BaseAttention], gates: Sequence[Float[Tensor, "*batch heads"]]) -> Iterator[None]:
    """Multiply the outputs of each layer's heads by gates inside a `with` statement; ablated heads stay ablated."""
    with ExitStack() as stack:
        for layer, own in zip(layers, gates, strict=True):
            factors = layer.head_gate.factors
            stack.enter_context(changed([layer.head_gate], factors=own if factors is None else factors * own))
        yield


def outputs_by_head(
    context: AnalysisContext, batch: Batch
) -> list[tuple[Float[Tensor, "batch heads seq v_head_dim"], Bool[Tensor, "batch seq"]]]:
    """The outputs of each layer's heads for a batch, before their ablation, and a mask that is False at padding."""
    is_token, layers, outputs = queries_by_kind(batch), context.network.attentions(), dict[int, Tensor]()

    def record(index: int, gate: Any, args: tuple[Tensor, ...]) -> None:
        outputs[index] = args[0]

    hooks = [layer.head_gate.register_forward_pre_hook(partial(record, index)) for index, layer in enumerate(layers)]
    with torch.no_grad(), context.precision(), running_hooks(context.network, hooks):
        context.task.forward(context.network, batch)
    return [(outputs[index], is_token[kind]) for index, kind in enumerate(context.kinds)]


def mean_outputs(context: AnalysisContext) -> list[Tensor]:
    """The mean output of each head over all tokens, without padding: `heads 1 v_head_dim` for each layer."""
    sums, counts = defaultdict[int, Any](int), Counter[int]()
    for batch in context.batches:
        for index, (outputs, is_token) in enumerate(outputs_by_head(context, batch)):
            sums[index] += outputs.float().masked_fill(~is_token[:, None, :, None], 0).sum(dim=(0, 2))
            counts[index] += int(is_token.sum())
    return [(sums[index] / counts[index]).unsqueeze(1) for index in sums]


def resampled_positions(lengths: Int[Tensor, " batch"], num_positions: int) -> Int[Tensor, "batch positions"]:
    """For each position of each row, the position in another row from which the replacing output is taken.

    `lengths` are the other rows' numbers of tokens. If the other row has no token at the same position, the position is
    that of a random token of this other row.
    """
    ends, place = lengths.clamp(min=1).unsqueeze(1), torch.arange(num_positions, device=lengths.device)
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(len(lengths), num_positions, generator=generator, dtype=torch.float64)
    return torch.where(place < ends, place, (draws.to(place.device) * ends).long())


def _mean(context: AnalysisContext) -> Replacement:
    means = mean_outputs(context)
    return lambda batch, layer, outputs: means[layer].to(outputs.dtype)


def _resample(context: AnalysisContext) -> Replacement:
    if min(len(batch["inputs"]) for batch in context.batches) < 2:
        row = context.row
        reason = f"needs at least two {row}s in every batch, to replace a head's output by that for another {row}"
        raise ArgumentError("mode", "resample", reason, {"mode": "mean"})

    def resampled(batch: Batch, layer: int, outputs: Tensor) -> Tensor:
        is_token = queries_by_kind(batch)[context.kinds[layer]]
        positions = resampled_positions(is_token.sum(dim=1).roll(1), is_token.shape[1])[:, None, :, None]
        return outputs.roll(1, dims=0).take_along_dim(positions, dim=2)

    return resampled


MODES: dict[str, Callable[[AnalysisContext], Replacement]] = {
    "zero": lambda context: _zero,
    "mean": _mean,
    "resample": _resample,
}
"""The functions that make the replacement of ablated heads' outputs, by the name of the mode."""


def ablations(
    context: AnalysisContext, mode: str, head_sets: Sequence[Sequence[Head]]
) -> list[Callable[[Batch], AbstractContextManager[None]]]:
    """For each set of heads, a function from a batch to a context manager that ablates them, with one of `MODES`."""
    replacement = MODES[mode](context)
    return [partial(gated, context.network, heads, replacement=replacement) for heads in head_sets]


def losses_without(context: AnalysisContext, head_sets: Sequence[Sequence[Head]], mode: str = "zero") -> list[Losses]:
    """The losses after ablating each set of heads separately, with a mode of `MODES`."""
    return [context.losses(ablation) for ablation in ablations(context, mode, head_sets)]


@torch.no_grad()
def state_changes(context: AnalysisContext, head_sets: Sequence[Sequence[Head]], mode: str = "zero") -> list[Losses]:
    """The relative change of a window's final states after ablating each set of heads: ‖ΔX‖/‖X‖.

    X holds the states of the window's tokens, without padding, and ΔX their change; ‖·‖ is the Frobenius norm. The
    `nats` of a result are the ratios, so that its mean is their mean over the windows.
    """
    ratios: list[list[Tensor]] = [[] for _ in head_sets]
    changes = ablations(context, mode, head_sets)
    for batch in context.batches:
        is_token = queries_by_kind(batch)[""].unsqueeze(-1)
        with context.precision():
            states = context.task.forward(context.network, batch).float() * is_token
            for of_set, change in zip(ratios, changes, strict=True):
                with change(batch):
                    after = context.task.forward(context.network, batch).float() * is_token
                of_set.append(((after - states).norm(dim=(1, 2)) / states.norm(dim=(1, 2))).double().cpu())
    joined = map(torch.cat, ratios)
    return [Losses(of_set, torch.ones_like(of_set)) for of_set in joined]


def losses_along(context: AnalysisContext, order: Sequence[Head], chosen: int, mode: str = "zero") -> dict[int, Losses]:
    """The losses without the first n heads of an order, for n = `chosen` and up to `MAX_POINTS` evenly spaced n."""
    counts = sorted({round(i * len(order) / (MAX_POINTS - 1)) for i in range(MAX_POINTS)} | {chosen})
    return dict(zip(counts, losses_without(context, [order[:count] for count in counts], mode), strict=True))


def head_changes(context: AnalysisContext) -> dict[Head, float]:
    """The increase of the loss after zero ablation of each head, in nats per target."""
    base, *without = losses_without(context, [[], *([head] for head in context.heads)])
    return {head: losses.mean - base.mean for head, losses in zip(context.heads, without, strict=True)}


def head_importance(context: AnalysisContext) -> dict[Head, float]:
    """I_h = mean over windows of |∂L/∂g_h|, where g_h is the head's gate (Michel et al. 2019, arXiv 1905.10650, eq. 2).

    L is the mean loss of a window, in nats per target. Each window has its own gates, so one forward and one backward
    pass give the gradients of all windows of a batch. An ablated head has no gradient.
    """
    totals = [torch.zeros(layer.num_heads) for layer in context.layers]
    for batch in context.batches:
        inputs = batch["inputs"]
        gates = [torch.ones(len(inputs), len(of), device=inputs.device, requires_grad=True) for of in totals]
        with torch.enable_grad(), context.precision(), gates_on(context.layers, gates):
            nats, targets = context.task.nats(context.network, batch)
            gradients = torch.autograd.grad((nats / targets.clamp(min=1)).sum(), gates)
        totals = [total + each.abs().sum(dim=0).cpu() for total, each in zip(totals, gradients, strict=True)]
    return dict(zip(context.heads, (torch.cat(totals) / context.num_windows).tolist(), strict=True))


@dataclass(eq=False)
class HeadAblation:
    """Ablation of each head, and of each group of heads that share a K/V head.

    The increase of the loss measures what no other head can supply (Michel et al. 2019, arXiv 1905.10650). An encoder
    without a prediction head has no loss; the relative change of its final states replaces it, see `state_changes`.

    Args:
        mode: the replacement of a head's output: `zero`; its `mean` over all tokens (Wang et al. 2022, arXiv
            2211.00593), which removes differences between tokens and keeps the constant part; or `resample`, its output
            at the same position of another window (Chan et al. 2022, causal scrubbing), which keeps the output's
            distribution. If that window is shorter, the output at a random token of it is used, the same token for
            every head. `tinyformer.Model.ablated` has the same modes.
    """

    mode: str = "zero"
    num_windows: int = 32
    num_resamples: int = 1000  # bootstrap resamples of the windows
    needs_gradient = needs_loss = False

    def __post_init__(self) -> None:
        require_choice("mode", self.mode, MODES)

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        has_loss, groups = context.task.has_loss, sharing_heads(context)
        columns, measure = (CHANGE_COLUMNS, losses_without) if has_loss else (STATES_COLUMNS, state_changes)
        sets: list[Heads] = [(), *((head,) for head in context.active_heads), *groups]
        measured = dict(zip(sets, measure(context, sets, self.mode), strict=True))
        base = measured[()]
        changes = {heads: after.change_from(base, self.num_resamples) for heads, after in measured.items()}
        rows, none = {}, Change(0.0, 0.0, 0.0)  # for a head that is already ablated
        for layer, head in context.heads:
            kv_head = context.layers[layer].head_map.kv_heads[head]
            rows[layer, head] = [kv_head, *changes.get(((layer, head),), none).row(base)[-len(columns) :]]
        tables = {"ablation": context.head_table(["kv_head", *columns], rows)}
        if groups:
            of_groups = []
            for heads in groups:
                numbers = " ".join(str(context.head_address(*head)[-1]) for head in heads)
                row = changes[heads].row(base)[-len(columns) :]
                of_groups.append([*context.addresses[heads[0][0]], numbers, *row])
            tables["kv_groups"] = [*context.address_columns, "heads", *columns], of_groups
        alone = {head: changes[head,] for head in context.active_heads}
        worst = sorted(alone, key=lambda head: -alone[head].mean)[:NUM_PRINTED]
        what, unit = ("loss", f"nats per {context.task.unit}") if has_loss else ("final states", "‖ΔX‖/‖X‖")
        title, label = f"Change of the {what} without the head ({self.mode} ablation)", f"change of the {what}, {unit}"
        form = "" if has_loss else ".4f"  # a norm has no sign
        header = f"{context.num_windows} {context.row}s; relative change of the final states [95 % interval]:"
        means = {head: change.mean for head, change in alone.items()}
        return AnalysisResult(
            scalars={"analysis/loss": base.mean} if has_loss else {},
            lines={
                "ablation": f"{self.mode}; {context.describe_losses(base) if has_loss else header}",
                **{f"  {context.head_title(*head)}": format(alone[head], form) for head in worst},
            },
            tables=tables,
            figures={"ablation": context.head_grid(means, title, label, diverging=has_loss)},
        )


def sharing_heads(context: AnalysisContext) -> list[Heads]:
    """The groups of several active heads that share a K/V head."""
    groups = defaultdict[tuple[int, int], list[Head]](list)
    for layer, head in context.active_heads:
        groups[layer, context.layers[layer].head_map.kv_heads[head]].append((layer, head))
    return [tuple(group) for group in groups.values() if len(group) > 1]


@dataclass(eq=False)
class HeadImportance:
    """The importance of each head by gradient, and its rank correlation with the effect of ablation."""

    num_windows: int = 32
    compare: bool = True  # also ablate each head, and report Spearman's ρ of importance and change of the loss
    needs_gradient = True

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        heads, columns = context.active_heads, {"importance": head_importance(context)}
        if self.compare:
            columns["change"] = head_changes(context)
        importance, label = columns["importance"], f"mean |∂ loss / ∂ gate|, nats per {context.task.unit}"
        most = sorted(heads, key=lambda head: -importance[head])[:NUM_PRINTED]
        rows = {head: [values[head] for values in columns.values()] for head in context.heads}
        found = AnalysisResult(
            lines={
                "importance": label,
                **{f"  {context.head_title(*head)}": f"{importance[head]:.4f}" for head in most},
            },
            tables={"importance": context.head_table([*columns], rows)},
            figures={"importance": context.head_grid(importance, "Importance of each head", label)},
        )
        if self.compare and len(heads) > 1:
            rho = rank_correlation(*([values[head] for head in heads] for values in columns.values()))
            found.lines["rank correlation"] = f"{rho:.3f} with the change of the loss without the head"
            found.scalars["analysis/rank_correlation"] = rho
        return found


def rank_correlation(x: list[float], y: list[float]) -> float:
    """Spearman's ρ of two or more values: 1 for the same order, -1 for the opposite order."""
    # The import takes a second, which only this analysis needs.
    from torchmetrics.functional.regression import spearman_corrcoef  # noqa: PLC0415

    return float(spearman_corrcoef(torch.tensor(x), torch.tensor(y)))
