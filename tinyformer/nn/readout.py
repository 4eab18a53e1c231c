"""Readouts: the output layers, from the encoder's vectors to logits, and the cross-entropy over a vocabulary.

They are not called heads, since a head is always an attention head here.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tinyformer.errors import ArgumentError, require_choice
from tinyformer.nn.layers import LayerNorm, Stream, find_activation, make_dropout
from tinyformer.nn.mask import AttentionMask

IGNORED = -100
"""The target id that the loss ignores, as `ignore_index` of PyTorch's cross-entropy."""


CPU_LOGITS = 2**24
"""Number of logits in memory at a time on a CPU, 64 MB in fp32; larger chunks are slower."""

GPU_FRACTION = 1 / 4
"""The fraction of a GPU's memory for logits and their gradients."""

BYTES_PER_LOGIT = 16
"""The bytes of a logit, its gradient and copies of both in fp32. Compiled code makes no copies."""


def vocabulary_scores(
    x: Float[Tensor, "*batch d_model"],
    weight: Float[Tensor, "vocab_size d_model"],
    bias: Float[Tensor, " vocab_size"] | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "*batch vocab_size"]:
    """The logits x Wᵀ + b, or c · tanh((x Wᵀ + b) / c) with a softcap c."""
    scores = padded_scores(x, weight, bias, 64 if x.is_cuda else 1, softcap)
    return scores if scores.shape[-1] == len(weight) else scores[..., : len(weight)]


