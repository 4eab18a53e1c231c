"""What a head does, as a number: pure functions of exact attention weights.

Each takes weights `batch heads q_seq k_seq`, whose rows sum to 1 (to less beside a sink), and returns a number for each
head: the mean over the batch and over the queries that the measure is defined for. Queries stand at the last `q_seq` of
`k_seq` positions.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor


def entropy(weights: Float[Tensor, "batch heads q_seq k_seq"]) -> Float[Tensor, " heads"]:
    """H = -Σ_k w_k ln w_k, in nats: 0 where a head looks at one token, ln(k) where it looks at k alike."""
    return torch.special.entr(weights).sum(dim=-1).mean(dim=(0, 2))


def distance(weights: Float[Tensor, "batch heads q_seq k_seq"]) -> Float[Tensor, " heads"]:
    """Σ_k w_k |q - k|: how far away a head looks, in tokens."""
    q_idx, k_idx = _positions(weights)
    return (weights * (q_idx - k_idx).abs()).sum(dim=-1).mean(dim=(0, 2))


def first_token(weights: Float[Tensor, "batch heads q_seq k_seq"]) -> Float[Tensor, " heads"]:
    """Share of attention on the first token, where heads with nothing to do rest (Xiao et al. 2023, 2309.17453)."""
    return weights[..., 0].mean(dim=(0, 2))


def previous_token(weights: Float[Tensor, "batch heads q_seq k_seq"]) -> Float[Tensor, " heads"]:
    """Share of attention on the token just before; the first token, which has none, is left out."""
    q_idx, k_idx = _positions(weights)
    has_previous = (q_idx > 0).squeeze(-1)
    return (weights * (k_idx == q_idx - 1)).sum(dim=-1)[..., has_previous].mean(dim=(0, 2))


def self_attention(weights: Float[Tensor, "batch heads q_seq k_seq"]) -> Float[Tensor, " heads"]:
    """Share of attention that a token gives itself."""
    q_idx, k_idx = _positions(weights)
    return (weights * (k_idx == q_idx)).sum(dim=-1).mean(dim=(0, 2))


MEASURES: dict[str, Callable[[Tensor], Tensor]] = {
    "entropy": entropy,
    "distance": distance,
    "first_token": first_token,
    "previous_token": previous_token,
    "self": self_attention,
}
"""By the name under which telemetry logs them: `attention/layer_00/head_00/entropy`."""


def _positions(weights: Tensor) -> tuple[Tensor, Tensor]:
    """The positions of queries `q_seq 1` and keys `k_seq`."""
    q_seq, k_seq = weights.shape[-2:]
    k_idx = torch.arange(k_seq, device=weights.device)
    return k_idx[k_seq - q_seq :].unsqueeze(-1), k_idx
