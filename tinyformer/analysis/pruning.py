"""Head pruning: the loss by the number of heads, and a smaller checkpoint."""

import copy
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from tinyformer.analysis.ablation import gated, head_changes
from tinyformer.analysis.importance import head_importance
from tinyformer.analysis.pictures.charts import lines
from tinyformer.analysis.subject import Findings, Subject, Trained, head_pairs, living_heads
from tinyformer.batch import Batch, tensors
from tinyformer.errors import ArgumentError, require_at_least, require_choice
from tinyformer.nn import AttentionMask, BaseAttention, Network, prune_heads
from tinyformer.nn.heads import Address
from tinyformer.nn.maps import is_own

MAX_POINTS = 17
"""Largest number of points of the curve, besides that of the chosen number of heads."""


def _by_importance(subject: Subject, seed: int) -> list[float]:
    return head_importance(subject)


def _by_ablation(subject: Subject, seed: int) -> list[float]:
    return head_changes(subject)


def _at_random(subject: Subject, seed: int) -> list[float]:
    num_heads = len(head_pairs(subject.layers))
    return torch.rand(num_heads, generator=torch.Generator().manual_seed(seed)).tolist()


ORDERS: dict[str, Callable[[Subject, int], list[float]]] = {
    "importance": _by_importance,
    "oracle": _by_ablation,
    "random": _at_random,
}
"""By name, the score of each head; heads with the lowest scores are pruned first."""


class HeadPruning:
    """Prunes heads one after the other, the least important first, and saves the smaller model.

    As in Michel et al. 2019 (arXiv 1905.10650, §4). Each layer keeps its last head; to remove the attention of a whole
    layer, use `Residual(branch=0)` instead. Ablated heads do not count, and stay as they are.

    Args:
        fraction: share of all heads to prune.
        order: which heads are pruned first: by `importance` (see `head_importance`); `oracle`, by the change of the
            loss after ablating each alone; or `random`, the baseline.
        num_windows: number of windows, examples or pairs, drawn at random from the evaluated split.
        seed: seed of the random order.
        random_orders: number of random orders to compare with in the picture and the table, with the seeds that follow
            `seed`. Each costs at most 17 evaluations of the windows.

    Raises:
        ArgumentError: the order is unknown, the fraction does not lie between 0 and 1, or a number is too small.
    """

    def __init__(
        self,
        fraction: float = 0.4,
        order: str = "importance",
        num_windows: int = 32,
        seed: int = 0,
        random_orders: int = 3,
    ) -> None:
        require_choice("order", order, ORDERS)
        require_at_least(1, {"num_windows": 32}, num_windows=num_windows)
        require_at_least(0, {"random_orders": 3}, random_orders=random_orders)
        if not 0 < fraction < 1:
            raise ArgumentError("fraction", fraction, "must lie between 0 and 1", {"fraction": 0.4})
        self.fraction, self.order, self.num_windows, self.seed = fraction, order, num_windows, seed
        self.random_orders = random_orders
        self.needs_gradient = order == "importance"

    def __call__(self, model: Trained, folder: Path = Path()) -> Findings:
        subject = model.sample(self.num_windows)
        layers, living, unit = subject.layers, living_heads(subject.layers), subject.task.unit
        total = len(living)
        num_pruned = self._num_pruned(total, total - len(dict(living)))
        ranked = pruning_order(subject, ORDERS[self.order](subject, self.seed))
        counts = sorted({round(i * len(ranked) / (MAX_POINTS - 1)) for i in range(MAX_POINTS)} | {num_pruned})
        num_windows = sum(len(batch["inputs"]) for batch in subject.batches)
        whole = subject.losses().mean
        curve = _curve(subject, ranked, counts, whole)
        seeds = [self.seed + 1 + index for index in range(self.random_orders)]
        baselines = {
            f"random, seed {seed}": _curve(subject, pruning_order(subject, _at_random(subject, seed)), counts, whole)
            for seed in seeds
        }
        pruned = copy.deepcopy(subject.network)
        for index, layer in enumerate(pruned.attentions()):
            prune_heads(layer, [layers[index].head_map.ids[head] for at, head in ranked[:num_pruned] if at == index])
        error = math.inf
        with suppress(RuntimeError, IndexError):  # of sizes that do not fit
            error = _difference(subject, ranked[:num_pruned], pruned)
        if not error < 1e-5:
            name, cause = _own_part(layers)
            reason = "computes something else without some of the heads, so that they cannot be pruned"
            raise ArgumentError(name, type(cause).__name__, reason)
        path = folder / "pruned.ckpt"
        subject.save_pruned(pruned, path)
        old_speed, new_speed = _tokens_per_second(subject, [subject.network, pruned])
        old_size, new_size = subject.network.num_parameters(), pruned.num_parameters()
        old_bytes, new_bytes = _num_bytes(subject.network), _num_bytes(pruned)
        return Findings(
            scalars={
                "analysis/loss": curve[0],
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
                + ", ".join(_written(subject.head_address(*pair)) for pair in sorted(ranked[:num_pruned])),
                "  loss": f"{curve[0]:.4f} -> {curve[num_pruned]:.4f} nats per {unit}, over {num_windows} "
                f"{subject.row}s",
                **_at_random_line(baselines, num_pruned),
                "  parameters": f"{old_size:,} -> {new_size:,} ({old_bytes:,} -> {new_bytes:,} bytes)",
                "  speed": f"{old_speed:,.0f} -> {new_speed:,.0f} tokens/s in the forward pass",
                "  check": f"differs from the gated model by {error:.1e}",
            },
            tables={
                "prune": (
                    ["pruned", "left", "loss", *(f"loss_random_{seed}" for seed in seeds)],
                    [
                        [count, total - count, loss, *(losses[count] for losses in baselines.values())]
                        for count, loss in curve.items()
                    ],
                )
            },
            figures={
                "prune": lines(
                    {self.order: ([total - count for count in counts], list(curve.values()))},
                    f"Loss by number of heads (pruning order: {self.order})",
                    "heads left",
                    f"loss, nats per {unit}",
                    baselines={
                        name: ([total - count for count in counts], list(losses.values()))
                        for name, losses in baselines.items()
                    },
                    marked=(total - num_pruned, curve[num_pruned], f"pruned.ckpt, {total - num_pruned} heads"),
                )
            },
            files=[path],
        )

    def _num_pruned(self, total: int, most: int) -> int:
        """The number of heads to prune.

        Raises:
            ArgumentError: it is 0, or more than `most`.
        """
        count = round(self.fraction * total)
        if most == 0:
            reason = "no head can be pruned, since each layer of the model has only one, which it keeps"
            raise ArgumentError("fraction", self.fraction, reason)
        if not 1 <= count <= most:
            reason = (
                f"is {count} of {total} heads; from 1 to {most} can be pruned, since each layer keeps its last head"
            )
            raise ArgumentError(
                "fraction", self.fraction, reason, {"fraction": round(min(max(count, 1), most) / total, 3)}
            )
        return count


