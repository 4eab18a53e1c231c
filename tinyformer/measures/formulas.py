"""Measures of attention heads: pure functions of exact attention weights.

Each function takes weights `batch heads rows k_seq`, whose rows sum to 1 (to less with a sink), and returns one value
for each head: the mean over the batch and over the queries for which the measure is defined, or nan if there are no
such queries. Layers may be stacked in a dimension before the batch. `rows` are the positions of the queries; by
default, the last of the `k_seq` positions.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tinyformer.data import TextTokenizer

Weights: TypeAlias = Float[Tensor, "*layers batch heads rows k_seq"]
Queries: TypeAlias = Float[Tensor, "*layers batch heads rows"]
Heads: TypeAlias = Float[Tensor, "*layers heads"]
Rows: TypeAlias = Int[Tensor, " rows"]
Tokens: TypeAlias = Int[Tensor, "batch k_seq"]

VERSIONS = {"duplicate_token": 2, "induction": 2}  # of measures whose meaning has changed; 1 for all others

REACH = 8  # the largest distance in tokens between a query and a near key

MIN_BLOCK, MAX_BOUNDARIES = 4, 32
"""The smallest number of tokens in a block, and the largest number of boundaries that are tried."""

LONGEST_PHRASE = 5  # tokens
SEGMENT = 8  # consecutive queries over which a stripe is averaged
STRIPE = 9  # rows; a horizontal stripe has fewer than half as many
FEWEST = 8  # queries that show an offset, and keys that an even row is spread over; fewer reach any share by chance


class OverQueries:
    """A measure: the mean over batch and queries of the values that `of_queries` returns, one for each query."""

    def __init__(self, of_queries: Callable[..., Queries], mean: Callable[..., Tensor] = torch.mean) -> None:
        self.of_queries, self.mean, self.__doc__ = of_queries, mean, of_queries.__doc__

    def __call__(self, *arguments: Any) -> Heads:
        return self.mean(self.of_queries(*arguments), dim=(-3, -1))


@OverQueries
def entropy(weights: Weights) -> Queries:
    """H = -Σ_k w_k ln w_k, in nats: 0 for attention on one token, ln(n) for equal attention on n tokens."""
    # torch.special.entr is not vectorised on CPU; where a weight is 0, so is the product.
    return weights.clamp(min=torch.finfo(weights.dtype).tiny).log_().mul_(weights).sum(dim=-1).abs()


@partial(OverQueries, mean=torch.nanmean)
def entropy_share(weights: Weights, num_visible: Tensor, entropies: Queries | None = None) -> Queries:
    """Entropy H / ln(n) of queries with n > 1 visible keys: 1 for equal attention on these; nan for other queries.

    The weights are first normalised to sum to 1, which removes the effect of a sink: for a sum S, the entropy is then
    H / S + ln S. `entropies` are the values of H; None to compute them.
    """
    totals = weights.sum(dim=-1).clamp(min=torch.finfo(weights.dtype).tiny)
    entropies = entropy.of_queries(weights) if entropies is None else entropies
    shares = (entropies / totals + totals.log()) / num_visible.clamp(min=2).log()
    return shares.masked_fill(num_visible <= 1, math.nan)


@OverQueries
def distance(weights: Weights, rows: Rows | None = None) -> Queries:
    """Σ_k w_k |q - k|: the mean distance of attention, in tokens."""
    q_idx, k_idx = _positions(weights, rows)
    return (weights * (q_idx - k_idx).abs().to(weights.dtype)).sum(dim=-1)


@OverQueries
def first_token(weights: Weights) -> Queries:
    """Share of attention on the first token, often an attention sink (Xiao et al. 2023, arXiv 2309.17453)."""
    return weights[..., 0]


@partial(OverQueries, mean=torch.nanmean)
def previous_token(weights: Weights, rows: Rows | None = None) -> Queries:
    """Share of attention on the previous token, over all queries but the first."""
    q_idx = _queries(weights, rows)
    return _weights_on(weights, (q_idx - 1).clamp(min=0)).masked_fill(q_idx == 0, math.nan)


@OverQueries
def self_attention(weights: Weights, rows: Rows | None = None) -> Queries:
    """Share of attention on the query's own token."""
    return _weights_on(weights, _queries(weights, rows))


@OverQueries
def near(weights: Weights, rows: Rows | None = None) -> Queries:
    """Share of attention on keys at most `REACH` tokens from the query, its own token included."""
    q_idx, k_idx = _positions(weights, rows)
    return (weights * ((q_idx - k_idx).abs() <= REACH)).sum(dim=-1)


