"""Attention: project to heads, compare, mix, gate, and project back."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tinyformer.nn.backends import AttentionCase, Backend, attention_weights, running_kernel, select_backend
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.norm import RMSNorm


class HeadGate(nn.Module):
    """A factor for each head between the backend and `o_proj`; 0 takes the head away, on every backend.

    Args:
        num_heads: of the layer.
        ablated: the heads whose factor is 0.
    """

    factors: Tensor | None

    def __init__(self, num_heads: int, ablated: Sequence[int] = ()) -> None:
        super().__init__()
        factors = None
        if ablated:
            factors = torch.ones(num_heads)
            factors[list(ablated)] = 0.0
        # It follows from the config, so it is no part of the weights.
        self.register_buffer("factors", factors, persistent=False)

    def forward(
        self, heads: Float[Tensor, "batch num_heads seq head_dim"]
    ) -> Float[Tensor, "batch num_heads seq head_dim"]:
        if self.factors is None:
            return heads
        return heads * self.factors.to(heads.dtype).view(-1, 1, 1)


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, arXiv 1706.03762), its keys and values shared or not.

    head_h = softmax(q_h k_gᵀ / √head_dim) v_g with g = h // (num_heads / num_kv_heads);  output = o_proj(concat(head))

    `num_kv_heads == num_heads` is multi-head attention, 1 is multi-query (Shazeer 2019, arXiv 1911.02150), between
    them grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245).

    Args:
        d_model: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key and value heads; `num_heads` unless given.
        head_dim: of each head; d_model / num_heads unless given.
        bias: whether the projections have one.
        dropout: probability to drop an attention weight in training.
        qk_norm: normalise each query and key by its root mean square before they are compared, with a learned
            scale for each dimension (Henry et al. 2020, arXiv 2010.04245; Dehghani et al. 2023, arXiv 2302.05442).
        backend: "auto", "eager", "sdpa" or "flash" (see `tinyformer.nn.backends`).
        position: makes the relative position, given `head_dim`; applied to self-attention only, since the tokens of
            two sequences have no distance.
        ablated_heads: `[layer, head]` pairs of the whole model whose heads are taken away.
        layer_index: which layer this is, from 0.
        num_layers: how many there are.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        qk_norm: bool = False,
        backend: str = "auto",
        position: Callable[..., nn.Module] | None = None,
        ablated_heads: Sequence[Sequence[int]] = (),
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_heads(d_model, num_heads, num_kv_heads, head_dim)
        head_dim = head_dim or d_model // num_heads
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale = head_dim**-0.5
        self.dropout = dropout
        self.q_proj = nn.Linear(d_model, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(d_model, num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(d_model, num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * head_dim, d_model, bias=bias)
        self.q_norm = RMSNorm(head_dim) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(head_dim) if qk_norm else nn.Identity()
        self.position = position(head_dim=head_dim) if position else nn.Identity()
        self.gate = HeadGate(num_heads, _ablated_here(ablated_heads, layer_index, num_layers, num_heads))
        self.backend = backend
        # The structure is checked now; the first step, or `resolve`, decides for a device and a dtype.
        select_backend(backend, AttentionCase("cpu", torch.float32, head_dim))
        self.resolved: Backend | None = None

    def forward(
        self,
        x: Float[Tensor, "batch q_seq d_model"],
        mask: AttentionMask | None = None,
        context: Float[Tensor, "batch k_seq d_model"] | None = None,
    ) -> Float[Tensor, "batch q_seq d_model"]:
        """Mix the values of the tokens that the mask lets each token see.

        Args:
            x: the tokens that ask.
            mask: who may attend to whom; everybody to everybody unless given.
            context: the tokens that answer (cross-attention); `x` itself unless given.
        """
        mask = mask or AttentionMask()
        q, k, v = self.project(x, context)
        dropout = self.dropout if self.training else 0.0
        backend = self.resolved or select_backend(self.backend, self._case(q, k, mask, dropout))
        heads = self.gate(backend.compute(q, k, v, mask, self.scale, dropout))
        return self.o_proj(heads.transpose(1, 2).flatten(-2))

    def weights(
        self,
        x: Float[Tensor, "batch q_seq d_model"],
        mask: AttentionMask | None = None,
        context: Float[Tensor, "batch k_seq d_model"] | None = None,
    ) -> Float[Tensor, "batch num_heads q_seq k_seq"]:
        """The exact attention weights that `forward` uses, whatever kernel it runs; without dropout."""
        q, k, _ = self.project(x, context)
        return attention_weights(q, k, mask or AttentionMask(), self.scale)

    def project(
        self,
        x: Float[Tensor, "batch q_seq d_model"],
        context: Float[Tensor, "batch k_seq d_model"] | None = None,
    ) -> tuple[
        Float[Tensor, "batch num_heads q_seq head_dim"],
        Float[Tensor, "batch num_kv_heads k_seq head_dim"],
        Float[Tensor, "batch num_kv_heads k_seq head_dim"],
    ]:
        """Queries, keys and values, normalised and positioned: what the backends compute on."""
        source = x if context is None else context
        q = self._split(self.q_proj(x), self.num_heads)
        k = self._split(self.k_proj(source), self.num_kv_heads)
        v = self._split(self.v_proj(source), self.num_kv_heads)
        q, k = self.q_norm(q), self.k_norm(k)
        if context is None:
            q, k = self.position(q), self.position(k)
        # Autocast keeps norms in fp32; the kernels want one dtype.
        return q.to(v.dtype), k.to(v.dtype), v

    def resolve(self, device: str, dtype: torch.dtype, mask: AttentionMask, seq: int | None = None) -> Backend:
        """Choose the backend once and for all, before the first step and before compiling.

        Args:
            device: the type, "cpu" or "cuda".
            dtype: that of queries, keys and values, under autocast the lower one.
            mask: of the kind that `forward` will get.
            seq: the longest sequence, in tokens; long unless given.

        Raises:
            ValueError: the named backend cannot compute this; the sentence names one that can.
        """
        case = AttentionCase(device, dtype, self.head_dim, self.dropout > 0, mask.lengths is not None, seq)
        self.resolved = select_backend(self.backend, case)
        return self.resolved

    def running_kernel(self, device: str, dtype: torch.dtype, mask: AttentionMask, seq: int = 8) -> str:
        """The kernel that the resolved backend runs on such input, found by running it once."""
        if self.resolved is None or self.resolved.name == "eager":
            return "eager"
        q = torch.zeros(1, self.num_heads, seq, self.head_dim, device=device, dtype=dtype)
        k = v = torch.zeros(1, self.num_kv_heads, seq, self.head_dim, device=device, dtype=dtype)
        compute = self.resolved.compute
        return running_kernel(lambda: compute(q, k, v, mask, self.scale, self.dropout))

    def _case(self, q: Tensor, k: Tensor, mask: AttentionMask, dropout: float) -> AttentionCase:
        q_seq, k_seq = q.shape[2], k.shape[2]
        needs_mask = mask.lengths is not None or (mask.causal and q_seq != k_seq)
        return AttentionCase(q.device.type, q.dtype, self.head_dim, dropout > 0, needs_mask, max(q_seq, k_seq))

    def _split(
        self, x: Float[Tensor, "batch seq width"], num_heads: int
    ) -> Float[Tensor, "batch {num_heads} seq head_dim"]:
        return x.unflatten(-1, (num_heads, self.head_dim)).transpose(1, 2)


def _check_heads(d_model: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> None:
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


def _ablated_here(pairs: Sequence[Sequence[int]], layer_index: int, num_layers: int, num_heads: int) -> list[int]:
    """The heads of this layer among the model's ablated ones, each pair checked against the model."""
    for pair in pairs:
        if len(pair) != 2 or not (0 <= pair[0] < num_layers and 0 <= pair[1] < num_heads):
            raise ValueError(
                f"attention.ablated_heads holds {list(pair)}, which is no [layer, head] of a model with "
                f"{num_layers} layers of {num_heads} heads; [{num_layers - 1}, {num_heads - 1}] is the last."
            )
    return [head for layer, head in pairs if layer == layer_index]
