"""Attention score functions, and modifications of scores and weights.

For each call, the layer creates a `Scoring`, which the kernel takes together with the mask.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.errors import ArgumentError
from tinyformer.nn.mask import AttentionMask, Grid

ScoreFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's signature: `score_mod(score, batch, head, q_idx, kv_idx)` is the new score."""

Queries: TypeAlias = Float[Tensor, "batch num_heads q_seq head_dim"]
"""The queries of each head, one vector for each token."""


@dataclass(frozen=True)
class ScoreMod:
    """A modification of the scores.

    Args:
        additive: whether `function` adds a bias that does not depend on the score.
        learned: whether gradients flow into the bias.
        by_head: whether `function` indexes a table by head number, so that a pruned layer has to pass the heads'
            original numbers.
    """

    function: ScoreFunction
    additive: bool = False
    learned: bool = False
    by_head: bool = False

    def is_as_declared(self, grid: Grid) -> bool:
        """Return False if the modification is declared additive, but its term depends on the scores of the grid."""
        scores = torch.linspace(-8, 8, grid.kv_idx.shape[3], device=grid.kv_idx.device)
        if not self.additive or scores.is_meta or type(scores) is not Tensor:
            return True
        zeros = torch.zeros(1, 1, grid.q_idx.shape[2], len(scores), device=scores.device)
        expected = self.function(zeros, *grid) + scores
        return torch.allclose(self.function(zeros + scores, *grid), expected, atol=1e-3, equal_nan=True)

    def of_heads(self, head_ids: Int[Tensor, " heads"]) -> "ScoreMod":
        """This modification for a pruned layer, given the original numbers of its heads."""
        if not self.by_head:
            return self

        def renumbered(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return self.function(score, batch, head_ids[head], q_idx, kv_idx)

        return replace(self, function=renumbered)


@dataclass(frozen=True)
class Scoring:
    """The rule by which a kernel computes scores from queries and keys, weights from scores, and outputs from weights.

    Args:
        scale: factor of the dot product.
        compare: computes the scores of `q` and `k`; None for scaled dot products.
        mods: modifications of the scores, in order.
        sink: a logit for each head that takes part in the softmax without a value, so that weights sum to less than 1
            (Agarwal et al. 2025, arXiv 2508.10925, gpt-oss).
        reweigh: computes new weights from the weights and their grid; None to keep the weights.
        mix: computes from the weights a term that is added to the weighted values; None for no term.
        log_decay: the sums c of a `ForgetGate`; c_i - c_j is added to the score of query i and key j.
    """

    scale: float = 1.0
    compare: Callable[[Tensor, Tensor], Tensor] | None = None
    mods: tuple[ScoreMod, ...] = ()
    sink: Float[Tensor, " num_heads"] | None = None
    reweigh: Callable[[Tensor, Grid], Tensor] | None = None
    mix: Callable[[Tensor], Tensor] | None = None
    log_decay: Float[Tensor, "batch num_heads k_seq"] | None = None

    @property
    def modifies(self) -> bool:
        """True if `modify` changes scores."""
        return bool(self.mods) or self.log_decay is not None

    def modify(self, scores: Float[Tensor, "*scores"], grid: Grid) -> Float[Tensor, "*pairs"]:
        """The scores of all pairs of the grid after all modifications."""
        for mod in self.mods:
            scores = mod.function(scores, *grid)
        if self.log_decay is None:
            return scores
        batch, head, q_idx, kv_idx = grid
        return scores + (self.log_decay[batch, head, q_idx] - self.log_decay[batch, head, kv_idx])

    def bias(self, grid: Grid) -> Float[Tensor, "#batch #heads q_seq k_seq"]:
        """The sum of all modifications, in fp32 at least; all of them must be additive."""
        pairs = (1, 1, grid.q_idx.shape[2], grid.kv_idx.shape[3])
        return self.modify(torch.zeros(pairs, device=grid.q_idx.device), grid)


class ScaledDotScore(nn.Module):
    """score(q, k) = scale · qᵀk (Vaswani et al. 2017, arXiv 1706.03762); the base class of all score functions.

    A parameter whose first axis has `num_heads` elements has a row for each head; the heads share all other parameters.

    Args:
        scale: factor of the dot product; None for 1 / √head_dim, 0 for attention that ignores queries and keys.
    """

    compare: Callable[[Tensor, Tensor], Tensor] | None = None
    """Computes the scores of queries and keys in place of a dot product; only some kernels take such scores."""

    is_rotation_invariant: bool = False
    """True if `compare` gives the same score when query and key are rotated alike, as a dot product does. Rotary
    positions require this."""

    def __init__(self, num_heads: int, head_dim: int, scale: float | None = None) -> None:
        super().__init__()
        if scale is not None and not 0 <= scale < math.inf:
            raise ArgumentError("scale", scale, "must be at least 0, and finite", {"scale": head_dim**-0.5})
        self.scale = head_dim**-0.5 if scale is None else scale

    def forward(self, q: Queries) -> Queries:
        """Transformed queries, whose dot product with the keys, times `scale`, is the score.

        Rotary positions rotate the result by R: qᵢᵀ W R_(j-i) kⱼ depends on positions through j - i alone. If W were
        applied to rotated queries, the score would depend on i and j themselves.
        """
        return q


class DotScore(ScaledDotScore):
    """score(q, k) = qᵀk (Luong et al. 2015, arXiv 1508.04025, "dot")."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__(num_heads, head_dim, scale=1.0)


class GeneralScore(ScaledDotScore):
    """score(q, k) = qᵀ W k with a matrix for each head (Luong et al. 2015, arXiv 1508.04025, "general").

    W is initialised to N(0, 1 / head_dim²), so that the scores have the variance of scaled dot products.
    """

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__(num_heads, head_dim, scale=1.0)
        self.weight = nn.Parameter(torch.randn(num_heads, head_dim, head_dim) / head_dim)

    def forward(self, q: Queries) -> Queries:
        return q @ self.weight.to(q.dtype)


class AdditiveScore(ScaledDotScore):
    """score(q, k) = vᵀ tanh(q + k) with a vector for each head (Bahdanau et al. 2014, arXiv 1409.0473).

    The paper's W s + U h are the projected query and key. Luong's "concat", vᵀ tanh(W [s; h]), is the same with one
    matrix. The computation holds a tensor of shape `batch heads q_seq k_seq head_dim` in memory.
    """

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__(num_heads, head_dim)
        self.weight = nn.Parameter(torch.randn(num_heads, head_dim, 1) / math.sqrt(head_dim))

    def compare(
        self, q: Queries, k: Float[Tensor, "batch num_kv_heads k_seq head_dim"]
    ) -> Float[Tensor, "batch num_heads q_seq k_seq"]:
        """The scores of all pairs of a query and a key."""
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        hidden = (q.unsqueeze(-2) + k.unsqueeze(-3)).tanh_()  # in place: it is the largest tensor of all
        return (hidden @ self.weight.to(q.dtype).unsqueeze(1)).squeeze(-1)


SCORES: dict[str, Callable[..., ScaledDotScore]] = {
    "scaled_dot": ScaledDotScore,
    "dot": DotScore,
    "general": GeneralScore,
    "additive": AdditiveScore,
}
"""The score functions by name."""


def make_score(
    score: str | Callable[..., ScaledDotScore], num_heads: int, head_dim: int, scale: float | None = None
) -> ScaledDotScore:
    """The score function of a layer, from a name in `SCORES` or a subclass of `ScaledDotScore`."""
    if scale is not None:
        if score != "scaled_dot":
            reason = "is a factor of the scaled dot product, but `score` is another function"
            raise ArgumentError("scale", scale, reason, {"scale": None})
        return ScaledDotScore(num_heads, head_dim, scale)
    factory = SCORES.get(score) if isinstance(score, str) else score
    made = None if factory is None else factory(num_heads, head_dim)
    if not isinstance(made, ScaledDotScore):
        known = ", ".join(SCORES)
        raise ArgumentError("score", score, f"must be one of {known}, or a subclass of tinyformer.nn.ScaledDotScore")
    return made


def softcap(cap: float) -> ScoreMod:
    """A bound on absolute scores: cap · tanh(score / cap) (Gemma 2, Riviere et al. 2024, arXiv 2408.00118)."""
    if cap <= 0:
        raise ArgumentError("softcap", cap, "must be above 0", {"softcap": 50.0})
    return ScoreMod(lambda score, batch, head, q_idx, kv_idx: cap * torch.tanh(score / cap))


class SSMax(nn.Module):
    """Scalable softmax (Nakanishi 2025, arXiv 2501.19399): score ← s log(n) · score, for n visible keys.

    So attention to a few keys does not disperse in longer texts. Each head learns s, which starts at 0.43, as in the
    paper. The factor is that of the query: biases of positions are not multiplied. n
    includes keys outside a predicted window.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((num_heads,), 0.43))

    def forward(self, q: Queries, num_visible: Int[Tensor, "#batch #num_heads #q_seq"]) -> Queries:
        """The queries, multiplied by s log(n); by 0 if they see at most one key."""
        logs = num_visible.clamp(min=1).to(torch.promote_types(q.dtype, torch.float32)).log()
        factors = self.weight.view(-1, 1) * logs
        return (q * factors.repeat_interleave(q.shape[1] // len(self.weight), dim=1).unsqueeze(-1)).to(q.dtype)


class LocalGaussian(nn.Module):
    """Weights times a Gaussian around a centre predicted from the query (Luong et al. 2015, "local-p").

    w ← w · exp(-(s - p)² / 2σ²) for a key at position s and a centre p; σ is half of the window's reach D, as in the
    paper (arXiv 1508.04025, eq. 9, 10). The weights are not normalised again. In cross-attention, p = S · sigmoid(vᵀ
    tanh(W q)) lies within the S tokens of the source; in self-attention, between the first and the last key of the
    query's window. With rotary positions, p depends on the rotated query, so weights depend on absolute positions, too.
    """

    def __init__(self, num_heads: int, head_dim: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.weight = nn.Parameter(torch.randn(num_heads, head_dim, head_dim) / math.sqrt(head_dim))
        self.vector = nn.Parameter(torch.randn(num_heads, head_dim, 1) / math.sqrt(head_dim))

    def forward(
        self, q: Queries, k_seq: int, mask: AttentionMask, is_cross: bool
    ) -> tuple[list[ScoreMod], Callable[[Tensor, Grid], Tensor]]:
        """The modification that hides keys at |s - p| > D (only in cross-attention), and the function that reweighs."""
        logit = torch.tanh(q @ self.weight.to(q.dtype)) @ self.vector.to(q.dtype)
        share = torch.sigmoid(logit.to(torch.promote_types(q.dtype, torch.float32)))
        before, after = (self.window // 2, self.window // 2) if is_cross else mask.span
        first, reach = k_seq - q.shape[2], max(before, after, 1)
        if is_cross:
            centres = share * (k_seq if mask.lengths is None else mask.lengths.view(-1, 1, 1, 1))
        else:
            centres = torch.arange(first, k_seq, device=q.device).unsqueeze(-1) - before + share * (before + after)

        def distance(q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return kv_idx - centres[:, :, q_idx.flatten() - first]

        def hide(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score.masked_fill(distance(q_idx, kv_idx).abs() > reach, -torch.inf)

        def reweigh(weights: Tensor, grid: Grid) -> Tensor:
            return weights * torch.exp(-(distance(grid.q_idx, grid.kv_idx) ** 2) / (2 * (reach / 2) ** 2))

        return [ScoreMod(hide, additive=True)] * is_cross, reweigh
