"""Head pruning: the loss by the number of heads, and a smaller checkpoint."""

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from tinyformer.analysis.context import AnalysisContext, Head, Trained
from tinyformer.analysis.removal.ablation import gated, head_changes, head_importance, losses_along
from tinyformer.costs.network import num_bytes
from tinyformer.data.batches.windows import Batch, tensors
from tinyformer.errors import ArgumentError, require_choice
from tinyformer.hardware import median_seconds
from tinyformer.nn import AttentionMask, Network
from tinyformer.nn.heads import require_prunable
from tinyformer.report.charts import lines
from tinyformer.report.result import AnalysisResult


def _random_scores(context: AnalysisContext, seed: int) -> dict[Head, float]:
    draws = torch.rand(len(context.heads), generator=torch.Generator().manual_seed(seed)).tolist()
    return dict(zip(context.heads, draws, strict=True))


ORDERS: dict[str, Callable[[AnalysisContext, int], dict[Head, float]]] = {
    "importance": lambda context, seed: head_importance(context),
    "oracle": lambda context, seed: head_changes(context),
    "random": _random_scores,
}
"""By name, the score of each head; heads with the lowest scores are pruned first."""


@dataclass(eq=False)
class HeadPruning:
    """Pruning of heads one after another, the least important first, and the checkpoint of the smaller model.

    The method is that of Michel et al. 2019 (arXiv 1905.10650, §4). Each layer keeps its last head; to remove the
    attention of a whole layer, use `Residual(branch=0)` instead. Ablated heads are neither counted nor pruned.

    Args:
        order: the score of a head, the lowest pruned first: `importance` (see `head_importance`); `oracle`, the change
            of the loss after ablating the head alone; or `random`, the baseline.
        random_orders: the number of random orders for comparison in the picture and the table; their seeds follow
            `seed`. Each costs at most 18 evaluations of the windows.
    """

    fraction: float = 0.4  # the share of all heads to prune
    order: str = "importance"
    num_windows: int = 32
    seed: int = 0  # for the random order
    random_orders: int = 3

    def __post_init__(self) -> None:
        require_choice("order", self.order, ORDERS)
        self.needs_gradient = self.order == "importance"

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        for layer in context.layers:
            require_prunable(layer)

        def curve(order: Sequence[Head]) -> dict[int, float]:
            return {count: losses.mean for count, losses in losses_along(context, order, number).items()}

        order = pruning_order(context, ORDERS[self.order](context, self.seed))
        number = self._num_pruned(len(context.active_heads), len(order))
        network, heads = copy.deepcopy(context.network), order[:number]
        network.prune([context.head_address(*head) for head in heads])
        difference = _difference(context, heads, network)
        seeds = range(self.seed + 1, self.seed + 1 + self.random_orders)
        at_random = {seed: curve(pruning_order(context, ORDERS["random"](context, seed))) for seed in seeds}
        own, total, unit = curve(order), len(context.active_heads), context.task.unit
        context.save_pruned(network, path := folder / "pruned.ckpt")
        left, loss, networks = [total - count for count in own], own[number], [context.network, network]
        costs: dict[str, list[Any]] = {
            "num_parameters": [of.num_parameters() for of in networks],
            "num_bytes": [num_bytes(of.parameters()) for of in networks],
            "tokens_per_second": _tokens_per_second(context, networks),
        }
        addresses = (",".join(map(str, context.head_address(*head))) for head in sorted(heads))
        others = ", ".join(f"{losses[number]:.4f}" for losses in at_random.values())
        return AnalysisResult(
            scalars={
                "analysis/loss": own[0],
                "analysis/pruned_loss": loss,
                "analysis/num_pruned": number,
                "analysis/num_heads": total,
                "analysis/difference_from_gated": difference,
                **{f"analysis/{name}": whole for name, (whole, _) in costs.items()},
                **{f"analysis/pruned_{name}": smaller for name, (_, smaller) in costs.items()},
            },
            lines={
                "pruned": f"{number} of {total} heads, by {self.order}: "
                + ", ".join(f"[{address}]" for address in addresses),
                "  loss": f"{own[0]:.4f} -> {loss:.4f} nats per {unit}, over {context.num_windows} {context.row}s",
                **({"  at random": f"{others} with as many heads pruned in random orders"} if others else {}),
                "  parameters": "{:,} -> {:,} ({:,} -> {:,} bytes)".format(
                    *costs["num_parameters"], *costs["num_bytes"]
                ),
                "  speed": "{:,.0f} -> {:,.0f} tokens/s in the forward pass".format(*costs["tokens_per_second"]),
                "  check": f"relative difference from the gated model {difference:.1e}",
            },
            tables={
                "prune": (
                    ["pruned", "left", "loss", *(f"loss_random_{seed}" for seed in at_random)],
                    [[at, total - at, *(losses[at] for losses in (own, *at_random.values()))] for at in own],
                )
            },
            figures={
                "prune": lines(
                    {self.order: (left, list(own.values()))},
                    f"Loss by number of heads (pruning order: {self.order})",
                    "heads left",
                    f"loss, nats per {unit}",
                    baselines={
                        f"random, seed {seed}": (left, list(losses.values())) for seed, losses in at_random.items()
                    },
                    marked=(total - number, loss, f"pruned.ckpt, {total - number} heads"),
                )
            },
            files=[path],
        )

    def _num_pruned(self, total: int, most: int) -> int:
        """The number of heads to prune, from 1 to `most`."""
        count = round(self.fraction * total)
        if 1 <= count <= most:
            return count
        reason = f"is {count} of {total} heads; 1 to {most} heads can be pruned, since each layer keeps its last head"
        raise ArgumentError("fraction", self.fraction, reason)


def pruning_order(context: AnalysisContext, score_of: Mapping[Head, float]) -> list[Head]:
    """The active heads by increasing score, without the highest-scoring head of each layer."""
    left = Counter(layer for layer, _ in context.active_heads)
    order = []
    for layer, head in sorted(context.active_heads, key=score_of.__getitem__):
        if left[layer] > 1:
            left[layer] -= 1
            order.append((layer, head))
    return order


@torch.no_grad()
def _difference(context: AnalysisContext, heads: Sequence[Head], pruned: Network) -> float:
    """max|a - b| / max|b| over the outputs a of the pruned and b of the gated model for one window.

    An `ArgumentError` is raised if they differ, for example if a user-defined class does not support pruning.
    """
    window = cast(Batch, {name: rows[:1] for name, rows in tensors(context.batches[0]).items()})
    mask = context.task.mask(window)
    with gated(context.network, heads):
        expected = context.task.forward(_exact(context.network, mask), window)
    found = context.task.forward(_exact(pruned, mask), window)
    error = float((found - expected).abs().max() / expected.abs().max())
    if not error < 1e-5:
        reason = "computes other outputs with pruned heads than with ablated heads, so it cannot be pruned"
        raise ArgumentError("attention", type(context.layers[0]).__name__, reason)
    return error


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
    passes = {str(index): partial(context.task.forward, network, batch) for index, network in enumerate(networks)}
    with context.precision():
        seconds = median_seconds(passes, batch["inputs"].device.type)
    num_tokens = sum(rows.numel() for name, rows in tensors(batch).items() if name in ("source", "inputs"))
    return [num_tokens / seconds[name] for name in passes]
