"""How many heads can go? The curve of the loss, and the smaller model."""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from tinyformer.analysis.ablation import HeadAblation, ablated
from tinyformer.analysis.charts import lines
from tinyformer.analysis.importance import head_importance
from tinyformer.analysis.subject import Findings, Subject, check_windows, head_pairs
from tinyformer.nn import Transformer, prune_heads

MAX_POINTS = 17
"""Of the curve."""


def _by_importance(subject: Subject, seed: int) -> list[float]:
    return head_importance(subject)


def _by_ablation(subject: Subject, seed: int) -> list[float]:
    found = HeadAblation("zero", num_resamples=1)(subject, Path())
    return [row[4] for row in found.tables["heads"][1]]


def _at_random(subject: Subject, seed: int) -> list[float]:
    num_heads = len(head_pairs(subject.layers))
    return torch.rand(num_heads, generator=torch.Generator().manual_seed(seed)).tolist()


ORDERS: dict[str, Callable[[Subject, int], list[float]]] = {
    "importance": _by_importance,
    "oracle": _by_ablation,
    "random": _at_random,
}
"""What each head is worth, by `analysis.order`; the heads worth least go first."""


class HeadPruning:
    """Heads go one after the other, those worth least first; what is left becomes a smaller checkpoint.

    As in Michel et al. 2019 (arXiv 1905.10650, §4). A layer keeps its last head, whatever it is worth: taking a whole
    layer's attention away is `block.attention_residual.branch=0`.

    Args:
        fraction: of all heads, to be pruned.
        order: which go first: by `importance`, the gradient's (see `head_importance`); `oracle`, by what taking each
            alone does to the loss; or at `random`, what the other two have to beat.
        num_windows: of the evaluated split.
        seed: of the random order.

    Raises:
        ValueError: there is no such order, or no such fraction.
    """

    def __init__(self, fraction: float = 0.4, order: str = "importance", num_windows: int = 32, seed: int = 0) -> None:
        if order not in ORDERS:
            raise ValueError(f"analysis.order={order}: choose one of {', '.join(ORDERS)}.")
        if not 0 < fraction < 1:
            raise ValueError(f"analysis.fraction={fraction} is no part of the heads; analysis.fraction=0.4 is.")
        self.fraction, self.order, self.num_windows, self.seed = fraction, order, check_windows(num_windows), seed
        self.needs_gradient = order == "importance"

    def __call__(self, subject: Subject, folder: Path) -> Findings:
        layers, total = subject.layers, len(head_pairs(subject.layers))
        num_windows = sum(len(batch["inputs"]) for batch in subject.batches)
        ranked = pruning_order(subject, ORDERS[self.order](subject, self.seed))
        num_pruned = round(self.fraction * total)
        if not 1 <= num_pruned <= len(ranked):
            works = len(ranked) / total if num_pruned else 1 / total
            raise ValueError(
                f"analysis.fraction={self.fraction} of {total} heads is {num_pruned}, and from 1 to {len(ranked)} can "
                "go, since a layer keeps its last head; "
                + (f"analysis.fraction={works:.3g} works." if ranked else "no head of this model can.")
            )
        counts = sorted({round(i * len(ranked) / (MAX_POINTS - 1)) for i in range(MAX_POINTS)} | {num_pruned})
        curve = {count: _gated_loss(subject, ranked[:count]) for count in counts}
        pruned = copy.deepcopy(subject.network)
        for index, layer in enumerate(pruned.attentions()):
            prune_heads(layer, [layers[index].head_ids[head] for at, head in ranked[:num_pruned] if at == index])
        error = _difference(subject, ranked[:num_pruned], pruned)
        if error > 1e-5:
            raise AssertionError(f"The pruned model differs from the gated one by {error:.1e}.")
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
                + ", ".join(f"[{i},{layers[i].head_ids[head]}]" for i, head in sorted(ranked[:num_pruned])),
                "  loss": f"{curve[0]:.4f} -> {curve[num_pruned]:.4f} nats per token, over {num_windows} windows",
                "  parameters": f"{old_size:,} -> {new_size:,} ({old_bytes:,} -> {new_bytes:,} bytes)",
                "  speed": f"{old_speed:,.0f} -> {new_speed:,.0f} tokens/s, forward",
                "  equal": f"to the gated model within {error:.1e}",
            },
            tables={
                "prune": (["pruned", "left", "loss"], [[count, total - count, loss] for count, loss in curve.items()])
            },
            figures={
                "prune": lines(
                    {self.order: ([total - count for count in curve], list(curve.values()))},
                    f"Loss with fewer heads, in the order: {self.order}",
                    "heads left",
                    "loss, nats per token",
                )
            },
            files=[path],
        )


def pruning_order(subject: Subject, worth: Sequence[float]) -> list[tuple[int, int]]:
    """All heads but one of each layer, as `head_pairs`, the ones worth least first."""
    pairs = head_pairs(subject.layers)
    left = [layer.num_heads for layer in subject.layers]
    order = []
    for index in sorted(range(len(pairs)), key=lambda index: worth[index]):
        layer, head = pairs[index]
        if left[layer] > 1:
            left[layer] -= 1
            order.append((layer, head))
    return order


def _gated_loss(subject: Subject, heads: Sequence[tuple[int, int]]) -> float:
    with _gated(subject.network, heads):
        return subject.losses().mean


def _gated(network: Transformer, heads: Sequence[tuple[int, int]]) -> ExitStack:
    stack = ExitStack()
    for index, layer in enumerate(network.attentions()):
        gone = [head for at, head in heads if at == index]
        if gone:
            stack.enter_context(ablated(layer, gone))
    return stack


@torch.no_grad()
def _difference(subject: Subject, heads: Sequence[tuple[int, int]], pruned: Transformer) -> float:
    """max|a - b| / max|b| over the logits of a batch, in fp32: the pruned model against the gated."""
    batch = subject.batches[0]
    with _gated(subject.network, heads):
        expected = subject.network(batch["inputs"], subject.mask(batch))
    return float((pruned(batch["inputs"], subject.mask(batch)) - expected).abs().max() / expected.abs().max())


@torch.no_grad()
def _tokens_per_second(subject: Subject, networks: Sequence[Transformer], repeats: int = 5) -> list[float]:
    """The median speed of each network over the batches; they take turns, so that what else runs hits both."""
    batch = subject.batches[0]
    seconds: list[list[float]] = [[] for _ in networks]
    for _ in range(repeats):
        for network, times in zip(networks, seconds, strict=True):
            start = time.perf_counter()
            with subject.precision():
                _wait(network(batch["inputs"], subject.mask(batch)))
            times.append(time.perf_counter() - start)
    return [batch["inputs"].numel() / statistics.median(times) for times in seconds]


def _wait(x: Tensor) -> None:
    if x.device.type == "cuda":
        torch.cuda.synchronize(x.device)


def _num_bytes(network: Transformer) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())