def largest_logit(logits: Weights) -> Heads:
    """The largest logit of the batch; steady growth precedes divergence (Dehghani et al. 2023, arXiv 2302.05442)."""
    return logits.amax(dim=(-4, -2, -1))


def effective_rank(weights: Weights) -> Heads:
    """(Σ σ²)² / Σ σ⁴ over the singular values σ of a map: 1 for equal rows, n for n orthogonal rows of equal norm.

    This participation ratio, a measure of dimension (Gao et al. 2017, bioRxiv 214262), needs two matrix products and no
    decomposition. The mean leaves out maps without a visible key, for which the ratio is not defined.
    """
    gram = weights @ weights.mT
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
    return (trace.square() / gram.square().sum(dim=(-2, -1))).nanmean(dim=-2)


def similarity(weights: Weights) -> Float[Tensor, "*layers heads heads"]:
    """Cosine similarity of the maps of each pair of heads, Σ w w' / √(Σ w² Σ w'²)."""
    flat = weights.flatten(-2)
    flat = flat / flat.norm(dim=-1, keepdim=True)
    return (flat @ flat.mT).nanmean(dim=-3)  # a map without a visible key has no direction


def nearest_head(weights: Weights) -> Heads:
    """Similarity to the most similar other head of the layer; nan if the layer has one head."""
    others = similarity(weights)
    num_heads = others.shape[-1]
    if num_heads == 1:
        return torch.full_like(others[..., 0], math.nan)
    itself = torch.eye(num_heads, dtype=torch.bool, device=others.device)
    return others.masked_fill(itself, -torch.inf).amax(dim=-1)


def mean_similarity(weights: Weights) -> Heads:
    """Mean similarity to the other heads of the layer; nan if the layer has one head.

    Its mean over the heads is the mean over all pairs.
    """
    of_pairs = similarity(weights)
    return (of_pairs.sum(dim=-1) - of_pairs.diagonal(dim1=-2, dim2=-1)) / (of_pairs.shape[-1] - 1)


def induction(weights: Weights, tokens: Tokens, rows: Rows | None = None) -> Heads:
    """Prefix matching: Σ w_k over k ≤ q with tokens[k - 1] = tokens[q].

    The share of attention on tokens that followed earlier occurrences of the query's token, over the queries whose
    token occurred before. An induction head predicts that the same token follows again (Elhage et al. 2021; Olsson et
    al. 2022, arXiv 2209.11895). It is best to use `repeated_tokens`, where only repetition predicts a token.
    """
    q_idx, k_idx = _positions(weights, rows)
    same = _same_token(tokens, q_idx)
    followed = torch.nn.functional.pad(same[..., :-1], (1, 0)) & (k_idx <= q_idx)
    return _share_on(weights, followed)


def duplicate_token(weights: Weights, tokens: Tokens, rows: Rows | None = None) -> Heads:
    """Share of attention on earlier occurrences of the query's token: Σ w_k over k < q with tokens[k] = tokens[q].

    The mean is over the queries whose token occurred before (Wang et al. 2022, arXiv 2211.00593).
    """
    q_idx, k_idx = _positions(weights, rows)
    return _share_on(weights, _same_token(tokens, q_idx) & (k_idx < q_idx))


def diagonal_distance(weights: Weights) -> Heads:
    """Σ_k w_k |k / (k_seq - 1) - q / (q_seq - 1)|: the mean distance from the diagonal, as a share of the source.

    It is 0 for attention that advances at an even pace, and 1/3 for equal attention on a long source.
    """
    q_place, k_place = (torch.linspace(0, 1, size, device=weights.device) for size in weights.shape[-2:])
    distance = (k_place - q_place.unsqueeze(-1)).abs()
    return (weights * distance).sum(dim=-1).mean(dim=(-3, -1))


def monotonicity(weights: Weights) -> Heads:
    """Kendall's τ between a query's position and the mean of the positions that it attends to, c_q = Σ_k k w_k.

    τ is 1 if the mean advances with every query, -1 if it always goes back, and nan for a single query (Kendall 1938).
    """
    q_seq, k_seq = weights.shape[-2:]
    centres = weights @ torch.arange(k_seq, dtype=weights.dtype, device=weights.device)
    signs = (centres.unsqueeze(-2) - centres.unsqueeze(-1)).sign()  # of each pair of an earlier and a later query
    pairs = torch.ones(q_seq, q_seq, device=weights.device).triu(1)
    return ((signs * pairs).sum(dim=(-2, -1)) / pairs.sum()).mean(dim=-2)


