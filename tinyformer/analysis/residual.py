"""Residual surgery: the loss without each residual connection or sublayer, and rank collapse without connections."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from tinyformer.analysis.measures.padding import without_padding
from tinyformer.analysis.measures.pair_probe import pairs_of
from tinyformer.analysis.pictures.charts import change_grid, lines
from tinyformer.analysis.subject import CHANGE_COLUMNS, Change, Findings, Subject, Trained
from tinyformer.errors import require_at_least
from tinyformer.nn import EncoderDecoder, Network, Residual
from tinyformer.nn.heads import layer_title

SUBLAYERS = ("attention_residual", "cross_attention_residual", "feed_forward_residual")
SUBLAYER_NAMES = dict(zip(SUBLAYERS, ("attention", "cross-attention", "feed-forward"), strict=True))
PARTS = ("skip", "branch")
PART_NAMES = {"skip": "skip around", "branch": "sublayer"}
"""Names of `PARTS` in figures."""

Kind: TypeAlias = tuple[str, ...]
"""The kind of a stack of layers: ("encoder",), ("decoder",), or () where there is only one stack."""


def distance_to_rank_one(x: Float[Tensor, "batch seq d_model"]) -> Float[Tensor, ""]:
    """‖X - 1 x̄ᵀ‖ / ‖X‖, averaged over the batch: 0 if all tokens of a sequence have the same vector.

    The residual of Dong et al. 2021 (arXiv 2103.03404) relative to X, in the Frobenius norm, for which x̄ is the mean
    over the tokens; for the paper's norm, √(‖·‖₁ ‖·‖_∞), no closed form exists.
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


def residuals_of(network: Network) -> list[Residual]:
    """The residual connections of each layer, in order."""
    layers = [layer for stack in network.stacks() for layer in stack.layers]
    return [getattr(layer, name) for layer in layers for name in SUBLAYERS if hasattr(layer, name)]


