"""Residual surgery: the loss without each residual connection or sublayer, and what is lost by depth without them."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from tinyformer.analysis.context import AnalysisContext, Trained, changed, require_positive
from tinyformer.files import finite
from tinyformer.measures.inputs import pairs_of, without_padding
from tinyformer.measures.intervals import CHANGE_COLUMNS, Change
from tinyformer.measures.linear_probe import linear_probe
from tinyformer.nn import Encoder, EncoderDecoder, Network, Residual
from tinyformer.nn.heads import layer_title
from tinyformer.report.charts import change_grid, lines
from tinyformer.report.result import AnalysisResult, Table

SUBLAYER_NAMES = {
    "attention_residual": "attention",
    "cross_attention_residual": "cross-attention",
    "feed_forward_residual": "feed-forward",
}
MIN_SHOWN = 0.05  # what the embeddings show beyond chance, as a share of tokens, from which a loss of it is judged
PART_NAMES = {"skip": "skip around", "branch": "sublayer"}
"""The parts of a residual connection, as they are called in figures."""

RANK_CHARTS = {
    "rank": (
        "Distance of the residual stream from rank 1 (0: all tokens have the same vector)",
        *("relative distance to rank 1", "log"),
    ),
    "token_cosine": ("Mean cosine similarity of the tokens of a sequence", "mean cosine similarity", "linear"),
}
"""Titles, y labels and y scales of the charts of `rank_by_depth`, by the names of their files."""

READING_CHARTS = {
    "tokens_read": ("Tokens that a linear probe reads from the residual stream", "share of tokens", "linear"),
    "positions_read": ("Positions that a linear probe reads from the residual stream", "share of tokens", "linear"),
}

ByDepth: TypeAlias = dict[tuple[str, ...], dict[str, Sequence[tuple[float, ...]]]]
"""By stack, then by model: values at each depth. A stack is ("encoder",), ("decoder",), or () if it is the only one."""


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


def residuals_of(layer: Any) -> dict[str, Residual]:
    """The residual connections of a layer, by the name of their attribute."""
    return {name: getattr(layer, name) for name in SUBLAYER_NAMES if hasattr(layer, name)}


def without_skips(network: Network) -> AbstractContextManager[None]:
    """Remove all residual connections of a network inside the block."""
    layers = [layer for stack in network.stacks() for layer in stack.layers]
    return changed([residual for layer in layers for residual in residuals_of(layer).values()], skip=0.0)


@contextmanager
def residual_streams(network: Network) -> Iterator[list[list[Tensor]]]:
    """Record the residual stream of each stack in a forward pass: the embeddings, then the output of each layer."""
    streams: list[list[Tensor]] = [[] for _ in network.stacks()]

    def begin(stream: list[Tensor], layer: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        stream.append(args[0].detach().requires_grad_())  # frozen embeddings would have no gradient
        return (stream[0], *args[1:])

    def record(stream: list[Tensor], layer: torch.nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        stream.append(output)

    with ExitStack() as hooks:
        for stream, stack in zip(streams, network.stacks(), strict=True):
            hooks.enter_context(stack.layers[0].register_forward_pre_hook(partial(begin, stream)))
            for layer in stack.layers:
                hooks.enter_context(layer.register_forward_hook(partial(record, stream)))
        yield streams


@torch.no_grad()
def rank_by_depth(network: Network, *inputs: Any) -> list[list[tuple[float, float]]]:
    """For each stack, `distance_to_rank_one` and `token_cosine` of the embeddings and of each layer's output."""
    with residual_streams(network) as streams:
        network(*inputs)
    return [[(float(distance_to_rank_one(x)), float(token_cosine(x))) for x in stream] for stream in streams]


def by_depth(context: AnalysisContext, measure: Callable[[Network], Sequence[Sequence[tuple[float, ...]]]]) -> ByDepth:
    """The results of `measure` in each stack, trained and untrained, with and without connections."""
    measured: ByDepth = {kind: {} for kind in stacks_of(context.network)}
    for name, network in context.networks().items():
        with_skips = measure(network)
        with without_skips(network):
            found = {"with skips": with_skips, "without skips": measure(network)}
        for skips, of_stacks in found.items():
            for of_kind, values in zip(measured.values(), of_stacks, strict=True):
                of_kind[f"{name}, {skips}"] = values
    return measured


def depth_table(context: AnalysisContext, measured: ByDepth, *columns: str) -> Table:
    """A row for each stack, model and depth."""
    return [*context.address_columns[:-1], "model", "depth", *columns], [
        [*kind, name, depth, *of_depth]
        for kind, of_kind in measured.items()
        for name, values in of_kind.items()
        for depth, of_depth in enumerate(values)
    ]


