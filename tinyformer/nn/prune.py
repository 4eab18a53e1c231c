"""Pruning: heads are removed, and the smaller layer computes what the layer with these heads ablated computes."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from tinyformer.errors import ArgumentError
from tinyformer.nn.attention import BaseAttention
from tinyformer.nn.heads import Address, HeadMap, layer_title
from tinyformer.nn.network import Network


def prune_heads(layer: BaseAttention, heads: Iterable[int]) -> None:
    """Remove heads from a layer in place, with all of their weights (Michel et al. 2019, arXiv 1905.10650).

    A K/V head is removed with the last query head that reads it. If that leaves groups of unequal size, keys and values
    are copied for each query head before the kernel; the cache still holds each of them once. Tables of positions that
    layers may share (T5's) keep their size. A parameter of the layer itself or of its score function belongs to the
    heads if its first axis is as long as there are heads, and else is shared by them. Heads are named by their numbers
    in the original layer, `layer.head_map.ids`; an `ArgumentError` if one is not among them, or none would stay.
    """
    ids, pruned, device = layer.head_map.ids, set(heads), layer.o_proj.weight.device
    if not pruned <= set(ids):
        raise ArgumentError("heads", min(pruned - set(ids)), f"must be among {', '.join(map(str, ids))}")
    left = [index for index, head in enumerate(ids) if head not in pruned]
    if not left:
        reason = "must leave a head in the layer; a residual branch of 0 removes the attention"
        raise ArgumentError("heads", sorted(pruned), reason)
    num_heads, num_kv_heads = layer.num_heads, layer.num_kv_heads
    kv_left = layer.head_map.keep(left, device)
    _keep_rows(layer.q_proj, left, num_heads)
    for projection in (layer.k_proj, layer.v_proj):
        _keep_rows(projection, kv_left, num_kv_heads)
    _keep_columns(layer.o_proj, left, num_heads)
    if layer.output_gate is not None:
        _keep_rows(layer.output_gate.proj, left, num_heads)
    for module in (layer, layer.score, layer.gaussian):
        for name, parameter in module.named_parameters(recurse=False) if module is not None else ():
            if parameter.ndim and len(parameter) == num_heads:  # others are shared by the heads
                setattr(module, name, _like(parameter, parameter[left]))
    if layer.head_gate.factors is not None:
        layer.head_gate.factors = layer.head_gate.factors[..., left]
    layer.num_heads, layer.num_kv_heads = len(left), len(kv_left)


def prune_model(network: Network, pruned_heads: Sequence[Sequence[str | int]]) -> None:
    """Remove heads, `[layer, head]` or `[kind, layer, head]`, from a network in place, see `prune_heads`."""
    layers = dict(zip(network.layer_addresses(), network.attentions(), strict=True))
    heads: dict[Address, set[int]] = defaultdict(set)
    for entry in pruned_heads:
        network.find_head("pruned_heads", entry)
        heads[tuple(entry[:-1])].add(int(entry[-1]))
    emptied = [address for address, of_layer in heads.items() if len(of_layer) == layers[address].num_heads]
    if emptied:
        entries = [list(entry) for entry in pruned_heads]
        kept = {(*address, max(heads[address])) for address in emptied}
        others = [entry for entry in entries if tuple(entry) not in kept]
        works = {**_without_attention(emptied, layers), "pruned_heads": others}
        raise ArgumentError("pruned_heads", entries, f"leaves no head in {layer_title(emptied[0])}", works)
    for address, of_layer in heads.items():
        prune_heads(layers[address], of_layer)


def with_zeros(network: Network, pruned: Network, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a network, given those of the same network without some heads, which get zeros and add nothing."""
    full = dict(weights)
    names = {module: name for name, module in network.named_modules()}
    for layer, smaller in zip(network.attentions(), pruned.attentions(), strict=True):
        left, num_heads, num_kv_heads = smaller.head_map.ids, layer.num_heads, layer.num_kv_heads
        kv_left = HeadMap(num_heads, num_kv_heads).keep(left, torch.device("cpu"))
        of_keys = (0, num_kv_heads, kv_left)
        places = {"q_proj": (0, num_heads, left), "k_proj": of_keys, "v_proj": of_keys, "o_proj": (1, num_heads, left)}
        for projection, (dim, num_parts, indices) in places.items():
            for name, parameter in layer.get_submodule(projection).named_parameters(f"{names[layer]}.{projection}"):
                if parameter.ndim > dim:
                    parts = weights[name].unflatten(dim, (len(indices), -1))
                    zeros = parts.new_zeros(parameter.shape).unflatten(dim, (num_parts, -1))
                    full[name] = zeros.index_copy(dim, torch.tensor(indices), parts).flatten(dim, dim + 1)
    return full


RESIDUALS = {(): "encoder.block.attention_residual", ("cross",): "decoder.block.cross_attention_residual"}
"""The residual connection around each kind of attention. Encoder and decoder share that of their self-attention, which
cannot be removed for one of them alone."""


def _without_attention(emptied: Collection[Address], layers: Collection[Address]) -> dict[str, list[int]]:
    """The arguments that remove the attention of whole layers, for the kinds in `RESIDUALS`."""
    works = {}
    for kind, residual in RESIDUALS.items():
        of_kind = [address for address in layers if address[:-1] == kind]
        if not set(of_kind).isdisjoint(emptied):
            works[f"{residual}.branch"] = [int(address not in emptied) for address in of_kind]
    return works


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