def pruning_order(subject: Subject, scores: Sequence[float]) -> list[tuple[int, int]]:
    """All of `living_heads` but the one with the highest of the `head_pairs`' scores in each layer, lowest first."""
    score_of, living = dict(zip(head_pairs(subject.layers), scores, strict=True)), living_heads(subject.layers)
    left = Counter(layer for layer, _ in living)
    order = []
    for layer, head in sorted(living, key=lambda pair: score_of[pair]):
        if left[layer] > 1:
            left[layer] -= 1
            order.append((layer, head))
    return order


def _curve(subject: Subject, order: Sequence[tuple[int, int]], counts: Sequence[int], whole: float) -> dict[int, float]:
    """The loss without the first heads of an order, by their number; `whole` is the loss of the unpruned model."""
    curve = {0: whole}
    for count in counts:
        if count:
            with gated(subject.network, order[:count]):
                curve[count] = subject.losses().mean
    return curve


def _at_random_line(baselines: Mapping[str, Mapping[int, float]], num_pruned: int) -> dict[str, str]:
    """The line of the summary on random orders, if there are any."""
    losses = ", ".join(f"{curve[num_pruned]:.4f}" for curve in baselines.values())
    return {"  at random": f"{losses} with as many heads pruned in random orders"} if losses else {}


def _own_part(layers: Sequence[BaseAttention]) -> tuple[str, nn.Module]:
    """The first part of a layer, by its argument, that has parameters and is of a class of one's own."""
    for at in layers:
        for name, part in (("attention.score", at.score), ("attention.position", at.position), ("attention", at)):
            if is_own(part) and list(part.parameters()):
                return name, part
    return "attention", layers[0]


def _written(address: Address) -> str:
    """The address of a head as a user types it, such as [3,0]."""
    return f"[{','.join(map(str, address))}]"


@torch.no_grad()
def _difference(subject: Subject, heads: Sequence[tuple[int, int]], pruned: Network) -> float:
    """max|a - b| / max|b| over the outputs a of the pruned and b of the gated model for one window."""
    window = cast(Batch, {name: rows[:1] for name, rows in tensors(subject.batches[0]).items()})
    mask = subject.task.mask(window)
    with gated(subject.network, heads):
        expected = subject.task.forward(_exact(subject.network, mask), window)
    return float((subject.task.forward(_exact(pruned, mask), window) - expected).abs().max() / expected.abs().max())


def _exact(network: Network, mask: AttentionMask) -> Network:
    """A copy of the network in fp64, with the eager backend, since some kernels support half precision only."""
    exact = copy.deepcopy(network).double()
    for layer in exact.attentions():
        layer.backend = "eager"
    exact.resolve_backends(next(exact.parameters()).device.type, torch.float64, mask, training=False)
    return exact


@torch.no_grad()
def _tokens_per_second(subject: Subject, networks: Sequence[Network], repeats: int = 5) -> list[float]:
    """The median speed of each network on a batch; they alternate, so that other load affects them alike."""
    batch = subject.batches[0]
    seconds: list[list[float]] = [[] for _ in networks]
    for _ in range(repeats):
        for network, times in zip(networks, seconds, strict=True):
            start = time.perf_counter()
            with subject.precision():
                _wait(subject.task.forward(network, batch))
            times.append(time.perf_counter() - start)
    num_tokens = sum(rows.numel() for name, rows in tensors(batch).items() if name in ("source", "inputs"))
    return [num_tokens / statistics.median(times) for times in seconds]


def _wait(x: Tensor) -> None:
    if x.device.type == "cuda":
        torch.cuda.synchronize(x.device)


def _num_bytes(network: Network) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())
