"""Differential attention: the difference of two softmaxes, which cancels attention that both have in common."""

import math
from collections.abc import Iterable
from typing import Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.errors import ArgumentError, head_dim_of
from tinyformer.nn.attention import Attention
from tinyformer.nn.kernels.eager import AttentionMaps
from tinyformer.nn.layers import RMSNorm
from tinyformer.nn.maps import QKV, AttentionInputs, HeadOutputs, Weights
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.score import Queries
from tinyformer.nn.softmax import AttentionOptions


class DifferentialAttention(Attention):
    """Differential attention (Ye et al. 2024, arXiv 2410.05258).

    head = (1 - λ_init) · norm((softmax(q₁ k₁ᵀ) - λ softmax(q₂ k₂ᵀ)) v);  λ = exp(λ_q₁·λ_k₁) - exp(λ_q₂·λ_k₂) + λ_init

    λ_init = 0.8 - 0.6 exp(-0.3 · layer_index). Each query and key has two halves of `head_dim / 2` dimensions, one for
    each softmax, so the projections are as large as in multi-head attention; only the vectors λ_q, λ_k and the norm are
    added. `project` returns the halves of head h as heads 2h and 2h + 1.

    Args:
        num_kv_heads: number of heads of keys and values; None for `num_heads`.
        head_dim: size of both halves of a query or key together; None for d_model / num_heads.
        qk_norm: as in `Attention`; True divides each half of a query and key by the root mean square of that half.
    """

    num_softmaxes = 2

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        qk_norm: bool | str = False,
        bias: bool | str = False,
        qk_norm_eps: float = 1e-6,
        **options: Unpack[AttentionOptions],
    ) -> None:
        head_dim = head_dim_of(d_model, num_heads, num_heads if num_kv_heads is None else num_kv_heads, head_dim)
        if head_dim % 2:
            raise ArgumentError("head_dim", head_dim, "must be even, to be split in half", {"head_dim": head_dim + 1})
        sizes = d_model, num_heads, num_kv_heads, head_dim, v_head_dim
        super().__init__(*sizes, qk_norm, bias, qk_norm_eps=qk_norm_eps, **options)
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * self.layer_index)
        # λ_q₁, λ_k₁, λ_q₂, λ_k₂, initialised as in the paper's code.
        self.lambdas = nn.ParameterList(nn.Parameter(0.1 * torch.randn(self.head_dim)) for _ in range(4))
        self.head_norm = RMSNorm(self.v_head_dim, eps=1e-5)

    def transform_queries(self, q: Queries) -> Queries:
        """The queries of both softmaxes after the transformation by the score function."""
        return _interleaved(self.score(q[:, i::2]) for i in range(2))

    def attend(self, qkv: QKV, mask: AttentionMask, is_cross: bool) -> HeadOutputs:
        """The normalised difference of the outputs of both softmaxes."""
        # (softmax₁ - λ softmax₂) v = softmax₁ v - λ softmax₂ v: two calls of a kernel, which may share K/V heads.
        first, second = (Attention.attend(self, half, mask, is_cross) for half in _halves(qkv))
        return self.difference(first, second)

    def apply_weights(self, weights: Weights, qkv: QKV, is_cross: bool) -> HeadOutputs:
        """The normalised difference of the outputs of both softmaxes, given their weights."""
        first, second = (Attention.apply_weights(self, weights[:, i::2], qkv, is_cross) for i in range(2))
        return self.difference(first, second)

    def difference(self, first: HeadOutputs, second: HeadOutputs) -> HeadOutputs:
        """The output of each head, given the outputs of its two softmaxes."""
        difference = first - self.factor().to(second.dtype) * second
        return (self.head_norm(difference) * (1 - self.lambda_init)).to(second.dtype)

    def attention_maps(
        self, qkv: QKV, mask: AttentionMask, is_cross: bool, rows: Int[Tensor, " rows"] | None = None
    ) -> AttentionMaps:
        """The attention maps of both softmaxes of each head; maps 2h and 2h + 1 belong to head h."""
        maps = [Attention.attention_maps(self, half, mask, is_cross, rows) for half in _halves(qkv)]
        return AttentionMaps(*map(_interleaved, zip(*maps, strict=True)))

    def weights_of_scores(self, call: AttentionInputs, scores: Weights) -> Weights:
        """The attention weights of both softmaxes of a call, with `scores` in place of the call's own."""
        calls = enumerate(call._replace(qkv=half) for half in _halves(call.qkv))
        return _interleaved(Attention.weights_of_scores(self, half, scores[:, i::2]) for i, half in calls)

    def factor(self) -> Float[Tensor, ""]:
        """λ, the factor of the second softmax."""
        q1, k1, q2, k2 = self.lambdas
        return torch.exp(q1 @ k1) - torch.exp(q2 @ k2) + self.lambda_init


def _halves(qkv: QKV) -> list[QKV]:
    """The queries, keys and values of each softmax."""
    return [QKV(qkv.q[:, i::2], qkv.k[:, i::2], qkv.v) for i in range(2)]


def _interleaved(halves: Iterable[Tensor]) -> Tensor:
    """The tensors of both softmaxes in one tensor, in which heads 2h and 2h + 1 belong to head h."""
    return torch.stack([*halves], dim=2).flatten(1, 2)
