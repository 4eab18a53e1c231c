"""Multi-head, grouped-query and multi-query attention.

`BaseAttention.forward` projects tokens to queries, keys and values, attends, gates the heads and projects back. The
definition of `attend`, softmax(q kᵀ / √head_dim) v, opens `kernels.eager`; the options that change it are in `softmax`.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.errors import ArgumentError, require_at_least
from tinyformer.nn.cache import LayerCache
from tinyformer.nn.gate import HeadGate, OutputGate, ablated_in_layer
from tinyformer.nn.heads import split_heads
from tinyformer.nn.kernels.eager import AttentionMaps
from tinyformer.nn.maps import QKV, AttentionInputs, HeadOutputs, Weights, exact_maps
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.norm import RMSNorm
from tinyformer.nn.sizes import head_dim_of
from tinyformer.nn.softmax import SoftmaxAttention


class BaseAttention(SoftmaxAttention):
    """Attention without its projections, which a subclass makes: those that `project` uses, and `o_proj`.

    Rows of `q_proj`, `k_proj` and `v_proj` and columns of `o_proj` are ordered by head: `prune_heads` relies on it.

    Args:
        gate: whether each token gates each head's output, see `OutputGate`.
        ablated_heads: `[layer, head]` pairs of the whole model whose heads output zero; see `ablated_in_layer`.
        layer_index: index of the layer, from 0.
        kind: the kind of attention in an encoder–decoder, see `KINDS`.
        options: of `SoftmaxAttention`, which also describes the sizes.
    """

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        position_dim: int | None = None,
        num_kv_heads: int | None = None,
        *,
        gate: bool = False,
        ablated_heads: Sequence[Sequence[int | str]] = (),
        layer_index: int = 0,
        num_layers: int = 1,
        kind: str | None = None,
        **options: Any,
    ) -> None:
        sizes = (num_heads, head_dim, v_head_dim, position_dim, num_kv_heads)
        super().__init__(*sizes, layer_index=layer_index, **options)
        self.kind = kind
        self.output_gate = OutputGate(d_model, num_heads) if gate else None
        ablated = ablated_in_layer(ablated_heads, layer_index, num_layers, num_heads, kind)
        self.head_gate = HeadGate(num_heads, ablated)
        self.inputs_hook = nn.Identity()  # its hooks see each `AttentionInputs`, and may replace it

    def forward(
        self,
        x: Float[Tensor, "batch q_seq input_dim"],
        mask: AttentionMask | None = None,
        context: Float[Tensor, "batch k_seq input_dim"] | None = None,
        context_mask: AttentionMask | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "batch q_seq d_model"]:
        """Attend from each token of `x` to the tokens of `x` that the mask allows; `weights` has how much.

        Args:
            x: what queries are projected from, and keys and values, too, unless there is a context.
            mask: the keys of `x` that each query may attend to; all without a mask.
            context: what keys and values are projected from in cross-attention: `attention(query, key, key)` of other
                libraries is `attention(query, context=key)` here.
            context_mask: the keys of the context that each query may attend to; `mask` has no effect then.
            cache: keys and values of the tokens before `x`, to which those of `x` are appended; in cross-attention
                those of the context, which are projected if it is empty.
        """
        call = self.inputs_hook(self.call(x, mask, context, context_mask, cache))
        if call.weights is None:
            heads = self.attend(call.qkv, call.mask, call.is_cross)
        else:
            heads = self.apply_weights(call.weights, call.qkv, call.is_cross)
        if self.output_gate is not None:
            heads = self.output_gate(heads, x)
        return self.o_proj(self.head_gate(heads).transpose(1, 2).flatten(-2))

    @abstractmethod
    def project(
        self,
        x: Float[Tensor, "batch q_seq input_dim"],
        context: Float[Tensor, "batch k_seq input_dim"] | None = None,
        cache: LayerCache | None = None,
    ) -> QKV:
        """Queries, keys and values, normalised and positioned.

        Queries pass through `transform_queries` before positions rotate them. `cache.extend(..., window=self.window)`
        appends keys and values to those of earlier tokens; a context is projected into an empty cache, and read later.
        """

    def attend(self, qkv: QKV, mask: AttentionMask, is_cross: bool) -> HeadOutputs:
        """The output of each head."""
        return self.softmax_attention(*qkv, mask, is_cross)

    def apply_weights(self, weights: Weights, qkv: QKV, is_cross: bool) -> HeadOutputs:
        """The output of each head, given the weights of `attention_maps`; a subclass overrides it with `attend`."""
        return self.weighted_values(weights, qkv.v, is_cross)

    def attention_maps(
        self, qkv: QKV, mask: AttentionMask, is_cross: bool, rows: Int[Tensor, " rows"] | None = None
    ) -> AttentionMaps:
        """The attention maps of `attend`, one per softmax, without dropout."""
        return self.softmax_maps(qkv.q, qkv.k, mask, is_cross, rows)

    def ablated(self) -> list[bool]:
        """A flag for each head: True if it is ablated in every row; analyses leave such heads out, or name them."""
        factors = self.head_gate.factors
        return [False] * self.num_heads if factors is None else (factors.view(-1, self.num_heads) == 0).all(0).tolist()

    def ablated_maps(self) -> list[bool]:
        """A flag for each map: True if its head is ablated."""
        return [flag for flag in self.ablated() for _ in range(self.num_softmaxes)]

    def weights(self, *args: Any, cache: LayerCache | None = None, **kwargs: Any) -> Weights:
        """The exact attention weights of `forward`, given its arguments, on any backend; the cache is not changed.

        Their shape is `batch num_heads q_seq k_seq`, with two maps for each head in differential attention. There is no
        dropout: rows sum to 1, or to less with a sink or a local Gaussian; a row without visible keys is 0.
        """
        return self.maps_of_call(self.call(*args, cache=cache and cache.copy(), **kwargs)).weights

    def maps_of_call(self, call: AttentionInputs, rows: Int[Tensor, " rows"] | None = None) -> AttentionMaps:
        """The attention weights of a call and their logits, for all queries or those at `rows`; see `exact_maps`."""
        return exact_maps(self, call, rows)

    def weights_of_scores(self, call: AttentionInputs, scores: Weights) -> Weights:
        """The attention weights of a call if its scores were others; see `softmax_of_scores`."""
        n, (q, k, _) = self.num_softmaxes, call.qkv
        parts = [
            self.softmax_of_scores(scores[:, i::n], q[:, i::n], k[:, i::n], call.mask, call.is_cross) for i in range(n)
        ]
        return torch.stack(parts, dim=2).flatten(1, 2)

    def call(
        self,
        x: Float[Tensor, "batch q_seq input_dim"],
        mask: AttentionMask | None = None,
        context: Float[Tensor, "batch k_seq input_dim"] | None = None,
        context_mask: AttentionMask | None = None,
        cache: LayerCache | None = None,
    ) -> AttentionInputs:
        """The inputs of attention in `forward`, given its arguments: the mask is limited to the layer's window.

        In cross-attention the window is around the aligned position, see `AttentionMask.aligned`, or the predicted one.
        """
        if isinstance(mask, Tensor):
            reason = "must be an AttentionMask, such as AttentionMask(allowed=mask); keys and values are of `context`"
            raise ArgumentError("mask", tuple(mask.shape), reason)
        is_cross = context is not None
        mask = (context_mask if is_cross else mask) or AttentionMask()
        if context is not None and self.window is not None and self.gaussian is None:
            first = 0 if cache is None else cache.num_queries
            mask = mask.aligned(self.window, first, x.shape[1], context.shape[1])
            if cache is not None:
                cache.num_queries += x.shape[1]
        elif not is_cross:
            mask = mask.within(self.window)
        mask = self.head_map.mask_of_left(mask)
        mask.require_sizes(len(x), self.num_heads)
        if cache is not None and cache.length and not is_cross and not mask.causal:
            reason = "must be True: cached tokens do not attend to new ones"
            raise ArgumentError("mask.causal", False, reason, {"causal": True})
        num_behind = 0 if cache is None or is_cross else cache.num_behind(self.window)
        return AttentionInputs(self.project(x, context, cache), mask.without_first(num_behind), is_cross, num_behind)


class Attention(BaseAttention):
    """Multi-head attention (Vaswani et al. 2017, arXiv 1706.03762), with or without shared keys and values.

    head_h = softmax(q_h k_gᵀ / √head_dim) v_g with g = h // (num_heads / num_kv_heads);  output = o_proj(concat(head))

    `num_kv_heads == num_heads` is multi-head attention, 1 is multi-query attention (Shazeer 2019, arXiv 1911.02150),
    between them is grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245).

    Args:
        num_kv_heads: None for `num_heads`.
        head_dim: size of each query and key; None for d_model / num_heads.
        v_head_dim: size of each value, and so of each head's output; None for `head_dim`.
        input_dim: size of each vector of `x` and of the context, used outside of a block; None for `d_model`.
        qk_norm: divide each query and key by its root mean square, with a learned scale for each dimension (Henry et
            al. 2020, arXiv 2010.04245; Dehghani et al. 2023, arXiv 2302.05442).
        options: of `BaseAttention`.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        qk_norm: bool = False,
        bias: bool = False,
        input_dim: int | None = None,
        **options: Any,
    ) -> None:
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        head_dim = head_dim_of(d_model, num_heads, num_kv_heads, head_dim)
        require_at_least(1, {"v_head_dim": head_dim, "input_dim": d_model}, v_head_dim=v_head_dim, input_dim=input_dim)
        v_head_dim, width = v_head_dim or head_dim, input_dim or d_model
        super().__init__(width, num_heads, head_dim // self.num_softmaxes, v_head_dim, None, num_kv_heads, **options)
        self.q_proj = nn.Linear(width, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(width, num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(width, num_kv_heads * v_head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * v_head_dim, d_model, bias=bias)
        self.q_norm = RMSNorm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim) if qk_norm else nn.Identity()

    def project(
        self,
        x: Float[Tensor, "batch q_seq input_dim"],
        context: Float[Tensor, "batch k_seq input_dim"] | None = None,
        cache: LayerCache | None = None,
    ) -> QKV:
        """Queries, keys and values, normalised and positioned."""
        q = self.transform_queries(self.q_norm(split_heads(self.q_proj(x), self.head_dim)))
        if context is not None and cache is not None and (known := cache.of_context(context)):
            k, v = known
            return QKV(q.to(v.dtype), k, v)
        source = x if context is None else context
        k = self.k_norm(split_heads(self.k_proj(source), self.head_dim))
        v = split_heads(self.v_proj(source), self.v_head_dim)
        if context is None:
            offset = cache.length if cache else 0
            q, k = self.position.rotate(q, offset), self.position.rotate(k, offset)
        q, k = q.to(v.dtype), k.to(v.dtype)  # autocast keeps norms in fp32; kernels take one dtype
        if cache is not None:
            k, v = cache.extend(k, v, window=None if context is not None else self.window)
        return QKV(q, k, v)
