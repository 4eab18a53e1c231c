"""Measures of cross-attention: whether heads align the tokens of a target with those of its source.

Each takes weights `batch heads q_seq k_seq`, queries of the target and keys of the source, without padding, and returns
one value for each head. Layers may be stacked before the batch.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from tinyformer.analysis.measures.measures import (
    MEASURES,
    Measure,
    effective_rank,
    entropy,
    entropy_share,
    nearest_head,
)
from tinyformer.analysis.shapes import vertical


def diagonal_distance(
    weights: Float[Tensor, "*layers batch heads q_seq k_seq"],
) -> Float[Tensor, "*layers heads"]:
    """Σ_k w_k |k / (k_seq - 1) - q / (q_seq - 1)|: the mean distance from the diagonal, as a share of the source.

    0 for attention that advances at an even pace, 1/3 for equal attention on a long source.
    """
    q_place, k_place = (torch.linspace(0, 1, size, device=weights.device) for size in weights.shape[-2:])
    distance = (k_place - q_place.unsqueeze(-1)).abs()
    return (weights * distance).sum(dim=-1).mean(dim=(-3, -1))


def monotonicity(weights: Float[Tensor, "*layers batch heads q_seq k_seq"]) -> Float[Tensor, "*layers heads"]:
    """Kendall's τ between a query's position and the mean of the positions that it attends to, c_q = Σ_k k w_k.

    1 if the mean advances with every token of the target, -1 if it goes back; nan for a single query (Kendall 1938).
    """
    q_seq, k_seq = weights.shape[-2:]
    centres = weights @ torch.arange(k_seq, dtype=weights.dtype, device=weights.device)
    signs = (centres.unsqueeze(-2) - centres.unsqueeze(-1)).sign()  # of each pair of an earlier and a later query
    pairs = torch.ones(q_seq, q_seq, device=weights.device).triu(1)
    return ((signs * pairs).sum(dim=(-2, -1)) / pairs.sum()).mean(dim=-2)


def coverage(weights: Float[Tensor, "*layers batch heads q_seq k_seq"]) -> Float[Tensor, "*layers heads"]:
    """The mean over source tokens of min(1, Σ_q w_q): how much of the source is attended to.

    Tu et al. 2016 (arXiv 1601.04811, §3).
    """
    return weights.sum(dim=-2).clamp(max=1).mean(dim=(-3, -1))


def source_end(weights: Float[Tensor, "*layers batch heads q_seq k_seq"]) -> Float[Tensor, "*layers heads"]:
    """Share of attention on the last token of the source, `eos`, where heads with nothing to align often rest."""
    return weights[..., -1].mean(dim=(-3, -1))


CROSS_MEASURES: dict[str, Measure] = {
    "entropy": Measure(lambda maps, rows, tokens: entropy(maps.weights), "entropy, nats"),
    "entropy_share": Measure(
        lambda maps, rows, tokens: entropy_share(maps.weights, maps.logits), "entropy, share of its maximum"
    ),
    "diagonal_distance": Measure(
        lambda maps, rows, tokens: diagonal_distance(maps.weights), "mean distance from the diagonal"
    ),
    "monotonicity": Measure(lambda maps, rows, tokens: monotonicity(maps.weights), "Kendall's τ of the alignment"),
    "coverage": Measure(lambda maps, rows, tokens: coverage(maps.weights), "share of the source attended to"),
    "source_end": Measure(lambda maps, rows, tokens: source_end(maps.weights), "share on the source's end"),
    "vertical": Measure(lambda maps, rows, tokens: vertical(maps.weights, -1), "largest share on one token"),
    "largest_logit": MEASURES["largest_logit"],
    "rank": Measure(lambda maps, rows, tokens: effective_rank(maps.weights), "effective rank of the map"),
    "similarity": Measure(lambda maps, rows, tokens: nearest_head(maps.weights), "cosine with the most similar head"),
}
"""The measures of cross-attention, by the last part of the logged name, as in `attention/cross/layer_00/head_00/…`."""

CROSS_MEANINGS: dict[str, str] = {name: measure.meaning for name, measure in CROSS_MEASURES.items()}
"""The meaning of each measure of cross-attention, by name."""
