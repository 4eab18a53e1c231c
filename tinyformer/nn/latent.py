"""Multi-head latent attention: keys and values are projected from a small latent vector, which a cache can hold."""

from typing import Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.errors import ArgumentError, head_dim_of, require_at_least
from tinyformer.nn.attention import BaseAttention
from tinyformer.nn.cache import LayerCache
from tinyformer.nn.heads import split_heads
from tinyformer.nn.kernels.eager import AttentionMaps, attention_maps, eager
from tinyformer.nn.layers import RMSNorm
from tinyformer.nn.maps import QKV, HeadOutputs, Source, Tokens, Weights
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.projections import by_letter, make_qk_norm
from tinyformer.nn.score import Queries
from tinyformer.nn.side_inputs import SideInputs
from tinyformer.nn.softmax import AttentionOptions


class LatentQKV(QKV):
    """The queries of each head, and the cached latents in place of keys and values.

    `k` is the latent followed by the positional key, and `v` is the latent. All query heads attend to this one "head";
    each query head has its own rows of `k_proj` and `v_proj`.
    """


class LatentAttention(BaseAttention):
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, arXiv 2405.04434, §2.1).

    c = norm(W_DKV x);  k_h = [W_UK,h c; k_R];  v_h = W_UV,h c;  q_h = [W_UQ,h c_Q; W_QR,h c_Q];  c_Q = norm(W_DQ x)

    `k_R`, which all heads share, and the dimensions of the queries that are multiplied with it encode the position:
    rotary positions rotate only these dimensions; other relative positions do not change them. A cache holds
    `kv_rank + rope_head_dim` numbers per token in place of `2 num_heads head_dim`. In decoding, q_hᵀ W_UK,h c =
    (W_UK,hᵀ q_h)ᵀ c and Σ w W_UV,h c = W_UV,h Σ w c, so queries can attend to the cached latents themselves, without
    computing keys and values. `eager` computes this, since a fused kernel gains nothing for a single query.

    Args:
        head_dim: size of queries and keys without their positional part; None for d_model / num_heads.
        v_head_dim: size of values; None for `head_dim`.
        rope_head_dim: size of the positional part; None for half of `head_dim`.
        kv_rank: size of the latent of keys and values; None for 4 `head_dim`, as in the paper.
        q_rank: size of the latent of queries; None for queries projected from the token itself.
        qk_norm: the norm of queries and keys without their positional parts, see `Attention`.
        bias: the projections with a bias, see `by_letter`: q is `q_proj` and `q_down_proj`, k is `k_proj` and
            `k_rope_proj`, v is `v_proj`, o is `o_proj`. `kv_down_proj` has a bias if k and v have.
    """

    has_latents = True
    reads_latents = True  # False: keys and values are always computed, so that they can be captured

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        rope_head_dim: int | None = None,
        kv_rank: int | None = None,
        q_rank: int | None = None,
        qk_norm: bool | str = False,
        bias: bool | str = False,
        qk_norm_eps: float = 1e-6,
        **options: Unpack[AttentionOptions],
    ) -> None:
        head_dim = head_dim_of(d_model, num_heads, num_heads, head_dim)
        examples = {"v_head_dim": head_dim, "rope_head_dim": 32, "kv_rank": 64, "q_rank": 64}
        require_at_least(
            1, examples, v_head_dim=v_head_dim, rope_head_dim=rope_head_dim, kv_rank=kv_rank, q_rank=q_rank
        )
        if rope_head_dim and rope_head_dim % 2:
            reason = "must be even, since rotary positions rotate pairs of dimensions"
            raise ArgumentError("rope_head_dim", rope_head_dim, reason, {"rope_head_dim": rope_head_dim + 1})
        rope_head_dim = rope_head_dim or max(2, head_dim // 4 * 2)  # even
        v_head_dim = v_head_dim or head_dim
        super().__init__(d_model, num_heads, head_dim + rope_head_dim, v_head_dim, rope_head_dim, **options)
        self.refuse_mixed_values("mixes values; in latent attention, a cache holds latents in place of values")
        if self.exclusive:
            reason = "removes values from the output; in latent attention, a cache holds latents in place of values"
            raise ArgumentError("exclusive", True, reason, {"exclusive": False})
        self.content_dim = head_dim
        self.kv_rank, self.q_rank = kv_rank or 4 * head_dim, q_rank
        q, k, v, o = by_letter("bias", bias, "qkvo").values()
        self.q_down_proj = nn.Linear(d_model, q_rank, bias=q) if q_rank else nn.Identity()
        self.q_latent_norm = RMSNorm(q_rank) if q_rank else nn.Identity()
        self.q_proj = nn.Linear(q_rank or d_model, num_heads * self.head_dim, bias=q)
        self.kv_down_proj = nn.Linear(d_model, self.kv_rank, bias=k and v)
        self.kv_latent_norm = RMSNorm(self.kv_rank)
        self.k_rope_proj = nn.Linear(d_model, rope_head_dim, bias=k)
        self.k_proj = nn.Linear(self.kv_rank, num_heads * head_dim, bias=k)
        self.v_proj = nn.Linear(self.kv_rank, num_heads * v_head_dim, bias=v)
        self.o_proj = nn.Linear(num_heads * v_head_dim, d_model, bias=o)
        self.q_norm = make_qk_norm(qk_norm, num_heads, head_dim, qk_norm_eps)
        self.k_norm = make_qk_norm(qk_norm, num_heads, head_dim, qk_norm_eps)

    def project(
        self,
        x: Tokens,
        context: Source | None = None,
        cache: LayerCache | None = None,
        side: SideInputs | None = None,
    ) -> QKV:
        """The queries, keys and values, or a `LatentQKV` if attending to the cached latents costs less."""
        q = split_heads(self.q_proj(self.q_latent_norm(self.q_down_proj(x))), self.head_dim)
        q, q_rope = self._parts(q)
        q, q_rope = self._parts(self.transform_queries(torch.cat([self.q_norm(q).to(q_rope.dtype), q_rope], dim=-1)))
        if context is not None and cache is not None and (known := cache.of_context(context)):
            (cached,) = known
        else:
            source = x if context is None else context
            latent = self.kv_latent_norm(self.kv_down_proj(source)).unsqueeze(1)
            k_rope = self.k_rope_proj(source).unsqueeze(1)
            if context is None:
                offset = cache.length if cache else 0
                q_rope, k_rope = self.position.rotate(q_rope, offset), self.position.rotate(k_rope, offset)
            if cache is not None:
                window = self.window if context is None else None
                (cached,) = cache.extend(torch.cat([latent.to(k_rope.dtype), k_rope], dim=-1), window=window)
        if cache is not None:
            latent, k_rope = cached.split([self.kv_rank, self.position_dim], dim=-1)
            if self.latents_cost_less(x.shape[1], cached.shape[2]):
                return LatentQKV(torch.cat([q, q_rope], dim=-1), cached, latent)
        k = split_heads(self.k_proj(latent.squeeze(1)), self.content_dim)
        v = split_heads(self.v_proj(latent.squeeze(1)), self.v_head_dim)
        # Autocast keeps norms in fp32; kernels take one dtype.
        q = torch.cat([q, q_rope], dim=-1).to(v.dtype)
        k = torch.cat([self.k_norm(k).to(v.dtype), k_rope.to(v.dtype).expand(-1, self.num_heads, -1, -1)], dim=-1)
        return QKV(q, k, v)

    def latents_cost_less(self, q_seq: int, k_seq: int) -> bool:
        """Return True if attending to the latents takes fewer multiply-adds than attending to keys and values."""
        is_product = isinstance(self.k_norm, nn.Identity) and self.score.compare is None
        is_linear = is_product and self.k_proj.bias is None and self.v_proj.bias is None
        if not (self.reads_latents and is_linear) or self.position.mixed_dim is not None:
            return False
        made_dim = self.content_dim + self.v_head_dim  # of a head's key and value, which are projected from a latent
        matrices = self.kv_rank * made_dim
        return q_seq * (k_seq * (2 * self.kv_rank - made_dim) + matrices) < k_seq * matrices

    def attend(self, qkv: QKV, mask: AttentionMask, is_cross: bool) -> HeadOutputs:
        """The output of each head, from keys and values or, for a `LatentQKV`, from the latents."""
        if not isinstance(qkv, LatentQKV):
            return super().attend(qkv, mask, is_cross)
        scoring = self.scoring(qkv.q, qkv.k.shape[2], mask, is_cross)
        dropout = self.dropout if self.training else 0.0
        return self._values_of(eager(self._in_latent_space(qkv.q), qkv.k, qkv.v, mask, scoring, dropout))

    def apply_weights(self, weights: Weights, qkv: QKV, is_cross: bool) -> HeadOutputs:
        """The output of each head, given its attention weights: from values or, for a `LatentQKV`, from the latents."""
        heads = super().apply_weights(weights, qkv, is_cross)
        return self._values_of(heads) if isinstance(qkv, LatentQKV) else heads

    def attention_maps(
        self, qkv: QKV, mask: AttentionMask, is_cross: bool, rows: Int[Tensor, " rows"] | None = None
    ) -> AttentionMaps:
        """The attention maps of each head, from the keys or, for a `LatentQKV`, from the latents."""
        if not isinstance(qkv, LatentQKV):
            return super().attention_maps(qkv, mask, is_cross, rows)
        scoring = self.scoring(qkv.q, qkv.k.shape[2], mask, is_cross)
        return attention_maps(self._in_latent_space(qkv.q), qkv.k, mask, scoring, rows)

    def _parts(self, q: Queries) -> tuple[Tensor, ...]:
        """Split queries into the dimensions for the keys' content and the dimensions for the positional key."""
        return q.split([self.content_dim, self.position_dim], dim=-1)

    def _in_latent_space(self, q: Queries) -> Float[Tensor, "batch num_heads q_seq k_dim"]:
        """Queries whose dot products with latents and positional keys equal the dot products of `q` with the keys."""
        q, q_rope = self._parts(q)
        weight = self.k_proj.weight.to(q.dtype).unflatten(0, (self.num_heads, -1))
        return torch.cat([q @ weight, q_rope], dim=-1)

    def _values_of(self, mixed: Float[Tensor, "batch num_heads q_seq kv_rank"]) -> HeadOutputs:
        """The output of each head, projected from its weighted mean of latents."""
        return mixed @ self.v_proj.weight.to(mixed.dtype).unflatten(0, (self.num_heads, -1)).mT

    def position_part(self, q: Queries) -> Float[Tensor, "batch num_heads q_seq position_dim"]:
        return q[..., -self.position_dim :]
