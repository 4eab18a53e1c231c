"""The difference of two softmaxes, in which what both attend to by chance cancels."""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.nn.attention import BaseAttention
from tinyformer.nn.cache import LayerCache
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.multi_head import check_heads
from tinyformer.nn.norm import RMSNorm
from tinyformer.nn.weights import AttentionMaps


class DifferentialAttention(BaseAttention):
    """Differential attention (Ye et al. 2024, arXiv 2410.05258).

    head = (1 - λ_init) · norm((softmax(q₁ k₁ᵀ) - λ softmax(q₂ k₂ᵀ)) v);  λ = exp(λ_q₁·λ_k₁) - exp(λ_q₂·λ_k₂) + λ_init

    λ_init = 0.8 - 0.6 exp(-0.3 · layer_index). Queries and keys are compared in halves of `head_dim / 2`, so the
    parameters are those of plain attention with as many heads, but for λ and the norm's scale.

    Args:
        d_model: width of the residual stream.
        num_heads: query heads, each with two softmaxes.
        num_kv_heads: key and value heads; `num_heads` unless given.
        head_dim: of values, and of both halves of queries and keys together; d_model / num_heads unless given.
        qk_norm: normalise each half of a query and a key before they are compared.
        bias: whether the projections have one.
        layer_index: which layer this is, from 0.
        options: of `BaseAttention`.

    Raises:
        ValueError: `head_dim` is odd.
    """

    num_softmaxes = 2

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        qk_norm: bool = False,
        bias: bool = False,
        layer_index: int = 0,
        **options: Any,
    ) -> None:
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_heads(d_model, num_heads, num_kv_heads, head_dim)
        head_dim = head_dim or d_model // num_heads
        if head_dim % 2:
            raise ValueError(
                f"attention.head_dim={head_dim} (d_model / num_heads) has no halves for differential attention; "
                f"attention.head_dim={head_dim + 1} works."
            )
        super().__init__(d_model, num_heads, head_dim // 2, head_dim, layer_index=layer_index, **options)
        self.num_kv_heads = num_kv_heads
        self.q_proj = nn.Linear(d_model, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(d_model, num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(d_model, num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * head_dim, d_model, bias=bias)
        self.q_norm = RMSNorm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim) if qk_norm else nn.Identity()
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer_index)
        # λ_q₁, λ_k₁, λ_q₂, λ_k₂, begun as in the paper's code.
        self.lambdas = nn.ParameterList(nn.Parameter(0.1 * torch.randn(self.head_dim)) for _ in range(4))
        self.head_norm = RMSNorm(head_dim, eps=1e-5)

    def project(
        self,
        x: Float[Tensor, "batch q_seq d_model"],
        context: Float[Tensor, "batch k_seq d_model"] | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[
        Float[Tensor, "batch num_heads q_seq q_dim"],
        Float[Tensor, "batch num_kv_heads all_seq q_dim"],
        Float[Tensor, "batch num_kv_heads all_seq v_head_dim"],
    ]:
        """Queries and keys, their two halves one behind the other, and values."""
        source = x if context is None else context
        first = cache.length if cache else 0
        # The halves are heads of their own until they are positioned.
        q = self.q_norm(self.split(self.q_proj(x), 2 * self.num_heads))
        k = self.k_norm(self.split(self.k_proj(source), 2 * self.num_kv_heads))
        v = self.split(self.v_proj(source), self.num_kv_heads)
        if context is None:
            q, k = self.position.rotate(q, first), self.position.rotate(k, first)
        # Autocast keeps norms in fp32; the kernels want one dtype.
        q, k = _join_halves(q.to(v.dtype)), _join_halves(k.to(v.dtype))
        if cache is not None:
            k, v = cache.extend(k, v, window=self.window)
        return q, k, v

    def attend(
        self,
        q: Float[Tensor, "batch num_heads q_seq q_dim"],
        k: Float[Tensor, "batch num_kv_heads k_seq q_dim"],
        v: Float[Tensor, "batch num_kv_heads k_seq v_head_dim"],
        mask: AttentionMask,
        crosses: bool,
    ) -> Float[Tensor, "batch num_heads q_seq v_head_dim"]:
        """The difference of what the two softmaxes mix, normalised."""
        # Softmax is linear in the values: two calls of a kernel, whose K/V heads stay shared.
        halves = zip(q.chunk(2, dim=-1), k.chunk(2, dim=-1), strict=True)
        first, second = (super(DifferentialAttention, self).attend(*half, v, mask, crosses) for half in halves)
        difference = first - self.factor().to(second.dtype) * second
        return (self.head_norm(difference) * (1 - self.lambda_init)).to(v.dtype)

    def softmaxes(
        self,
        q: Float[Tensor, "batch num_heads q_seq q_dim"],
        k: Float[Tensor, "batch num_kv_heads k_seq q_dim"],
        mask: AttentionMask,
        crosses: bool,
        rows: Int[Tensor, " rows"] | None = None,
    ) -> AttentionMaps:
        """Both softmaxes of each head: maps 2h and 2h + 1 are those of head h."""
        halves = zip(q.chunk(2, dim=-1), k.chunk(2, dim=-1), strict=True)
        first, second = (super(DifferentialAttention, self).softmaxes(*half, mask, crosses, rows) for half in halves)
        return AttentionMaps(*(torch.stack(p, dim=2).flatten(1, 2) for p in zip(first, second, strict=True)))

    def factor(self) -> Float[Tensor, ""]:
        """λ, by which the second softmax is subtracted."""
        q1, k1, q2, k2 = self.lambdas
        return torch.exp(q1 @ k1) - torch.exp(q2 @ k2) + self.lambda_init


def _join_halves(
    x: Float[Tensor, "batch twice_heads seq half_dim"],
) -> Float[Tensor, "batch heads seq head_dim"]:
    return x.unflatten(1, (-1, 2)).transpose(2, 3).flatten(-2)