def scalar_of(kind: Sequence[str], model: str, name: str) -> str:
    """The name of a scalar of a stack and of a model of `by_depth`: "analysis/encoder/trained_with_skips/…"."""
    return "/".join(["analysis", *kind, model.replace(", ", "_").replace(" ", "_"), name])


def depth_charts(
    measured: ByDepth,
    charts: Mapping[str, tuple[str, str, str]],
    control: str = "",
    controls: Mapping[tuple[str, ...], Sequence[float]] | None = None,
) -> dict[str, Figure]:
    """Charts over depth for each stack, one for each value, given their names, titles, y labels and y scales.

    `controls` are the values of a grey line of the name `control` in each chart of a stack.
    """
    return {
        "_".join([*kind, name]): lines(
            {
                model: (range(len(values)), [of_depth[index] for of_depth in values])
                for model, values in of_kind.items()
            },
            title,
            f"layers of the {kind[0]}" if kind else "layers",
            ylabel,
            yscale,
            {control: ([0, len(next(iter(of_kind.values()))) - 1], [controls[kind][index]] * 2)} if controls else None,
        )
        for kind, of_kind in measured.items()
        for index, (name, (title, ylabel, yscale)) in enumerate(charts.items())
    }


@dataclass(eq=False)
class ResidualSurgery:
    """The loss without each residual connection or sublayer, and the rank of the residual stream by depth.

    Both stacks of an encoder–decoder are analysed; the decoder also has residual connections around cross-attention.

    What is lost with them is read back: `readings` of the residual stream, of which the embeddings and chance are the
    controls. Without residual connections and feed-forward networks, the output of attention converges to rank 1, the
    same vector for all tokens, doubly exponentially with depth (Dong et al. 2021, arXiv 2103.03404).
    """

    num_windows: int = 32
    num_resamples: int = 1000  # bootstrap resamples of the windows
    needs_gradient = False

    def __post_init__(self) -> None:
        require_positive(self, "num_windows", "num_resamples")

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        base, changes = context.losses(), dict[tuple[Any, ...], Change]()
        for kind, stack in stacks_of(context.network).items():
            for depth, layer in enumerate(stack.layers):
                for (name, residual), part in itertools.product(residuals_of(layer).items(), PART_NAMES):
                    with changed([residual], **{part: 0.0}):
                        changes[*kind, depth, name, part] = context.losses().change_from(base, self.num_resamples)
        ranks = by_depth(context, partial(_mean_ranks, context))
        worst = sorted(changes, key=lambda removed: -changes[removed].mean)[:5]
        read = by_depth(context, partial(readings, context))
        chances = {
            kind: of_stack[0]
            for kind, of_stack in zip(read, readings(context, context.network, torch.zeros_like), strict=True)
        }
        last = {(*kind, name): values[-1] for kind, of_kind in ranks.items() for name, values in of_kind.items()}
        return AnalysisResult(
            scalars={
                "analysis/loss": base.mean,
                **{scalar_of(at[:-1], at[-1], "rank_distance"): distance for at, (distance, _) in last.items()},
                **{
                    scalar_of(kind, name, f"{what}_read"): finite(share)
                    for kind, of_kind in read.items()
                    for name, values in of_kind.items()
                    for what, share in zip(("tokens", "positions"), values[-1], strict=True)
                },
            },
            lines={
                "residual": context.describe_losses(base),
                **{f"  {layer_title(at[:-2])} {at[-2]}.{at[-1]}=0": str(changes[at]) for at in worst},
                **{
                    f"  {' '.join(at)}": f"distance to rank 1 {distance:.3f}, token cosine {cosine:.3f}"
                    for at, (distance, cosine) in last.items()
                },
                "reading": "what a linear probe reads from the last layer, on rows that do not fit it; "
                "the embeddings and chance are its controls:",
                **{
                    f"  read, {' '.join([*kind, name])}": ", ".join(
                        _verdict(*shares)
                        for shares in zip(("tokens", "positions"), values[-1], values[0], chances[kind], strict=True)
                    )
                    for kind, of_kind in read.items()
                    for name, values in of_kind.items()
                },
            },
            tables={
                "residual": (
                    [*context.address_columns, "sublayer", "removed", *CHANGE_COLUMNS],
                    [[*at, *change.row(base)] for at, change in changes.items()],
                ),
                "rank": depth_table(context, ranks, "distance_to_rank_one", "token_cosine"),
                "reading": depth_table(context, read, *READING_CHARTS),
            },
            figures={
                "residual": _change_figure({at: change.mean for at, change in changes.items()}, context.task.unit),
                **depth_charts(ranks, RANK_CHARTS),
                **depth_charts(read, READING_CHARTS, "chance", chances),
            },
        )


