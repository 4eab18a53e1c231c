"""The definition of attention, softmax(q kᵀ / √head_dim) v, as written; every other kernel must give its results."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tinyformer.nn.mask import AttentionMask, Grid
from tinyformer.nn.score import Scoring


def attention_weights(
    q: Float[Tensor, "batch num_heads q_seq head_dim"],
    k: Float[Tensor, "batch num_kv_heads k_seq head_dim"],
    mask: AttentionMask,
    scoring: Scoring,
) -> Float[Tensor, "batch num_heads q_seq k_seq"]:
    """Attention weights, softmax(scale · q kᵀ + mask) (Vaswani et al. 2017, arXiv 1706.03762), modified by `scoring`.

    Query head `h` uses K/V head `h // (num_heads / num_kv_heads)` (grouped queries: Ainslie et al. 2023, arXiv
    2305.13245). The softmax is taken in fp32 at least. Rows sum to 1, to less with a sink, or to 0 where the mask
    allows no key.
    """
    scores, hidden = _masked_scores(q, k, mask, scoring)
    return _softmax(scores, hidden, q.shape[2], mask, scoring)


def eager(
    q: Float[Tensor, "batch num_heads q_seq head_dim"],
    k: Float[Tensor, "batch num_kv_heads k_seq head_dim"],
    v: Float[Tensor, "batch num_kv_heads k_seq v_head_dim"],
    mask: AttentionMask,
    scoring: Scoring,
    dropout: float = 0.0,
) -> Float[Tensor, "batch num_heads q_seq v_head_dim"]:
    """Attention with its weights in memory: weights · v, on any device, in any dtype, with any mask and score."""
    weights = attention_weights(q, k, mask, scoring).to(v.dtype)
    if dropout:
        weights = F.dropout(weights, dropout)
    return weighted_values(weights, v, scoring.mix)


def weighted_values(
    weights: Float[Tensor, "batch num_heads q_seq k_seq"],
    v: Float[Tensor, "batch num_kv_heads k_seq v_head_dim"],
    mix: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, "batch num_heads q_seq v_head_dim"]:
    """The product of weights and v, plus the term of a relative position (`mix`, see `Scoring`)."""
    grouped = weights.reshape(v.shape[0], v.shape[1], -1, v.shape[2])
    out = (grouped @ v).view(*weights.shape[:3], v.shape[-1])
    return out if mix is None else out + mix(weights)


class AttentionMaps(NamedTuple):
    """The attention weights of a layer, or of stacked layers, and their logits.

    Attributes:
        weights: rows sum to 1, to less with a sink, or to 0 where the mask allows no key.
        logits: the scores before the softmax, -inf where the mask hides the key.
    """

    weights: Float[Tensor, "*layers batch maps rows k_seq"]
    logits: Float[Tensor, "*layers batch maps rows k_seq"]


def attention_maps(
    q: Float[Tensor, "*layers batch num_heads q_seq head_dim"],
    k: Float[Tensor, "*layers batch num_kv_heads k_seq head_dim"],
    mask: AttentionMask,
    scoring: Scoring,
    rows: Int[Tensor, " rows"] | None = None,
) -> AttentionMaps:
    """The attention weights and logits of all queries or the queries at `rows`, for analysis.

    Layers that share a scoring without `compare` may be stacked in an axis before the batch. `scoring` must
    be the scoring of all queries, even if `rows` selects a few; time and memory grow with the number of `rows`.
    """
    scores, hidden = _masked_scores(q, k, mask, scoring, rows)
    weights = _softmax(scores, hidden, q.shape[-2], mask, scoring, rows)
    return AttentionMaps(weights, scores if hidden is None else scores.masked_fill(hidden, -torch.inf))


def _masked_scores(
    q: Float[Tensor, "*layers batch num_heads q_seq head_dim"],
    k: Float[Tensor, "*layers batch num_kv_heads k_seq head_dim"],
    mask: AttentionMask,
    scoring: Scoring,
    rows: Int[Tensor, " rows"] | None = None,
) -> tuple[Float[Tensor, "*layers batch num_heads rows k_seq"], Bool[Tensor, "#batch #num_heads #rows k_seq"] | None]:
    """The modified scores, with the dtype's minimum at masked keys, and the mask of these keys, if there is one."""
    (*layers, batch, num_heads, q_seq, head_dim), (num_kv_heads, k_seq) = q.shape, k.shape[-3:-1]
    q = q if rows is None else q[..., rows, :]
    if scoring.compare is None:
        # The queries of a group are stacked along the sequence, so that their K/V head is not copied.
        grouped = (q * scoring.scale).reshape(*layers, batch, num_kv_heads, -1, head_dim)
        scores = (grouped @ k.transpose(-2, -1)).view(*layers, batch, num_heads, -1, k_seq)
    else:
        scores = scoring.compare(q, k)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if scoring.modifies:
        scores = scoring.modify(scores, Grid.of(batch, num_heads, q_seq, k_seq, q.device, rows))
    allowed = mask.dense(q_seq, k_seq, q.device, rows)
    if allowed is None:
        return scores, None
    hidden = ~allowed
    # The minimum, not -inf: the softmax of a row of -inf alone would be NaN, and so would its gradient.
    return scores.masked_fill(hidden, torch.finfo(scores.dtype).min), hidden


def _softmax(
    scores: Float[Tensor, "*layers batch num_heads rows k_seq"],
    hidden: Bool[Tensor, "#batch #num_heads #rows k_seq"] | None,
    q_seq: int,
    mask: AttentionMask,
    scoring: Scoring,
    rows: Int[Tensor, " rows"] | None = None,
) -> Float[Tensor, "*layers batch num_heads rows k_seq"]:
    """Attention weights: softmax over keys and sink, 0 in rows without visible keys, changed by `scoring.reweigh`."""
    batch, num_heads, _, k_seq = scores.shape[-4:]
    if scoring.sink is not None:
        sink = scoring.sink.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1)[..., :k_seq]
    if hidden is not None and mask.may_leave_rows_empty(q_seq, k_seq):
        weights = weights.masked_fill(hidden, 0.0)
    if scoring.reweigh is None:
        return weights
    return scoring.reweigh(weights, Grid.of(batch, num_heads, q_seq, k_seq, scores.device, rows))
