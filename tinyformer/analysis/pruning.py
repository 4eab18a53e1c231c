"""How many heads can go? The curve of the loss, and the smaller model."""

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from tinyformer.analysis.ablation import ablated, head_changes
from tinyformer.analysis.charts import lines
from tinyformer.analysis.importance import head_importance
from tinyformer.analysis.subject import Findings, Subject, at_least_one, head_pairs
from tinyformer.batch import Batch, tensors
from tinyformer.nn import AttentionMask, Transformer, prune_heads

MAX_POINTS = 17
"""Of the curve."""


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
        self.fraction, self.order, self.seed = fraction, order, seed
        self.num_windows = at_least_one("num_windows", num_windows, 32)
        self.needs_gradient = order == "importance"

    def __call__(self, subject: Subject, folder: Path) -> Findings:
        layers, total = subject.layers, len(head_pairs(subject.layers))
        num_pruned = self._num_pruned(total, total - len(layers))
        ranked = pruning_order(subject, ORDERS[self.order](subject, self.seed))
        counts = sorted({round(i * len(ranked) / (MAX_POINTS - 1)) for i in range(MAX_POINTS)} | {num_pruned})
        num_windows, curve = sum(len(batch["inputs"]) for batch in subject.batches), {}
        for count in counts:
            with gated(subject.network, ranked[:count]):
                curve[count] = subject.losses().mean
        pruned = copy.deepcopy(subject.network)
        for index, layer in enumerate(pruned.attentions()):
            prune_heads(layer, [layers[index].head_ids[head] for at, head in ranked[:num_pruned] if at == index])
        error = _difference(subject, ranked[:num_pruned], pruned)
        assert error < 1e-5, f"The pruned model differs from the gated one by {error:.1e}."
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
                "  loss": f"{curve[0]:.4f} -> {curve[num_pruned]:.4f} nats per {subject.unit}, over {num_windows} "
                f"{subject.row}s",
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
                    f"loss, nats per {subject.unit}",
                )
            },
            files=[path],
        )

    def _num_pruned(self, total: int, most: int) -> int:
        """How many heads go.

        Raises:
            ValueError: none would, or more than `most`.
        """
        count = round(self.fraction * total)
        if most == 0:
            raise ValueError("analysis=prune takes heads, and each layer of this model has one, which it keeps.")
        if not 1 <= count <= most:
            works = round(min(max(count, 1), most) / total, 3)
            raise ValueError(
                f"analysis.fraction={self.fraction} of {total} heads is {count}, and from 1 to {most} can go, since a "
                f"layer keeps its last head; analysis.fraction={works} works."
            )
        return count


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


@contextmanager
def gated(network: Transformer, heads: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Take some of `head_pairs` away inside the block."""
    with ExitStack() as stack:
        for index, layer in enumerate(network.attentions()):
            stack.enter_context(ablated(layer, [head for at, head in heads if at == index]))
        yield


@torch.no_grad()
def _difference(subject: Subject, heads: Sequence[tuple[int, int]], pruned: Transformer) -> float:
    """max|a - b| / max|b| over the logits of a window: the pruned model against the gated."""
    window = cast(Batch, {name: rows[:1] for name, rows in tensors(subject.batches[0]).items()})
    mask = subject.mask(window)
    with gated(subject.network, heads):
        expected = _exact(subject.network, mask)(window["inputs"], mask)
    return float((_exact(pruned, mask)(window["inputs"], mask) - expected).abs().max() / expected.abs().max())


def _exact(network: Transformer, mask: AttentionMask) -> Transformer:
    """The network in fp64. By eager: some kernels take half precision alone."""
    exact = copy.deepcopy(network).double()
    for layer in exact.attentions():
        layer.backend = "eager"
    exact.resolve_backends(next(exact.parameters()).device.type, torch.float64, mask, training=False)
    return exact


@torch.no_grad()
def _tokens_per_second(subject: Subject, networks: Sequence[Transformer], repeats: int = 5) -> list[float]:
    """The median speed of each network on a batch; they take turns, so that what else runs hits both."""
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