def _mean_ranks(context: AnalysisContext, network: Network) -> list[list[tuple[float, ...]]]:
    """`rank_by_depth`, averaged over the windows or pairs without their padding."""
    inputs = inputs_without_padding(context)
    with context.precision():
        ranks = [rank_by_depth(network, *arguments) for arguments in inputs]
    num_rows = torch.tensor([len(arguments[0]) for arguments in inputs])
    of_rows = [torch.tensor(of_stack, dtype=torch.float64) for of_stack in zip(*ranks, strict=True)]
    # Sequences of one token are left out: they have no pair of tokens, so their cosine is nan.
    means = [ranks.repeat_interleave(num_rows, dim=0).nanmean(dim=0) for ranks in of_rows]
    return [list(map(tuple, of_stack.tolist())) for of_stack in means]


@torch.no_grad()
def readings(
    context: AnalysisContext, network: Network, seen: Callable[[Tensor], Tensor] = lambda x: x
) -> list[list[tuple[float, ...]]]:
    """For each stack, the shares of tokens, and of positions, that a `linear_probe` reads by depth: embeddings first.

    Every other row of the sample, without its padding, fits the probes; the others test them. `seen` is what the probes
    see of a residual stream; of zeros they tell the most frequent label, which is chance.
    """
    streams: list[list[list[Tensor]]] = []
    labels: list[list[Tensor]] = []  # of each batch and stack: token, position, and whether the row fits the probes
    num_rows = 0
    for arguments in inputs_without_padding(context):
        with context.precision(), residual_streams(network) as found:
            network(*arguments)
        streams.append([[seen(x.float()).flatten(0, 1) for x in stream] for stream in found])
        is_test = torch.arange(num_rows, num_rows + len(arguments[0]), device=arguments[0].device).unsqueeze(-1) % 2
        num_rows += len(is_test)
        places = (torch.arange(ids.shape[1], device=ids.device) for ids in arguments[: len(found)])
        parts = (torch.broadcast_tensors(*of_stack, is_test) for of_stack in zip(arguments, places, strict=False))
        labels.append([torch.stack(of_stack).flatten(1) for of_stack in parts])
    read = []
    for of_stack, of_labels in zip(zip(*streams, strict=True), zip(*labels, strict=True), strict=True):
        *texts, is_test = torch.cat(of_labels, dim=1)
        by_layer = [torch.cat(parts) for parts in zip(*of_stack, strict=True)]
        read.append([tuple(linear_probe(x, labels, is_test == 0) for labels in texts) for x in by_layer])
    return read


def _verdict(what: str, last: float, first: float, by_chance: float) -> str:
    """The verdict on a reading: kept at 90 % or more of the embeddings' accuracy above chance, lost at 10 % or less."""
    shown = first - by_chance
    left = (last - by_chance) / shown if shown > MIN_SHOWN else math.nan
    lost = "kept" if left >= 0.9 else "lost" if left <= 0.1 else "partly lost"
    word = "not in the embeddings" if math.isnan(left) else lost
    return f"{what} {last:.1%} ({word}; embeddings {first:.1%}, chance {by_chance:.1%})"


def stacks_of(network: Network) -> dict[tuple[str, ...], Encoder]:
    """The stacks of layers by kind: ("encoder",) and ("decoder",), or () where there is one stack."""
    kinds = [("encoder",), ("decoder",)] if isinstance(network, EncoderDecoder) else [()]
    return dict(zip(kinds, network.stacks(), strict=True))


def inputs_without_padding(context: AnalysisContext) -> list[tuple[Any, ...]]:
    """Arguments of the network without padding: one pair each, or all windows of one length."""
    if isinstance(context.network, EncoderDecoder):
        return [(pair.source, pair.target) for batch in context.batches for pair in pairs_of(batch)]
    return [(batch["inputs"], context.task.mask(batch)) for batch in without_padding(context.batches)]


def _change_figure(changes: dict[tuple[Any, ...], float], unit: str) -> Figure:
    columns = {
        (name, part): f"{part_title}\n{title}"
        for name, title in SUBLAYER_NAMES.items()
        for part, part_title in PART_NAMES.items()
    }
    cells = {(layer_title(at[:-2]), columns[at[-2:]]): change for at, change in changes.items()}
    rows, shown = list(dict.fromkeys(row for row, _ in cells)), {column for _, column in cells}
    return change_grid(
        cells,
        rows,
        [column for column in columns.values() if column in shown],
        "Change of the loss without a residual connection (skip) or a sublayer",
        f"change of the loss, nats per {unit}",
    )
