"""Attention heads: their addresses, the K/V head of each query head, gates that scale the outputs, and pruning."""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from tinyformer.errors import ArgumentError
from tinyformer.nn.maps import HeadOutputs, Tokens
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.projections import ProjectionNorm
from tinyformer.nn.score import ScoreMod

if TYPE_CHECKING:
    import tinyformer.nn.attention  # which imports this module


def split_heads(
    x: Float[Tensor, "batch seq heads_times_dim"], head_dim: int
) -> Float[Tensor, "batch heads seq {head_dim}"]:
    """Split the concatenated vectors of all heads into one vector for each head."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


# Addresses.

KINDS = ("encoder", "decoder", "cross")
"""The kinds of attention in an encoder–decoder."""

Address: TypeAlias = tuple[str | int, ...]
"""The address of an attention layer: (3,), or ("cross", 3) in an encoder–decoder."""


def plain_address(address: Iterable[Any]) -> tuple[Any, ...]:
    """An address with Python integers in place of NumPy or torch integers, such as the result of an `argmax`."""
    return tuple(operator.index(part) if hasattr(part, "__index__") else part for part in address)


def layer_title(address: Address) -> str:
    """The address of a layer in words, such as "layer 3" or "cross layer 3"."""
    *kind, index = map(str, address)
    return " ".join([*kind, "layer", index])


def not_a_head(
    argument: str, head: Sequence[int | str], num_layers: int, num_heads: int, kind: str | None = None
) -> ArgumentError:
    """The error for an invalid address of a head, which is [layer, head], or [kind, layer, head]."""
    if kind is None:
        reason, last = "must hold [layer, head] pairs of a model with", []
    else:
        reason, last = f"must hold [kind, layer, head] with a kind of {', '.join(KINDS)}; {kind} has", [kind]
    reason = f"{reason} {num_layers} layers of {num_heads} heads"
    return ArgumentError(argument, [list(head)], reason, {argument: [[*last, num_layers - 1, num_heads - 1]]})


def ablated_in_layer(
    heads: Sequence[Sequence[int | str]], layer_index: int, num_layers: int, num_heads: int, kind: str | None = None
) -> list[int]:
    """The ablated heads of one layer, given the `[layer, head]` or `[kind, layer, head]` entries of the whole model."""
    of_kind: Address = () if kind is None else (kind,)
    known = [(*of_kind, layer, head) for layer in range(num_layers) for head in range(num_heads)]
    ablated = []
    for entry in heads:
        address = plain_address(entry)
        if kind is not None and len(address) == 3 and address[0] in KINDS and address[0] != kind:
            continue  # the layers of that kind check this address
        if address not in known:
            raise not_a_head("ablated_heads", entry, num_layers, num_heads, kind)
        if address[-2] == layer_index:
            ablated.append(int(address[-1]))
    return ablated


# Modules of an attention layer.


class HeadMap(nn.Module):
    """The heads that remain in a layer after pruning, and the K/V head that each of them uses.

    Attributes:
        ids: the original number of each remaining head; pruning does not renumber heads.
        kv_heads: the K/V head of each remaining head, as an index into the remaining K/V heads.
        pruned: the numbers of the pruned heads.
    """

    _ids: Tensor | None
    _kv_index: Tensor | None

    def __init__(self, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.ids = list(range(num_heads))
        self.pruned: list[int] = []
        self.kv_heads = [head // (num_heads // num_kv_heads) for head in self.ids]
        # `ids` and `kv_heads` on the layer's device; None if the forward pass does not need them.
        self.register_buffer("_ids", None, persistent=False)
        self.register_buffer("_kv_index", None, persistent=False)

    def keep(self, indices: Sequence[int], device: torch.device) -> list[int]:
        """Keep only the heads at `indices`, and return the indices of the K/V heads that they use."""
        kv_left = sorted({self.kv_heads[index] for index in indices})
        self.pruned = sorted({*self.pruned, *self.ids} - {self.ids[index] for index in indices})
        self.ids = [self.ids[index] for index in indices]
        self.kv_heads = [kv_left.index(self.kv_heads[index]) for index in indices]
        self._ids = torch.tensor(self.ids, device=device) if self.pruned else None
        evenly = [index // (len(indices) // len(kv_left)) for index in range(len(indices))]
        self._kv_index = None if self.kv_heads == evenly else torch.tensor(self.kv_heads, device=device)
        return kv_left

    def expand_kv(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values for a kernel, copied for each query head if groups of query heads differ in size."""
        return (k, v) if self._kv_index is None else (k[:, self._kv_index], v[:, self._kv_index])

    def mask_of_left(self, mask: AttentionMask) -> AttentionMask:
        """The mask of the remaining heads, given a mask with a pattern for each head of the original layer."""
        if self._ids is None or mask.allowed is None or mask.num_heads == 1:
            return mask
        return replace(mask, allowed=mask.allowed[:, self._ids])

    def renumber(self, mod: ScoreMod) -> ScoreMod:
        """A score modification that is called with the heads' original numbers, see `ScoreMod.of_heads`."""
        return mod if self._ids is None else mod.of_heads(self._ids)


