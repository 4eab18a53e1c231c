"""Multi-head attention, with keys and values for each head or shared among several."""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from tinyformer.nn.attention import BaseAttention
from tinyformer.nn.cache import LayerCache
from tinyformer.nn.norm import RMSNorm


class Attention(BaseAttention):
    """Multi-head attention (Vaswani et al. 2017, arXiv 1706.03762), its keys and values shared or not.

    head_h = softmax(q_h k_gᵀ / √head_dim) v_g with g = h // (num_heads / num_kv_heads);  output = o_proj(concat(head))

    `num_kv_heads == num_heads` is multi-head attention, 1 is multi-query (Shazeer 2019, arXiv 1911.02150), between
    them grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245).

    Args:
        d_model: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key and value heads; `num_heads` unless given.
        head_dim: of each head; d_model / num_heads unless given.
        qk_norm: normalise each query and key by its root mean square before they are compared, with a learned
            scale for each dimension (Henry et al. 2020, arXiv 2010.04245; Dehghani et al. 2023, arXiv 2302.05442).
        bias: whether the projections have one.
        options: of `BaseAttention`.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        qk_norm: bool = False,
        bias: bool = False,
        **options: Any,
    ) -> None:
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_heads(d_model, num_heads, num_kv_heads, head_dim)
        super().__init__(d_model, num_heads, head_dim or d_model // num_heads, **options)
        self.num_kv_heads = num_kv_heads
        self.q_proj = nn.Linear(d_model, num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(d_model, num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(d_model, num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * self.head_dim, d_model, bias=bias)
        self.q_norm = RMSNorm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim) if qk_norm else nn.Identity()

    def project(
        self,
        x: Float[Tensor, "batch q_seq d_model"],
        context: Float[Tensor, "batch k_seq d_model"] | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[
        Float[Tensor, "batch num_heads q_seq head_dim"],
        Float[Tensor, "batch num_kv_heads all_seq head_dim"],
        Float[Tensor, "batch num_kv_heads all_seq head_dim"],
    ]:
        """Queries, keys and values, normalised and positioned; with those of the cache."""
        source = x if context is None else context
        first = cache.length if cache else 0
        q = self.split(self.q_proj(x), self.num_heads)
        k = self.split(self.k_proj(source), self.num_kv_heads)
        v = self.split(self.v_proj(source), self.num_kv_heads)
        q, k = self.q_norm(q), self.k_norm(k)
        if context is None:
            q, k = self.position.rotate(q, first), self.position.rotate(k, first)
        # Autocast keeps norms in fp32; the kernels want one dtype.
        q, k = q.to(v.dtype), k.to(v.dtype)
        if cache is not None:
            k, v = cache.extend(k, v, window=self.window)
        return q, k, v


def check_heads(d_model: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> None:
    """Refuse numbers of heads that do not divide what they share.

    Raises:
        ValueError: they do not; the sentence names the nearest that do.
    """
    if head_dim is not None and head_dim < 1:
        raise ValueError(f"attention.head_dim={head_dim} is no size; attention.head_dim=32 is, null is their share.")
    if num_heads < 1 or (head_dim is None and d_model % num_heads):
        works = max((n for n in range(1, min(num_heads, d_model) + 1) if d_model % n == 0), default=1)
        raise ValueError(
            f"model.num_heads={num_heads} does not divide model.d_model={d_model}; model.num_heads={works} does."
        )
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        works = max((n for n in range(1, min(num_kv_heads, num_heads) + 1) if num_heads % n == 0), default=1)
        raise ValueError(
            f"attention.num_kv_heads={num_kv_heads} does not divide model.num_heads={num_heads}; "
            f"attention.num_kv_heads={works} does."
        )
