"""Residual surgery: the loss without each residual connection or sublayer, and the information lost by depth."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from matplotlib.figure import Figure
from torch import Tensor

from tinyformer.analysis.context import AnalysisContext, Trained, changed
from tinyformer.analysis.depth.by_depth import (
    RESIDUALS,
    by_depth,
    depth_charts,
    depth_scalar,
    depth_table,
    residuals_of,
    skips_of,
    stacks_of,
    streams_without_padding,
)
from tinyformer.files import finite
from tinyformer.measures.intervals import CHANGE_COLUMNS, Change, Losses
from tinyformer.nn import Network
from tinyformer.nn.heads import layer_title
from tinyformer.report.charts import named_grid
from tinyformer.report.result import AnalysisResult

MIN_SHOWN = 0.05  # the accuracy of a probe on the embeddings, above chance, that a verdict needs
RESOLUTION = 2**-7  # of bfloat16, relative to the root mean square of a probe's inputs
PARTS = ("skip", "branch")  # of a residual connection

RANK_CHARTS = {
    "rank": ("Distance of the residual stream from rank 1, where all tokens are equal", "relative distance", "log"),
    "token_cosine": ("Mean cosine similarity of the tokens of a sequence", "mean cosine similarity", "linear"),
}
"""Titles, y labels and y scales of the charts of `rank_by_depth`, by the names of their files."""

READING_CHARTS = {
    "tokens_read": ("Tokens that a linear probe reads from the residual stream", "share of tokens", "linear"),
    "positions_read": ("Positions that a linear probe reads from the residual stream", "share of tokens", "linear"),
}


def distance_to_rank_one(x: Float[Tensor, "batch seq d_model"]) -> Float[Tensor, ""]:
    """‖X - 1 x̄ᵀ‖ / ‖X‖, averaged over the batch: 0 if all tokens of a sequence have the same vector.

    This is the residual of Dong et al. 2021 (arXiv 2103.03404) relative to X. The Frobenius norm is used, since the
    best x̄ is then the mean over the tokens; for the paper's norm, √(‖·‖₁ ‖·‖_∞), x̄ has no closed form.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    rest = x - x.mean(dim=1, keepdim=True)
    return (rest.norm(dim=(1, 2)) / x.norm(dim=(1, 2)).clamp(min=torch.finfo(x.dtype).tiny)).mean()


def token_cosine(x: Float[Tensor, "batch seq d_model"]) -> Float[Tensor, ""]:
    """The mean cosine similarity of all pairs of different tokens of a sequence, averaged over the batch."""
    unit, seq = F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1), x.shape[1]
    # ‖Σ u‖² = Σᵢⱼ uᵢ·uⱼ, minus the pairs of a token with itself.
    pairs = unit.sum(dim=1).square().sum(dim=-1) - unit.square().sum(dim=(1, 2))
    return (pairs / (seq * (seq - 1))).mean()


def rank_by_depth(context: AnalysisContext, network: Network) -> list[list[tuple[float, ...]]]:
    """For each stack, `distance_to_rank_one` and `token_cosine` by depth, averaged over rows without their padding."""
    found, num_rows = [], []
    for arguments, streams in streams_without_padding(context, network):
        found.append([[(float(distance_to_rank_one(x)), float(token_cosine(x))) for x in of] for of in streams])
        num_rows.append(len(arguments[0]))
    ranks = [torch.tensor(of_stack, dtype=torch.float64) for of_stack in zip(*found, strict=True)]
    # Sequences of one token are left out: they have no pair of tokens, so their cosine is nan.
    means = [of_stack.repeat_interleave(torch.tensor(num_rows), dim=0).nanmean(dim=0) for of_stack in ranks]
    return [list(map(tuple, of_stack.tolist())) for of_stack in means]


def linear_probe(
    x: Float[Tensor, "samples d_model"], labels: Int[Tensor, " samples"], is_fit: Bool[Tensor, " samples"]
) -> float:
    """The accuracy of a linear probe on the samples that it is not fitted on and whose labels occur in the fit.

    The probe is linear discriminant analysis (Fisher 1936), which predicts the label with the largest xᵀ Σ⁻¹ μ - μᵀ Σ⁻¹
    μ / 2 + ln π, where μ are the means of the labels, π their shares, and Σ the covariance within them: unlike logistic
    regression, as in Alain & Bengio 2016 (arXiv 1610.01644), it has a closed form. Σ includes noise of the size
    `RESOLUTION`, which hides smaller differences. Equal vectors get the most frequent label. nan without test samples.
    """
    x = x.double()
    is_test = ~is_fit & torch.isin(labels, labels[is_fit])
    train, test = x[is_fit], x[is_test]
    if not len(test):
        return math.nan
    known, index, counts = labels[is_fit].unique(return_inverse=True, return_counts=True)
    centre = train.mean(dim=0)
    means = x.new_zeros(len(known), x.shape[1]).index_add_(0, index, train - centre) / counts.unsqueeze(-1)
    within = train - centre - means[index]
    noise = (RESOLUTION**2 * train.square().mean()).clamp(min=1e-30)
    covariance = within.mT @ within / len(train) + noise * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    weights = torch.linalg.solve(covariance, means.mT)
    bias = (counts / len(train)).log() - (means.mT * weights).sum(dim=0) / 2
    predicted = known[((test - centre) @ weights + bias).argmax(dim=-1)]
    return float((predicted == labels[is_test]).double().mean())


