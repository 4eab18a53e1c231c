"""What is read from the encoder's vectors; a "head" is always an attention head."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.nn.feed_forward import find_activation
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.norm import LayerNorm
from tinyformer.nn.pooling import POOLINGS
from tinyformer.nn.vocabulary import vocabulary_cross_entropy, vocabulary_scores


class TokenReadout(nn.Module):
    """Scores every token of the vocabulary, at every position.

    Args:
        token_embedding: of the encoder.
        tied: whether the output matrix is the embedding itself (Press & Wolf 2017, arXiv 1608.05859).
        bias: whether each token has a number that is added to its score.
    """

    def __init__(self, token_embedding: nn.Embedding, tied: bool = True, bias: bool = False) -> None:
        super().__init__()
        vocab_size, d_model = token_embedding.weight.shape
        self.proj = nn.Linear(d_model, vocab_size, bias)
        if tied:
            self.proj.weight = token_embedding.weight

    def features(self, x: Float[Tensor, "batch seq d_model"]) -> Float[Tensor, "batch seq d_model"]:
        """What the output matrix is applied to: the encoder's vectors."""
        return x

    def forward(
        self, x: Float[Tensor, "batch seq d_model"], mask: AttentionMask | None = None
    ) -> Float[Tensor, "batch seq vocab_size"]:
        return vocabulary_scores(self.features(x), self.proj.weight, self.proj.bias)

    def cross_entropy(
        self, x: Float[Tensor, "batch seq d_model"], targets: Int[Tensor, "batch seq"]
    ) -> Float[Tensor, ""]:
        """See `vocabulary_cross_entropy`."""
        return vocabulary_cross_entropy(self.features(x), self.proj.weight, targets, self.proj.bias)


class MaskedTokenReadout(TokenReadout):
    """Scores every token of the vocabulary as BERT does for hidden ones (Devlin et al. 2019, arXiv 1810.04805).

    E norm(activation(W x + b)) + c: a layer of its own before the output matrix E, which has a bias for each token.

    Args:
        token_embedding: of the encoder.
        tied: see `TokenReadout`.
        norm: makes the norm, given its width.
        activation: a name in `ACTIVATIONS`.
    """

    def __init__(
        self,
        token_embedding: nn.Embedding,
        tied: bool = True,
        norm: Callable[..., nn.Module] = LayerNorm,
        activation: str = "gelu",
    ) -> None:
        super().__init__(token_embedding, tied, bias=True)
        d_model = token_embedding.embedding_dim
        self.dense = nn.Linear(d_model, d_model)
        self.activation = find_activation(activation)
        self.norm = norm(d_model)

    def features(self, x: Float[Tensor, "batch seq d_model"]) -> Float[Tensor, "batch seq d_model"]:
        """norm(activation(W x + b))."""
        return self.norm(self.activation(self.dense(x)))


class ClassReadout(nn.Module):
    """Scores every class, once for a sequence.

    Args:
        token_embedding: of the encoder.
        labels: the names of the classes; none only as long as the data have not been read.
        pooling: how one vector is made of all: a name in `POOLINGS`.
        dropout: probability to drop an element of that vector in training.

    Raises:
        ValueError: there is no such pooling, or less than two classes.
    """

    def __init__(
        self, token_embedding: nn.Embedding, labels: Sequence[str] | None, pooling: str = "mean", dropout: float = 0.0
    ) -> None:
        super().__init__()
        if pooling not in POOLINGS:
            raise ValueError(f"task.readout.pooling={pooling}: choose one of {', '.join(POOLINGS)}.")
        if labels is None or len(labels) < 2:
            raise ValueError(f"task.labels={labels}: there are at least two classes to choose from, [no,yes].")
        self.pooling = POOLINGS[pooling](token_embedding.embedding_dim)
        self.dropout = nn.Dropout(dropout)
        self.proj = nn.Linear(token_embedding.embedding_dim, len(labels))

    def forward(
        self, x: Float[Tensor, "batch seq d_model"], mask: AttentionMask | None = None
    ) -> Float[Tensor, "batch classes"]:
        """Score.

        Args:
            x: the vectors.
            mask: of the batch, whose `lengths` tell text from padding.
        """
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        lengths = None if mask is None else mask.lengths
        real = positions >= 0 if lengths is None else positions < lengths.unsqueeze(-1)
        return self.proj(self.dropout(self.pooling(x, real)))
