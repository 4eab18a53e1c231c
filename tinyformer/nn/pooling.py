"""One vector for a sequence, out of one for each of its tokens."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn


class FirstToken(nn.Module):
    """The vector of the first token, which stands for the whole (Devlin et al. 2018, arXiv 1810.04805: `[CLS]`)."""

    def __init__(self, d_model: int) -> None:
        super().__init__()

    def forward(
        self, x: Float[Tensor, "batch seq d_model"], real: Bool[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch d_model"]:
        return x[:, 0]


class MeanPooling(nn.Module):
    """The mean over the real tokens."""

    def __init__(self, d_model: int) -> None:
        super().__init__()

    def forward(
        self, x: Float[Tensor, "batch seq d_model"], real: Bool[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch d_model"]:
        return torch.where(real.unsqueeze(-1), x, 0).sum(dim=1) / real.sum(dim=1, keepdim=True)


class AttentionPooling(nn.Module):
    """The mean over the real tokens, weighted by additive attention with one query for all texts.

    weights = softmax(u . tanh(W x)), where u is learned (Yang et al. 2016, "Hierarchical Attention Networks for
    Document Classification"; the score is that of Bahdanau et al. 2014, arXiv 1409.0473).

    Args:
        d_model: width of the vectors.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.key_proj = nn.Linear(d_model, d_model)
        self.query = nn.Linear(d_model, 1, bias=False)

    def weights(
        self, x: Float[Tensor, "batch seq d_model"], real: Bool[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch seq"]:
        """How much each token counts."""
        scores = self.query(torch.tanh(self.key_proj(x))).squeeze(-1)
        return scores.masked_fill(~real, -torch.inf).softmax(dim=-1)

    def forward(
        self, x: Float[Tensor, "batch seq d_model"], real: Bool[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch d_model"]:
        # A weight of 0 does not undo padding that is not finite.
        return (self.weights(x, real).unsqueeze(1) @ torch.where(real.unsqueeze(-1), x, 0)).squeeze(1)


POOLINGS: dict[str, Callable[[int], nn.Module]] = {
    "cls": FirstToken,
    "mean": MeanPooling,
    "attention": AttentionPooling,
}
"""By the name that `task.readout.pooling` gives them; made with `d_model`."""
