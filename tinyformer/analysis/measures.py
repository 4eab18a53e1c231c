"""What a head does, as a number: pure functions of exact attention weights.

Each takes weights `batch heads rows k_seq`, whose rows sum to 1 (to less beside a sink), and returns a number for each
head: the mean over the batch and over the queries that the measure is defined for, nan where there are none. `rows`
says which queries of the sequence they are; without it, they are the last of the `k_seq` positions.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tinyformer.analysis.capture import CapturedMaps
from tinyformer.nn import AttentionMaps

REACH = 8
"""Tokens: how far from its query a key may be to count as near."""


def entropy(weights: Float[Tensor, "batch heads rows k_seq"]) -> Float[Tensor, " heads"]:
    """H = -Σ_k w_k ln w_k, in nats: 0 where a head looks at one token, ln(k) where it looks at k alike."""
    return torch.special.entr(weights).sum(dim=-1).mean(dim=(0, 2))


def entropy_share(
    weights: Float[Tensor, "batch heads rows k_seq"], logits: Float[Tensor, "batch heads rows k_seq"]
) -> Float[Tensor, " heads"]:
    """H / ln(n), where n keys are visible to the query: 1 where it looks at all of them alike.

    Queries that see one key alone have no choice, and are left out. What a sink takes is left out of H, too: the
    weights are made to sum to 1.

    Args:
        weights: of attention.
        logits: -inf where the mask hides the key.
    """
    visible = (logits > -torch.inf).sum(dim=-1)
    given = weights / weights.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    shares = torch.special.entr(given).sum(dim=-1) / visible.clamp(min=2).log()
    return _mean_where(shares, visible > 1)


def distance(
    weights: Float[Tensor, "batch heads rows k_seq"], rows: Int[Tensor, " rows"] | None = None
) -> Float[Tensor, " heads"]:
    """Σ_k w_k |q - k|: how far away a head looks, in tokens."""
    q_idx, k_idx = _positions(weights, rows)
    return (weights * (q_idx - k_idx).abs()).sum(dim=-1).mean(dim=(0, 2))


def first_token(weights: Float[Tensor, "batch heads rows k_seq"]) -> Float[Tensor, " heads"]:
    """Share of attention on the first token, where heads with nothing to do rest (Xiao et al. 2023, 2309.17453)."""
    return weights[..., 0].mean(dim=(0, 2))


def previous_token(
    weights: Float[Tensor, "batch heads rows k_seq"], rows: Int[Tensor, " rows"] | None = None
) -> Float[Tensor, " heads"]:
    """Share of attention on the token just before; the first token, which has none, is left out."""
    q_idx, k_idx = _positions(weights, rows)
    return _mean_where((weights * (k_idx == q_idx - 1)).sum(dim=-1), (q_idx > 0).squeeze(-1))


def self_attention(
    weights: Float[Tensor, "batch heads rows k_seq"], rows: Int[Tensor, " rows"] | None = None
) -> Float[Tensor, " heads"]:
    """Share of attention that a token gives itself."""
    q_idx, k_idx = _positions(weights, rows)
    return (weights * (k_idx == q_idx)).sum(dim=-1).mean(dim=(0, 2))


def near(
    weights: Float[Tensor, "batch heads rows k_seq"], rows: Int[Tensor, " rows"] | None = None, reach: int = REACH
) -> Float[Tensor, " heads"]:
    """Share of attention on keys at most `reach` tokens away, the query's own included."""
    q_idx, k_idx = _positions(weights, rows)
    return (weights * ((q_idx - k_idx).abs() <= reach)).sum(dim=-1).mean(dim=(0, 2))


def largest_logit(logits: Float[Tensor, "batch heads rows k_seq"]) -> Float[Tensor, " heads"]:
    """The largest logit of the batch; where it keeps growing, training is about to diverge (Dehghani 2302.05442)."""
    return logits.amax(dim=(0, 2, 3))


def effective_rank(weights: Float[Tensor, "batch heads rows k_seq"]) -> Float[Tensor, " heads"]:
    """(Σ σ²)² / Σ σ⁴ over the singular values σ of a map: 1 where all queries look alike, n where n differ entirely.

    The participation ratio, as a dimension (Gao et al. 2017, bioRxiv 214262): as exact as counting what passes a
    threshold, and two matrix products in place of a decomposition. Maps without a visible key have none.
    """
    gram = weights @ weights.mT
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
    return (trace.square() / gram.square().sum(dim=(-2, -1))).nanmean(dim=0)


def similarity(weights: Float[Tensor, "batch heads rows k_seq"]) -> Float[Tensor, "heads heads"]:
    """Cosine between the maps of each two heads, Σ w w' / √(Σ w² Σ w'²): 1 where they are the same."""
    flat = weights.flatten(2)
    flat = flat / flat.norm(dim=-1, keepdim=True)
    return (flat @ flat.mT).nanmean(dim=0)  # a map without a visible key has no direction


def nearest_head(weights: Float[Tensor, "batch heads rows k_seq"]) -> Float[Tensor, " heads"]:
    """Similarity to the head of the layer that is most like it; nan where a head is alone."""
    others = similarity(weights)
    if len(others) == 1:
        return others.new_full((1,), math.nan)
    return others.fill_diagonal_(-torch.inf).amax(dim=-1)


def induction(
    weights: Float[Tensor, "batch heads rows k_seq"],
    tokens: Int[Tensor, "batch k_seq"],
    rows: Int[Tensor, " rows"] | None = None,
) -> Float[Tensor, " heads"]:
    """Share of attention on what followed the query's token before: Σ w_k over k ≤ q with tokens[k - 1] = tokens[q].

    A head that does this predicts that what came next will come next again (Elhage et al. 2021; Olsson et al. 2022,
    arXiv 2209.11895, who call it prefix matching). Over queries whose token occurred before; it says most on repeated
    random tokens, where nothing else tells what comes next.
    """
    q_idx, k_idx = _positions(weights, rows)
    same = _same_token(tokens, q_idx)
    followed = torch.nn.functional.pad(same[..., :-1], (1, 0)) & (k_idx <= q_idx)
    return _mass_on(weights, followed)


