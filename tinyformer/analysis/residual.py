"""What the residual connections are for: take them away, and watch the tokens become alike."""

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
from tinyformer.analysis.subject import CHANGE_COLUMNS, Change, Findings, Subject, at_least_one, fullest
from tinyformer.nn import Residual, Transformer

SUBLAYERS = ("attention_residual", "feed_forward_residual")
PARTS = ("skip", "branch")


def distance_to_rank_one(x: Float[Tensor, "batch seq d_model"]) -> Float[Tensor, ""]:
    """‖X - 1 x̄ᵀ‖ / ‖X‖, the mean over the batch: 0 where all tokens of a sequence are the same vector.

    Dong et al. 2021 (arXiv 2103.03404). In the Frobenius norm, whose nearest x̄ is the tokens' mean; the paper's own,
    √(‖·‖₁ ‖·‖_∞), has none in closed form.
    """
    x = x.float()
    rest = x - x.mean(dim=1, keepdim=True)
    return (rest.norm(dim=(1, 2)) / x.norm(dim=(1, 2)).clamp(min=torch.finfo(x.dtype).tiny)).mean()


def token_cosine(x: Float[Tensor, "batch seq d_model"]) -> Float[Tensor, ""]:
    """The mean cosine of each two different tokens of a sequence, and over the batch: 1 where all point alike."""
    unit, seq = F.normalize(x.float(), dim=-1), x.shape[1]
    # ‖Σ u‖² = Σᵢⱼ uᵢ·uⱼ, of which those of a token with itself are taken off.
    pairs = unit.sum(dim=1).square().sum(dim=-1) - unit.square().sum(dim=(1, 2))
    return (pairs / (seq * (seq - 1))).mean()


@contextmanager
def scaled(residuals: Sequence[Residual], part: str, scale: float) -> Iterator[None]:
    """Set a part of some residual connections, `skip` or `branch`, inside the block."""
    before = [getattr(residual, part) for residual in residuals]
    for residual in residuals:
        setattr(residual, part, scale)
    try:
        yield
    finally:
        for residual, value in zip(residuals, before, strict=True):
            setattr(residual, part, value)


def residuals_of(network: Transformer) -> list[Residual]:
    """Both connections of each layer, from the first to the last."""
    return [getattr(layer, name) for layer in network.encoder.layers for name in SUBLAYERS]


@torch.no_grad()
def rank_by_depth(network: Transformer, batch: Any, mask: Any) -> list[tuple[float, float]]:
    """`distance_to_rank_one` and `token_cosine` of the embeddings and of the output of each layer."""
    found: list[tuple[float, float]] = []

    def record(layer: torch.nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if not found:
            found.append((float(distance_to_rank_one(args[0])), float(token_cosine(args[0]))))
        found.append((float(distance_to_rank_one(output)), float(token_cosine(output))))

    hooks = [layer.register_forward_hook(record) for layer in network.encoder.layers]
    try:
        network(batch["inputs"], mask)
    finally:
        for hook in hooks:
            hook.remove()
    return found


class ResidualSurgery:
    """Each connection and each sublayer taken away alone, and the rank of the stream with and without connections.

    Without connections, attention makes all tokens alike at a rate that grows with depth (Dong et al. 2021, arXiv
    2103.03404).

    Args:
        num_windows: of the evaluated split.
        num_resamples: of the bootstrap over windows.
    """

    needs_gradient = False

    def __init__(self, num_windows: int = 32, num_resamples: int = 1000) -> None:
        self.num_windows = at_least_one("num_windows", num_windows, 32)
        self.num_resamples = at_least_one("num_resamples", num_resamples, 1000)

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
                "residual": f"over {len(base.nats)} {subject.row}s whose loss is {base.mean:.4f} nats per "
                f"{subject.unit}",
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
                    "How far the tokens are from being one and the same vector",
                    "layers passed",
                    "relative distance to rank 1",
                    "log",
                ),
                "token_cosine": lines(
                    {name: (range(len(values)), [v[1] for v in values]) for name, values in ranks.items()},
                    "How alike the tokens' directions are",
                    "layers passed",
                    "mean cosine of two tokens",
                ),
            },
        )

    def _ranks(self, subject: Subject) -> dict[str, list[tuple[float, float]]]:
        batch = fullest(subject.batches[0], len(subject.batches[0]["inputs"]))
        found = {}
        for name, network in {"trained": subject.network, "untrained": subject.untrained()}.items():
            with subject.precision():
                found[f"{name}, with skips"] = rank_by_depth(network, batch, subject.mask(batch))
                with scaled(residuals_of(network), "skip", 0.0):
                    found[f"{name}, without skips"] = rank_by_depth(network, batch, subject.mask(batch))
        return found
