"""Readouts: the output layers, from the encoder's vectors to logits.

They are not called heads, since a head is always an attention head here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tinyformer.errors import ArgumentError, require_choice
from tinyformer.nn.feed_forward import find_activation
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.norm import LayerNorm
from tinyformer.nn.residual import Stream, make_dropout
from tinyformer.nn.vocabulary import vocabulary_cross_entropy, vocabulary_scores


class TokenReadout(nn.Module):
    """Logits of every token of the vocabulary, at every position.

    Args:
        tied: whether the output matrix is the embedding matrix (Press & Wolf 2017, arXiv 1608.05859).
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

    def features(self, x: Stream) -> Stream:
        """The vectors that the output matrix is applied to: the encoder's own, or scaled."""
        return x if self.scale is None else x * self.scale

    def forward(self, x: Stream, mask: AttentionMask | None = None) -> Float[Tensor, "batch seq vocab_size"]:
        return vocabulary_scores(self.features(x), self.proj.weight, self.proj.bias)

    def cross_entropy(
        self, x: Stream, targets: Int[Tensor, "batch seq"], label_smoothing: float = 0.0
    ) -> Float[Tensor, ""]:
        """The mean cross-entropy of the logits in nats, see `vocabulary_cross_entropy`."""
        features, proj = self.features(x), self.proj
        return vocabulary_cross_entropy(features, proj.weight, targets, proj.bias, label_smoothing=label_smoothing)


class MaskedTokenReadout(TokenReadout):
    """BERT's output layer for masked tokens (Devlin et al. 2019, arXiv 1810.04805).

    logits = E norm(activation(W x + b)) + c, where E is the output matrix.

    Args:
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

    def features(self, x: Stream) -> Stream:
        """norm(activation(W x + b))."""
        return self.norm(self.activation(self.dense(x)))


def first_token(x: Stream, is_token: Tensor) -> Float[Tensor, "batch d_model"]:
    """The vector of the first token, as BERT's `[CLS]` (Devlin et al. 2019, arXiv 1810.04805)."""
    return x[:, 0]


def mean_of_tokens(x: Stream, is_token: Bool[Tensor, "batch seq"]) -> Float[Tensor, "batch d_model"]:
    """The mean over the tokens, without padding."""
    return torch.where(is_token.unsqueeze(-1), x, 0).sum(dim=1) / is_token.sum(dim=1, keepdim=True)


class AttentionPooling(nn.Module):
    """The mean over the tokens, weighted by additive attention with one learned query.

    weights = softmax(u · tanh(W x)), where u is the query (Yang et al. 2016, "Hierarchical Attention Networks for
    Document Classification"; the score is that of Bahdanau et al. 2014, arXiv 1409.0473).
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.key_proj = nn.Linear(d_model, d_model)
        self.query = nn.Linear(d_model, 1, bias=False)

    def forward(self, x: Stream, is_token: Bool[Tensor, "batch seq"]) -> Float[Tensor, "batch d_model"]:
        scores = self.query(torch.tanh(self.key_proj(x))).squeeze(-1)
        weights = scores.masked_fill(~is_token, -torch.inf).softmax(dim=-1)
        # 0 times a vector that is not finite would be NaN.
        return (weights.unsqueeze(1) @ torch.where(is_token.unsqueeze(-1), x, 0)).squeeze(1)


POOLINGS: dict[str, Callable[[int], Callable[[Tensor, Tensor], Tensor]]] = {
    "cls": lambda d_model: first_token,
    "mean": lambda d_model: mean_of_tokens,
    "attention": AttentionPooling,
}
"""How the vectors of a sequence become one, by name; each is called with `d_model`."""


class ClassReadout(nn.Module):
    """Logits of every class, for a whole sequence.

    Args:
        labels: the names of the classes.
        pooling: a name in `POOLINGS`.
        dropout: of the pooled vector.
    """

    def __init__(
        self, token_embedding: nn.Embedding, labels: Sequence[Any] | None, pooling: str = "mean", dropout: float = 0.0
    ) -> None:
        super().__init__()
        require_choice("pooling", pooling, POOLINGS)
        if labels is None or len(labels) < 2:
            raise ArgumentError("labels", labels, "must name at least two classes", {"labels": ["no", "yes"]})
        self.pooling = POOLINGS[pooling](token_embedding.embedding_dim)
        self.dropout = make_dropout(dropout)
        self.proj = nn.Linear(token_embedding.embedding_dim, len(labels))

    def forward(self, x: Stream, mask: AttentionMask | None = None) -> Float[Tensor, "batch classes"]:
        """The logits of the classes; the `lengths` of the mask separate tokens from padding."""
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        lengths = None if mask is None else mask.lengths
        is_token = positions >= 0 if lengths is None else positions < lengths.unsqueeze(-1)
        return self.proj(self.dropout(self.pooling(x, is_token)))


class SpanReadout(nn.Module):
    """BERT's output layer for SQuAD (Devlin et al. 2019, arXiv 1810.04805).

    Two scores of every token: as the first and as the last token of the answer.
    """

    def __init__(self, token_embedding: nn.Embedding, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = make_dropout(dropout)
        self.proj = nn.Linear(token_embedding.embedding_dim, 2)

    def forward(self, x: Stream, mask: AttentionMask | None = None) -> Float[Tensor, "batch seq 2"]:
        return self.proj(self.dropout(x))
