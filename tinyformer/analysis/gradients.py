"""Gradients by depth: their norm with and without residual connections, and the share of saturated softmax rows."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

from tinyformer.analysis.measures.capture import attention_calls, running_hooks
from tinyformer.analysis.measures.probe import ablated_maps, map_names
from tinyformer.analysis.pictures.charts import head_grid, lines
from tinyformer.analysis.residual import Kind, inputs_without_padding, residuals_of, scaled, stack_kinds
from tinyformer.analysis.subject import Findings, Subject, Trained
from tinyformer.batch import IGNORED, Batch
from tinyformer.errors import ArgumentError, require_at_least
from tinyformer.nn import AttentionMaps, BaseAttention, Network

Series = dict[str, list[float]]
"""The gradient norm at each depth of a stack, by model."""


class GradientFlow:
    """The gradient norm of the residual stream by depth, and the share of saturated softmax rows of each head.

    The gradient is that of the mean loss of a window, in nats per target, with respect to the embeddings and to the
    output of each layer; its norm is taken over all tokens and dimensions, and averaged over windows. Without residual
    connections (`skip=0`), gradients vanish or explode with depth (He et al. 2016, arXiv 1603.05027, section 2).

    A softmax row is saturated if its largest weight w is at least `saturated`: then no derivative of a weight with
    respect to a logit exceeds w (1 - w) there, 0.0099 for 0.99. Dot products grow with the dimension of a head, and
    saturate the softmax unless they are scaled (Vaswani et al. 2017, arXiv 1706.03762, section 3.2.1, footnote 4); so
    the share is also given with a scale of 1. Rows with a single visible key do not count. For the same rows, the table
    `logits` has the `logit_statistics` of each head: the variance of the logits, and the trace of the softmax's
    Jacobian.

    The table `sublayers` has, for the trained and the untrained network, the norm of the gradient of the mean loss with
    respect to all weights of each sublayer (Xiong et al. 2020, arXiv 2002.04745, section 3.3), and that of the gradient
    of a single target's loss, averaged over windows. The first is smaller where gradients of different targets cancel.

    Args:
        num_windows: number of windows, or pairs, of the evaluated split.
        saturated: the largest weight of a row at which it counts as saturated.

    Raises:
        ArgumentError: the number is below 1, or the weight is not at least 0.5 and below 1.
    """

    needs_gradient = True

    def __init__(self, num_windows: int = 32, saturated: float = 0.99) -> None:
        require_at_least(1, {"num_windows": 32}, num_windows=num_windows)
        if not 0.5 <= saturated < 1:
            raise ArgumentError("saturated", saturated, "must be at least 0.5 and below 1", {"saturated": 0.99})
        self.num_windows, self.saturated = num_windows, saturated

    def __call__(self, model: Trained, folder: Path = Path()) -> Findings:
        subject = model.sample(self.num_windows)
        norms, kinds = self._norms(subject), stack_kinds(subject.network)
        shares = self._shares(subject)
        names = [map_names(layer) for layer in subject.layers]
        rows = [
            [*address, name, *(_finite(of_layers[layer][head]) for of_layers in shares.values())]
            for layer, address in enumerate(subject.addresses)
            for head, name in enumerate(names[layer])
        ]
        means = {
            name: float(torch.tensor(list(itertools.chain(*of_layers))).nanmean()) for name, of_layers in shares.items()
        }
        return Findings(
            scalars={f"analysis/{name}": _finite(mean) for name, mean in means.items()},
            lines={
                "gradients": f"norm of the loss's gradient with respect to embeddings and to the last layer's output, "
                f"mean of {sum(len(batch['inputs']) for batch in subject.batches)} {subject.row}s",
                **{
                    f"  {' '.join([*kind, name])}": f"{values[0]:.3g} and {values[-1]:.3g}"
                    for kind, series in zip(kinds, norms, strict=True)
                    for name, values in series.items()
                },
                "saturated rows": f"{means['saturated']:.1%} of softmax rows have a weight of {self.saturated:g} or "
                f"more; {means['saturated_without_scale']:.1%} with a scale of 1",
            },
            tables={
                "gradients": (
                    [*subject.address_columns[:-1], "model", "depth", "gradient_norm"],
                    [
                        [*kind, name, depth, value]
                        for kind, series in zip(kinds, norms, strict=True)
                        for name, values in series.items()
                        for depth, value in enumerate(values)
                    ],
                ),
                "saturation": ([*subject.address_columns, "head", *shares], rows),
                "logits": (
                    [*subject.address_columns, "head", "logit_variance", "softmax_jacobian"],
                    [
                        [*address, name, *map(_finite, of_head)]
                        for address, of_layer, own in zip(subject.addresses, self._logits(subject), names, strict=True)
                        for name, of_head in zip(own, of_layer, strict=True)
                    ],
                ),
                "sublayers": (
                    [
                        *subject.address_columns[:-1],
                        *("model", "layer", "sublayer", "gradient_norm", "target_gradient_norm"),
                    ],
                    [
                        [*kind, name, *at, *norms]
                        for name, network in {"trained": subject.network, "untrained": subject.untrained()}.items()
                        for kind, of_stack in zip(kinds, sublayer_gradients(subject, network), strict=True)
                        for at, norms in of_stack.items()
                    ],
                ),
            },
            figures={
                **{"_".join([*kind, "gradients"]): _chart(kind, of) for kind, of in zip(kinds, norms, strict=True)},
                "saturation": head_grid(
                    shares["saturated"],
                    [[name.removeprefix("0") for name in layer] for layer in names],
                    f"Share of softmax rows with a weight of {self.saturated:g} or more",
                    layers=subject.addresses,
                    label="share of rows",
                    ablated=ablated_maps(subject.network),
                ),
            },
        )

    def _norms(self, subject: Subject) -> list[Series]:
        """`gradient_norms` by stack, for the trained and the untrained network, with and without connections."""
        norms: list[Series] = [{} for _ in subject.network.stacks()]
        for name, network in {"trained": subject.network, "untrained": subject.untrained()}.items():
            for suffix, residuals in {"with skips": [], "without skips": residuals_of(network)}.items():
                with scaled(residuals, "skip", 0.0):
                    found = gradient_norms(subject, network)
                for series, values in zip(norms, found, strict=True):
                    series[f"{name}, {suffix}"] = values
        return norms

    def _logits(self, subject: Subject) -> list[list[list[float]]]:
        """The means of `logit_statistics` over rows, for each map of each layer, over inputs without padding."""
        sums = zeros_by_map(subject, 3)
        for inputs in inputs_without_padding(subject):
            with subject.precision(), torch.no_grad():
                calls = attention_calls(subject.network, *inputs)
                found = [logit_statistics(layer.maps_of_call(call)) for layer, call in calls]
            sums = [total + new.cpu() for total, new in zip(sums, found, strict=True)]
        return [(total[:2] / total[2]).T.tolist() for total in sums]

    def _shares(self, subject: Subject) -> dict[str, list[list[float]]]:
        """The share of saturated rows for each map of each layer, over inputs without padding; nan if no row counts.

        It is nan for an ablated head, too. For the share with a scale of 1, queries and keys are those of the
        unchanged model.
        """
        counts = {name: zeros_by_map(subject, 2) for name in ("saturated", "saturated_without_scale")}
        for inputs in inputs_without_padding(subject):
            with subject.precision():
                calls = attention_calls(subject.network, *inputs)
                for name, layers in {"saturated": [], "saturated_without_scale": subject.layers}.items():
                    with torch.no_grad(), unscaled(layers):
                        found = [count_saturated(layer.maps_of_call(call), self.saturated) for layer, call in calls]
                    counts[name] = [count + new.cpu() for count, new in zip(counts[name], found, strict=True)]
        return {
            name: [(saturated / rows).tolist() for saturated, rows in of_layers] for name, of_layers in counts.items()
        }


def zeros_by_map(subject: Subject, number: int) -> list[Float[Tensor, "{number} maps"]]:
    """Sums to start from, for the maps of each layer: zero, or nan for those of ablated heads."""
    flags = [torch.tensor(flags) for flags in ablated_maps(subject.network)]
    return [torch.zeros(number, len(of), dtype=torch.float64).masked_fill(of, math.nan) for of in flags]


def sublayer_gradients(subject: Subject, network: Network) -> list[dict[tuple[int, str], tuple[float, float]]]:
    """Two norms ‖∂L / ∂W‖ over all weights W of a sublayer, by layer and name, for each stack of a network.

    In the first, L is the mean loss of the batches' windows, in nats per target. In the second, L is the loss of the
    last target of a window, which has the longest context, and the norm is averaged over windows. Norm layers are left
    out: they belong to the layer, not to the sublayer.
    """
    sublayers = [
        {
            (depth, name): list(getattr(layer, name).parameters())
            for depth, layer in enumerate(stack.layers)
            for name in ("attention", "cross_attention", "feed_forward")
            if getattr(layer, name, None) is not None
        }
        for stack in network.stacks()
    ]
    groups = [several for of_stack in sublayers for several in of_stack.values()]
    weights = list(itertools.chain(*groups))
    totals = [torch.zeros_like(weight, dtype=torch.float64) for weight in weights]
    of_targets = torch.zeros(len(groups), dtype=torch.float64)
    num_windows = sum(len(batch["inputs"]) for batch in subject.batches)
    for batch in subject.batches:
        with torch.enable_grad(), subject.precision(), running_hooks(network), learning(weights):
            nats, targets = subject.task.nats(network, batch)
            loss = (nats / targets.clamp(min=1)).sum() / num_windows
            gradients = torch.autograd.grad(loss, weights, materialize_grads=True)
            totals = [total + gradient for total, gradient in zip(totals, gradients, strict=True)]
            nats, _ = subject.task.nats(network, with_last_target(batch))
            for row in nats:
                gradients = torch.autograd.grad(row, weights, retain_graph=True, materialize_grads=True)
                of_targets += torch.tensor(_norms_of(groups, gradients), dtype=torch.float64)
    norms = zip(_norms_of(groups, totals), (of_targets / num_windows).tolist(), strict=True)
    return [{at: next(norms) for at in of_stack} for of_stack in sublayers]


def with_last_target(batch: Batch) -> Batch:
    """A batch in which each row is scored at its last target alone; unchanged if its rows have a single target."""
    if "targets" not in batch:
        return batch
    is_target = batch["targets"] != IGNORED
    is_last = is_target & (is_target.cumsum(dim=1) == is_target.sum(dim=1, keepdim=True))
    return {**batch, "targets": batch["targets"].masked_fill(~is_last, IGNORED)}


def _norms_of(groups: Sequence[Sequence[Tensor]], gradients: Sequence[Tensor]) -> list[float]:
    """The gradient norm of each group of weights; `gradients` are those of the first group, then of the next."""
    found = iter(gradients)
    return [math.sqrt(sum(float(next(found).double().square().sum()) for _ in several)) for several in groups]


def gradient_norms(subject: Subject, network: Network) -> list[list[float]]:
    """The mean over windows of ‖∂L / ∂X‖ for each stack of a network, where X are the embeddings or a layer's output.

    L is the mean loss of the window, in nats per target. The loss of a window depends on its own stream only, so one
    backward pass gives the gradients of all windows of a batch.
    """
    stacks = network.stacks()
    totals = [torch.zeros(len(stack.layers) + 1, dtype=torch.float64) for stack in stacks]
    for batch in subject.batches:
        with torch.enable_grad(), subject.precision(), running_hooks(network), recorded(network) as streams:
            nats, targets = subject.task.nats(network, batch)
            loss = (nats / targets.clamp(min=1)).sum()
            gradients = iter(torch.autograd.grad(loss, list(itertools.chain(*streams)), materialize_grads=True))
        for index, total in enumerate(totals):
            norms = [
                gradient.float().flatten(1).norm(dim=1).sum() for gradient in itertools.islice(gradients, len(total))
            ]
            totals[index] = total + torch.stack(norms).cpu()
    num_windows = sum(len(batch["inputs"]) for batch in subject.batches)
    return [(total / num_windows).tolist() for total in totals]


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


def count_saturated(maps: AttentionMaps, threshold: float) -> Int[Tensor, "2 maps"]:
    """For each map, the number of saturated rows, and the number of all rows; both count rows that see several keys.

    Args:
        maps: attention weights and logits of one layer.
        threshold: the largest weight at which a row counts as saturated.
    """
    has_choice = (maps.logits > -torch.inf).sum(dim=-1) > 1
    is_saturated = maps.weights.amax(dim=-1) >= threshold
    return torch.stack([is_saturated & has_choice, has_choice]).sum(dim=(1, 3))


@contextmanager
def learning(weights: Sequence[Tensor]) -> Iterator[None]:
    """Make weights require gradients inside the block, even if they are frozen."""
    before = [weight.requires_grad for weight in weights]
    for weight in weights:
        weight.requires_grad_()
    try:
        yield
    finally:
        for weight, value in zip(weights, before, strict=True):
            weight.requires_grad_(value)


@contextmanager
def recorded(network: Network) -> Iterator[list[list[Tensor]]]:
    """Record the residual stream of each stack in a forward pass: the embeddings, then the output of each layer."""
    streams: list[list[Tensor]] = [[] for _ in network.stacks()]

    def begin(of_stack: list[Tensor], layer: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        of_stack.append(args[0].detach().requires_grad_())  # frozen embeddings would have no gradient
        return (of_stack[0], *args[1:])

    def record(of_stack: list[Tensor], layer: torch.nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        of_stack.append(output)

    hooks = []
    for of_stack, stack in zip(streams, network.stacks(), strict=True):
        hooks.append(stack.layers[0].register_forward_pre_hook(partial(begin, of_stack)))
        hooks += [layer.register_forward_hook(partial(record, of_stack)) for layer in stack.layers]
    try:
        yield streams
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def unscaled(layers: Sequence[BaseAttention]) -> Iterator[None]:
    """Set the scale of the scores to 1 inside the block, which changes nothing for scores without a scale."""
    before = [layer.score.scale for layer in layers]
    for layer in layers:
        layer.score.scale = 1.0
    try:
        yield
    finally:
        for layer, scale in zip(layers, before, strict=True):
            layer.score.scale = scale


def _chart(kind: Kind, norms: Mapping[str, Sequence[float]]) -> Figure:
    """The gradient norms of a stack by depth."""
    return lines(
        {name: (range(len(values)), values) for name, values in norms.items()},
        "Gradient of the loss with respect to the residual stream (depth 0: the embeddings)",
        f"layers of the {kind[0]}" if kind else "layers",
        "norm",
        "log",
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
