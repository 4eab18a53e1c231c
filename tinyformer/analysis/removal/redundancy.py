"""Redundancy of heads: the loss without pairs and growing sets of heads, and the overlap of weights and outputs."""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float
from matplotlib.figure import Figure
from torch import Tensor

from tinyformer.analysis.context import AnalysisContext, Head, Trained, every_second
from tinyformer.analysis.removal.ablation import (
    MODES,
    Heads,
    head_importance,
    losses_along,
    losses_without,
    outputs_by_head,
)
from tinyformer.errors import ArgumentError, require_choice
from tinyformer.measures.intervals import CHANGE_COLUMNS, Change, Losses, simultaneous
from tinyformer.nn import BaseAttention
from tinyformer.nn.heads import layer_title
from tinyformer.report.charts import change_grid, lines, named_grid
from tinyformer.report.result import AnalysisResult

NUM_PRINTED, NUM_DRAWN = 3, 24  # pairs of each sign that are printed, heads in the picture of pairs

Without: TypeAlias = Mapping[Heads, Losses]
"""The losses by the set of heads that are ablated; `()` is the key of the whole model's losses."""

Curve: TypeAlias = Mapping[int, tuple[Change, float]]
"""By number of removed heads: the change of the loss, and the sum of its changes if each head is removed alone."""

PROJECTIONS = {"W_Q": "q_proj", "W_K": "k_proj", "W_V": "v_proj", "W_O": "o_proj"}
"""The projections in which each head has its own rows or columns, by their names in papers."""

ORDERS: dict[str, Callable[[AnalysisContext, Without], dict[Head, float]]] = {
    "oracle": lambda context, trained: {head: _half(trained[head,], 0).mean for head in context.active_heads},
    "importance": lambda context, trained: head_importance(every_second(context, 0)),
}
"""The functions that compute each head's importance on the first, third, … window, by the name of the order."""


class Overlap(NamedTuple):
    """The overlap of two heads of a layer in one projection (`part`), or in their outputs."""

    layer: int
    heads: tuple[int, int]
    part: str
    trained: float
    untrained: float
    chance: float