class HeadGate(nn.Module):
    """head_h ← g_h · head_h + (1 - g_h) · r_h: a factor g_h of 0 ablates the head, on every backend.

    Attributes:
        factors: g, of shape `heads` or `batch heads`; None if all factors are 1.
        replacement: function from the heads' outputs to r, the outputs that replace ablated heads; None for zeros.
    """

    factors: Tensor | None
    replacement: Callable[[Tensor], Tensor] | None

    def __init__(self, num_heads: int, ablated: Sequence[int] = ()) -> None:
        super().__init__()
        factors = torch.ones(num_heads).index_fill(0, torch.tensor([*ablated]), 0.0) if ablated else None
        # Not persistent: the factors follow from the config.
        self.register_buffer("factors", factors, persistent=False)
        self.replacement = None

    def forward(self, heads: HeadOutputs) -> HeadOutputs:
        if self.factors is None:
            return heads
        factors = self.factors.to(heads.dtype).unflatten(-1, (-1, 1, 1))
        gated = heads * factors
        return gated if self.replacement is None else gated + (1 - factors) * self.replacement(heads)


class OutputGate(nn.Module):
    """head_h ← head_h · sigmoid(W x + b)_h, with x the token of the query (Qiu et al. 2025, arXiv 2505.06708).

    Args:
        input_dim: size of x.
        num_heads: number of heads.
        width: number of gates of each head: 1, or the size of its output for a gate of each element.
    """

    def __init__(self, input_dim: int, num_heads: int, width: int = 1) -> None:
        super().__init__()
        self.width = width
        self.proj = nn.Linear(input_dim, num_heads * width)

    def forward(self, heads: HeadOutputs, x: Tokens) -> HeadOutputs:
        gates = torch.sigmoid(self.proj(x)).unflatten(-1, (-1, self.width)).transpose(1, 2)
        return heads * gates.to(heads.dtype)


