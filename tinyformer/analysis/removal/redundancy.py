"""Redundancy of heads: the loss without pairs and growing sets of them, and the overlap of what they read and write."""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from tinyformer.analysis.context import AnalysisContext, Head, Trained, every_second, require_positive
from tinyformer.analysis.removal.ablation import MODES, Outputs, head_importance, losses_without, outputs_by_head
from tinyformer.analysis.removal.pruning import MAX_POINTS
from tinyformer.errors import ArgumentError, require_at_least, require_choice
from tinyformer.measures.intervals import CHANGE_COLUMNS, Change, Losses
from tinyformer.nn import BaseAttention
from tinyformer.nn.heads import layer_title
from tinyformer.report.charts import change_grid, lines
from tinyformer.report.result import AnalysisResult

NUM_PRINTED, NUM_DRAWN = 3, 24  # pairs of a kind that are printed, heads in the picture of pairs

PROJECTIONS = {"W_Q": "q_proj", "W_K": "k_proj", "W_V": "v_proj", "W_O": "o_proj"}
"""The projections of which each head has its own rows, or columns, by their names in papers."""

OVERLAPS = ("trained", "untrained", "chance")  # what is compared, and the columns of the table

Without: TypeAlias = Mapping[tuple[Head, ...], Losses]
"""The losses without some heads; without `()`, those of the whole model."""


ORDERS: dict[str, Callable[[AnalysisContext, Without], dict[Head, float]]] = {
    "oracle": lambda context, trained: {head: _half(trained[head,], 0).mean for head in context.active_heads},
    "importance": lambda context, trained: dict(
        zip(context.heads, head_importance(every_second(context, 0)), strict=True)
    ),
}
"""By name, the importance of each head on the first, third, … window; sets of heads grow from the lowest."""


