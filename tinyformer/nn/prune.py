"""Pruning: a smaller layer that computes what the layer with some heads ablated computes."""

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from tinyformer.errors import ArgumentError
from tinyformer.nn.attention import BaseAttention
from tinyformer.nn.heads import not_a_head


def prune_heads(layer: BaseAttention, heads: Iterable[int]) -> None:
    """Remove heads from a layer in place, with all of their weights (Michel et al. 2019, arXiv 1905.10650).

    A K/V head is removed with the last query head that reads it. If that leaves groups of unequal size, keys and values
    are copied for each query head inside the kernel; the cache still holds each of them once. Tables of positions that
    layers may share (T5's) keep their size.

    Args:
        layer: the layer.
        heads: their numbers, as in `layer.head_map.ids`.

    Raises:
        ArgumentError: the layer has no such head, or none would be left.
    """
    ids, pruned, device = layer.head_map.ids, set(heads), layer.o_proj.weight.device
    if not pruned <= set(ids):
        raise ArgumentError("heads", min(pruned - set(ids)), f"must be among {', '.join(map(str, ids))}")
    left = [index for index, head in enumerate(ids) if head not in pruned]
    if not left:
        raise ArgumentError(
            "heads", sorted(pruned), "must leave a head in the layer; a residual branch of 0 removes the attention"
        )
    num_heads, num_kv_heads = layer.num_heads, layer.num_kv_heads
    kv_left = layer.head_map.keep(left, device)
    _keep_rows(layer.q_proj, left, num_heads)
    for projection in (layer.k_proj, layer.v_proj):
        _keep_rows(projection, kv_left, num_kv_heads)
    _keep_columns(layer.o_proj, left, num_heads)
    if layer.output_gate is not None:
        _keep_rows(layer.output_gate.proj, left, num_heads)
    for module in (layer.score, layer.gaussian):
        for name, parameter in module.named_parameters(recurse=False) if module is not None else ():
            setattr(module, name, _like(parameter, parameter[left]))
    if layer.sink is not None:
        layer.sink = _like(layer.sink, layer.sink[left])
    if layer.head_gate.factors is not None:
        layer.head_gate.factors = layer.head_gate.factors[..., left]
    layer.num_heads, layer.num_kv_heads = len(left), len(kv_left)


def prune_model(layers: Sequence[BaseAttention], pruned_heads: Sequence[Sequence[int]]) -> None:
    """Remove heads from a model in place, see `prune_heads`.

    Args:
        layers: the attention of each layer, from the first to the last.
        pruned_heads: `[layer, head]` pairs.

    Raises:
        ArgumentError: a pair is not a head of the model, or a layer would lose all of its heads.
    """
    for pair in pruned_heads:
        if len(pair) != 2 or not 0 <= pair[0] < len(layers) or pair[1] not in layers[pair[0]].head_map.ids:
            raise not_a_head("pruned_heads", pair, len(layers), layers[-1].num_heads)
    for index, layer in enumerate(layers):
        heads = {head for other, head in pruned_heads if other == index}
        if len(heads) == layer.num_heads:
            pairs = [list(pair) for pair in pruned_heads]
            branch = [int(other != index) for other in range(len(layers))]
            raise ArgumentError(
                "pruned_heads",
                pairs,
                f"leaves no head in layer {index}",
                {"encoder.block.attention_residual.branch": branch},
            )
        if heads:
            prune_heads(layer, heads)


def _keep_rows(linear: nn.Linear, indices: list[int], num_heads: int) -> None:
    """Keep the output features of some heads."""
    linear.weight = _like(linear.weight, linear.weight.unflatten(0, (num_heads, -1))[indices].flatten(0, 1))
    if linear.bias is not None:
        linear.bias = _like(linear.bias, linear.bias.unflatten(0, (num_heads, -1))[indices].flatten())
    linear.out_features = len(linear.weight)


def _keep_columns(linear: nn.Linear, indices: list[int], num_heads: int) -> None:
    """Keep the input features of some heads."""
    linear.weight = _like(linear.weight, linear.weight.unflatten(1, (num_heads, -1))[:, indices].flatten(1))
    linear.in_features = linear.weight.shape[1]


def _like(old: Tensor, values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.detach().clone(), requires_grad=old.requires_grad)