def readings(
    context: AnalysisContext, network: Network, seen: Callable[[Tensor], Tensor] = lambda x: x
) -> list[list[tuple[float, ...]]]:
    """For each stack and depth, embeddings first, the accuracy of a `linear_probe` for tokens, and for positions.

    Rows 1, 3, … of the sample, without padding, fit the probes, and rows 2, 4, … test them. `seen` maps a residual
    stream to the probes' input. If this input is 0, the accuracy is chance: the share of the most frequent label.
    """
    samples: list[list[tuple[Tensor, ...]]] = [[] for _ in network.stacks()]  # stream, token, position, row of tokens
    num_rows = 0
    for arguments, streams in streams_without_padding(context, network):
        for of_stack, stream, ids in zip(samples, streams, arguments, strict=False):
            rows, places = (torch.arange(size, device=ids.device) for size in ids.shape)
            of_tokens = torch.broadcast_tensors(ids, places, num_rows + rows.unsqueeze(-1))
            x = torch.stack([seen(of_depth.float()) for of_depth in stream], dim=2)
            of_stack.append(tuple(part.flatten(0, 1) for part in (x, *of_tokens)))
        num_rows += len(arguments[0])
    read = []
    for of_stack in samples:
        x, *labels, row = map(torch.cat, zip(*of_stack, strict=True))
        read.append([tuple(linear_probe(of_depth, of, row % 2 == 0) for of in labels) for of_depth in x.unbind(1)])
    return read


@dataclass(eq=False)
class ResidualSurgery:
    """The loss without each residual connection or sublayer, and the rank of the residual stream by depth.

    Both stacks of an encoder–decoder are analysed; the decoder also has residual connections around cross-attention.
    Linear probes for tokens and positions measure what is lost by depth, see `readings`; their controls are embeddings
    and chance. Without residual connections and feed-forward networks, the output of attention converges to rank 1, the
    same vector for all tokens, doubly exponentially with depth (Dong et al. 2021, arXiv 2103.03404).
    """

    num_windows: int = 32
    num_resamples: int = 1000  # bootstrap resamples of the windows
    needs_gradient = False

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        base, changes = self._losses(context)
        ranks, read = (by_depth(context, partial(measure, context)) for measure in (rank_by_depth, readings))
        of_zeros = readings(context, context.network, torch.zeros_like)
        chances = {(*kind, "chance"): of for kind, of in zip(stacks_of(context.network), of_zeros, strict=True)}
        worst = sorted(changes, key=lambda removed: -changes[removed].mean)[:5]
        columns = [*context.address_columns, "sublayer", "removed", *CHANGE_COLUMNS]
        return AnalysisResult(
            scalars={
                "analysis/loss": base.mean,
                **{depth_scalar(at, "rank_distance"): values[-1][0] for at, values in ranks.items()},
                **{
                    depth_scalar(at, name): finite(share)
                    for at, values in read.items()
                    for name, share in zip(READING_CHARTS, values[-1], strict=True)
                },
            },
            lines={
                "residual": context.describe_losses(base),
                **{f"  {layer_title(at[:-2])} {at[-2]}.{at[-1]}=0": str(changes[at]) for at in worst},
                **{
                    f"  {' '.join(at)}": "distance to rank 1 {:.3f}, token cosine {:.3f}".format(*values[-1])
                    for at, values in ranks.items()
                },
                "reading": "accuracy of a linear probe on the last layer, for rows that it was not fitted on; "
                "the embeddings and chance are its controls:",
                **{
                    f"  read, {' '.join(at)}": _reading_in_words(values, chances[*at[:-1], "chance"][0])
                    for at, values in read.items()
                },
            },
            tables={
                "residual": (columns, [[*at, *change.row(base)] for at, change in changes.items()]),
                "rank": depth_table(context, ranks, "distance_to_rank_one", "token_cosine"),
                "reading": depth_table(context, read, *READING_CHARTS),
            },
            figures={
                "residual": _change_figure(changes, context.task.unit),
                **depth_charts(ranks, RANK_CHARTS),
                **depth_charts(read, READING_CHARTS, chances),
            },
        )

    def _losses(self, context: AnalysisContext) -> tuple[Losses, dict[tuple[Any, ...], Change]]:
        """The loss of the model, and its change by stack, layer, residual connection and removed part (`PARTS`)."""
        base, changes = context.losses(), {}
        for kind, stack in stacks_of(context.network).items():
            for depth, layer in enumerate(stack.layers):
                removable = {"skip": skips_of(layer), "branch": residuals_of(layer)}
                for name, part in itertools.product(RESIDUALS, PARTS):
                    if residual := removable[part].get(name):
                        with changed([residual], **{part: 0.0}):
                            changes[*kind, depth, name, part] = context.losses().change_from(base, self.num_resamples)
        return base, changes


def _reading_in_words(values: Sequence[Sequence[float]], chances: Sequence[float]) -> str:
    """Verdicts on the probes: "kept" is 90 % or more of the embeddings' accuracy above chance, "lost" 10 % or less."""
    parts = []
    for label, first, last, chance in zip(("tokens", "positions"), values[0], values[-1], chances, strict=True):
        shown = first - chance
        left = (last - chance) / shown if shown > MIN_SHOWN else math.nan
        lost = "kept" if left >= 0.9 else "lost" if left <= 0.1 else "partly lost"
        word = "not in the embeddings" if math.isnan(left) else lost
        parts.append(f"{label} {last:.1%} ({word}; embeddings {first:.1%}, chance {chance:.1%})")
    return ", ".join(parts)


def _change_figure(changes: Mapping[tuple[Any, ...], Change], unit: str) -> Figure:
    cells = {}
    for (*layer, name, part), change in changes.items():
        column = f"{name.removesuffix('_residual').replace('_', '-')}\n{part}"
        cells[layer_title(tuple(layer)), column] = change.mean
    title = "Change of the loss without a residual connection (skip) or a sublayer (branch)"
    return named_grid(cells, title, f"change of the loss, nats per {unit}")
