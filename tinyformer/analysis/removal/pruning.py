"""Head pruning: the loss by the number of heads, and a smaller checkpoint."""

import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import nn

from tinyformer.analysis.context import AnalysisContext, Head, Trained, require_positive
from tinyformer.analysis.removal.ablation import gated, head_changes, head_importance, losses_without
from tinyformer.batch import Batch, tensors
from tinyformer.costs.network import num_bytes
from tinyformer.errors import ArgumentError, require_at_least, require_choice
from tinyformer.nn import AttentionMask, BaseAttention, Network, prune_heads
from tinyformer.nn.maps import is_own
from tinyformer.nn.timing import median_seconds
from tinyformer.report.charts import lines
from tinyformer.report.result import AnalysisResult

MAX_POINTS = 17  # largest number of points of the curve, besides that of the chosen number of heads


def _random_scores(context: AnalysisContext, seed: int) -> list[float]:
    return torch.rand(len(context.heads), generator=torch.Generator().manual_seed(seed)).tolist()


ORDERS: dict[str, Callable[[AnalysisContext, int], list[float]]] = {
    "importance": lambda context, seed: head_importance(context),
    "oracle": lambda context, seed: head_changes(context),
    "random": _random_scores,
}
"""By name, the score of each head; heads with the lowest scores are pruned first."""


@dataclass(eq=False)
class HeadPruning:
    """Prunes heads one after the other, the least important first, and saves the smaller model.

    As in Michel et al. 2019 (arXiv 1905.10650, §4). Each layer keeps its last head; to remove the attention of a whole
    layer, use `Residual(branch=0)` instead. Ablated heads do not count, and stay as they are.

    Args:
        order: which heads are pruned first: by `importance` (see `head_importance`); `oracle`, by the change of the
            loss after ablating each alone; or `random`, the baseline.
        random_orders: number of random orders to compare with in the picture and the table, with the seeds that follow
            `seed`. Each costs at most 17 evaluations of the windows.
    """

    fraction: float = 0.4  # of all heads, to prune
    order: str = "importance"
    num_windows: int = 32
    seed: int = 0  # of the random order
    random_orders: int = 3

    def __post_init__(self) -> None:
        require_choice("order", self.order, ORDERS)
        require_positive(self, "num_windows")
        require_at_least(0, {"random_orders": 3}, random_orders=self.random_orders)
        if not 0 < self.fraction < 1:
            raise ArgumentError("fraction", self.fraction, "must lie between 0 and 1", {"fraction": 0.4})
        self.needs_gradient = self.order == "importance"

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        total, unit = len(context.active_heads), context.task.unit
        ranked = pruning_order(context, ORDERS[self.order](context, self.seed))
        num_pruned = self._num_pruned(total, len(ranked))
        removed, num_left = ranked[:num_pruned], total - num_pruned
        counts = sorted({round(i * len(ranked) / (MAX_POINTS - 1)) for i in range(MAX_POINTS)} | {num_pruned})
        whole = context.losses().mean
        curve = _curve(context, ranked, counts, whole)
        seeds = range(self.seed + 1, self.seed + 1 + self.random_orders)
        baselines = {
            seed: _curve(context, pruning_order(context, _random_scores(context, seed)), counts, whole)
            for seed in seeds
        }
        pruned = copy.deepcopy(context.network)
        for index, layer in enumerate(pruned.attentions()):
            prune_heads(layer, [layer.head_map.ids[head] for at, head in removed if at == index])
        error = math.inf
        with suppress(RuntimeError, IndexError):  # of sizes that do not fit
            error = _difference(context, removed, pruned)
        if not error < 1e-5:
            name, cause = _own_part(context.layers)
            reason = "computes something else without some of the heads, so that they cannot be pruned"
            raise ArgumentError(name, type(cause).__name__, reason)
        path = folder / "pruned.ckpt"
        context.save_pruned(pruned, path)
        old_speed, new_speed = _tokens_per_second(context, [context.network, pruned])
        old_size, new_size = context.network.num_parameters(), pruned.num_parameters()
        old_bytes, new_bytes = num_bytes(context.network.parameters()), num_bytes(pruned.parameters())
        left = [total - count for count in counts]
        rows = [[at, total - at, loss, *(losses[at] for losses in baselines.values())] for at, loss in curve.items()]
        at_random = ", ".join(f"{losses[num_pruned]:.4f}" for losses in baselines.values())
        addresses = (",".join(map(str, context.head_address(*head))) for head in sorted(removed))
        return AnalysisResult(
            scalars={
                "analysis/loss": whole,
                "analysis/pruned_loss": curve[num_pruned],
                "analysis/num_pruned": num_pruned,
                "analysis/num_heads": total,
                "analysis/difference_from_gated": error,
                "analysis/num_parameters": old_size,
                "analysis/pruned_num_parameters": new_size,
                "analysis/num_bytes": old_bytes,
                "analysis/pruned_num_bytes": new_bytes,
                "analysis/tokens_per_second": old_speed,
                "analysis/pruned_tokens_per_second": new_speed,
            },
            lines={
                "pruned": f"{num_pruned} of {total} heads, by {self.order}: "
                + ", ".join(f"[{address}]" for address in addresses),
                "  loss": f"{whole:.4f} -> {curve[num_pruned]:.4f} nats per {unit}, over {context.num_windows} "
                f"{context.row}s",
                **({"  at random": f"{at_random} with as many heads pruned in random orders"} if at_random else {}),
                "  parameters": f"{old_size:,} -> {new_size:,} ({old_bytes:,} -> {new_bytes:,} bytes)",
                "  speed": f"{old_speed:,.0f} -> {new_speed:,.0f} tokens/s in the forward pass",
                "  check": f"differs from the gated model by {error:.1e}",
            },
            tables={"prune": (["pruned", "left", "loss", *(f"loss_random_{seed}" for seed in seeds)], rows)},
            figures={
                "prune": lines(
                    {self.order: (left, list(curve.values()))},
                    f"Loss by number of heads (pruning order: {self.order})",
                    "heads left",
                    f"loss, nats per {unit}",
                    baselines={
                        f"random, seed {seed}": (left, list(losses.values())) for seed, losses in baselines.items()
                    },
                    marked=(num_left, curve[num_pruned], f"pruned.ckpt, {num_left} heads"),
                )
            },
            files=[path],
        )

    def _num_pruned(self, total: int, most: int) -> int:
        """The number of heads to prune, from 1 to `most`."""
        count = round(self.fraction * total)
        if most == 0:
            reason = "no head can be pruned, since each layer of the model has only one, which it keeps"
            raise ArgumentError("fraction", self.fraction, reason)
        if not 1 <= count <= most:
            reason = (
                f"is {count} of {total} heads; from 1 to {most} can be pruned, since each layer keeps its last head"
            )
            works = {"fraction": round(min(max(count, 1), most) / total, 3)}
            raise ArgumentError("fraction", self.fraction, reason, works)
        return count