def duplicate_token(
    weights: Float[Tensor, "batch heads rows k_seq"],
    tokens: Int[Tensor, "batch k_seq"],
    rows: Int[Tensor, " rows"] | None = None,
) -> Float[Tensor, " heads"]:
    """Share of attention on the query's token where it occurred before: Σ w_k over k < q with tokens[k] = tokens[q].

    Wang et al. 2022 (arXiv 2211.00593). Over queries whose token occurred before.
    """
    q_idx, k_idx = _positions(weights, rows)
    return _mass_on(weights, _same_token(tokens, q_idx) & (k_idx < q_idx))


def repeated_tokens(vocab_size: int, num_sequences: int, period: int, seed: int = 0) -> Int[Tensor, "batch seq"]:
    """Random tokens said twice: `period` of them, each another one as far as there are so many, and the same again.

    Args:
        vocab_size: from which they are drawn alike.
        num_sequences: rows.
        period: length of what is repeated; a row is twice as long.
        seed: of the draw, which leaves other random numbers alone.
    """
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randperm(vocab_size, generator=generator) for _ in range(num_sequences)]
    once = torch.stack([draw.repeat(-(-period // vocab_size))[:period] for draw in draws])
    return once.repeat(1, 2)


@dataclass(frozen=True)
class Measure:
    """A measure under a name.

    Args:
        of: the number for each head, from a layer's maps, the queries that they are of, and the tokens.
        meaning: in a few words, with the unit.
    """

    of: Callable[[AttentionMaps, Tensor, Tensor], Tensor]
    meaning: str


MEASURES: dict[str, Measure] = {
    "entropy": Measure(lambda maps, rows, tokens: entropy(maps.weights), "entropy, nats"),
    "entropy_share": Measure(
        lambda maps, rows, tokens: entropy_share(maps.weights, maps.logits), "entropy, share of the largest possible"
    ),
    "distance": Measure(lambda maps, rows, tokens: distance(maps.weights, rows), "mean distance, tokens"),
    "first_token": Measure(lambda maps, rows, tokens: first_token(maps.weights), "share on the first token"),
    "previous_token": Measure(
        lambda maps, rows, tokens: previous_token(maps.weights, rows), "share on the token just before"
    ),
    "self": Measure(lambda maps, rows, tokens: self_attention(maps.weights, rows), "share on the token itself"),
    "near": Measure(lambda maps, rows, tokens: near(maps.weights, rows), f"share within {REACH} tokens"),
    "largest_logit": Measure(lambda maps, rows, tokens: largest_logit(maps.logits), "largest logit"),
    "rank": Measure(lambda maps, rows, tokens: effective_rank(maps.weights), "effective rank of the map"),
    "similarity": Measure(lambda maps, rows, tokens: nearest_head(maps.weights), "cosine with the most similar head"),
}
"""What is measured on any text, by the name under which it is logged: `attention/layer_00/head_00/entropy`."""

PATTERNS: dict[str, Measure] = {
    "induction": Measure(
        lambda maps, rows, tokens: induction(maps.weights, tokens, rows), "share on what followed the same token"
    ),
    "duplicate_token": Measure(
        lambda maps, rows, tokens: duplicate_token(maps.weights, tokens, rows), "share on the same token before"
    ),
}
"""The measures that are computed on `repeated_tokens`."""

MEANINGS: dict[str, str] = {name: measure.meaning for name, measure in (MEASURES | PATTERNS).items()}
"""The meaning of each measure, by name."""


def measure_layers(
    measures: Mapping[str, Measure], maps: CapturedMaps, tokens: Int[Tensor, "batch k_seq"]
) -> dict[str, list[list[float]]]:
    """Some measures of captured maps, each for each layer and each of its maps.

    Args:
        measures: by their names, such as `MEASURES`.
        maps: captured from one forward pass.
        tokens: of that pass.
    """
    assert maps.rows is not None
    rows = maps.rows
    return {name: [m.of(layer, rows, tokens).tolist() for layer in maps.layers] for name, m in measures.items()}


def _positions(weights: Tensor, rows: Tensor | None) -> tuple[Int[Tensor, "rows 1"], Int[Tensor, " k_seq"]]:
    """The positions of queries and keys."""
    num_rows, k_seq = weights.shape[-2:]
    k_idx = torch.arange(k_seq, device=weights.device)
    return (k_idx[k_seq - num_rows :] if rows is None else rows).unsqueeze(-1), k_idx


def _same_token(tokens: Tensor, q_idx: Int[Tensor, "rows 1"]) -> Bool[Tensor, "batch 1 rows k_seq"]:
    """Whether a key's token is the query's."""
    return (tokens[:, q_idx] == tokens.unsqueeze(1)).unsqueeze(1)


def _mass_on(
    weights: Float[Tensor, "batch heads rows k_seq"], keys: Bool[Tensor, "batch 1 rows k_seq"]
) -> Float[Tensor, " heads"]:
    """Share of attention on some keys, over the queries that have one."""
    return _mean_where((weights * keys).sum(dim=-1), keys.any(dim=-1))


def _mean_where(values: Float[Tensor, "batch heads rows"], counted: Bool[Tensor, "*rows"]) -> Float[Tensor, " heads"]:
    """The mean over some queries of the batch."""
    counted = counted.expand(values.shape)
    return (values * counted).sum(dim=(0, 2)) / counted.sum(dim=(0, 2))
