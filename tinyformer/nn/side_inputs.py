"""Inputs of a layer other than the residual stream: the token ids, the embedding x₀, and the first layer's values."""

from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.errors import ArgumentError
from tinyformer.nn.layers import Stream

Values: TypeAlias = Float[Tensor, "batch num_kv_heads seq v_head_dim"]
"""The values of new tokens, which a layer's cache does not contain yet."""


class SideInputs(NamedTuple):
    """The tensors that layers read in addition to the residual stream.

    Attributes:
        tokens: the token ids.
        embedding: x₀, the input of the first layer.
        first_values: the values of the first layer, without the values of cached tokens; None in the first layer.
    """

    tokens: Int[Tensor, "batch seq"]
    embedding: Stream
    first_values: Values | None = None


class ValueResidual(nn.Module):
    """The value residual of ResFormer: v ← λ₁ v + λ₂ v₁, with the first layer's values v₁ (arXiv 2410.17897).

    Each layer but the first learns its λ₁ and λ₂ (Zhou et al. 2024).

    Args:
        share: initial value of λ₂; λ₁ starts at 1 - `share`. 0 is the identity.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        if not 0 <= share <= 1:
            raise ArgumentError("value_residual", share, "must be from 0 to 1", {"value_residual": 0.5})
        self.factors = nn.Parameter(torch.tensor([1.0 - share, float(share)]))

    def forward(self, v: Values, first_values: Values) -> Values:
        own, first = self.factors.to(v.dtype)
        return own * v + first * first_values


class ValueEmbedding(nn.Module):
    """Value embeddings, as in modded-nanogpt: v ← v + λ E[token], with a value in E for each token and K/V head.

    The layer learns E and λ, which starts at 0: the identity.
    """

    def __init__(self, vocab_size: int, num_kv_heads: int, v_head_dim: int) -> None:
        super().__init__()
        self.num_kv_heads = num_kv_heads
        self.table = nn.Embedding(vocab_size, num_kv_heads * v_head_dim)
        self.factor = nn.Parameter(torch.zeros(1))

    def forward(self, v: Values, tokens: Int[Tensor, "batch seq"]) -> Values:
        looked_up = self.table(tokens).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
        return v + (self.factor * looked_up).to(v.dtype)
