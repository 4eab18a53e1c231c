"""Heads taken out for good: a smaller layer that computes what the layer with those heads gated off computes."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from tinyformer.nn.attention import BaseAttention


def prune_heads(layer: BaseAttention, heads: Iterable[int]) -> None:
    """Take heads out of a layer, with every weight that is theirs (Michel et al. 2019, arXiv 1905.10650).

    A K/V head goes when the last query head that reads it does. Where that leaves groups of unequal size, keys and
    values are copied for each query head when they are compared; the cache still holds each of them once. Tables of
    positions that layers may share (T5's) stay whole.

    Args:
        layer: changed in place.
        heads: their numbers, as in `layer.head_ids`.

    Raises:
        ValueError: there is no such head, or none would be left.
    """
    ids, gone, device = layer.head_ids, set(heads), layer.o_proj.weight.device
    if not gone <= set(ids):
        raise ValueError(f"The layer has no head {min(gone - set(ids))}; it has {', '.join(map(str, ids))}.")
    # Plain numbers: a network without memory, on torch's meta device, can be pruned too.
    left = [index for index, head in enumerate(ids) if head not in gone]
    if not left:
        raise ValueError(
            "No head would be left in the layer; block.attention_residual.branch=0 for this layer takes it away whole."
        )
    kv_of_head = [layer.kv_of_head[index] for index in left]
    kv_left = sorted(set(kv_of_head))
    num_heads, num_kv_heads = layer.num_heads, layer.num_kv_heads
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
    layer.kept = torch.tensor([ids[index] for index in left], device=device)
    layer.pruned = sorted({*layer.pruned, *gone})
    layer.num_heads, layer.num_kv_heads = len(left), len(kv_left)
    index_of_kv = [kv_left.index(kv) for kv in kv_of_head]
    shared_evenly = index_of_kv == [index // (len(left) // len(kv_left)) for index in range(len(left))]
    layer.kv_index = None if shared_evenly else torch.tensor(index_of_kv, device=device)


def prune_model(layers: Sequence[BaseAttention], pruned: Sequence[Sequence[int]]) -> None:
    """Take heads out of a model.

    Args:
        layers: the attention of each, from the first to the last.
        pruned: `[layer, head]` pairs.

    Raises:
        ValueError: a pair is no head of the model, or a layer would lose all of its heads.
    """
    for pair in pruned:
        if len(pair) != 2 or not 0 <= pair[0] < len(layers) or pair[1] not in layers[pair[0]].head_ids:
            raise ValueError(
                f"model.pruned_heads holds {list(pair)}, which is no [layer, head] of a model with {len(layers)} "
                f"layers of {layers[0].num_heads} heads; [{len(layers) - 1}, {layers[-1].num_heads - 1}] is the last."
            )
    for index, layer in enumerate(layers):
        heads = {head for other, head in pruned if other == index}
        if len(heads) == layer.num_heads:
            branch = ",".join("0" if other == index else "1" for other in range(len(layers)))
            raise ValueError(
                f"model.pruned_heads={[list(pair) for pair in pruned]} leaves no head in layer {index}; "
                f"block.attention_residual.branch=[{branch}] takes its attention away whole."
            )
        if heads:
            prune_heads(layer, heads)


def _keep_rows(linear: nn.Linear, kept: list[int], num_heads: int) -> None:
    """Keep the outputs of some heads."""
    linear.weight = _like(linear.weight, linear.weight.unflatten(0, (num_heads, -1))[kept].flatten(0, 1))
    if linear.bias is not None:
        linear.bias = _like(linear.bias, linear.bias.unflatten(0, (num_heads, -1))[kept].flatten())
    linear.out_features = len(linear.weight)


def _keep_columns(linear: nn.Linear, kept: list[int], num_heads: int) -> None:
    """Keep the inputs of some heads."""
    linear.weight = _like(linear.weight, linear.weight.unflatten(1, (num_heads, -1))[:, kept].flatten(1))
    linear.in_features = linear.weight.shape[1]


def _like(old: Tensor, values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.detach().clone(), requires_grad=old.requires_grad)