@dataclass(eq=False)
class HeadRedundancy:
    """The redundancy of heads: the loss without pairs and growing sets of heads, and the overlap of heads.

    - The interaction of heads a and b is Δ(a, b) - Δ(a) - Δ(b), where Δ is the increase of the loss without them. Above
      0, each supplies what is lost without the other, as backup heads do (Wang et al. 2022, arXiv 2211.00593). Below 0,
      what is lost without one is lost already without the other. A pair counts if its whole `simultaneous` interval
      lies beyond `margin`. The control is the untrained network.
    - Sets grow by the importance of heads on one half of the windows, and at random; they are measured on the other
      half, next to the sum of Δ of each head alone.
    - The overlap of two heads of a layer is the `subspace_overlap` of each projection, and the `output_overlap`, with
      those of the untrained network and of chance. Heads that share a K/V head are not compared by it.

    Args:
        mode: what replaces the outputs of ablated heads, see `HeadAblation`.
        num_pairs: at most so many pairs, drawn at random if there are more; each costs two evaluations of the windows.
        margin: the smallest interaction that counts, in nats per target.
        order: the importance by which sets grow: `oracle`, Δ(a), or `importance`, its estimate by gradients, see
            `head_importance`; as in `HeadPruning`.
    """

    mode: str = "zero"
    num_windows: int = 32
    num_resamples: int = 1000  # bootstrap resamples of the windows
    num_pairs: int = 300
    margin: float = 0.01
    order: str = "oracle"
    random_orders: int = 3
    seed: int = 0  # of the random pairs and orders

    def __post_init__(self) -> None:
        require_choice("mode", self.mode, MODES)
        require_choice("order", self.order, ORDERS)
        self.needs_gradient = self.order == "importance"
        require_at_least(2, {"num_resamples": 1000}, num_resamples=self.num_resamples)
        require_at_least(0, {"margin": 0.01}, margin=self.margin)
        require_positive(self, "num_windows", "num_pairs", "random_orders")

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        heads, generator = context.active_heads, torch.Generator().manual_seed(self.seed)
        if min(len(heads), context.num_windows) < 2:
            reason = f"needs two heads and two {context.row}s at least; it has {len(heads)} and {context.num_windows}"
            raise ArgumentError("analysis", "redundancy", reason, {"analysis": "maps"})
        pairs = list(itertools.combinations(heads, 2))
        drawn = torch.randperm(len(pairs), generator=generator)[: self.num_pairs].sort().values.tolist()
        sets = [(), *((head,) for head in heads), *(pairs[at] for at in drawn)]
        trained, untrained = (
            dict(zip(sets, losses_without(replace(context, network=network), sets, self.mode), strict=True))
            for network in context.networks().values()
        )
        orders, base = self._orders(context, trained, generator), trained[()]
        found = [self._pairs(context, trained, untrained), self._sets(context, trained, orders), overlaps(context)]
        alone = {head: trained[head,].change_from(base, self.num_resamples).row(base) for head in heads}
        scalars, own_lines, tables, figures = (
            {name: value for part in found for name, value in getattr(part, kind).items()}
            for kind in ("scalars", "lines", "tables", "figures")
        )
        heading = f"{self.mode}; {context.describe_losses(base)}"
        tables["alone"] = context.head_table(CHANGE_COLUMNS, alone)
        return AnalysisResult(
            {"analysis/loss": base.mean} | scalars, {"redundancy": heading} | own_lines, tables, figures
        )

    def _pairs(self, context: AnalysisContext, trained: Without, untrained: Without) -> AnalysisResult:
        """The interactions of the pairs, and those of the untrained network."""
        found, control = (interactions(losses, self.num_resamples) for losses in (trained, untrained))
        base, names = trained[()].mean, {head: context.head_title(*head) for head in context.active_heads}
        ranked = sorted(found, key=lambda pair: -abs(found[pair].mean))
        backing, opposing = self._beyond({pair: found[pair] for pair in ranked})
        printed = dict.fromkeys(opposing[:NUM_PRINTED], "lose less together")
        printed = dict.fromkeys(backing[:NUM_PRINTED], "back each other up") | printed
        if not backing:
            printed |= {max(found, key=lambda pair: found[pair].low): "do not clearly back each other up"}
        rows, sentences = [], {}
        for pair, change in found.items():
            first, second = (trained[head,].mean - base for head in pair)
            both = trained[pair].mean - base
            address = [part for head in pair for part in context.head_address(*head)]
            values = [first, second, both, change.mean, change.low, change.high]
            rows.append([*address, *values, control[pair].mean])
            if pair in printed:
                sentences[pair] = f"without both {both:+.4f}, the sum of each alone {first + second:+.4f}: {change}"
        drawn = sorted(list(dict.fromkeys(head for pair in ranked for head in pair))[:NUM_DRAWN])
        across = {head: names[head].replace(" head", "\nhead") for head in drawn}
        of_drawn = {pair: change.mean for pair, change in found.items() if {*pair} <= {*drawn}}
        cells = {(names[a], across[b]): mean for pair, mean in of_drawn.items() for a, b in (pair, pair[::-1])}
        num_untrained, total = list(map(len, self._beyond(control))), len(names) * (len(names) - 1) // 2
        address_columns = [f"{name}_{side}" for side in "ab" for name in (*context.address_columns, "head")]
        own_columns = ["change_a", "change_b", "change_both", "interaction", "low", "high", "untrained"]
        return AnalysisResult(
            scalars={
                "analysis/num_pairs": len(found),
                "analysis/backing_pairs": len(backing),
                "analysis/opposing_pairs": len(opposing),
                "analysis/untrained_backing_pairs": num_untrained[0],
                "analysis/untrained_opposing_pairs": num_untrained[1],
            },
            lines={
                "pairs": f"{len(backing)} of {len(found)} pairs{f', drawn of {total},' * (len(found) < total)} back "
                f"each other up by more than {self.margin:g}, {len(opposing)} lose less together (untrained: "
                f"{num_untrained[0]} and {num_untrained[1]}); interaction [95 % interval for all pairs at once]:",
                **{
                    f"  {' and '.join(names[head] for head in pair)}": f"{verdict}: {sentences[pair]}"
                    for pair, verdict in printed.items()
                },
            },
            tables={"pairs": ([*address_columns, *own_columns], rows)},
            figures={
                "pairs": change_grid(
                    cells,
                    [names[head] for head in drawn],
                    list(across.values()),
                    f"Interaction: what is lost without two heads, beyond the sum of each alone ({self.mode} ablation)",
                    f"interaction, nats per {context.task.unit}",
                )
            },
        )

    def _beyond(self, changes: Mapping[tuple[Head, ...], Change]) -> tuple[list[Any], list[Any]]:
        """The pairs whose whole interval is above the margin, and those whose whole interval is below -margin."""
        above = [pair for pair, change in changes.items() if change.low > self.margin]
        return above, [pair for pair, change in changes.items() if change.high < -self.margin]

    def _orders(self, context: AnalysisContext, trained: Without, generator: torch.Generator) -> dict[str, list[Head]]:
        """The heads in the orders in which sets grow, by importance on the first, third, … window and at random."""
        least = sorted(context.active_heads, key=ORDERS[self.order](context, trained).__getitem__)
        draws = [torch.randperm(len(least), generator=generator).tolist() for _ in range(self.random_orders)]
        random = {f"random {number}": [least[at] for at in draw] for number, draw in enumerate(draws, 1)}
        return {"least important first": least, "most important first": least[::-1], **random}

    def _sets(self, context: AnalysisContext, trained: Without, orders: Mapping[str, Sequence[Head]]) -> AnalysisResult:
        """The loss without growing sets of heads, on the second, fourth, … window."""
        base, total = _half(trained[()], 1), len(context.active_heads)
        counts = sorted({round(i * total / (MAX_POINTS - 1)) for i in range(MAX_POINTS)} | {total // 2})
        curves: dict[str, dict[int, Change]] = {}
        rows, summed = [], 0.0
        for name, order in orders.items():
            without = losses_without(context, [order[:count] for count in counts], self.mode)
            changes = [_half(losses, 1).change_from(base, self.num_resamples) for losses in without]
            curves[name] = dict(zip(counts, changes, strict=True))
            for count, change in curves[name].items():
                summed = sum(_half(trained[head,], 1).mean - base.mean for head in order[:count])
                rows.append([name, count, *change.row(base), summed])
        drawn = {name: (counts, [change.mean for change in curve.values()]) for name, curve in curves.items()}
        drawn["sum of each alone"] = counts, [row[-1] for row in rows[: len(counts)]]
        at_half = {name: curve[total // 2] for name, curve in curves.items()}
        at_random = [at_half.pop(name).mean for name in orders if name.startswith("random")]
        everything = curves["least important first"][total]
        return AnalysisResult(
            scalars={"analysis/change_without_all": everything.mean, "analysis/sum_of_each_alone": summed},
            lines={
                "sets": f"without {total // 2} of {total} heads, ordered on half of the {context.row}s and measured on "
                "the others:",
                **{f"  {name}": str(change) for name, change in at_half.items()},
                "  random": f"{statistics.fmean(at_random):+.4f}, the mean of {len(at_random)} orders from "
                f"{min(at_random):+.4f} to {max(at_random):+.4f}",
                "  all heads": f"{everything}; the sum of each alone {summed:+.4f}",
            },
            tables={"sets": (["order", "removed", *CHANGE_COLUMNS, "sum_of_each_alone"], rows)},
            figures={
                "sets": lines(
                    {name: curve for name, curve in drawn.items() if not name.startswith("random")},
                    f"Change of the loss without growing sets of heads ({self.mode} ablation)",
                    "heads removed",
                    f"change of the loss, nats per {context.task.unit}",
                    baselines={name: curve for name, curve in drawn.items() if name.startswith("random")},
                )
            },
        )


def _half(losses: Losses, first: int) -> Losses:
    """Every second window."""
    return Losses(losses.nats[first::2], losses.targets[first::2])


def interactions(without: Without, num_resamples: int) -> dict[tuple[Head, ...], Change]:
    """Δ(a, b) - Δ(a) - Δ(b) in nats per target for each pair in `without`, with `simultaneous` intervals."""
    base, pairs = without[()], [heads for heads in without if len(heads) == 2]
    together = [Losses(without[pair].nats + base.nats, base.targets) for pair in pairs]
    apart = [Losses(without[a,].nats + without[b,].nats, base.targets) for a, b in pairs]
    return dict(zip(pairs, simultaneous(together, apart, num_resamples), strict=True))


def simultaneous(after: Sequence[Losses], before: Sequence[Losses], num_resamples: int) -> list[Change]:
    """Changes of the loss with 95 % intervals that hold for all of them at once, however many are looked at.

    mean ± c s, where s is the standard deviation over bootstrap resamples of the windows, and c the 95 % quantile, over
    the resamples, of the largest |deviation| / s of any of the changes (max-T, Westfall & Young 1993).
    """
    pairs = list(zip(after, before, strict=True))
    means = torch.tensor([late.mean - early.mean for late, early in pairs], dtype=torch.float64)
    resampled = torch.stack([late.resampled_changes(early, num_resamples) for late, early in pairs])
    deviations, spread = resampled - means.unsqueeze(1), resampled.std(dim=1).clamp(min=1e-12)
    width = (deviations.abs() / spread.unsqueeze(1)).amax(dim=0).quantile(0.95) * spread
    return [Change(*bounds) for bounds in torch.stack([means, means - width, means + width], dim=1).tolist()]


def subspace_overlap(weights: Float[Tensor, "heads head_dim features"]) -> Float[Tensor, "heads heads"]:
    """The mean squared cosine of the principal angles between the row spaces of heads (Björck & Golub 1973).

    1 for equal subspaces, 0 for orthogonal ones, head_dim / features in expectation for random ones.
    """
    bases = torch.linalg.qr(weights.double().mT).Q
    return torch.linalg.svdvals(bases.mT.unsqueeze(1) @ bases).square().mean(dim=-1)


def weights_by_head(layer: BaseAttention, of: Any = Tensor.detach) -> dict[str, Float[Tensor, "heads dim features"]]:
    """The weights with which each head reads and, transposed, writes, or what `of` returns in place of the weights."""
    found = {}
    for name, projection in PROJECTIONS.items():
        weight = of(getattr(layer, projection).weight).cpu()
        if name in ("W_K", "W_V"):
            found[name] = weight.unflatten(0, (layer.num_kv_heads, -1))[layer.head_map.kv_heads]
        else:
            found[name] = (weight.mT if name == "W_O" else weight).unflatten(0, (layer.num_heads, -1))
    return found


def output_overlap(context: AnalysisContext) -> list[Float[Tensor, "2 heads heads"]]:
    """For each layer the linear CKA of the outputs of heads over all tokens, and by chance, with shuffled tokens.

    ‖cov(a, b)‖² / (‖cov(a, a)‖ ‖cov(b, b)‖), from 0 to 1: 1 for outputs that are equal up to rotation and scale
    (Kornblith et al. 2019, arXiv 1905.00414).
    """

    def moments(of_layer: Outputs) -> list[Tensor]:
        outputs, is_token = of_layer
        x = outputs.transpose(1, 2)[is_token].double().cpu().flatten(1)
        shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]
        return [torch.stack([x.T @ x, x.T @ shuffled]), x.sum(dim=0), torch.tensor(len(x))]

    found, of_batches = [], [outputs_by_head(context, batch, moments) for batch in context.batches]
    for layer, of_layer in zip(context.layers, zip(*of_batches, strict=True), strict=True):
        products, total, count = (torch.stack(terms).sum(dim=0) for terms in zip(*of_layer, strict=True))
        covariance = products / count - torch.outer(total, total) / count**2
        blocks = covariance.unflatten(2, (layer.num_heads, -1)).unflatten(1, (layer.num_heads, -1))
        sizes = blocks.square().sum(dim=(2, 4))
        norms = sizes[0].diagonal().sqrt()
        found.append(sizes / torch.outer(norms, norms))
    return found


def head_overlaps(context: AnalysisContext) -> list[dict[str, Float[Tensor, "2 heads heads"]]]:
    """The overlap of the heads of each layer, by projection and of their outputs, each before what chance gives."""
    found = []
    for layer, outputs in zip(context.layers, output_overlap(context), strict=True):
        parts = {name: (subspace_overlap(part), part) for name, part in weights_by_head(layer).items()}
        chance = {name: torch.full_like(of, part.shape[1] / part.shape[2]) for name, (of, part) in parts.items()}
        found.append({name: torch.stack([of, chance[name]]) for name, (of, _) in parts.items()} | {"outputs": outputs})
    return found


def overlaps(context: AnalysisContext) -> AnalysisResult:
    """The overlap of the heads of each layer, trained and untrained, see `HeadRedundancy`."""
    trained, untrained = (head_overlaps(replace(context, network=network)) for network in context.networks().values())
    rows = []
    for (layer, a), (other, b) in itertools.combinations(context.active_heads, 2):
        heads = context.layers[layer].head_map
        for part in trained[layer] if layer == other else ():
            if heads.kv_heads[a] != heads.kv_heads[b] or part not in ("W_K", "W_V"):
                own, chance = trained[layer][part][:, a, b].tolist()
                values = [own, float(untrained[layer][part][0, a, b]), chance]
                rows.append([*context.addresses[layer], heads.ids[a], heads.ids[b], part, *values])
    if not rows:  # no layer has two heads
        return AnalysisResult()
    found = AnalysisResult(
        tables={"overlap": ([*context.address_columns, "head_a", "head_b", "part", *OVERLAPS], rows)}
    )
    found.lines["overlap"] = "mean over pairs of heads of a layer: squared cosine between subspaces, CKA of outputs"
    cells: dict[tuple[str, str], float] = {}
    for part in dict.fromkeys(row[-4] for row in rows):
        of_part = [row for row in rows if row[-4] == part]
        means = {name: statistics.fmean(row[at] for row in of_part) for at, name in enumerate(OVERLAPS, -3)}
        found.scalars |= {f"analysis/overlap/{part}/{name}": mean for name, mean in means.items()}
        most, above = max(of_part, key=lambda row: row[-3]), max(row[-2] for row in of_part)
        found.lines[f"  {part}"] = (
            ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())
            + f"; {sum(row[-3] > above for row in of_part)} of {len(of_part)} pairs above all untrained ones; most: "
            f"{layer_title(tuple(most[:-6]))} heads {most[-6]} and {most[-5]}, {most[-3]:.3f}"
        )
        for address in context.addresses:
            of_layer = [row[-3:] for row in of_part if row[:-6] == list(address)]
            for at, name in enumerate(OVERLAPS[:2] if of_layer else ()):
                beyond = statistics.fmean(values[at] - values[2] for values in of_layer)
                cells[layer_title(address), f"{part}\n{name}"] = beyond
    title = "Overlap of two heads of a layer beyond chance, mean over pairs"
    down, across = (list(dict.fromkeys(place[side] for place in cells)) for side in (0, 1))
    found.figures["overlap"] = change_grid(cells, down, across, title, "overlap minus that of chance")
    return found
