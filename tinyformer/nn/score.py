"""How much a query wants a key: score functions, and what is added to their scores.

The second half of what a backend is told (the first is the mask): a `Scoring`, made anew for each call.
"""

import math
import pydoc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.errors import ArgumentError
from tinyformer.nn.mask import Grid

ScoreFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's signature: `score_mod(score, batch, head, q_idx, kv_idx)` is the new score."""


@dataclass(frozen=True)
class ScoreMod:
    """A change of the scores.

    Args:
        function: in FlexAttention's signature.
        additive: whether it adds something that does not depend on the score, so that a bias can stand for it.
        learned: whether a gradient flows into what it adds.
        by_head: whether it looks up the head in a table of all the heads that the model was made with, so that it is
            told the number which a head had before others were pruned.
    """

    function: ScoreFunction
    additive: bool = False
    learned: bool = False
    by_head: bool = False

    def of_heads(self, head_ids: Int[Tensor, " heads"]) -> "ScoreMod":
        """This change for some heads of the model, known by their numbers."""
        if not self.by_head:
            return self

        def translated(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return self.function(score, batch, head_ids[head], q_idx, kv_idx)

        return replace(self, function=translated)


@dataclass(frozen=True)
class Scoring:
    """What becomes of queries and keys until they are weights, and of the weights until they are an output.

    Args:
        scale: of the dot product.
        compare: scores of `q` and `k` where these are no dot product.
        mods: changes of the scores, in order.
        sink: one logit for each head, which takes its share of the softmax and gives no value (Agarwal et al. 2025,
            arXiv 2508.10925, gpt-oss).
        reweigh: a change of the weights, given the grid that they are on.
        mix: what the weights add to the output besides the values.
    """

    scale: float = 1.0
    compare: Callable[[Tensor, Tensor], Tensor] | None = None
    mods: tuple[ScoreMod, ...] = ()
    sink: Float[Tensor, " num_heads"] | None = None
    reweigh: Callable[[Tensor, Grid], Tensor] | None = None
    mix: Callable[[Tensor], Tensor] | None = None

    def modify(self, scores: Float[Tensor, "*scores"], grid: Grid) -> Float[Tensor, "*pairs"]:
        """The scores after all changes, of the pairs in the grid."""
        for mod in self.mods:
            scores = mod.function(scores, *grid)
        return scores

    def bias(self, grid: Grid) -> Float[Tensor, "#batch #heads q_seq k_seq"]:
        """What additive changes come to, in fp32 at least."""
        pairs = (1, 1, grid.q_idx.shape[2], grid.kv_idx.shape[3])
        return self.modify(torch.zeros(pairs, device=grid.q_idx.device), grid)


class ScaledDotScore(nn.Module):
    """score(q, k) = qᵀk / √head_dim (Vaswani et al. 2017, arXiv 1706.03762).

    The parameters of a score function, if any, have the heads as their first axis.
    """

    compare: Callable[[Tensor, Tensor], Tensor] | None = None
    """The scores themselves, for a score that is no dot product; every kernel computes those that are."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.scale = head_dim**-0.5

    def forward(
        self, q: Float[Tensor, "batch num_heads q_seq head_dim"]
    ) -> Float[Tensor, "batch num_heads q_seq head_dim"]:
        """The queries whose dot product with the keys, times `scale`, is the score."""
        return q


class DotScore(ScaledDotScore):
    """score(q, k) = qᵀk (Luong et al. 2015, arXiv 1508.04025, "dot")."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__(num_heads, head_dim)
        self.scale = 1.0


class GeneralScore(ScaledDotScore):
    """score(q, k) = qᵀ W k with a matrix for each head (Luong et al. 2015, arXiv 1508.04025, "general").

    W begins as N(0, 1 / head_dim²), which gives its scores the spread of the scaled dot product.
    """

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__(num_heads, head_dim)
        self.scale = 1.0
        self.weight = nn.Parameter(torch.randn(num_heads, head_dim, head_dim) / head_dim)

    def forward(
        self, q: Float[Tensor, "batch num_heads q_seq head_dim"]
    ) -> Float[Tensor, "batch num_heads q_seq head_dim"]:
        return q @ self.weight.to(q.dtype)


class AdditiveScore(ScaledDotScore):
    """score(q, k) = vᵀ tanh(q + k) with a vector for each head (Bahdanau et al. 2014, arXiv 1409.0473).

    The paper's W s + U h are the projected query and key. Luong's "concat", vᵀ tanh(W [s; h]), is the same with both
    in one matrix. It holds `batch heads q_seq k_seq head_dim` numbers in memory.
    """

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__(num_heads, head_dim)
        self.weight = nn.Parameter(torch.randn(num_heads, head_dim, 1) / math.sqrt(head_dim))

    def compare(
        self,
        q: Float[Tensor, "batch num_heads q_seq head_dim"],
        k: Float[Tensor, "batch num_kv_heads k_seq head_dim"],
    ) -> Float[Tensor, "batch num_heads q_seq k_seq"]:
        """The scores of all pairs."""
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        hidden = (q.unsqueeze(-2) + k.unsqueeze(-3)).tanh_()  # in place: it is the largest tensor of all
        return (hidden @ self.weight.to(q.dtype).unsqueeze(1)).squeeze(-1)


SCORES: dict[str, Callable[..., ScaledDotScore]] = {
    "scaled_dot": ScaledDotScore,
    "dot": DotScore,
    "general": GeneralScore,
    "additive": AdditiveScore,
}
"""The values of `attention.score`."""


def find_score(name: str) -> Callable[..., ScaledDotScore]:
    """The score function of a name, ours or the dotted one of a user's class."""
    found: Any = SCORES.get(name) or (pydoc.locate(name) if "." in name else None)
    is_score = isinstance(found, type) and issubclass(found, ScaledDotScore)
    if not is_score:
        reason = f"must be one of {', '.join(SCORES)}, or a subclass of tinyformer.nn.ScaledDotScore"
        raise ArgumentError("score", name, reason)
    return found


def softcap(cap: float) -> ScoreMod:
    """`cap · tanh(score / cap)`: no score passes the cap (Gemma 2, Riviere et al. 2024, arXiv 2408.00118)."""
    if cap <= 0:
        raise ArgumentError("softcap", cap, "must be above 0", {"softcap": 50.0})
    return ScoreMod(lambda score, batch, head, q_idx, kv_idx: cap * torch.tanh(score / cap))


class LocalGaussian(nn.Module):
    """Weights fall off with the distance from a centre that the query predicts (Luong et al. 2015, "local-p").

    w ← w · exp(-(s - p)² / 2σ²) with σ half of the window's reach D, as in the paper (arXiv 1508.04025, eq. 9 and 10),
    and not normalised again. There p = S · sigmoid(vᵀ tanh(W q)) ranges over the whole source sentence; in
    self-attention the query has a place of its own, so p ranges over its window: from the first key in it to the last.

    Args:
        num_heads: each predicts a centre of its own.
        head_dim: of the queries.
        window: see `AttentionMask`.
    """

    def __init__(self, num_heads: int, head_dim: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.weight = nn.Parameter(torch.randn(num_heads, head_dim, head_dim) / math.sqrt(head_dim))
        self.vector = nn.Parameter(torch.randn(num_heads, head_dim, 1) / math.sqrt(head_dim))

    def forward(
        self, q: Float[Tensor, "batch num_heads q_seq head_dim"], k_seq: int, span: tuple[int, int]
    ) -> Callable[[Tensor, Grid], Tensor]:
        """The change of the weights of these queries, or of some of them.

        Args:
            q: the queries.
            k_seq: number of keys.
            span: how many keys before and after itself a query sees.
        """
        before, after = span
        hidden = torch.tanh(q @ self.weight.to(q.dtype))
        logit = hidden @ self.vector.to(q.dtype)
        share = torch.sigmoid(logit.to(torch.promote_types(q.dtype, torch.float32)))
        first, sigma = k_seq - q.shape[2], max(before, after, 1) / 2

        def reweigh(weights: Tensor, grid: Grid) -> Tensor:
            centre = grid.q_idx - before + share[:, :, grid.q_idx.flatten() - first] * (before + after)
            return weights * torch.exp(-((grid.kv_idx - centre) ** 2) / (2 * sigma**2))

        return reweigh
