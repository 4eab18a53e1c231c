"""Gradients by depth: their norm with and without residual connections, and the share of saturated softmax rows."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tinyformer.analysis.context import AnalysisContext, Trained, changed, require_positive
from tinyformer.analysis.depth.residual import (
    ByDepth,
    by_depth,
    depth_charts,
    depth_table,
    inputs_without_padding,
    residual_streams,
    scalar_of,
    stacks_of,
)
from tinyformer.batch import IGNORED, Batch
from tinyformer.errors import ArgumentError
from tinyformer.files import finite
from tinyformer.measures.capture import attention_calls, head_label, map_names, running_hooks
from tinyformer.measures.probe import ablated_maps
from tinyformer.nn import AttentionMaps, Network
from tinyformer.report.charts import head_grid
from tinyformer.report.result import AnalysisResult, Table

NORM_TITLE = "Gradient of the loss by depth, as a multiple of that at the last layer (depth 0: the embeddings)"
KEPT = 100  # a gradient that changes by a smaller factor over all layers neither vanishes nor explodes


@dataclass(eq=False)
class GradientFlow:
    """The gradient norm of the residual stream by depth, and the share of saturated softmax rows of each head.

    The gradient is that of the mean loss of a window, in nats per target, with respect to the embeddings and to the
    output of each layer; its norm is taken over all tokens and dimensions, and averaged over windows. Without residual
    connections (`skip=0`), gradients vanish or explode with depth (He et al. 2016, arXiv 1603.05027, section 2), unless
    a norm makes up for the size: sublayers then have to turn inputs of variance 1 into outputs of more than its `eps`.

    A softmax row is saturated if its largest weight w is at least `saturated`: then no derivative of a weight with
    respect to a logit exceeds w (1 - w) there, 0.0099 for 0.99. Dot products grow with the dimension of a head, and
    saturate the softmax unless they are scaled (Vaswani et al. 2017, arXiv 1706.03762, section 3.2.1, footnote 4); so
    the share is also given with a scale of 1. Rows with a single visible key do not count. For the same rows, the table
    `logits` has the `logit_statistics` of each head: the variance of the logits, and the trace of the softmax's
    Jacobian.

    The table `sublayers` has, for the trained and the untrained network, the norm of the gradient of the mean loss with
    respect to all weights of each sublayer (Xiong et al. 2020, arXiv 2002.04745, section 3.3), and that of the gradient
    of a single target's loss, averaged over windows. The first is smaller where gradients of different targets cancel.
    """

    num_windows: int = 32
    saturated: float = 0.99  # the largest weight of a row at which it counts as saturated
    needs_gradient = True

    def __post_init__(self) -> None:
        require_positive(self, "num_windows")
        if not 0.5 <= self.saturated < 1:
            raise ArgumentError("saturated", self.saturated, "must be at least 0.5 and below 1", {"saturated": 0.99})

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        norms = by_depth(context, lambda network: gradient_norms(context, network))
        relative: ByDepth = {
            kind: {
                name: [(norm / values[-1][0] if values[-1][0] else math.nan,) for (norm,) in values]
                for name, values in of_kind.items()
            }
            for kind, of_kind in norms.items()
        }
        statistics = row_statistics(context, self.saturated)
        shares = {name: statistics[name] for name in ("saturated", "saturated_without_scale")}
        means = {
            name: float(torch.tensor(list(itertools.chain(*of_layers))).nanmean()) for name, of_layers in shares.items()
        }
        norm = context.network.stacks()[0].layers[0].attention_norm
        columns = ["model", "layer", "sublayer", "gradient_norm", "target_gradient_norm"]
        rows = [
            [*kind, name, *at, *of_sublayer]
            for name, network in context.networks().items()
            for (kind, *at), of_sublayer in sublayer_gradients(context, network).items()
        ]
        return AnalysisResult(
            scalars={
                **{f"analysis/{name}": finite(mean) for name, mean in means.items()},
                **{
                    scalar_of(kind, name, "gradient_ratio"): finite(ratio)
                    for kind, of_kind in relative.items()
                    for name, ((ratio,), *_) in of_kind.items()
                },
            },
            lines={
                "gradients": f"norm of the loss's gradient with respect to embeddings and to the last layer's output, "
                f"mean of {context.num_windows} {context.row}s",
                **{
                    f"  {' '.join([*kind, name])}": f"{values[0][0]:.3g} and {values[-1][0]:.3g}, "
                    + _ratio_in_words(relative[kind][name][0][0], len(values) - 1)
                    for kind, of_kind in norms.items()
                    for name, values in of_kind.items()
                },
                "  norms": f"{norm}: without skips, gradients vanish if sublayers turn inputs of variance 1 into "
                "outputs of a variance below eps, as narrow ones do",
                "saturated rows": f"{means['saturated']:.1%} of softmax rows have a weight of {self.saturated:g} or "
                f"more; {means['saturated_without_scale']:.1%} with a scale of 1",
            },
            tables={
                "gradients": depth_table(context, norms, "gradient_norm"),
                "saturation": _map_table(context, shares),
                "logits": _map_table(context, {name: statistics[name] for name in statistics if name not in shares}),
                "sublayers": ([*context.address_columns[:-1], *columns], rows),
            },
            figures={
                **depth_charts(
                    relative,
                    {"gradients": (NORM_TITLE, "norm / norm at the last layer", "log")},
                    "kept",
                    {kind: [1.0] for kind in relative},
                ),
                "saturation": head_grid(
                    shares["saturated"],
                    [[head_label(name) for name in map_names(layer)] for layer in context.layers],
                    f"Share of softmax rows with a weight of {self.saturated:g} or more",
                    layers=context.addresses,
                    label="share of rows",
                    ablated=ablated_maps(context.network),
                ),
            },
        )


@torch.no_grad()
def row_statistics(context: AnalysisContext, saturated: float) -> dict[str, list[list[float]]]:
    """Means over the softmax rows of each map of each layer, by the name of a column, over inputs without padding.

    These are the means of `logit_statistics`, and the shares of rows that are `saturated`, also with a scale of 1 for
    the queries and keys of the unchanged model. Rows with a single visible key do not count; if no row counts, the mean
    is nan, as it is for an ablated head.
    """
    names = ("logit_variance", "softmax_jacobian", "saturated", "saturated_without_scale")
    sums = [
        torch.zeros(len(names) + 1, len(flags), dtype=torch.float64).masked_fill(torch.tensor(flags), math.nan)
        for flags in ablated_maps(context.network)
    ]
    for inputs in inputs_without_padding(context):
        with context.precision():
            calls = attention_calls(context.network, *inputs)
            for total, (layer, call) in zip(sums, calls, strict=True):
                maps = layer.maps_of_call(call)
                variance, jacobian, num_rows = logit_statistics(maps)
                counts = [count_saturated(maps, saturated)]
                with changed([layer.score], scale=1.0):  # changes nothing for scores without a scale
                    counts.append(count_saturated(layer.maps_of_call(call), saturated))
                total.add_(torch.stack([variance, jacobian, *counts, num_rows]).cpu())
    means = [of_layer[:-1] / of_layer[-1] for of_layer in sums]
    return {name: [of_layer[index].tolist() for of_layer in means] for index, name in enumerate(names)}


def _map_table(context: AnalysisContext, columns: Mapping[str, Sequence[Sequence[float]]]) -> Table:
    return [*context.address_columns, "head", *columns], [
        [*address, name, *(finite(of_layers[index][head]) for of_layers in columns.values())]
        for index, (address, layer) in enumerate(zip(context.addresses, context.layers, strict=True))
        for head, name in enumerate(map_names(layer))
    ]


def sublayer_gradients(
    context: AnalysisContext, network: Network
) -> dict[tuple[tuple[str, ...], int, str], tuple[float, float]]:
    """Two norms ‖∂L / ∂W‖ over all weights W of a sublayer, by the kind of its stack, its layer and its name.

    In the first, L is the mean loss of the batches' windows, in nats per target. In the second, L is the loss of the
    last target of a window, which has the longest context, and the norm is averaged over windows. Norm layers are left
    out: they belong to the layer, not to the sublayer.
    """
    sublayers = {
        (kind, depth, name): list(getattr(layer, name).parameters())
        for kind, stack in stacks_of(network).items()
        for depth, layer in enumerate(stack.layers)
        for name in ("attention", "cross_attention", "feed_forward")
        if getattr(layer, name, None) is not None
    }
    groups, weights = list(sublayers.values()), list(itertools.chain(*sublayers.values()))
    totals = [torch.zeros_like(weight, dtype=torch.float64) for weight in weights]
    of_targets = torch.zeros(len(groups), dtype=torch.float64)
    for batch in context.batches:
        with (
            torch.enable_grad(),
            context.precision(),
            running_hooks(network),
            changed(weights, requires_grad=True),  # even if they are frozen
        ):
            nats, targets = context.task.nats(network, batch)
            loss = (nats / targets.clamp(min=1)).sum() / context.num_windows
            gradients = torch.autograd.grad(loss, weights, materialize_grads=True)
            totals = [total + gradient for total, gradient in zip(totals, gradients, strict=True)]
            nats, _ = context.task.nats(network, with_last_target(batch))
            for row in nats:
                gradients = torch.autograd.grad(row, weights, retain_graph=True, materialize_grads=True)
                of_targets += torch.tensor(_norms_of(groups, gradients), dtype=torch.float64)
    norms = zip(_norms_of(groups, totals), (of_targets / context.num_windows).tolist(), strict=True)
    return dict(zip(sublayers, norms, strict=True))


def with_last_target(batch: Batch) -> Batch:
    """A batch in which each row is scored at its last target alone; unchanged if its rows have a single target."""
    if "targets" not in batch:
        return batch
    is_target = batch["targets"] != IGNORED
    is_last = is_target.cumsum(dim=1) == is_target.sum(dim=1, keepdim=True)
    return {**batch, "targets": batch["targets"].masked_fill(~is_last, IGNORED)}


def _norms_of(groups: Sequence[Sequence[Tensor]], gradients: Sequence[Tensor]) -> list[float]:
    """The gradient norm of each group of weights; `gradients` are those of the first group, then of the next."""
    remaining = iter(gradients)
    return [math.sqrt(sum(float(next(remaining).double().square().sum()) for _ in group)) for group in groups]


def gradient_norms(context: AnalysisContext, network: Network) -> list[list[tuple[float]]]:
    """The mean over windows of ‖∂L / ∂X‖ for each stack of a network, where X are the embeddings or a layer's output.

    L is the mean loss of the window, in nats per target. The loss of a window depends on its own stream only, so one
    backward pass gives the gradients of all windows of a batch.
    """
    totals = [torch.zeros(len(stack.layers) + 1, dtype=torch.float64) for stack in network.stacks()]
    for batch in context.batches:
        with torch.enable_grad(), context.precision(), running_hooks(network), residual_streams(network) as streams:
            nats, targets = context.task.nats(network, batch)
            loss = (nats / targets.clamp(min=1)).sum()
            gradients = iter(torch.autograd.grad(loss, list(itertools.chain(*streams)), materialize_grads=True))
        for total in totals:
            of_stack = itertools.islice(gradients, len(total))
            total.add_(torch.stack([gradient.float().flatten(1).norm(dim=1).sum() for gradient in of_stack]).cpu())
    return [list(zip((total / context.num_windows).tolist(), strict=True)) for total in totals]


def logit_statistics(maps: AttentionMaps) -> Float[Tensor, "3 maps"]:
    """Two sums over the rows of each map that see more than one key, and the number of these rows.

    The first is that of the variance of a row's logits, which grows with the dimension of a head unless the logits are
    scaled (Vaswani et al. 2017, arXiv 1706.03762, footnote 4). The second is that of the trace Σ w (1 - w) of the
    softmax's Jacobian diag(w) - wwᵀ, which vanishes with saturation; with a sink, the w of a row sum to less than 1.
    """
    is_visible, weights = maps.logits > -torch.inf, maps.weights.double()
    num_keys = is_visible.sum(dim=-1)
    logits = maps.logits.double().masked_fill(~is_visible, 0)
    mean = logits.sum(dim=-1, keepdim=True) / num_keys.clamp(min=1).unsqueeze(-1)
    variance = (logits - mean).square().masked_fill(~is_visible, 0).sum(dim=-1) / num_keys.clamp(min=1)
    has_choice = (num_keys > 1).double()
    sums = torch.stack([variance * has_choice, (weights * (1 - weights)).sum(dim=-1) * has_choice, has_choice])
    return sums.sum(dim=(1, 3))


def count_saturated(maps: AttentionMaps, threshold: float) -> Int[Tensor, " maps"]:
    """For each map, the number of rows that see several keys and whose largest weight reaches the threshold."""
    has_choice = (maps.logits > -torch.inf).sum(dim=-1) > 1
    is_saturated = maps.weights.amax(dim=-1) >= threshold
    return (is_saturated & has_choice).sum(dim=(0, 2))


def _ratio_in_words(ratio: float, num_layers: int) -> str:
    """The ratio of gradient norms, embeddings to last layer, and whether the gradient vanishes or explodes."""
    if not ratio > 0:
        return "no ratio: it is 0 somewhere"
    word = "vanishes" if ratio < 1 / KEPT else "explodes" if ratio > KEPT else "is kept"
    return f"ratio {ratio:.3g} over {num_layers} layers, {ratio ** (1 / num_layers):.3g} for each: it {word}"
