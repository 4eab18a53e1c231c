"""Pooling: one vector for a sequence from the vectors of its tokens."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn


class FirstToken(nn.Module):
    """The vector of the first token, as BERT's `[CLS]` (Devlin et al. 2019, arXiv 1810.04805)."""

    def __init__(self, d_model: int) -> None:
        super().__init__()

    def forward(
        self, x: Float[Tensor, "batch seq d_model"], is_token: Bool[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch d_model"]:
        return x[:, 0]


class MeanPooling(nn.Module):
    """The mean over the tokens, without padding."""

    def __init__(self, d_model: int) -> None:
        super().__init__()

    def forward(
        self, x: Float[Tensor, "batch seq d_model"], is_token: Bool[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch d_model"]:
        return torch.where(is_token.unsqueeze(-1), x, 0).sum(dim=1) / is_token.sum(dim=1, keepdim=True)


class AttentionPooling(nn.Module):
    """The mean over the tokens, weighted by additive attention with one learned query.

    weights = softmax(u · tanh(W x)), where u is the query (Yang et al. 2016, "Hierarchical Attention Networks for
    Document Classification"; the score is that of Bahdanau et al. 2014, arXiv 1409.0473).

    Args:
        d_model: width of the vectors.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.key_proj = nn.Linear(d_model, d_model)
        self.query = nn.Linear(d_model, 1, bias=False)

    def weights(
        self, x: Float[Tensor, "batch seq d_model"], is_token: Bool[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch seq"]:
        """The attention weight of each token; 0 for padding."""
        scores = self.query(torch.tanh(self.key_proj(x))).squeeze(-1)
        return scores.masked_fill(~is_token, -torch.inf).softmax(dim=-1)

    def forward(
        self, x: Float[Tensor, "batch seq d_model"], is_token: Bool[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch d_model"]:
        # 0 times a vector that is not finite would be NaN.
        return (self.weights(x, is_token).unsqueeze(1) @ torch.where(is_token.unsqueeze(-1), x, 0)).squeeze(1)


POOLINGS: dict[str, Callable[[int], nn.Module]] = {
    "cls": FirstToken,
    "mean": MeanPooling,
    "attention": AttentionPooling,
}
"""Poolings by name; each is called with `d_model`."""
