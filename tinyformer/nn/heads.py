"""The heads of a layer: their size, their numbers, and the K/V head that each reads."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tinyformer.errors import ArgumentError
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.score import ScoreMod


def split_heads(
    x: Float[Tensor, "batch seq heads_times_dim"], head_dim: int
) -> Float[Tensor, "batch heads seq {head_dim}"]:
    """One vector for each head out of the concatenated vectors of all heads."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


KINDS = ("encoder", "decoder", "cross")
"""The kinds of attention in an encoder–decoder."""


def not_a_head(
    argument: str, head: Sequence[int | str], num_layers: int, num_heads: int, kind: str | None = None
) -> ArgumentError:
    """The error for an argument that holds what is not the address of a head, which begins with the kind if any."""
    if kind is None:
        reason, last = "must hold [layer, head] pairs of a model with", []
    else:
        reason, last = f"must hold [kind, layer, head] with a kind of {', '.join(KINDS)}; {kind} has", [kind]
    reason = f"{reason} {num_layers} layers of {num_heads} heads"
    return ArgumentError(argument, [list(head)], reason, {argument: [[*last, num_layers - 1, num_heads - 1]]})


Address: TypeAlias = tuple[str | int, ...]
"""The address of an attention layer: (3,), or ("cross", 3) where there are several kinds of attention."""


def plain_address(address: Iterable[Any]) -> tuple[Any, ...]:
    """An address with Python's integers in place of those of NumPy or torch, such as the result of an `argmax`."""

    def is_integer(part: Any) -> bool:
        return hasattr(part, "__index__") and not isinstance(part, bool)

    return tuple(operator.index(part) if is_integer(part) else part for part in address)


def layer_title(address: Address) -> str:
    """An address in words: "layer 3", or "cross layer 3"."""
    *kind, index = map(str, address)
    return " ".join([*kind, "layer", index])


class HeadMap(nn.Module):
    """The heads of the original layer that are left, and the K/V head that each of them reads.

    Attributes:
        ids: the number of each head that is left; heads keep their numbers when others are pruned.
        kv_heads: the K/V head that each head reads, as an index into those that are left.
        pruned: the numbers of the pruned heads.
    """

    _ids: Tensor | None
    _kv_index: Tensor | None

    def __init__(self, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.ids = list(range(num_heads))
        self.pruned: list[int] = []
        self.kv_heads = [head // (num_heads // num_kv_heads) for head in self.ids]
        # On the layer's device, for the forward pass; None where nothing has to be looked up.
        self.register_buffer("_ids", None, persistent=False)
        self.register_buffer("_kv_index", None, persistent=False)

    def keep(self, indices: Sequence[int], device: torch.device) -> list[int]:
        """Drop all heads but those at some indices; returns the indices of the K/V heads that these read."""
        kv_left = sorted({self.kv_heads[index] for index in indices})
        self.pruned = sorted({*self.pruned, *self.ids} - {self.ids[index] for index in indices})
        self.ids = [self.ids[index] for index in indices]
        self.kv_heads = [kv_left.index(self.kv_heads[index]) for index in indices]
        self._ids = torch.tensor(self.ids, device=device) if self.pruned else None
        evenly = [index // (len(indices) // len(kv_left)) for index in range(len(indices))]
        self._kv_index = None if self.kv_heads == evenly else torch.tensor(self.kv_heads, device=device)
        return kv_left

    def expand_kv(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as kernels take them: one copy for each query head if groups are of unequal size."""
        return (k, v) if self._kv_index is None else (k[:, self._kv_index], v[:, self._kv_index])

    def mask_of_left(self, mask: AttentionMask) -> AttentionMask:
        """The mask for the heads that are left, given one with a pattern for each head of the original layer."""
        if self._ids is None or mask.num_heads == 1:
            return mask
        assert mask.allowed is not None
        return replace(mask, allowed=mask.allowed[:, self._ids])

    def renumber(self, mod: ScoreMod) -> ScoreMod:
        """A score modification that receives the original head numbers, see `ScoreMod.of_heads`."""
        return mod if self._ids is None else mod.of_heads(self._ids)
