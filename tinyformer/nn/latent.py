"""Keys and values made from one small latent vector, which is all that a cache has to hold."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.nn.attention import BaseAttention
from tinyformer.nn.backends import eager
from tinyformer.nn.cache import LayerCache
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.multi_head import check_heads
from tinyformer.nn.norm import RMSNorm
from tinyformer.nn.weights import AttentionMaps, attention_maps


class LatentAttention(BaseAttention):
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, arXiv 2405.04434, §2.1).

    c = norm(W_DKV x);  k_h = [W_UK,h c; k_R];  v_h = W_UV,h c;  q_h = [W_UQ,h c_Q; W_QR,h c_Q];  c_Q = norm(W_DQ x)

    `k_R`, one for all heads, and its part of the queries carry the position, decoupled from the rest. With rotary
    positions they are turned, and nothing else is; with others they are compared as they are. For each token a cache
    holds `kv_rank + rope_head_dim` numbers in place of `2 num_heads head_dim`. A step behind a cache makes no keys and
    values of them: q_hᵀ W_UK,h c = (W_UK,hᵀ q_h)ᵀ c, and likewise Σ w W_UV,h c = W_UV,h Σ w c, so that queries meet the
    latents themselves, by `eager`, since one query leaves a kernel nothing to fuse.

    Args:
        d_model: width of the residual stream.
        num_heads: of queries, keys and values.
        head_dim: of values, and of queries and keys without their decoupled part; d_model / num_heads unless given.
        rope_head_dim: of the decoupled part; half of `head_dim` unless given.
        kv_rank: size of the latent that keys and values are made from; 4 `head_dim` unless given, as in the paper.
        q_rank: size of the queries' latent; none unless given: they are made from the token itself.
        qk_norm: normalise each query and key, but not their decoupled parts, before they are compared.
        bias: whether the projections have one.
        options: of `BaseAttention`.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int | None = None,
        rope_head_dim: int | None = None,
        kv_rank: int | None = None,
        q_rank: int | None = None,
        qk_norm: bool = False,
        bias: bool = False,
        **options: Any,
    ) -> None:
        check_heads(d_model, num_heads, num_heads, head_dim)
        for key, size in {"rope_head_dim": rope_head_dim, "kv_rank": kv_rank, "q_rank": q_rank}.items():
            if size is not None and size < 1:
                raise ValueError(f"attention.{key}={size} is no size; attention.{key}=64 is, and so is null.")
        if rope_head_dim and rope_head_dim % 2:
            raise ValueError(
                f"attention.rope_head_dim={rope_head_dim} is odd, and rotary positions turn pairs of dimensions; "
                f"attention.rope_head_dim={rope_head_dim + 1} works."
            )
        head_dim = head_dim or d_model // num_heads
        # Rotary positions turn pairs, so the default is even.
        rope_head_dim = rope_head_dim or max(2, head_dim // 4 * 2)
        super().__init__(d_model, num_heads, head_dim + rope_head_dim, head_dim, rope_head_dim, **options)
        self.num_kv_heads, self.kv_rank, self.q_rank = num_heads, kv_rank or 4 * head_dim, q_rank
        source = q_rank or d_model
        self.q_down_proj = nn.Linear(d_model, q_rank, bias=bias) if q_rank else nn.Identity()
        self.q_latent_norm = RMSNorm(q_rank) if q_rank else nn.Identity()
        self.q_proj = nn.Linear(source, num_heads * self.head_dim, bias=bias)
        self.kv_down_proj = nn.Linear(d_model, self.kv_rank, bias=bias)
        self.kv_latent_norm = RMSNorm(self.kv_rank)
        self.k_rope_proj = nn.Linear(d_model, self.position_dim, bias=bias)
        self.k_proj = nn.Linear(self.kv_rank, num_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(self.kv_rank, num_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * head_dim, d_model, bias=bias)
        self.q_norm = RMSNorm(head_dim) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(head_dim) if qk_norm else nn.Identity()

    def project(
        self,
        x: Float[Tensor, "batch q_seq d_model"],
        context: Float[Tensor, "batch k_seq d_model"] | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[
        Float[Tensor, "batch num_heads q_seq q_dim"],
        Float[Tensor, "batch num_kv_heads all_seq k_dim"],
        Float[Tensor, "batch num_kv_heads all_seq v_dim"],
    ]:
        """Queries, keys and values; the cache holds the latent and the decoupled key that they are made from.

        Where queries meet the latents themselves, what the cache holds stands for the keys of all heads, and the latent
        for their values.
        """
        source = x if context is None else context
        first = cache.length if cache else 0
        q = self.split(self.q_proj(self.q_latent_norm(self.q_down_proj(x))), self.num_heads)
        q, q_rope = q.split([self.v_head_dim, self.position_dim], dim=-1)
        latent = self.kv_latent_norm(self.kv_down_proj(source)).unsqueeze(1)
        k_rope = self.k_rope_proj(source).unsqueeze(1)
        if context is None:
            q_rope, k_rope = self.position.rotate(q_rope, first), self.position.rotate(k_rope, first)
        if cache is not None:
            (held,) = cache.extend(torch.cat([latent.to(k_rope.dtype), k_rope], dim=-1), window=self.window)
            latent, k_rope = held.split([self.kv_rank, self.position_dim], dim=-1)
            if self._meets_latents(x.shape[1], held.shape[2]):
                return torch.cat([q, q_rope], dim=-1), held, latent
        k = self.split(self.k_proj(latent.squeeze(1)), self.num_heads)
        v = self.split(self.v_proj(latent.squeeze(1)), self.num_heads)
        q, k = self.q_norm(q), self.k_norm(k)
        # Autocast keeps norms in fp32; the kernels want one dtype.
        q = torch.cat([q.to(v.dtype), q_rope.to(v.dtype)], dim=-1)
        k = torch.cat([k.to(v.dtype), k_rope.to(v.dtype).expand(-1, self.num_heads, -1, -1)], dim=-1)
        return q, k, v

    def _meets_latents(self, q_seq: int, k_seq: int) -> bool:
        """Whether queries can meet the latents themselves, and it takes fewer multiply-adds than keys and values."""
        is_linear = isinstance(self.k_norm, nn.Identity) and self.k_proj.bias is None and self.score.compare is None
        # With a single head, a latent and a key could not be told apart by their shapes.
        if not is_linear or self.num_heads == 1 or self.position.mixed_dim is not None:
            return False
        matrix = self.kv_rank * self.v_head_dim
        return q_seq * (k_seq * (self.kv_rank - self.v_head_dim) + matrix) < k_seq * matrix

    def attend(
        self,
        q: Float[Tensor, "batch num_heads q_seq head_dim"],
        k: Float[Tensor, "batch num_kv_heads k_seq k_dim"],
        v: Float[Tensor, "batch num_kv_heads k_seq v_dim"],
        mask: AttentionMask,
        crosses: bool,
    ) -> Float[Tensor, "batch num_heads q_seq v_head_dim"]:
        """The heads' outputs, from keys and values or from the latent."""
        if k.shape[1] == self.num_heads:
            return super().attend(q, k, v, mask, crosses)
        q, scoring = self.scoring(q, k.shape[2], mask, crosses)
        mixed = eager(self._in_latent_space(q), k, v, mask, scoring, self.dropout if self.training else 0.0)
        return mixed @ self.v_proj.weight.to(mixed.dtype).unflatten(0, (self.num_heads, -1)).mT

    def softmaxes(
        self,
        q: Float[Tensor, "batch num_heads q_seq head_dim"],
        k: Float[Tensor, "batch num_kv_heads k_seq k_dim"],
        mask: AttentionMask,
        crosses: bool,
        rows: Int[Tensor, " rows"] | None = None,
    ) -> AttentionMaps:
        """Those of each head, from keys or from the latent."""
        if k.shape[1] == self.num_heads:
            return super().softmaxes(q, k, mask, crosses, rows)
        q, scoring = self.scoring(q, k.shape[2], mask, crosses)
        return attention_maps(self._in_latent_space(q), k, mask, scoring, rows)

    def _in_latent_space(
        self, q: Float[Tensor, "batch num_heads q_seq head_dim"]
    ) -> Float[Tensor, "batch num_heads q_seq k_dim"]:
        """Queries whose dot product with the latent and the decoupled key is theirs with the keys."""
        q, q_rope = q.split([self.v_head_dim, self.position_dim], dim=-1)
        weight = self.k_proj.weight.to(q.dtype).unflatten(0, (self.num_heads, -1))
        return torch.cat([q @ weight, q_rope], dim=-1)

    @property
    def cached_numbers(self) -> int:
        """How many numbers a cache holds for each token: the latent and the decoupled key."""
        return self.kv_rank + self.position_dim

    def position_part(
        self, q: Float[Tensor, "batch num_heads q_seq head_dim"]
    ) -> Float[Tensor, "batch num_heads q_seq position_dim"]:
        """The decoupled part."""
        return q[..., -self.position_dim :]
