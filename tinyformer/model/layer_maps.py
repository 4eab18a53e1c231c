"""The attention maps of one layer for one text."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tinyformer.errors import ArgumentError
from tinyformer.measures import head_label, map_names
from tinyformer.nn import AttentionMaps, BaseAttention, DifferentialAttention
from tinyformer.nn.heads import Address


@dataclass(frozen=True, eq=False)
class LayerMaps:
    """The attention maps of a layer for one text."""

    address: Address  # the address of the layer, (3,) or ("cross", 3)
    heads: tuple[int, ...]  # the numbers of its heads; pruned heads are missing, the others keep their numbers
    names: tuple[str, ...]  # the name of each map: "3" for that of head 3, "3a" and "3b" if a head has two softmaxes
    weights: Float[Tensor, "maps queries keys"]  # the attention weights of each map
    logits: Float[Tensor, "maps queries keys"] | None  # before the softmax; None for maps of words
    factor: float | None  # λ of differential attention, the factor of the second softmax; None for other attention
    ablated: frozenset[int]  # the numbers of the heads whose output is replaced
    skip: float = 1.0  # the scale of the residual connection around the attention
    branch: float = 1.0  # the scale of the attention's output

    @classmethod
    def of(cls, layer: BaseAttention, address: Address, maps: AttentionMaps, residual: nn.Module | None) -> "LayerMaps":
        """The maps of a layer for one text, given as (1, maps, queries, keys), and its residual scales."""
        heads = tuple(layer.head_map.ids)
        factor = float(layer.factor()) if isinstance(layer, DifferentialAttention) else None
        ablated = frozenset(head for head, flag in zip(heads, layer.ablated(), strict=True) if flag)
        weights, logits = (part[0].detach().cpu() for part in maps)
        scales = (getattr(residual, name, 1.0) for name in ("skip", "branch"))
        return cls(address, heads, tuple(map(head_label, map_names(layer))), weights, logits, factor, ablated, *scales)

    @property
    def kind(self) -> str:
        return str(self.address[0]) if len(self.address) > 1 else ""

    @property
    def is_signed(self) -> bool:
        return self.factor is not None or bool((self.weights < 0).any())

    @property
    def is_ablated(self) -> list[bool]:
        """Of each map, whether its head is ablated."""
        return [head in self.ablated for head in self.heads for _ in range(len(self.names) // len(self.heads))]

    def of_head(self, head: int | str) -> Float[Tensor, "queries keys"]:
        """The map of a head, or, given a name such as "3a", that of one of its softmaxes.

        In differential attention the map of a head is softmax₁ - λ softmax₂, whose weights multiply the values. They
        can be negative, and each row sums to 1 - λ. Another class with several softmaxes has maps by name only.
        """
        if isinstance(head, str):
            return self.weights[self.names.index(head)]
        per_head = len(self.names) // len(self.heads)
        first = per_head * self.heads.index(head)
        if per_head == 1:
            return self.weights[first]
        if self.factor is None:
            reason = f"has {per_head} maps, which are addressed by their names"
            works = {"head": (*self.address, self.names[first])}
            raise ArgumentError("head", (*self.address, head), reason, works)
        return self.weights[first] - self.factor * self.weights[first + 1]

    def active_heads(self) -> Float[Tensor, "heads queries keys"]:
        """The map of each head that is not ablated, see `of_head`."""
        weights = self.weights[~torch.tensor(self.is_ablated)]
        return weights if self.factor is None else weights[0::2] - self.factor * weights[1::2]