def padded_scores(
    x: Float[Tensor, "*batch d_model"],
    weight: Float[Tensor, "vocab_size d_model"],
    bias: Float[Tensor, " vocab_size"] | None = None,
    multiple: int = 64,
    softcap: float | None = None,
) -> Float[Tensor, "*batch width"]:
    """The `vocabulary_scores`, and columns of zeros up to a multiple of `multiple` (GPT-2's 50,257 become 50,304).

    Tensor cores are faster where 64 divides the sizes of a product; CPUs gain nothing from that.
    """
    padding = -len(weight) % multiple
    if padding:
        weight = F.pad(weight, (0, 0, 0, padding))
        bias = None if bias is None else F.pad(bias, (0, padding))
    scores = F.linear(x, weight, bias)
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def vocabulary_cross_entropy(
    x: Float[Tensor, "*batch d_model"],
    weight: Float[Tensor, "vocab_size d_model"],
    targets: Int[Tensor, "*batch"],
    bias: Float[Tensor, " vocab_size"] | None = None,
    max_logits: int | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> Float[Tensor, ""]:
    """Mean of -log softmax(`vocabulary_scores`)[target] over targets other than `IGNORED`, in nats; 0 without any.

    At most `max_logits` logits are in memory at a time; the default is `CPU_LOGITS`, or on a GPU what `GPU_FRACTION`
    allows. If there are more logits, the logits of the first rows are kept for the backward pass; the others are
    computed in chunks, and recomputed in the backward pass. `label_smoothing` is the share of the target probability
    that is spread evenly over the vocabulary (Szegedy et al. 2015, arXiv 1512.00567).
    """
    x, targets = x.flatten(0, -2), targets.flatten()
    scored = targets != IGNORED
    # The number of scored rows would take a synchronisation on a GPU, and be a dynamic shape in a compiled graph.
    if not x.is_cuda and not torch.compiler.is_compiling() and not scored.all():
        x, targets = x[scored], targets[scored]
    summed_nats = partial(_summed_nats, bias=bias, label_smoothing=label_smoothing, softcap=softcap)
    most = max((max_logits or _most_logits(x.device, torch.compiler.is_compiling())) // len(weight), 2)
    if len(x) <= most:
        nats = summed_nats(x, weight, targets)
    else:
        recomputed_nats = partial(checkpoint, summed_nats, use_reentrant=False, preserve_rng_state=False)
        chunk_size = min(len(x) - most, most // 2)
        sizes = [most - chunk_size, len(x) - most + chunk_size]  # rows whose logits are kept, and all other rows
        (kept, others), (kept_targets, other_targets) = x.split(sizes), targets.split(sizes)
        sums = [summed_nats(kept, weight, kept_targets)]
        for chunk, target in zip(others.split(chunk_size), other_targets.split(chunk_size), strict=True):
            sums.append(recomputed_nats(chunk, weight, target))
        nats = torch.stack(sums).sum()
    return nats / scored.sum().clamp(min=1)


@torch.compiler.assume_constant_result
def _most_logits(device: torch.device, is_compiled: bool) -> int:
    """The largest number of logits to hold in a device's memory at a time."""
    if device.type != "cuda":
        return CPU_LOGITS
    memory = GPU_FRACTION * torch.cuda.get_device_properties(device).total_memory
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else torch.float32
    return int(memory / (2 * dtype.itemsize if is_compiled else BYTES_PER_LOGIT))


def _summed_nats(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, label_smoothing: float, softcap: float | None
) -> Tensor:
    if torch.compiler.is_compiling() and not label_smoothing:
        scores = padded_scores(x, weight, bias, 64 if x.is_cuda else 1, softcap)
        nats, _ = TargetNats.apply(scores, targets, len(weight))
        return nats.sum()
    scores = vocabulary_scores(x, weight, bias, softcap)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return F.cross_entropy(scores, targets, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing)


class TargetNats(torch.autograd.Function):
    """-log softmax(scores)[target] of each row in nats, 0 where the target is `IGNORED`, and each row's log-sum-exp.

    The gradient, softmax(scores) - one-hot(target), is written out: if compiled, it takes one pass over the scores,
    in their dtype. The gradient of `F.cross_entropy` takes three passes on a GPU, one of them to sum rows that are zero
    except at the target. Without compilation, each operation here takes a separate pass.
    """

    @staticmethod
    def forward(
        scores: Float[Tensor, "rows width"], targets: Int[Tensor, " rows"], vocab_size: int
    ) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
        wide = _unpadded(scores, vocab_size)
        log_sums = wide.logsumexp(dim=-1)
        of_targets = wide.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return torch.where(targets == IGNORED, 0.0, log_sums - of_targets), log_sums

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: tuple[Tensor, Tensor]) -> None:
        scores, targets, ctx.vocab_size = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(scores, targets, output[1])

    @staticmethod
    def backward(ctx: Any, pull: Tensor, _: Tensor | None) -> tuple[Tensor, None, None]:
        scores, targets, log_sums = ctx.saved_tensors
        pull = torch.where(targets == IGNORED, 0.0, pull).unsqueeze(-1)
        probabilities = (_unpadded(scores, ctx.vocab_size) - log_sums.unsqueeze(-1)).exp()
        is_target = torch.arange(scores.shape[-1], device=scores.device) == targets.unsqueeze(-1)
        return ((probabilities - is_target.to(pull.dtype)) * pull).to(scores.dtype), None, None


def _unpadded(scores: Float[Tensor, "rows width"], vocab_size: int) -> Float[Tensor, "rows width"]:
    """The scores in fp32 at least, with -inf in the columns beyond the vocabulary."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if scores.shape[-1] == vocab_size:
        return scores
    return scores.masked_fill(torch.arange(scores.shape[-1], device=scores.device) >= vocab_size, -torch.inf)


class TokenReadout(nn.Module):
    """Logits of every token of the vocabulary, at every position.

    Args:
        tied: whether the output matrix is the embedding matrix (Press & Wolf 2017, arXiv 1608.05859).
        scaled: whether the vectors are divided by √d_model first, as in T5 (Raffel et al. 2019, arXiv 1910.10683).
        softcap: bound c on the logits' absolute values, c · tanh(logit / c) (Gemma 2, Riviere et al. 2024, arXiv
            2408.00118); None for no bound.
    """

    def __init__(
        self,
        token_embedding: nn.Embedding,
        tied: bool = True,
        bias: bool = False,
        scaled: bool = False,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        if softcap is not None and softcap <= 0:
            raise ArgumentError("softcap", softcap, "must be above 0", {"softcap": 30.0})
        self.softcap = softcap
        vocab_size, d_model = token_embedding.weight.shape
        self.scale = d_model**-0.5 if scaled else None
        self.proj = nn.Linear(d_model, vocab_size, bias)
        if tied:
            self.proj.weight = token_embedding.weight

    def features(self, x: Stream) -> Stream:
        """The vectors that the output matrix is applied to: `x`, divided by √d_model if `scaled`."""
        return x if self.scale is None else x * self.scale

    def forward(self, x: Stream, mask: AttentionMask | None = None) -> Float[Tensor, "batch seq vocab_size"]:
        return vocabulary_scores(self.features(x), self.proj.weight, self.proj.bias, self.softcap)

    def cross_entropy(
        self, x: Stream, targets: Int[Tensor, "batch seq"], label_smoothing: float = 0.0
    ) -> Float[Tensor, ""]:
        """The mean cross-entropy of the logits in nats, see `vocabulary_cross_entropy`."""
        options: dict[str, Any] = {"label_smoothing": label_smoothing, "softcap": self.softcap}
        return vocabulary_cross_entropy(self.features(x), self.proj.weight, targets, self.proj.bias, **options)


class MaskedTokenReadout(TokenReadout):
    """BERT's output layer for masked tokens (Devlin et al. 2019, arXiv 1810.04805).

    logits = E norm(activation(W x + b)) + c, where E is the output matrix.

    Args:
        norm: factory of the norm, called with `d_model`.
        activation: a name in `ACTIVATIONS`.
        dense_bias: whether the dense layer has the bias b; ModernBERT's has none.
    """

    def __init__(
        self,
        token_embedding: nn.Embedding,
        tied: bool = True,
        norm: Callable[..., nn.Module] = LayerNorm,
        activation: str = "gelu",
        softcap: float | None = None,
        dense_bias: bool = True,
    ) -> None:
        super().__init__(token_embedding, tied, bias=True, softcap=softcap)
        d_model = token_embedding.embedding_dim
        self.dense = nn.Linear(d_model, d_model, dense_bias)
        self.activation = find_activation(activation)
        self.norm = norm(d_model)

    def features(self, x: Stream) -> Stream:
        """norm(activation(W x + b))."""
        return self.norm(self.activation(self.dense(x)))


def first_token(x: Stream, is_token: Tensor) -> Float[Tensor, "batch d_model"]:
    """The vector of the first token, like BERT's `[CLS]` (Devlin et al. 2019, arXiv 1810.04805)."""
    return x[:, 0]


def mean_of_tokens(x: Stream, is_token: Bool[Tensor, "batch seq"]) -> Float[Tensor, "batch d_model"]:
    """The mean over the tokens, without padding."""
    return torch.where(is_token.unsqueeze(-1), x, 0).sum(dim=1) / is_token.sum(dim=1, keepdim=True)


class AttentionPooling(nn.Module):
    """The mean over the tokens, weighted by additive attention with one learned query.

    weights = softmax(u · tanh(W x)), where u is the query (Yang et al. 2016, "Hierarchical Attention Networks for
    Document Classification"; the score is from Bahdanau et al. 2014, arXiv 1409.0473).
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
"""Factories of functions that pool the vectors of a sequence to one vector, by name; called with `d_model`."""


class ClassReadout(nn.Module):
    """Logits of every class, for a whole sequence.

    Args:
        labels: the names of the classes.
        pooling: a name in `POOLINGS`.
        dropout: dropout probability of the pooled vector.
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

    Every token gets two scores: as the first and as the last token of the answer.
    """

    def __init__(self, token_embedding: nn.Embedding, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = make_dropout(dropout)
        self.proj = nn.Linear(token_embedding.embedding_dim, 2)

    def forward(self, x: Stream, mask: AttentionMask | None = None) -> Float[Tensor, "batch seq 2"]:
        return self.proj(self.dropout(x))


class StateReadout(nn.Module):
    """The readout of an encoder without a prediction head: its output is the encoder's final states, unchanged."""

    def __init__(self, token_embedding: nn.Embedding) -> None:
        super().__init__()

    def forward(self, x: Stream, mask: AttentionMask | None = None) -> Stream:
        return x
