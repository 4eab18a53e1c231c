"""Attention weights from queries and keys: the definition, which kernels agree with and which people look at."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tinyformer.nn.mask import AttentionMask, Grid
from tinyformer.nn.score import Scoring


class AttentionMaps(NamedTuple):
    """What the softmaxes of a layer make of queries and keys.

    Args:
        weights: rows sum to 1, to less beside a sink, or to 0 where the mask allows no key.
        logits: the scores that the weights are the softmax of, -inf where the mask hides the key.
    """

    weights: Float[Tensor, "batch maps rows k_seq"]
    logits: Float[Tensor, "batch maps rows k_seq"]


def attention_weights(
    q: Float[Tensor, "batch num_heads q_seq head_dim"],
    k: Float[Tensor, "batch num_kv_heads k_seq head_dim"],
    mask: AttentionMask,
    scoring: Scoring,
) -> Float[Tensor, "batch num_heads q_seq k_seq"]:
    """Attention weights (Vaswani et al. 2017, arXiv 1706.03762): softmax(scale q kᵀ + mask), and what `Scoring` adds.

    Query head `h` reads K/V head `h // (num_heads / num_kv_heads)` (grouped queries: Ainslie et al. 2023, arXiv
    2305.13245). The softmax is taken in fp32 at least. Rows sum to 1, to less beside a sink, or to 0 where the mask
    allows no key.
    """
    scores, allowed = _scores(q, k, mask, scoring)
    return _softmax(scores, allowed, q.shape[2], mask, scoring)


def attention_maps(
    q: Float[Tensor, "batch num_heads q_seq head_dim"],
    k: Float[Tensor, "batch num_kv_heads k_seq head_dim"],
    mask: AttentionMask,
    scoring: Scoring,
    rows: Int[Tensor, " rows"] | None = None,
) -> AttentionMaps:
    """The attention weights of some queries, to be looked at, beside their logits.

    Args:
        q: queries.
        k: keys.
        mask: who may attend to whom.
        scoring: made for all of the queries.
        rows: which of the queries; all unless given. Time and memory grow with their number.
    """
    scores, allowed = _scores(q, k, mask, scoring, rows)
    weights = _softmax(scores, allowed, q.shape[2], mask, scoring, rows)
    return AttentionMaps(weights, scores if allowed is None else scores.masked_fill(~allowed, -torch.inf))


def _scores(
    q: Float[Tensor, "batch num_heads q_seq head_dim"],
    k: Float[Tensor, "batch num_kv_heads k_seq head_dim"],
    mask: AttentionMask,
    scoring: Scoring,
    rows: Int[Tensor, " rows"] | None = None,
) -> tuple[Float[Tensor, "batch num_heads rows k_seq"], Bool[Tensor, "#batch 1 #rows k_seq"] | None]:
    """The scores after all changes, the smallest number where the mask hides the key; and what it allows."""
    (batch, num_heads, q_seq, head_dim), (num_kv_heads, k_seq) = q.shape, k.shape[1:3]
    chosen = q if rows is None else q[:, :, rows]
    if scoring.compare is None:
        # The queries of a group stand one below the other, so that its one key head serves them without being copied.
        grouped = (chosen * scoring.scale).reshape(batch, num_kv_heads, -1, head_dim)
        scores = (grouped @ k.transpose(-2, -1)).view(batch, num_heads, -1, k_seq)
    else:
        scores = scoring.compare(chosen, k)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if scoring.mods:
        scores = scoring.modify(scores, Grid.of(batch, num_heads, q_seq, k_seq, q.device, rows))
    allowed = mask.dense(q_seq, k_seq, q.device, rows)
    if allowed is not None:
        # The smallest number, not -inf: a row of -inf alone would be NaN, and so would its gradient.
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    return scores, allowed


def _softmax(
    scores: Float[Tensor, "batch num_heads rows k_seq"],
    allowed: Bool[Tensor, "#batch 1 #rows k_seq"] | None,
    q_seq: int,
    mask: AttentionMask,
    scoring: Scoring,
    rows: Int[Tensor, " rows"] | None = None,
) -> Float[Tensor, "batch num_heads rows k_seq"]:
    batch, num_heads, num_rows, k_seq = scores.shape
    if scoring.sink is not None:
        sink = scoring.sink.to(scores.dtype).view(1, -1, 1, 1).expand(batch, -1, num_rows, 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1)[..., :k_seq]
    if allowed is not None and mask.may_leave_rows_empty(q_seq, k_seq):
        weights = weights.masked_fill(~allowed, 0.0)
    if scoring.reweigh is None:
        return weights
    return scoring.reweigh(weights, Grid.of(batch, num_heads, q_seq, k_seq, scores.device, rows))