def coverage(weights: Weights) -> Heads:
    """The mean over source tokens of min(1, Σ_q w_qk), the attended share (Tu et al. 2016, arXiv 1601.04811, §3)."""
    return weights.sum(dim=-2).clamp(max=1).mean(dim=(-3, -1))


def source_end(weights: Weights) -> Heads:
    """Share of attention on the last token of the source, `eos`, where heads without a token to align often attend."""
    return weights[..., -1].mean(dim=(-3, -1))


def vertical(weights: Weights, left_out: int = 0) -> Heads:
    """max_k mean_q w_qk: share of attention on the one key that receives most of it.

    In BERT such keys are delimiters, which appear as vertical lines (Kovaleva et al. 2019, arXiv 1908.08593, §4.1).
    `left_out` is the index of a key that is excluded: 0, where sinks form, or -1, the end of a source.
    """
    received = weights.mean(dim=-2)
    others = received[..., 1:] if left_out == 0 else received[..., :-1]
    if others.shape[-1] == 0:
        return torch.full_like(received[..., 0].mean(dim=-2), math.nan)
    return others.amax(dim=-1).mean(dim=-2)


def block(weights: Weights, logits: Weights, rows: Rows) -> Heads:
    """mean_q Σ_k min(w_qk, b_qk): overlap with a map of two blocks; 1 if attention is even within each block.

    After Kovaleva et al. 2019 (arXiv 1908.08593, §4.1). The overlap is 1 minus the total variation distance between w
    and b, where b is even attention on the visible keys on the query's side of a boundary. At most `MAX_BOUNDARIES` are
    compared, which have at least a quarter of the sequence and at least `MIN_BLOCK` tokens on both sides. The boundary
    that the least attention crosses is used. The mean is over queries that see keys on both sides, so that a mask alone
    makes no blocks.
    """
    k_seq = weights.shape[-1]
    least = max(k_seq // 4, MIN_BLOCK)
    if k_seq < 2 * least:
        return torch.full_like(weights[..., 0, 0].mean(dim=-2), math.nan)
    step = -(-(k_seq - 2 * least + 1) // MAX_BOUNDARIES)
    boundaries = torch.arange(least, k_seq - least + 1, step, device=weights.device)
    queries, sums = rows.unsqueeze(-1), weights.cumsum(dim=-1)
    visible = (logits[..., :1, :, :] > -torch.inf).float().cumsum(dim=-1)  # the mask is the same for all heads
    sees_both = _across(visible, queries, boundaries) > 0
    crossing = _mean_of_rows(_across(sums, queries, boundaries), sees_both)
    boundary = boundaries[crossing.nan_to_num(torch.inf).argmin(dim=-1)][..., None, None]
    num_across = _across(visible, queries, boundary)
    even = 1 / (visible[..., -1:] - num_across).clamp(min=1)
    is_own = (torch.arange(k_seq, device=weights.device) >= boundary) == (queries >= boundary)
    overlap = (torch.minimum(weights, even) * is_own).sum(dim=-1, keepdim=True)
    return _mean_of_rows(overlap, num_across > 0).squeeze(-1).nanmean(dim=-2)


def offset_share(weights: Weights, logits: Weights, rows: Rows) -> Heads:
    """max_d mean_q w_{q,q+d}: share of attention at the one offset d, other than 0 and -1, that receives most of it.

    d = 1 is the next token. At least half of the queries, and at least `FEWEST`, see a key at d; nan if no d fits.
    """
    shares = _shares_by_offset(weights, logits, rows).amax(dim=-1)
    return shares.masked_fill(shares == -torch.inf, math.nan)


def offset(weights: Weights, logits: Weights, rows: Rows) -> Heads:
    """The offset d of `offset_share` in tokens: 1 for the next token, -3 for the third before; nan if there is none."""
    shares = _shares_by_offset(weights, logits, rows)
    offsets = (shares.argmax(dim=-1) - weights.shape[-1] + 1).to(shares)
    return offsets.masked_fill(shares.amax(dim=-1) == -torch.inf, math.nan)


def segment_vertical(weights: Weights) -> Heads:
    """Share of the attention of a segment of queries on a single key: the value that a quarter of the queries reach.

    A segment is `SEGMENT` consecutive queries; its share is max_k of the mean of w_qk over these queries. s_q is the
    largest share of a segment that includes q, and the measure is the 75 % quantile of s_q. The first key, where sinks
    form, is excluded. The result is nan for fewer queries than two segments have.
    """
    if weights.shape[-2] < 2 * SEGMENT:
        return torch.full_like(weights[..., 0, 0].mean(dim=-2), math.nan)
    sums = torch.nn.functional.pad(weights[..., 1:].cumsum(dim=-2), (0, 0, 1, 0))
    stripes = (sums[..., SEGMENT:, :] - sums[..., :-SEGMENT, :]).amax(dim=-1) / SEGMENT
    best = torch.nn.functional.pad(stripes, (SEGMENT - 1, SEGMENT - 1)).unfold(-1, SEGMENT, 1).amax(dim=-1)
    return best.quantile(0.75, dim=-1).mean(dim=-2)


def horizontal(weights: Weights, logits: Weights) -> Heads:
    """Horizontal stripes: how much more evenly a few queries attend to their keys than the queries around them.

    e_q = Σ_k min(w_qk, 1/n) is the overlap of a row with even attention on its n visible keys: 1 for an even row, 1/n
    for attention on one key. The measure is the 95 % quantile of e_q minus the median of e in the `STRIPE` rows around
    q: near 1 if at least a twentieth of the queries attend evenly, each next to rows that attend to single keys; 0 if
    all rows are alike, as in a uniform head. Queries with fewer than `FEWEST` visible keys are excluded.
    """
    visible = (logits > -torch.inf).sum(dim=-1)
    even = torch.minimum(weights, 1 / visible.clamp(min=1).unsqueeze(-1)).sum(dim=-1)
    even = even.masked_fill(visible < FEWEST, math.nan)
    around = torch.nn.functional.pad(even, (STRIPE // 2, STRIPE // 2), value=math.nan).unfold(-1, STRIPE, 1)
    contrast = even - around.nanmedian(dim=-1).values
    return contrast.nanquantile(0.95, dim=-1, interpolation="higher").nanmean(dim=-2)


def phrases(weights: Weights, logits: Weights, rows: Rows) -> Heads:
    """mean_q Σ_k min(w_qk, b_qk): overlap with phrases, blocks of tokens; 1 if attention is even within each phrase.

    Like `block`, but the sequence is divided into single tokens and phrases of 2 to `LONGEST_PHRASE` tokens, such that
    the overlap is largest. b is even attention on the visible keys of the query's phrase, and 0 for a single token.
    Queries that see at most `LONGEST_PHRASE` keys are excluded. Short sequences, or `rows` lacking a query, give nan.
    """
    num_rows, k_seq = weights.shape[-2:]
    if num_rows != k_seq or k_seq <= LONGEST_PHRASE:
        return torch.full_like(weights[..., 0, 0].mean(dim=-2), math.nan)
    reach = LONGEST_PHRASE - 1
    band = rows.unsqueeze(-1) + torch.arange(-reach, reach + 1, device=weights.device)
    inside, band = (band >= 0) & (band < k_seq), band.clamp(0, k_seq - 1)
    visible = (logits[..., :1, :, :] > -torch.inf).float()  # the mask is the same for all heads
    counted = visible.sum(dim=-1) > LONGEST_PHRASE
    near, is_near = (part.gather(-1, band.expand(*part.shape[:-1], -1)) * inside for part in (weights, visible))
    best = [torch.zeros_like(weights[..., 0, 0])]  # the largest overlap of the first n tokens, by n
    overlaps = []  # the overlap of each possible phrase, by its length minus 2
    for length in range(2, LONGEST_PHRASE + 1):
        places = [slice(reach - place, reach - place + length) for place in range(length)]
        even = [1 / is_near[..., at].sum(dim=-1, keepdim=True).clamp(min=1) for at in places]
        of_place = [
            (torch.minimum(near[..., at], share) * is_near[..., at]).sum(dim=-1) * counted
            for at, share in zip(places, even, strict=True)
        ]
        starts = [of_place[place][..., place : k_seq - length + 1 + place] for place in range(length)]
        overlaps.append(torch.stack(starts).sum(dim=0))  # indexed by the first token of the phrase
    for end in range(1, k_seq + 1):
        lengths = range(2, min(end, LONGEST_PHRASE) + 1)
        options = [best[end - length] + overlaps[length - 2][..., end - length] for length in lengths]
        best.append(torch.stack([best[-1], *options]).amax(dim=0))
    return (best[-1] / counted.sum(dim=-1)).nanmean(dim=-2)


def repeated_tokens(
    vocab_size: int, num_sequences: int, period: int, tokenizer: TextTokenizer, seed: int = 0
) -> Int[Tensor, "batch seq"]:
    """Sequences of the tokens that begin a text, then `period` random text tokens twice (distinct ones if possible)."""
    generator, words = torch.Generator().manual_seed(seed), torch.tensor(tokenizer.text_ids(vocab_size))
    draws = [torch.randperm(vocab_size, generator=generator) for _ in range(num_sequences)]
    once = torch.stack([draw[torch.isin(draw, words)].repeat(-(-period // len(words)))[:period] for draw in draws])
    start = torch.tensor(tokenizer.around[0], dtype=torch.long)
    return torch.cat([start.expand(num_sequences, -1), once.repeat(1, 2)], dim=1)


def _positions(weights: Tensor, rows: Tensor | None) -> tuple[Int[Tensor, "rows 1"], Int[Tensor, " k_seq"]]:
    return _queries(weights, rows).unsqueeze(-1), torch.arange(weights.shape[-1], device=weights.device)


def _queries(weights: Tensor, rows: Tensor | None) -> Int[Tensor, " rows"]:
    num_rows, k_seq = weights.shape[-2:]
    return torch.arange(k_seq - num_rows, k_seq, device=weights.device) if rows is None else rows


def _weights_on(weights: Weights, keys: Int[Tensor, " rows"]) -> Float[Tensor, "*layers batch heads rows"]:
    return weights.gather(-1, keys.unsqueeze(-1).expand(*weights.shape[:-1], 1)).squeeze(-1)


def _shares_by_offset(weights: Weights, logits: Weights, rows: Rows) -> Float[Tensor, "*layers heads offsets"]:
    """The mean weight of visible keys by offset, from 1 - k_seq on; -inf at offsets that `offset_share` excludes."""
    k_seq, num_queries = weights.shape[-1], weights.shape[-4] * weights.shape[-2]
    place = (torch.arange(k_seq, device=weights.device) - rows.unsqueeze(-1) + k_seq - 1).flatten()

    def by_offset(values: Float[Tensor, "*layers batch heads rows k_seq"]) -> Float[Tensor, "*layers heads offsets"]:
        sums = values.sum(dim=-4).flatten(-2)
        return sums.new_zeros(*sums.shape[:-1], 2 * k_seq - 1).index_add_(-1, place, sums)

    seen = by_offset((logits[..., :1, :, :] > -torch.inf).to(weights.dtype))  # the mask is the same for all heads
    shares = by_offset(weights) / seen.clamp(min=1)
    own = torch.arange(2 * k_seq - 1, device=weights.device)
    has_own = (own == k_seq - 1) | (own == k_seq - 2)  # the measures `self` and `previous_token`
    return shares.masked_fill((2 * seen < num_queries) | (seen < FEWEST) | has_own, -torch.inf)


def _same_token(tokens: Tensor, q_idx: Int[Tensor, "rows 1"]) -> Bool[Tensor, "batch 1 rows k_seq"]:
    return (tokens[:, q_idx] == tokens.unsqueeze(1)).unsqueeze(1)


def _share_on(weights: Weights, keys: Bool[Tensor, "batch 1 rows k_seq"]) -> Heads:
    """Share of attention on the chosen keys, averaged over the queries that have chosen keys."""
    return _mean_where((weights * keys).sum(dim=-1), keys.any(dim=-1))


def _mean_where(values: Float[Tensor, "*layers batch heads rows"], counted: Bool[Tensor, "*rows"]) -> Heads:
    """The mean of `values` over the queries of the batch where `counted` is True."""
    counted = counted.expand(values.shape)
    return (values * counted).sum(dim=(-3, -1)) / counted.sum(dim=(-3, -1))


def _across(
    sums: Float[Tensor, "*layers batch #heads rows k_seq"],
    queries: Int[Tensor, "rows 1"],
    boundaries: Int[Tensor, "*#maps boundaries"],
) -> Float[Tensor, "*layers batch #heads rows boundaries"]:
    """For each query and boundary, the sum of values over the keys that the boundary separates from the query.

    `sums` are cumulative over the keys. A boundary is the index of the first key behind it. All maps have the same
    `boundaries`, or each map has one boundary and `boundaries` ends with two axes of size 1.
    """
    shape = torch.broadcast_shapes(sums.shape[:-1], boundaries.shape[:-1])
    before = sums.expand(*shape, -1).gather(-1, (boundaries - 1).expand(*shape, -1))
    return torch.where(queries >= boundaries, before, sums[..., -1:] - before)


def _mean_of_rows(
    values: Float[Tensor, "*maps rows columns"], counted: Bool[Tensor, "*#maps rows columns"]
) -> Float[Tensor, "*maps columns"]:
    """The mean of `values` over the queries of each map where `counted` is True; nan if there are none."""
    return (values * counted).sum(dim=-2) / counted.sum(dim=-2)
