"""Readouts: the output layers, from the encoder's vectors to logits.

They are not called heads, since a head is always an attention head here.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.errors import ArgumentError, require_choice
from tinyformer.nn.dropout import make_dropout
from tinyformer.nn.feed_forward import find_activation
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.norm import LayerNorm
from tinyformer.nn.pooling import POOLINGS
from tinyformer.nn.vocabulary import vocabulary_cross_entropy, vocabulary_scores


class TokenReadout(nn.Module):
    """Logits of every token of the vocabulary, at every position.

    Args:
        token_embedding: the encoder's token embedding.
        tied: whether the output matrix is the embedding matrix (Press & Wolf 2017, arXiv 1608.05859).
        bias: whether the logits have a bias.
        scaled: whether the vectors are divided by √d_model first, as in T5 (Raffel et al. 2019, arXiv 1910.10683).
    """

    def __init__(
        self, token_embedding: nn.Embedding, tied: bool = True, bias: bool = False, scaled: bool = False
    ) -> None:
        super().__init__()
        vocab_size, d_model = token_embedding.weight.shape
        self.scale = d_model**-0.5 if scaled else None
        self.proj = nn.Linear(d_model, vocab_size, bias)
        if tied:
            self.proj.weight = token_embedding.weight

    def features(self, x: Float[Tensor, "batch seq d_model"]) -> Float[Tensor, "batch seq d_model"]:
        """The vectors that the output matrix is applied to: the encoder's own, or scaled."""
        return x if self.scale is None else x * self.scale

    def forward(
        self, x: Float[Tensor, "batch seq d_model"], mask: AttentionMask | None = None
    ) -> Float[Tensor, "batch seq vocab_size"]:
        return vocabulary_scores(self.features(x), self.proj.weight, self.proj.bias)

    def cross_entropy(
        self, x: Float[Tensor, "batch seq d_model"], targets: Int[Tensor, "batch seq"], label_smoothing: float = 0.0
    ) -> Float[Tensor, ""]:
        """The mean cross-entropy of the logits in nats, see `vocabulary_cross_entropy`."""
        features, proj = self.features(x), self.proj
        return vocabulary_cross_entropy(features, proj.weight, targets, proj.bias, label_smoothing=label_smoothing)


class MaskedTokenReadout(TokenReadout):
    """BERT's output layer for masked tokens (Devlin et al. 2019, arXiv 1810.04805).

    logits = E norm(activation(W x + b)) + c, where E is the output matrix.

    Args:
        token_embedding: the encoder's token embedding.
        tied: see `TokenReadout`.
        norm: factory of the norm, called with `d_model`.
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
    """Logits of every class, for a whole sequence.

    Args:
        token_embedding: the encoder's token embedding.
        labels: the names of the classes.
        pooling: how the vectors of a sequence become one: a name in `POOLINGS`.
        dropout: probability of zeroing an element of the pooled vector in training.

    Raises:
        ArgumentError: there is no such pooling, or there are fewer than two classes.
    """

    def __init__(
        self, token_embedding: nn.Embedding, labels: Sequence[str] | None, pooling: str = "mean", dropout: float = 0.0
    ) -> None:
        super().__init__()
        require_choice("pooling", pooling, POOLINGS)
        if labels is None or len(labels) < 2:
            raise ArgumentError("labels", labels, "must name at least two classes", {"labels": ["no", "yes"]})
        self.pooling = POOLINGS[pooling](token_embedding.embedding_dim)
        self.dropout = make_dropout(dropout)
        self.proj = nn.Linear(token_embedding.embedding_dim, len(labels))

    def forward(
        self, x: Float[Tensor, "batch seq d_model"], mask: AttentionMask | None = None
    ) -> Float[Tensor, "batch classes"]:
        """The logits of the classes.

        Args:
            x: the encoder's vectors.
            mask: the attention mask of the batch, whose `lengths` separate tokens from padding.
        """
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        lengths = None if mask is None else mask.lengths
        is_token = positions >= 0 if lengths is None else positions < lengths.unsqueeze(-1)
        return self.proj(self.dropout(self.pooling(x, is_token)))


class SpanReadout(nn.Module):
    """BERT's output layer for SQuAD (Devlin et al. 2019, arXiv 1810.04805).

    Two scores of every token: as the first and as the last token of the answer.

    Args:
        token_embedding: the encoder's token embedding.
        dropout: probability of zeroing an element of the encoder's vectors in training.
    """

    def __init__(self, token_embedding: nn.Embedding, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = make_dropout(dropout)
        self.proj = nn.Linear(token_embedding.embedding_dim, 2)

    def forward(
        self, x: Float[Tensor, "batch seq d_model"], mask: AttentionMask | None = None
    ) -> Float[Tensor, "batch seq 2"]:
        return self.proj(self.dropout(x))
