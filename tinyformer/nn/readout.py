"""What is read from the encoder's vectors; a "head" is always an attention head."""

from jaxtyping import Float
from torch import Tensor, nn


class TokenReadout(nn.Module):
    """Scores every token of the vocabulary, at every position.

    Args:
        token_embedding: of the encoder.
        tied: whether the output matrix is the embedding itself (Press & Wolf 2017, arXiv 1608.05859).
    """

    def __init__(self, token_embedding: nn.Embedding, tied: bool = True) -> None:
        super().__init__()
        vocab_size, d_model = token_embedding.weight.shape
        self.proj = nn.Linear(d_model, vocab_size, bias=False)
        if tied:
            self.proj.weight = token_embedding.weight

    def forward(self, x: Float[Tensor, "batch seq d_model"]) -> Float[Tensor, "batch seq vocab_size"]:
        return self.proj(x)