def without_own_value(
    heads: Float[Tensor, "batch num_heads q_seq v_head_dim"], v: Float[Tensor, "batch num_kv_heads k_seq v_head_dim"]
) -> Float[Tensor, "batch num_heads q_seq v_head_dim"]:
    """Exclusive self-attention, XSA (arXiv 2603.09078): y_i - (y_i · v̂_i) v̂_i with v̂_i = v_i / ‖v_i‖.

    Each head's output loses its part in the direction of the value of the query's own token. The last query is at the
    position of the last key. The first token sees itself alone, and its output is 0 but for rounding, in fp32 at least:
    a norm of the output would amplify more.
    """
    own = v[..., -heads.shape[2] :, :].repeat_interleave(heads.shape[1] // v.shape[1], dim=1)
    wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
    unit = F.normalize(own.to(wide.dtype), dim=-1)
    return (wide - (wide * unit).sum(dim=-1, keepdim=True) * unit).to(heads.dtype)


# Pruning: the smaller layer computes what the layer with these heads ablated computes.


def require_prunable(layer: "tinyformer.nn.attention.BaseAttention") -> None:
    """Raise an error for a layer whose other heads would compute something else after pruning."""
    if isinstance(getattr(layer, "q_norm", None), ProjectionNorm):
        reason = "divides all heads by one root mean square, which pruning would change; heads can be ablated"
        raise ArgumentError("qk_norm", "projection", reason)
    layer.refuse_mixed_values("adds values that pruning does not change; `ablated_heads` sets the output of heads to 0")


def prune_heads(layer: "tinyformer.nn.attention.BaseAttention", heads: Iterable[int]) -> None:
    """Remove heads from a layer in place, with all of their weights (Michel et al. 2019, arXiv 1905.10650).

    A K/V head is removed with the last query head that uses it. If the remaining groups of query heads differ in size,
    the kernel gets a copy of keys and values for each query head; the cache holds no copies. Position tables, which
    layers may share, as in T5, keep their size. A parameter of the layer itself or of its score function has a row for
    each head if its first axis has `num_heads` elements; the heads share all other parameters. `heads` are original
    numbers, as in `head_map.ids`. An `ArgumentError` is raised if a head is not in the layer, or if no head remains.
    """
    require_prunable(layer)
    ids, pruned, num_heads = layer.head_map.ids, set(heads), layer.num_heads
    if not pruned <= set(ids):
        raise ArgumentError("heads", min(pruned - set(ids)), f"must be one of {', '.join(map(str, ids))}")
    left = [index for index, head in enumerate(ids) if head not in pruned]
    if not left:
        reason = "must leave at least one head; to remove the attention itself, set its residual branch to 0"
        raise ArgumentError("heads", sorted(pruned), reason)
    kv_left = layer.head_map.keep(left, layer.o_proj.weight.device)
    _keep(layer.q_proj, 0, left, num_heads)
    _keep(layer.k_proj, 0, kv_left, layer.num_kv_heads)
    _keep(layer.v_proj, 0, kv_left, layer.num_kv_heads)
    for name, causal_sum in layer.sums.items():
        _keep(causal_sum, 0, *((left, num_heads) if name == "q" else (kv_left, layer.num_kv_heads)))
    _keep(layer.o_proj, 1, left, num_heads)
    if layer.output_gate is not None:
        _keep(layer.output_gate.proj, 0, left, num_heads)
    if layer.forget is not None:
        _keep(layer.forget.proj, 0, left, num_heads)
    for module in (layer, layer.score, layer.gaussian, layer.ssmax):
        for name, parameter in module.named_parameters(recurse=False) if module is not None else ():
            if parameter.ndim and len(parameter) == num_heads:  # all heads share other parameters
                setattr(module, name, _like(parameter, parameter[left]))
    if layer.sink is not None:
        layer.sink = layer.sink if len(layer.sink) == len(left) else layer.sink[left]  # a sink of 0 is no parameter
    if layer.head_gate.factors is not None:
        layer.head_gate.factors = layer.head_gate.factors[..., left]
    layer.num_heads, layer.num_kv_heads = len(left), len(kv_left)


def _keep(module: nn.Module, dim: int, indices: Sequence[int], num_heads: int) -> None:
    """Keep only the output features (dim 0) or the input features (dim 1) of the heads at `indices`."""
    for name, parameter in module.named_parameters():
        if parameter.ndim > dim:  # a bias has output features only
            index = torch.tensor(indices, device=parameter.device)
            parts = parameter.unflatten(dim, (num_heads, -1)).index_select(dim, index)
            setattr(module, name, _like(parameter, parts.flatten(dim, dim + 1)))
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape


def _like(old: Tensor, values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.detach().clone(), requires_grad=old.requires_grad)
