"""Gates on the outputs of heads, between attention and the output projection."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tinyformer.nn.heads import KINDS, not_a_head, plain_address


class HeadGate(nn.Module):
    """head_h ← g_h · head_h + (1 - g_h) · r_h: a factor g_h of 0 ablates the head, on every backend.

    Attributes:
        factors: g, of shape `heads` or `batch heads`; None if all factors are 1.
        replacement: computes r, the replacement of an ablated head, from the outputs; None for zero.
    """

    factors: Tensor | None
    replacement: Callable[[Tensor], Tensor] | None

    def __init__(self, num_heads: int, ablated: Sequence[int] = ()) -> None:
        super().__init__()
        factors = torch.ones(num_heads).index_fill(0, torch.tensor([*ablated]), 0.0) if ablated else None
        # Not persistent: the factors follow from the config.
        self.register_buffer("factors", factors, persistent=False)
        self.replacement = None

    def forward(
        self, heads: Float[Tensor, "batch num_heads seq head_dim"]
    ) -> Float[Tensor, "batch num_heads seq head_dim"]:
        if self.factors is None:
            return heads
        factors = self.factors.to(heads.dtype).unflatten(-1, (-1, 1, 1))
        gated = heads * factors
        return gated if self.replacement is None else gated + (1 - factors) * self.replacement(heads)


class OutputGate(nn.Module):
    """head_h ← head_h · sigmoid(W x + b)_h, the head-wise gate of Qiu et al. 2025 (arXiv 2505.06708).

    x is the token that the query is projected from.
    """

    def __init__(self, input_dim: int, num_heads: int) -> None:
        super().__init__()
        self.proj = nn.Linear(input_dim, num_heads)

    def forward(
        self, heads: Float[Tensor, "batch num_heads seq head_dim"], x: Float[Tensor, "batch seq input_dim"]
    ) -> Float[Tensor, "batch num_heads seq head_dim"]:
        return heads * torch.sigmoid(self.proj(x)).transpose(1, 2).unsqueeze(-1).to(heads.dtype)


def ablated_in_layer(
    heads: Sequence[Sequence[int | str]], layer_index: int, num_layers: int, num_heads: int, kind: str | None = None
) -> list[int]:
    """The heads of this layer among `[layer, head]` or, in an encoder–decoder, `[kind, layer, head]` of the model."""
    ablated = []
    for entry in heads:
        *own_kind, layer, head = plain_address(entry) if len(entry) > 1 else (-1, -1)
        if own_kind and own_kind[0] != kind and kind is not None and own_kind[0] in KINDS and len(own_kind) == 1:
            continue  # of another kind, whose layers check it
        is_head = isinstance(layer, int) and isinstance(head, int) and 0 <= layer < num_layers and 0 <= head < num_heads
        is_head = is_head and bool not in (type(layer), type(head))  # True equals 1
        if own_kind != ([] if kind is None else [kind]) or not is_head:
            raise not_a_head("ablated_heads", entry, num_layers, num_heads, kind)
        if layer == layer_index:
            ablated.append(int(head))
    return ablated
