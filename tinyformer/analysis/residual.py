"""Residual surgery: the loss without each connection or sublayer, and rank collapse without connections."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tinyformer.analysis.charts import lines
from tinyformer.analysis.subject import CHANGE_COLUMNS, Change, Findings, Subject, fullest
from tinyformer.batch import Batch
from tinyformer.errors import require_at_least
from tinyformer.nn import AttentionMask, Residual, Transformer

SUBLAYERS = ("attention_residual", "feed_forward_residual")
PARTS = ("skip", "branch")


def distance_to_rank_one(x: Float[Tensor, "batch seq d_model"]) -> Float[Tensor, ""]:
    """‖X - 1 x̄ᵀ‖ / ‖X‖, averaged over the batch: 0 if all tokens of a sequence have the same vector.

    Dong et al. 2021 (arXiv 2103.03404), with the Frobenius norm, for which the mean over the tokens is the best x̄; for
    the paper's norm, √(‖·‖₁ ‖·‖_∞), no closed form exists.
    """
    x = x.float()
    rest = x - x.mean(dim=1, keepdim=True)
    return (rest.norm(dim=(1, 2)) / x.norm(dim=(1, 2)).clamp(min=torch.finfo(x.dtype).tiny)).mean()


def token_cosine(x: Float[Tensor, "batch seq d_model"]) -> Float[Tensor, ""]:
    """The mean cosine similarity of all pairs of different tokens of a sequence, averaged over the batch."""
    unit, seq = F.normalize(x.float(), dim=-1), x.shape[1]
    # ‖Σ u‖² = Σᵢⱼ uᵢ·uⱼ, minus the pairs of a token with itself.
    pairs = unit.sum(dim=1).square().sum(dim=-1) - unit.square().sum(dim=(1, 2))
    return (pairs / (seq * (seq - 1))).mean()


@contextmanager
def scaled(residuals: Sequence[Residual], part: str, scale: float) -> Iterator[None]:
    """Set the `skip` or the `branch` scale of residual connections inside the block."""
    before = [getattr(residual, part) for residual in residuals]
    for residual in residuals:
        setattr(residual, part, scale)
    try:
        yield
    finally:
        for residual, value in zip(residuals, before, strict=True):
            setattr(residual, part, value)


def residuals_of(network: Transformer) -> list[Residual]:
    """Both residual connections of each layer, in order."""
    return [getattr(layer, name) for layer in network.encoder.layers for name in SUBLAYERS]


@torch.no_grad()
def rank_by_depth(network: Transformer, batch: Batch, mask: AttentionMask) -> list[tuple[float, float]]:
    """`distance_to_rank_one` and `token_cosine` of the embeddings and of the output of each layer."""
    ranks: list[tuple[float, float]] = []

    def record(layer: torch.nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        for x in (output,) if ranks else (args[0], output):
            ranks.append((float(distance_to_rank_one(x)), float(token_cosine(x))))

    hooks = [layer.register_forward_hook(record) for layer in network.encoder.layers]
    try:
        network(batch["inputs"], mask)
    finally:
        for hook in hooks:
            hook.remove()
    return ranks


class ResidualSurgery:
    """The loss without each residual connection or sublayer, and the rank of the residual stream by depth.

    Without residual connections, attention makes the vectors of all tokens converge at a rate that grows with depth
    (Dong et al. 2021, arXiv 2103.03404).

    Args:
        num_windows: number of windows of the evaluated split.
        num_resamples: number of bootstrap resamples of the windows.

    Raises:
        ArgumentError: a number is below 1.
    """

    needs_gradient = False

    def __init__(self, num_windows: int = 32, num_resamples: int = 1000) -> None:
        works = {"num_windows": 32, "num_resamples": 1000}
        require_at_least(1, works, num_windows=num_windows, num_resamples=num_resamples)
        self.num_windows, self.num_resamples = num_windows, num_resamples

    def __call__(self, subject: Subject, folder: Path) -> Findings:
        base = subject.losses()
        changes: dict[tuple[int, str, str], Change] = {}
        for depth, layer in enumerate(subject.network.encoder.layers):
            for name, part in itertools.product(SUBLAYERS, PARTS):
                with scaled([getattr(layer, name)], part, 0.0):
                    changes[depth, name, part] = subject.losses().change_from(base, self.num_resamples)
        ranks = self._ranks(subject)
        worst = sorted(changes, key=lambda removed: -changes[removed].mean)[:5]
        last = {name: values[-1] for name, values in ranks.items()}
        return Findings(
            scalars={
                "analysis/loss": base.mean,
                **{
                    f"analysis/{name.replace(', ', '_').replace(' ', '_')}/rank_distance": v[0]
                    for name, v in last.items()
                },
            },
            lines={
                "residual": f"{len(base.nats)} {subject.row}s with a loss of {base.mean:.4f} nats per "
                f"{subject.task.unit}; change of the loss [95 % interval]:",
                **{f"  layer {at[0]} {at[1]}.{at[2]}=0": str(changes[at]) for at in worst},
                **{f"  {name}": f"distance to rank 1 {v[0]:.3f}, token cosine {v[1]:.3f}" for name, v in last.items()},
            },
            tables={
                "residual": (
                    ["layer", "sublayer", "removed", *CHANGE_COLUMNS],
                    [[*at, *change.row(base)] for at, change in changes.items()],
                ),
                "rank": (
                    ["model", "depth", "distance_to_rank_one", "token_cosine"],
                    [[name, depth, *v] for name, values in ranks.items() for depth, v in enumerate(values)],
                ),
            },
            figures={
                "rank": lines(
                    {name: (range(len(values)), [v[0] for v in values]) for name, values in ranks.items()},
                    "Distance of the residual stream from rank 1 (0: all tokens have the same vector)",
                    "layers",
                    "relative distance to rank 1",
                    "log",
                ),
                "token_cosine": lines(
                    {name: (range(len(values)), [v[1] for v in values]) for name, values in ranks.items()},
                    "Mean cosine similarity of the tokens of a sequence",
                    "layers",
                    "mean cosine similarity",
                ),
            },
        )

    def _ranks(self, subject: Subject) -> dict[str, list[tuple[float, float]]]:
        batch = fullest(subject.batches[0], len(subject.batches[0]["inputs"]))
        mask, ranks = subject.task.mask(batch), {}
        for name, network in {"trained": subject.network, "untrained": subject.untrained()}.items():
            with subject.precision():
                ranks[f"{name}, with skips"] = rank_by_depth(network, batch, mask)
                with scaled(residuals_of(network), "skip", 0.0):
                    ranks[f"{name}, without skips"] = rank_by_depth(network, batch, mask)
        return ranks