@dataclass(eq=False)
class HeadRedundancy:
    """The redundancy of heads: the loss without pairs and growing sets of heads, and the overlap of heads.

    - The interaction of heads a and b is Δ(a, b) - Δ(a) - Δ(b), where Δ is the increase of the loss without them. If it
      is positive, each head makes up for the other head's removal, as backup heads do (Wang et al. 2022, arXiv
      2211.00593). If it is negative, both heads serve one effect, which ends if either head is removed. A pair
      counts if its `simultaneous` interval is above `margin` or below `-margin`. The control is the untrained network.
    - Sets of heads grow by importance on one half of the windows, and at random. The loss without them is measured on
      the other half, and compared with the sum of Δ over the single heads.
    - The overlap of two heads of a layer is the `subspace_overlap` of each projection, and the `output_overlap`. The
      controls are the untrained network and chance. Projections that the heads share are not compared.

    Args:
        mode: the replacement of ablated heads' outputs, see `HeadAblation`.
        num_pairs: the maximum number of pairs, drawn at random from all; each costs two evaluations of the windows.
        margin: the smallest size of an interaction that counts, in nats per target.
        order: the importance by which sets grow, as in `HeadPruning`: `oracle`, Δ(a), or `importance`, its estimate by
            gradients, see `head_importance`.
    """

    mode: str = "zero"
    num_windows: int = 32
    num_resamples: int = 1000  # bootstrap resamples of the windows
    num_pairs: int = 300
    margin: float = 0.01
    order: str = "oracle"
    random_orders: int = 3
    seed: int = 0  # for the random pairs and orders

    def __post_init__(self) -> None:
        require_choice("mode", self.mode, MODES)
        require_choice("order", self.order, ORDERS)
        self.needs_gradient = self.order == "importance"

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        heads, generator = context.active_heads, torch.Generator().manual_seed(self.seed)
        if min(len(heads), context.num_windows) < 2:
            reason = f"needs at least two heads and two {context.row}s, and has {len(heads)} and {context.num_windows}"
            raise ArgumentError("analysis", "redundancy", reason, {"analysis": "maps"})
        pairs = list(itertools.combinations(heads, 2))
        drawn = torch.randperm(len(pairs), generator=generator)[: self.num_pairs].sort().values.tolist()
        sets = [(), *((head,) for head in heads), *(pairs[at] for at in drawn)]
        trained, untrained = (
            dict(zip(sets, losses_without(replace(context, network=network), sets, self.mode), strict=True))
            for network in context.networks().values()
        )
        base, curves = trained[()], self._curves(context, trained, generator)
        alone = {head: trained[head,].change_from(base, self.num_resamples).row(base) for head in heads}
        found = AnalysisResult(
            scalars={"analysis/loss": base.mean},
            lines={"redundancy": f"{self.mode}; {context.describe_losses(base)}"},
            tables={"alone": context.head_table(CHANGE_COLUMNS, alone)},
        )
        self._add_pairs(found, context, trained, untrained)
        self._add_curves(found, context, _half(base, 1), curves)
        add_overlaps(found, context, overlaps(context))
        return found

    def _curves(self, context: AnalysisContext, trained: Without, generator: torch.Generator) -> dict[str, Curve]:
        """The `Curve` of each order in which sets of heads grow, measured on the second, fourth, … window."""
        least = sorted(context.active_heads, key=ORDERS[self.order](context, trained).__getitem__)
        orders = {"least important first": least, "most important first": least[::-1]}
        for number in range(1, self.random_orders + 1):
            orders[f"random {number}"] = [least[at] for at in torch.randperm(len(least), generator=generator).tolist()]
        base = _half(trained[()], 1)
        alone = {head: _half(trained[head,], 1).mean - base.mean for head in least}
        curves: dict[str, Curve] = {}
        for name, order in orders.items():
            losses = losses_along(context, order, len(order) // 2, self.mode)
            changes = {at: _half(after, 1).change_from(base, self.num_resamples) for at, after in losses.items()}
            curves[name] = {at: (of, sum(alone[head] for head in order[:at])) for at, of in changes.items()}
        return curves

    def _add_pairs(self, found: AnalysisResult, context: AnalysisContext, trained: Without, untrained: Without) -> None:
        """Add the interactions of the pairs, in the trained and in the untrained network."""
        measured, control = (interactions(losses, self.num_resamples) for losses in (trained, untrained))
        names = {head: context.head_title(*head) for head in context.active_heads}
        backing, opposing = self._beyond_margin(measured)
        untrained_backing, untrained_opposing = map(len, self._beyond_margin(control))
        found.scalars |= {
            "analysis/num_pairs": len(measured),
            "analysis/backing_pairs": len(backing),
            "analysis/opposing_pairs": len(opposing),
            "analysis/untrained_backing_pairs": untrained_backing,
            "analysis/untrained_opposing_pairs": untrained_opposing,
        }
        total = len(names) * (len(names) - 1) // 2
        of_all = f", drawn of {total}," * (len(measured) < total)
        found.lines["pairs"] = (
            f"{len(backing)} of {len(measured)} pairs{of_all} back each other up by more than {self.margin:g}, "
            f"{len(opposing)} lose less together (untrained: {untrained_backing} and {untrained_opposing}); "
            "interaction [95 % interval for all pairs at once]:"
        )
        printed = dict.fromkeys(backing[:NUM_PRINTED], "back each other up")
        printed = printed or {max(measured, key=lambda pair: measured[pair].low): "do not clearly back each other up"}
        printed |= dict.fromkeys(opposing[:NUM_PRINTED], "lose less together")
        rows, base = [], trained[()].mean
        for pair, change in measured.items():
            first, second, both = (trained[heads].mean - base for heads in (pair[:1], pair[1:], pair))
            address = [part for head in pair for part in context.head_address(*head)]
            rows.append([*address, first, second, both, *astuple(change), control[pair].mean])
            if pair in printed:
                increases = f"without both {both:+.4f}, the sum of each alone {first + second:+.4f}"
                heading = f"  {names[pair[0]]} and {names[pair[1]]}"
                found.lines[heading] = f"{printed[pair]}: {increases}: {change}"
        address_columns = [f"{name}_{side}" for side in "ab" for name in (*context.address_columns, "head")]
        columns = ["change_a", "change_b", "change_both", "interaction", "low", "high", "untrained"]
        found.tables["pairs"] = [*address_columns, *columns], rows
        title = f"Interaction: loss change without both heads, minus the changes without each ({self.mode} ablation)"
        found.figures["pairs"] = _grid(measured, names, title, f"interaction, nats per {context.task.unit}")

    def _beyond_margin(self, changes: Mapping[Heads, Change]) -> tuple[list[Heads], list[Heads]]:
        """The pairs whose whole interval is above the margin, and the pairs whose interval is below -margin."""
        ranked = sorted(changes, key=lambda pair: -abs(changes[pair].mean))
        above = [pair for pair in ranked if changes[pair].low > self.margin]
        return above, [pair for pair in ranked if changes[pair].high < -self.margin]

    def _add_curves(
        self, found: AnalysisResult, context: AnalysisContext, base: Losses, curves: Mapping[str, Curve]
    ) -> None:
        """Add the change of the loss as more and more heads are removed, see `Curve`."""
        rows: list[list[Any]] = [
            [name, count, *change.row(base), summed]
            for name, curve in curves.items()
            for count, (change, summed) in curve.items()
        ]
        total, least = len(context.active_heads), curves["least important first"]
        everything, summed = least[total][0], rows[-1][-1]
        drawn = {name: ([*curve], [change.mean for change, _ in curve.values()]) for name, curve in curves.items()}
        random = {name: drawn.pop(name) for name in curves if name.startswith("random")}
        at_random = [curves[name][total // 2][0].mean for name in random]
        found.scalars |= {"analysis/change_without_all": everything.mean, "analysis/sum_of_each_alone": summed}
        found.lines |= {
            "sets": f"without {total // 2} of {total} heads, ordered on half of the {context.row}s and measured on "
            "the others:",
            **{f"  {name}": str(curves[name][total // 2][0]) for name in drawn},
            "  random": f"{statistics.fmean(at_random):+.4f}, the mean of {len(at_random)} orders from "
            f"{min(at_random):+.4f} to {max(at_random):+.4f}",
            "  all heads": f"{everything}; the sum of each alone {summed:+.4f}",
        }
        found.tables["sets"] = ["order", "removed", *CHANGE_COLUMNS, "sum_of_each_alone"], rows
        drawn["sum of each alone"] = [*least], [summed for _, summed in least.values()]
        title = f"Change of the loss without growing sets of heads ({self.mode} ablation)"
        label = f"change of the loss, nats per {context.task.unit}"
        found.figures["sets"] = lines(drawn, title, "heads removed", label, baselines=random)


def _half(losses: Losses, first: int) -> Losses:
    """The losses of every second window, beginning with the window `first`."""
    return Losses(losses.nats[first::2], losses.targets[first::2])


def interactions(without: Without, num_resamples: int) -> dict[tuple[Head, ...], Change]:
    """Δ(a, b) - Δ(a) - Δ(b) in nats per target for each pair in `without`, with `simultaneous` intervals."""
    base, pairs = without[()], [heads for heads in without if len(heads) == 2]
    together = [Losses(without[pair].nats + base.nats, base.targets) for pair in pairs]
    apart = [Losses(without[a,].nats + without[b,].nats, base.targets) for a, b in pairs]
    return dict(zip(pairs, simultaneous(together, apart, num_resamples), strict=True))


def _grid(changes: Mapping[Heads, Change], names: Mapping[Head, str], title: str, label: str) -> Figure:
    """A grid of the interactions of pairs, for the `NUM_DRAWN` heads with the strongest interactions."""
    ranked = sorted(changes, key=lambda pair: -abs(changes[pair].mean))
    drawn = sorted(list(dict.fromkeys(head for pair in ranked for head in pair))[:NUM_DRAWN])
    across = {head: names[head].replace(" head", "\nhead") for head in drawn}
    of_drawn = {pair: change.mean for pair, change in changes.items() if {*pair} <= {*drawn}}
    cells = {(names[a], across[b]): mean for pair, mean in of_drawn.items() for a, b in (pair, pair[::-1])}
    return change_grid(cells, [names[head] for head in drawn], list(across.values()), title, label)


def subspace_overlap(weights: Float[Tensor, "heads head_dim features"]) -> Float[Tensor, "heads heads"]:
    """The mean squared cosine of the principal angles between the row spaces of heads (Björck & Golub 1973).

    1 for equal subspaces, 0 for orthogonal ones, head_dim / features in expectation for random ones.
    """
    bases = torch.linalg.qr(weights.double().mT).Q
    return torch.linalg.svdvals(bases.mT.unsqueeze(1) @ bases).square().mean(dim=-1)


def weights_by_head(layer: BaseAttention, of: Any = Tensor.detach) -> dict[str, Float[Tensor, "heads dim features"]]:
    """Each head's rows of W_Q, W_K, W_V and the transposed W_O, or of the tensor that `of` returns for a weight."""
    found = {}
    for name, projection in PROJECTIONS.items():
        weight = of(getattr(layer, projection).weight).cpu()
        if name in ("W_K", "W_V"):
            found[name] = weight.unflatten(0, (layer.num_kv_heads, -1))[layer.head_map.kv_heads]
        else:
            found[name] = (weight.mT if name == "W_O" else weight).unflatten(0, (layer.num_heads, -1))
    return found


def output_overlap(context: AnalysisContext) -> list[Float[Tensor, "2 heads heads"]]:
    """For each layer, the linear CKA of each two heads' outputs: [0] at the same tokens, [1] (chance) at random tokens.

    CKA is ‖cov(a, b)‖² / (‖cov(a, a)‖ ‖cov(b, b)‖), from 0 to 1: 1 for outputs that are equal up to rotation and scale
    (Kornblith et al. 2019, arXiv 1905.00414).
    """
    of_batches = [
        [_moments(outputs, is_token) for outputs, is_token in outputs_by_head(context, batch)]
        for batch in context.batches
    ]
    found = []
    for layer, of_layer in zip(context.layers, zip(*of_batches, strict=True), strict=True):
        products, total, count = (torch.stack(terms).sum(dim=0) for terms in zip(*of_layer, strict=True))
        covariance = products / count - torch.outer(total, total) / count**2
        blocks = covariance.unflatten(2, (layer.num_heads, -1)).unflatten(1, (layer.num_heads, -1))
        sizes = blocks.square().sum(dim=(2, 4))
        norms = sizes[0].diagonal().sqrt()
        found.append(sizes / torch.outer(norms, norms))
    return found


def _moments(outputs: Float[Tensor, "batch heads seq dim"], is_token: Bool[Tensor, "batch seq"]) -> tuple[Tensor, ...]:
    """Return sums over tokens: [x xᵀ, x yᵀ], x and 1, where x are a token's outputs, and y those of a random token."""
    x = outputs.transpose(1, 2)[is_token].double().cpu().flatten(1)
    shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]
    return torch.stack([x.T @ x, x.T @ shuffled]), x.sum(dim=0), torch.tensor(len(x))


def head_overlaps(context: AnalysisContext) -> list[dict[str, Float[Tensor, "2 heads heads"]]]:
    """The overlap of each layer's heads, by projection and in their outputs: [0] measured, [1] by chance."""
    found = []
    for layer, outputs in zip(context.layers, output_overlap(context), strict=True):
        of_layer = {"outputs": outputs}
        for name, part in weights_by_head(layer).items():
            overlap = subspace_overlap(part)
            of_layer[name] = torch.stack([overlap, torch.full_like(overlap, part.shape[1] / part.shape[2])])
        found.append(of_layer)
    return found


def overlaps(context: AnalysisContext) -> list[Overlap]:
    """The overlap of each two heads of a layer, trained and untrained; projections that they share are left out."""
    trained, untrained = (head_overlaps(replace(context, network=network)) for network in context.networks().values())
    found = []
    for (layer, a), (other, b) in itertools.combinations(context.active_heads, 2):
        kv_heads = context.layers[layer].head_map.kv_heads
        for part in (*PROJECTIONS, "outputs") if layer == other else ():
            if kv_heads[a] != kv_heads[b] or part not in ("W_K", "W_V"):
                own, chance = trained[layer][part][:, a, b].tolist()
                found.append(Overlap(layer, (a, b), part, own, float(untrained[layer][part][0, a, b]), chance))
    return found


def add_overlaps(found: AnalysisResult, context: AnalysisContext, overlaps: Sequence[Overlap]) -> None:
    """Add a table of the overlaps, lines with their means by projection, and a figure of their means by layer."""
    if not overlaps:  # no layer has two heads
        return
    names = Overlap._fields[3:]
    rows = []
    for layer, (a, b), *values in overlaps:
        rows.append([*context.head_address(layer, a), context.head_address(layer, b)[-1], *values])
    found.tables["overlap"] = [*context.address_columns, "head_a", "head_b", "part", *names], rows
    found.lines["overlap"] = "mean over pairs of heads of a layer: squared cosine between subspaces, CKA of outputs"
    cells = {}
    for part in dict.fromkeys(of.part for of in overlaps):
        of_part = [of for of in overlaps if of.part == part]
        means = {name: statistics.fmean(getattr(of, name) for of in of_part) for name in names}
        found.scalars |= {f"analysis/overlap/{part}/{name}": mean for name, mean in means.items()}
        most, above = max(of_part, key=lambda of: of.trained), max(of.untrained for of in of_part)
        first, second = (context.head_address(most.layer, head)[-1] for head in most.heads)
        found.lines[f"  {part}"] = (
            ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())
            + f"; {sum(of.trained > above for of in of_part)} of {len(of_part)} pairs above all untrained ones; most: "
            f"{layer_title(context.addresses[most.layer])} heads {first} and {second}, {most.trained:.3f}"
        )
        for layer in dict.fromkeys(of.layer for of in of_part):
            for name in names[:2]:
                beyond = [getattr(of, name) - of.chance for of in of_part if of.layer == layer]
                cells[layer_title(context.addresses[layer]), f"{part}\n{name}"] = statistics.fmean(beyond)
    title = "Overlap of two heads of a layer beyond chance, mean over pairs"
    found.figures["overlap"] = named_grid(cells, title, "overlap minus its value by chance")