def pruning_order(context: AnalysisContext, scores: Sequence[float]) -> list[Head]:
    """The living heads, those with the lowest scores first, without the one of each layer that has the highest."""
    score_of, living = dict(zip(context.heads, scores, strict=True)), context.active_heads
    left = Counter(layer for layer, _ in living)
    order = []
    for layer, head in sorted(living, key=score_of.__getitem__):
        if left[layer] > 1:
            left[layer] -= 1
            order.append((layer, head))
    return order


def _curve(context: AnalysisContext, order: Sequence[Head], counts: Sequence[int], whole: float) -> dict[int, float]:
    """The loss without the first heads of an order, by their number; `whole` is the loss of the unpruned model."""
    some = [count for count in counts if count]
    losses = losses_without(context, [order[:count] for count in some])
    return {0: whole} | {count: without.mean for count, without in zip(some, losses, strict=True)}


def _own_part(layers: Sequence[BaseAttention]) -> tuple[str, nn.Module]:
    """The first part of a layer, by its argument, that has parameters and is of a user-defined class."""
    for at in layers:
        for name, part in (("attention.score", at.score), ("attention.position", at.position), ("attention", at)):
            if is_own(part) and list(part.parameters()):
                return name, part
    return "attention", layers[0]


@torch.no_grad()
def _difference(context: AnalysisContext, heads: Sequence[Head], pruned: Network) -> float:
    """max|a - b| / max|b| over the outputs a of the pruned and b of the gated model for one window."""
    window = cast(Batch, {name: rows[:1] for name, rows in tensors(context.batches[0]).items()})
    mask = context.task.mask(window)
    with gated(context.network, heads):
        expected = context.task.forward(_exact(context.network, mask), window)
    return float((context.task.forward(_exact(pruned, mask), window) - expected).abs().max() / expected.abs().max())


def _exact(network: Network, mask: AttentionMask) -> Network:
    """A copy of the network in fp64, with the eager backend, since some kernels support half precision only."""
    exact = copy.deepcopy(network).double()
    for layer in exact.attentions():
        layer.backend = "eager"
    exact.resolve_backends(next(exact.parameters()).device.type, torch.float64, mask, training=False)
    return exact


@torch.no_grad()
def _tokens_per_second(context: AnalysisContext, networks: Sequence[Network]) -> list[float]:
    """The median speed of each network on a batch."""
    batch = context.batches[0]

    def forward(network: Network) -> None:
        with context.precision():
            context.task.forward(network, batch)

    passes = {str(index): partial(forward, network) for index, network in enumerate(networks)}
    seconds = median_seconds(passes, next(networks[0].parameters()).device.type)
    num_tokens = sum(rows.numel() for name, rows in tensors(batch).items() if name in ("source", "inputs"))
    return [num_tokens / seconds[name] for name in passes]
