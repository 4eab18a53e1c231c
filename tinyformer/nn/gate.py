"""Factors on the heads' outputs, between the backend and the output projection."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn


class HeadGate(nn.Module):
    """A factor for each head between the backend and `o_proj`; 0 takes the head away, on every backend.

    Args:
        num_heads: of the layer.
        ablated: the heads whose factor is 0.
    """

    factors: Tensor | None

    def __init__(self, num_heads: int, ablated: Sequence[int] = ()) -> None:
        super().__init__()
        factors = None
        if ablated:
            factors = torch.ones(num_heads)
            factors[list(ablated)] = 0.0
        # It follows from the config, so it is no part of the weights.
        self.register_buffer("factors", factors, persistent=False)

    def forward(
        self, heads: Float[Tensor, "batch num_heads seq head_dim"]
    ) -> Float[Tensor, "batch num_heads seq head_dim"]:
        if self.factors is None:
            return heads
        return heads * self.factors.to(heads.dtype).view(-1, 1, 1)


class OutputGate(nn.Module):
    """head_h ← head_h · sigmoid(W x)_h: each token opens or closes each head (Qiu et al. 2025, arXiv 2505.06708).

    The paper's head-wise gate: one number for each head and token.

    Args:
        d_model: width of the residual stream.
        num_heads: of the layer.
    """

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.proj = nn.Linear(d_model, num_heads)

    def forward(
        self, heads: Float[Tensor, "batch num_heads seq head_dim"], x: Float[Tensor, "batch seq d_model"]
    ) -> Float[Tensor, "batch num_heads seq head_dim"]:
        """Gate the heads by the tokens that asked."""
        return heads * torch.sigmoid(self.proj(x)).transpose(1, 2).unsqueeze(-1).to(heads.dtype)
