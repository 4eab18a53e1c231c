"""Shapes of attention maps (Kovaleva et al. 2019, arXiv 1908.08593, section 4.1): one column, or blocks.

A measure is a mean over the batch, or nan if it is not defined for any sequence. With a sink, rows sum to less than 1.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

MIN_BLOCK = 4
"""The smallest number of tokens in a block."""

MAX_BOUNDARIES = 32
"""The largest number of boundaries that are tried."""


def vertical(
    weights: Float[Tensor, "*layers batch heads rows k_seq"], left_out: int = 0
) -> Float[Tensor, "*layers heads"]:
    """max_k mean_q w_qk: share of attention on the one key that receives most.

    In BERT such keys are delimiters, which appear as vertical lines in the map. The key with the index `left_out` does
    not count: 0, where sinks form, or -1, the end of a source.
    """
    received = weights.mean(dim=-2)
    others = received[..., 1:] if left_out == 0 else received[..., :-1]
    if others.shape[-1] == 0:
        return torch.full_like(received[..., 0].mean(dim=-2), math.nan)
    return others.amax(dim=-1).mean(dim=-2)


def block(
    weights: Float[Tensor, "*layers batch heads rows k_seq"],
    logits: Float[Tensor, "*layers batch heads rows k_seq"],
    q_idx: Int[Tensor, " rows"],
) -> Float[Tensor, "*layers heads"]:
    """mean_q Σ_k min(w_qk, b_qk): overlap with a map of two blocks; 1 if attention is even within each block.

    The overlap is 1 minus the total variation distance between w and b, where b is even attention on the visible keys
    on the query's side of a boundary. The boundary is the one that the least attention crosses, out of at most
    `MAX_BOUNDARIES` with at least a quarter of the sequence, and `MIN_BLOCK` tokens, on each side. Only queries count
    that see keys on both sides, so that a mask alone makes no blocks.
    """
    k_seq = weights.shape[-1]
    least = max(k_seq // 4, MIN_BLOCK)
    if k_seq < 2 * least:
        return torch.full_like(weights[..., 0, 0].mean(dim=-2), math.nan)
    step = -(-(k_seq - 2 * least + 1) // MAX_BOUNDARIES)
    boundaries = torch.arange(least, k_seq - least + 1, step, device=weights.device)
    queries, sums = q_idx.unsqueeze(-1), weights.cumsum(dim=-1)
    visible = (logits[..., :1, :, :] > -torch.inf).float().cumsum(dim=-1)  # the mask is the same for all heads
    sees_both = _across(visible, queries, boundaries) > 0
    crossing = _mean_where(_across(sums, queries, boundaries), sees_both)
    boundary = boundaries[crossing.nan_to_num(torch.inf).argmin(dim=-1)][..., None, None]
    num_across = _across(visible, queries, boundary)
    even = 1 / (visible[..., -1:] - num_across).clamp(min=1)
    is_own = (torch.arange(k_seq, device=weights.device) >= boundary) == (queries >= boundary)
    overlap = (torch.minimum(weights, even) * is_own).sum(dim=-1, keepdim=True)
    return _mean_where(overlap, num_across > 0).squeeze(-1).nanmean(dim=-2)


def _across(
    sums: Float[Tensor, "*layers batch #heads rows k_seq"],
    queries: Int[Tensor, "rows 1"],
    boundaries: Int[Tensor, "*#maps boundaries"],
) -> Float[Tensor, "*layers batch #heads rows boundaries"]:
    """The sum of each query's values over the keys on the other side of each boundary, from their cumulative sums.

    A boundary is the first key of the second side; boundaries are the same for all maps, or `... 1 1`, one for each.
    """
    shape = torch.broadcast_shapes(sums.shape[:-1], boundaries.shape[:-1])
    before = sums.expand(*shape, -1).gather(-1, (boundaries - 1).expand(*shape, -1))
    return torch.where(queries >= boundaries, before, sums[..., -1:] - before)


def _mean_where(
    values: Float[Tensor, "*maps rows columns"], counted: Bool[Tensor, "*#maps rows columns"]
) -> Float[Tensor, "*maps columns"]:
    """The mean over the counted queries; nan if there are none."""
    return (values * counted).sum(dim=-2) / counted.sum(dim=-2)
