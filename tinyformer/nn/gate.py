"""Factors on the heads' outputs, between the backend and the output projection."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tinyformer.nn.heads import not_a_head


class HeadGate(nn.Module):
    """head_h ← g_h · head_h + (1 - g_h) · r_h before `o_proj`: a factor of 0 takes the head away, on every backend.

    Args:
        num_heads: of the layer.
        ablated: the heads whose factor is 0.

    Attributes:
        factors: g, `heads` or `batch heads`; None where all are 1.
        replacement: makes r, what stands in for a head that is taken away; zero where it is None.
    """

    factors: Tensor | None
    replacement: Callable[[Tensor], Tensor] | None

    def __init__(self, num_heads: int, ablated: Sequence[int] = ()) -> None:
        super().__init__()
        factors = None
        if ablated:
            factors = torch.ones(num_heads)
            factors[list(ablated)] = 0.0
        # It follows from the config, so it is no part of the weights.
        self.register_buffer("factors", factors, persistent=False)
        self.replacement = None

    def forward(
        self, heads: Float[Tensor, "batch num_heads seq head_dim"]
    ) -> Float[Tensor, "batch num_heads seq head_dim"]:
        if self.factors is None:
            return heads
        factors = self.factors.to(heads.dtype).unflatten(-1, (-1, 1, 1))
        kept = heads * factors
        return kept if self.replacement is None else kept + (1 - factors) * self.replacement(heads)


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


def ablated_in_layer(pairs: Sequence[Sequence[int]], layer_index: int, num_layers: int, num_heads: int) -> list[int]:
    """The heads of this layer among the model's ablated heads.

    Raises:
        ArgumentError: a pair is not a head of the model.
    """
    for pair in pairs:
        if len(pair) != 2 or not (0 <= pair[0] < num_layers and 0 <= pair[1] < num_heads):
            raise not_a_head("ablated_heads", pair, num_layers, num_heads)
    return [head for layer, head in pairs if layer == layer_index]
