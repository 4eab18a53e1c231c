"""Gradients by depth: their norm with and without residual connections, and the share of saturated softmax rows."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from tinyformer.analysis.context import AnalysisContext, Trained, changed
from tinyformer.analysis.depth.by_depth import (
    ByDepth,
    by_depth,
    depth_charts,
    depth_scalar,
    depth_table,
    inputs_without_padding,
    stacks_of,
    stream_points,
)
from tinyformer.data.batches.windows import IGNORED, Batch
from tinyformer.files import finite
from tinyformer.measures.capture import attention_calls, running_hooks
from tinyformer.measures.points import intervention
from tinyformer.measures.probe import ablated_maps
from tinyformer.nn import AttentionMaps, Network
from tinyformer.report.result import AnalysisResult

NORM_TITLE = "Norm of the loss's gradient by depth, divided by the norm at the last layer (depth 0: the embeddings)"
KEPT = 100  # a gradient that changes by a smaller factor over all layers neither vanishes nor explodes


@dataclass(eq=False)
class GradientFlow:
    """The gradient norm of the residual stream by depth, and the share of saturated softmax rows of each head.

    The gradient is that of the mean loss of a window, in nats per target, with respect to the embeddings and to the
    output of each layer; its norm is taken over all tokens and dimensions, and averaged over windows. Without residual
    connections (`skip=0`), gradients vanish or explode with depth (He et al. 2016, arXiv 1603.05027, section 2), unless
    norm layers restore the size. They can if sublayers turn inputs of variance 1 into outputs of variance above `eps`.

    A softmax row is saturated if its largest weight w is at least `saturated`: then no derivative of its weights
    with respect to its logits exceeds w (1 - w), 0.0099 for w = 0.99. Dot products grow with the dimension of a head,
    and saturate the softmax unless they are scaled (Vaswani et al. 2017, arXiv 1706.03762, section 3.2.1, footnote 4);
    so the share is also given with a scale of 1. Rows with a single visible key are left out. For the same rows, the
    table `logits` has, for each head, the variance of the logits and the trace of the softmax's Jacobian.

    The table `sublayers` has, for the trained and the untrained network, the norm of the gradient of the mean loss with
    respect to all weights of each sublayer (Xiong et al. 2020, arXiv 2002.04745, section 3.3), and the norm for a
    single target's loss, averaged over windows. The norm of the mean loss is smaller if gradients of targets cancel.
    """

    num_windows: int = 32
    saturated: float = 0.99  # the largest weight of a row at which it counts as saturated
    needs_gradient = True

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        found = AnalysisResult()
        report_norms(found, context, by_depth(context, partial(gradient_norms, context)))
        report_rows(found, context, row_statistics(context, self.saturated), self.saturated)
        columns = [*context.address_columns[:-1], "model", "layer", "sublayer", "gradient_norm", "target_gradient_norm"]
        rows = [
            [*kind, name, *at, *norms]
            for name, network in context.networks().items()
            for (kind, *at), norms in sublayer_gradients(context, network).items()
        ]
        found.tables["sublayers"] = columns, rows
        return found


def report_norms(found: AnalysisResult, context: AnalysisContext, norms: ByDepth) -> None:
    """Add the gradient norms by depth, and the ratio of each to the norm at the last layer."""
    relative: ByDepth = {
        model: [(norm / values[-1][0] if values[-1][0] else math.nan,) for (norm,) in values]
        for model, values in norms.items()
    }
    found.scalars |= {depth_scalar(model, "gradient_ratio"): finite(of[0][0]) for model, of in relative.items()}
    found.lines["gradients"] = "norm of the loss's gradient with respect to embeddings and to the last layer's output, "
    found.lines["gradients"] += f"mean of {context.num_windows} {context.row}s"
    for model, values in norms.items():
        words = _ratio_in_words(relative[model][0][0], len(values) - 1)
        found.lines[f"  {' '.join(model)}"] = f"{values[0][0]:.3g} and {values[-1][0]:.3g}, {words}"
    found.tables["gradients"] = depth_table(context, norms, "gradient_norm")
    kept: ByDepth = {(*model[:-1], "kept"): [(1.0,)] * len(values) for model, values in norms.items()}
    charts = {"gradients": (NORM_TITLE, "norm / norm at the last layer", "log")}
    found.figures |= depth_charts(relative, charts, kept)


def report_rows(
    found: AnalysisResult, context: AnalysisContext, statistics: Mapping[str, list[float]], saturated: float
) -> None:
    """Add the `row_statistics` of each map."""
    shares, others = list(statistics)[:2], list(statistics)[2:]
    for table, columns in {"saturation": shares, "logits": others}.items():
        maps = zip(context.map_addresses, *(map(finite, statistics[column]) for column in columns), strict=True)
        found.tables[table] = [*context.address_columns, "head", *columns], [[*at, *of] for at, *of in maps]
    scaled, unscaled = (float(torch.tensor(statistics[name]).nanmean()) for name in shares)
    found.scalars |= {f"analysis/{name}": finite(mean) for name, mean in zip(shares, (scaled, unscaled), strict=True)}
    found.lines["saturated rows"] = (
        f"{scaled:.1%} of softmax rows have a weight of {saturated:g} or more; {unscaled:.1%} with a scale of 1"
    )
    title = f"Share of softmax rows with a weight of {saturated:g} or more"
    found.figures["saturation"] = context.map_grid(statistics["saturated"], title, "share of rows")


@torch.no_grad()
def row_statistics(context: AnalysisContext, saturated: float) -> dict[str, list[float]]:
    """Means over the softmax rows of each map, by the name of a column, over inputs without padding.

    They are the share of `saturated` rows, the same share if logits are not scaled (but queries and keys are those of
    the unchanged model), and the variance and the trace of `sums_over_rows`. A mean over no rows is nan, and so are the
    means of an ablated head.
    """
    names = ("saturated", "saturated_without_scale", "logit_variance", "softmax_jacobian")
    sums = [
        torch.zeros(len(names) + 1, len(flags), dtype=torch.float64).masked_fill(torch.tensor(flags), math.nan)
        for flags in ablated_maps(context.network)
    ]
    for inputs in inputs_without_padding(context):
        with context.precision():
            calls = attention_calls(context.network, *inputs)
            for total, (layer, call) in zip(sums, calls, strict=True):
                count, *others = sums_over_rows(layer.maps_of_call(call), saturated)
                with changed([layer.score], scale=1.0):  # changes nothing for scores without a scale
                    unscaled, *_ = sums_over_rows(layer.maps_of_call(call), saturated)
                total.add_(torch.stack([count, unscaled, *others]).cpu())
    *totals, num_rows = torch.cat(sums, dim=1)
    return {name: (total / num_rows).tolist() for name, total in zip(names, totals, strict=True)}


def sums_over_rows(maps: AttentionMaps, saturated: float) -> Float[Tensor, "4 maps"]:
    """For each map, three sums over the rows that see more than one key, and the number of these rows.

    The first is the number of rows whose largest weight is at least `saturated`. The second sums the variance of a
    row's logits, which grows with the dimension of a head unless the logits are scaled (Vaswani et al. 2017, arXiv
    1706.03762, footnote 4). The third sums the trace Σ w (1 - w) of the softmax's Jacobian diag(w) - wwᵀ, which
    vanishes with saturation; if the softmax has a sink, the w of a row sum to less than 1.
    """
    is_visible, weights = maps.logits > -torch.inf, maps.weights.double()
    num_keys = is_visible.sum(dim=-1)
    logits = maps.logits.double().masked_fill(~is_visible, 0)
    mean = logits.sum(dim=-1, keepdim=True) / num_keys.clamp(min=1).unsqueeze(-1)
    variance = (logits - mean).square().masked_fill(~is_visible, 0).sum(dim=-1) / num_keys.clamp(min=1)
    jacobian, is_saturated = (weights * (1 - weights)).sum(dim=-1), maps.weights.amax(dim=-1) >= saturated
    has_choice = (num_keys > 1).double()
    statistics = (is_saturated, variance, jacobian, torch.ones_like(variance))
    return torch.stack([of_rows * has_choice for of_rows in statistics]).sum(dim=(1, 3))


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
        with torch.enable_grad(), context.precision(), running_hooks(network), changed(weights, requires_grad=True):
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
    """The batch with only the last target of each row; it is unchanged if its rows have a single target."""
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
    names = stream_points(network)
    points = list(itertools.chain(*names))
    totals = torch.zeros(len(points), dtype=torch.float64)
    for batch in context.batches:
        with context.precision(), intervention(network, {}, points, gradients=True) as captured:
            nats, targets = context.task.nats(network, batch)
            streams = [captured[name][0] for name in points]
            gradients = torch.autograd.grad((nats / targets.clamp(min=1)).sum(), streams, materialize_grads=True)
        totals += torch.stack([gradient.float().flatten(1).norm(dim=1).sum() for gradient in gradients]).cpu()
    means = iter((totals / context.num_windows).tolist())
    return [[(next(means),) for _ in of_stack] for of_stack in names]


def _ratio_in_words(ratio: float, num_layers: int) -> str:
    """The ratio of gradient norms, embeddings to last layer, in words: the gradient vanishes, explodes, or is kept."""
    if not ratio > 0:
        return "no ratio: a gradient norm is 0"
    word = "vanishes" if ratio < 1 / KEPT else "explodes" if ratio > KEPT else "is kept"
    return f"ratio {ratio:.3g} over {num_layers} layers, {ratio ** (1 / num_layers):.3g} for each: it {word}"