@torch.no_grad()
def rank_by_depth(network: Network, *inputs: Any) -> list[list[tuple[float, float]]]:
    """For each stack, `distance_to_rank_one` and `token_cosine` of the embeddings and of each layer's output."""
    stacks: list[list[tuple[float, float]]] = [[] for _ in network.stacks()]

    def record(ranks: list[tuple[float, float]], layer: torch.nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        for x in (output,) if ranks else (args[0], output):
            ranks.append((float(distance_to_rank_one(x)), float(token_cosine(x))))

    hooks = [
        layer.register_forward_hook(partial(record, ranks))
        for ranks, stack in zip(stacks, network.stacks(), strict=True)
        for layer in stack.layers
    ]
    try:
        network(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return stacks


class ResidualSurgery:
    """The loss without each residual connection or sublayer, and the rank of the residual stream by depth.

    Both stacks of an encoder–decoder are analysed; the decoder also has residual connections around cross-attention.

    Without residual connections and feed-forward networks, the output of attention converges to rank 1, the same vector
    for all tokens, doubly exponentially with depth (Dong et al. 2021, arXiv 2103.03404).

    Args:
        num_windows: number of windows, examples or pairs, drawn at random from the evaluated split.
        num_resamples: number of bootstrap resamples of the windows.

    Raises:
        ArgumentError: a number is below 1.
    """

    needs_gradient = False

    def __init__(self, num_windows: int = 32, num_resamples: int = 1000) -> None:
        works = {"num_windows": 32, "num_resamples": 1000}
        require_at_least(1, works, num_windows=num_windows, num_resamples=num_resamples)
        self.num_windows, self.num_resamples = num_windows, num_resamples

    def __call__(self, model: Trained, folder: Path = Path()) -> Findings:
        subject = model.sample(self.num_windows)
        base, kinds = subject.losses(), stack_kinds(subject.network)
        changes: dict[tuple[str | int, ...], Change] = {}
        for kind, stack in zip(kinds, subject.network.stacks(), strict=True):
            for depth, layer in enumerate(stack.layers):
                sublayers = [name for name in SUBLAYERS if hasattr(layer, name)]
                for name, part in itertools.product(sublayers, PARTS):
                    with scaled([getattr(layer, name)], part, 0.0):
                        changes[*kind, depth, name, part] = subject.losses().change_from(base, self.num_resamples)
        ranks = self._ranks(subject)
        worst = sorted(changes, key=lambda removed: -changes[removed].mean)[:5]
        last = {(*kind, name): values[-1] for kind, by_name in ranks.items() for name, values in by_name.items()}
        return Findings(
            scalars={
                "analysis/loss": base.mean,
                **{
                    f"analysis/{'/'.join(at).replace(', ', '_').replace(' ', '_')}/rank_distance": v[0]
                    for at, v in last.items()
                },
            },
            lines={
                "residual": f"{len(base.nats)} {subject.row}s with a loss of {base.mean:.4f} nats per "
                f"{subject.task.unit}; change of the loss [95 % interval]:",
                **{f"  {layer_title(at[:-2])} {at[-2]}.{at[-1]}=0": str(changes[at]) for at in worst},
                **{
                    f"  {' '.join(at)}": f"distance to rank 1 {v[0]:.3f}, token cosine {v[1]:.3f}"
                    for at, v in last.items()
                },
            },
            tables={
                "residual": (
                    [*subject.address_columns, "sublayer", "removed", *CHANGE_COLUMNS],
                    [[*at, *change.row(base)] for at, change in changes.items()],
                ),
                "rank": (
                    [*subject.address_columns[:-1], "model", "depth", "distance_to_rank_one", "token_cosine"],
                    [
                        [*kind, name, depth, *v]
                        for kind, by_name in ranks.items()
                        for name, values in by_name.items()
                        for depth, v in enumerate(values)
                    ],
                ),
            },
            figures={
                "residual": _change_figure({at: change.mean for at, change in changes.items()}, subject.task.unit),
                **{name: figure for kind, by_name in ranks.items() for name, figure in _figures(kind, by_name).items()},
            },
        )

    def _ranks(self, subject: Subject) -> dict[Kind, dict[str, list[tuple[float, float]]]]:
        """`rank_by_depth` by stack, for the trained and the untrained network, with and without connections."""
        inputs, kinds = inputs_without_padding(subject), stack_kinds(subject.network)
        num_rows = torch.tensor([len(arguments[0]) for arguments in inputs])
        ranks: dict[Kind, dict[str, list[tuple[float, float]]]] = {kind: {} for kind in kinds}
        for name, network in {"trained": subject.network, "untrained": subject.untrained()}.items():
            for suffix, residuals in {"with skips": [], "without skips": residuals_of(network)}.items():
                with subject.precision(), scaled(residuals, "skip", 0.0):
                    found = [rank_by_depth(network, *arguments) for arguments in inputs]
                for kind, *of_stack in zip(kinds, *found, strict=True):
                    # Sequences of one token are left out: they have no pair of tokens, so their cosine is nan.
                    of_rows = torch.tensor(of_stack, dtype=torch.float64).repeat_interleave(num_rows, dim=0)
                    means = of_rows.nanmean(dim=0)
                    ranks[kind][f"{name}, {suffix}"] = [(distance, cosine) for distance, cosine in means.tolist()]
        return ranks


def stack_kinds(network: Network) -> list[Kind]:
    """The kind of each stack: ("encoder",) and ("decoder",), or () where there is one stack."""
    return [("encoder",), ("decoder",)] if isinstance(network, EncoderDecoder) else [()]


def inputs_without_padding(subject: Subject) -> list[tuple[Any, ...]]:
    """Arguments of the network without padding: one pair each, or all windows of one length."""
    if isinstance(subject.network, EncoderDecoder):
        return [(pair.source, pair.target) for batch in subject.batches for pair in pairs_of(batch)]
    return [(batch["inputs"], subject.task.mask(batch)) for batch in without_padding(subject.batches)]


def _change_figure(changes: Mapping[tuple[str | int, ...], float], unit: str) -> Figure:
    """The change of the loss without each connection and each sublayer of every layer."""
    columns = {(name, part): f"{PART_NAMES[part]}\n{SUBLAYER_NAMES[name]}" for name in SUBLAYERS for part in PARTS}
    named = {(layer_title(at[:-2]), columns[str(at[-2]), str(at[-1])]): change for at, change in changes.items()}
    rows, found = list(dict.fromkeys(row for row, _ in named)), {column for _, column in named}
    title = "Change of the loss without a residual connection (skip) or a sublayer"
    return change_grid(
        named, rows, [name for name in columns.values() if name in found], title, f"change of the loss, nats per {unit}"
    )


def _figures(kind: Kind, ranks: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, Figure]:
    """The two measures of `rank_by_depth` of one stack, by the name of their file."""
    charts = {
        "rank": (
            "Distance of the residual stream from rank 1 (0: all tokens have the same vector)",
            *("relative distance to rank 1", "log"),
        ),
        "token_cosine": ("Mean cosine similarity of the tokens of a sequence", "mean cosine similarity", "linear"),
    }
    return {
        "_".join([*kind, chart]): lines(
            {name: (range(len(values)), [v[index] for v in values]) for name, values in ranks.items()},
            title,
            f"layers of the {kind[0]}" if kind else "layers",
            ylabel,
            yscale,
        )
        for index, (chart, (title, ylabel, yscale)) in enumerate(charts.items())
    }
