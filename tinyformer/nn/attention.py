"""Multi-head, grouped-query and multi-query attention, and the base class of all attention layers.

`BaseAttention.forward` runs four steps: `project` computes q, k and v, `attend` computes the heads' outputs with one of
the `kernels`, the gates of `heads` scale the outputs, and `o_proj` projects them. `kernels.eager` has the definition,
softmax(q kᵀ / √head_dim) v; the options that change it are in `softmax`. `Attention` has three variants:

    multi-head (MHA)         grouped-query (GQA)      multi-query (MQA)
    num_kv_heads=4           num_kv_heads=2           num_kv_heads=1

    k,v  k,v  k,v  k,v         k,v       k,v                 k,v
     │    │    │    │         ┌─┴──┐    ┌─┴──┐        ┌────┬──┴─┬────┐
     q    q    q    q         q    q    q    q        q    q    q    q

The suffix of a tensor's name is its shape:

    B batch      T queries (q_seq)    H query heads (num_heads)          D size of a query and of a key (head_dim)
    M d_model    S keys (k_seq)       G heads of keys and values         V size of a value (v_head_dim)
"""

from abc import abstractmethod
from dataclasses import replace
from typing import Any, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.errors import ArgumentError, head_dim_of, require_at_least
from tinyformer.nn.cache import LayerCache
from tinyformer.nn.heads import split_heads, without_own_value
from tinyformer.nn.kernels.choose import run_kernel
from tinyformer.nn.kernels.eager import AttentionMaps, attention_maps, weighted_values
from tinyformer.nn.maps import QKV, AttentionInputs, HeadOutputs, Source, Tokens, Weights, exact_maps
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.projections import by_letter, make_qk_norm
from tinyformer.nn.side_inputs import SideInputs, Values
from tinyformer.nn.softmax import AttentionOptions, SoftmaxAttention


class BaseAttention(SoftmaxAttention):
    """Base class of attention layers; a subclass creates the projections that `project` uses, and `o_proj`.

    The rows of `q_proj`, `k_proj` and `v_proj` and the columns of `o_proj` must be ordered by head, for `prune_heads`.
    """

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear

    def forward(
        self,
        x: Tokens,
        mask: AttentionMask | None = None,
        context: Source | None = None,
        context_mask: AttentionMask | None = None,
        cache: LayerCache | None = None,
        side: SideInputs | None = None,
    ) -> Float[Tensor, "batch q_seq d_model"] | tuple[Float[Tensor, "batch q_seq d_model"], Values]:
        """Return the output for each token of `x`; `weights` returns the attention weights of the same call.

        Args:
            x: the vectors that queries are projected from; without a context, also keys and values.
            mask: the keys of `x` that each query may attend to; None for all keys.
            context: in cross-attention, the vectors that keys and values are projected from:
                `attention(query, key, key)` of other libraries is `attention(query, context=key)` here.
            context_mask: the keys of the context that each query may attend to; with a context, `mask` has no effect.
            cache: keys and values of the tokens before `x`, to which the keys and values of `x` are appended. In
                cross-attention, it holds those of the context, which are projected only if the cache is empty.
            side: what the values depend on in addition to `x`; with it, the values of `x` are returned, too.
        """
        inputs = self.inputs_hook(self.inputs(x, mask, context, context_mask, cache, side))  # q, k, v by `project`
        if inputs.weights is None:
            heads_BHTV = self.attend(inputs.qkv, inputs.mask, inputs.is_cross)
        else:
            heads_BHTV = self.apply_weights(inputs.weights, inputs.qkv, inputs.is_cross)
        if self.exclusive:
            heads_BHTV = without_own_value(heads_BHTV, self.head_map.expand_kv(*inputs.qkv[1:])[1])
        if self.output_gate is not None:
            heads_BHTV = self.output_gate(heads_BHTV, x)
        output = self.o_proj(self.head_gate(heads_BHTV).transpose(1, 2).flatten(-2))
        return output if side is None else (output, inputs.qkv.v[..., -x.shape[1] :, :])

    def inputs(
        self,
        x: Tokens,
        mask: AttentionMask | None = None,
        context: Source | None = None,
        context_mask: AttentionMask | None = None,
        cache: LayerCache | None = None,
        side: SideInputs | None = None,
    ) -> AttentionInputs:
        """The queries, keys, values and mask of a call of `forward` with these arguments; the mask includes the window.

        In cross-attention, the window is around the aligned position (`AttentionMask.aligned`) or a predicted position.
        """
        if isinstance(mask, Tensor):
            reason = "must be an AttentionMask, such as AttentionMask(allowed=mask); the other sequence is `context`"
            raise ArgumentError("mask", tuple(mask.shape), reason)
        is_cross, num_behind = context is not None, 0
        if is_cross and (self.exclusive or self.sums):
            raise ArgumentError("context", "a tensor", "must be None with `exclusive`, `convolution` or `shifted_keys`")
        mask = (context_mask if is_cross else mask) or AttentionMask()
        if context is not None and self.window is not None and self.gaussian is None:
            first = 0 if cache is None else cache.count_queries(x.shape[1])
            mask = mask.aligned(self.window, first, x.shape[1], context.shape[1])
        elif not is_cross:
            mask = mask.within(self.window)
            if cache is not None and cache.length and not mask.causal:
                reason = "must be True with a cache: cached tokens do not attend to new tokens"
                raise ArgumentError("mask.causal", False, reason, {"causal": True})
            num_behind = 0 if cache is None else cache.num_behind(self.window)
        mask = self.head_map.mask_of_left(mask)
        mask.require_sizes(len(x), self.num_heads)
        given: dict[str, Any] = ({} if side is None else {"side": side}) | ({"mask": mask} if self.sums else {})
        qkv = self.project(x, context, cache, **given)
        mask = mask.without_first(num_behind)
        if self.ssmax is not None:
            qkv = qkv._replace(q=self.ssmax(qkv.q, mask.num_visible(x.shape[1], qkv.k.shape[2], x.device)))
        if self.forget is not None:
            self.forget.require_causal(mask.causal)
            mask = replace(mask, log_decay=self.forget(x, cache, self.window))
        return AttentionInputs(qkv, mask, is_cross, num_behind)

    @abstractmethod
    def project(
        self,
        x: Tokens,
        context: Source | None = None,
        cache: LayerCache | None = None,
        side: SideInputs | None = None,
    ) -> QKV:
        """The queries, keys and values after normalisation and rotation by their positions.

        A subclass applies `transform_queries` before the rotation, and appends keys and values to the cache by
        `cache.extend(..., window=self.window)`. In cross-attention, it projects a context only if the cache is empty.
        `side` is given only if the layer's `reads_side_inputs` is true, and the mask only if the layer has `sums`.
        """

    def attend(self, qkv: QKV, mask: AttentionMask, is_cross: bool) -> HeadOutputs:
        """The output of each head, softmax(score(q, k)) v, computed by the layer's backend."""
        k_BGSD, v_BGSV = self.head_map.expand_kv(qkv.k, qkv.v)
        scoring = self.scoring(qkv.q, k_BGSD.shape[2], mask, is_cross)
        dropout = self.dropout if self.training else 0.0
        return run_kernel(self.resolved or self.backend, qkv.q, k_BGSD, v_BGSV, mask, scoring, dropout)

    def apply_weights(self, weights: Weights, qkv: QKV, is_cross: bool) -> HeadOutputs:
        """The output of each head, given its attention weights; a subclass overrides it together with `attend`."""
        _, v_BGSV = self.head_map.expand_kv(qkv.k, qkv.v)
        mix = None if is_cross else self.position.mix(*weights.shape[-2:])
        return weighted_values(weights.to(v_BGSV.dtype), v_BGSV, mix)

    # Maps, for analysis.

    def attention_maps(
        self, qkv: QKV, mask: AttentionMask, is_cross: bool, rows: Int[Tensor, " rows"] | None = None
    ) -> AttentionMaps:
        """The maps of `attend`, one per softmax, without dropout, for all queries or the queries at `rows`."""
        k_BGSD, _ = self.head_map.expand_kv(qkv.k, qkv.v)
        return attention_maps(qkv.q, k_BGSD, mask, self.scoring(qkv.q, k_BGSD.shape[2], mask, is_cross), rows)

    def weights(self, *args: Any, cache: LayerCache | None = None, **kwargs: Any) -> Weights:
        """The exact attention weights of a call of `forward` with these arguments; the cache does not change.

        Their shape is `batch num_heads q_seq k_seq`, with two maps for each head in differential attention. There is no
        dropout: rows sum to 1, or to less with a sink or a local Gaussian; a row without visible keys is 0.
        """
        return self.maps_of_call(self.inputs(*args, cache=cache and cache.copy(), **kwargs)).weights

    def maps_of_call(self, call: AttentionInputs, rows: Int[Tensor, " rows"] | None = None) -> AttentionMaps:
        """The attention weights and logits of a call, for all queries or the queries at `rows`; see `exact_maps`."""
        return exact_maps(self, call, rows)

    def weights_of_scores(self, call: AttentionInputs, scores: Weights) -> Weights:
        """The attention weights of a call with `scores` in place of its own; the mask or a score of -∞ hides a key."""
        (q, k, _), mask = call.qkv, replace(call.mask, log_decay=None)
        scoring = replace(self.scoring(q, k.shape[2], mask, call.is_cross), compare=lambda q, k: scores, mods=())
        allowed, dense = scores > -torch.inf, mask.dense(q.shape[2], k.shape[2], scores.device)
        visible = AttentionMask(allowed=allowed if dense is None else allowed & dense)
        return attention_maps(q, k, visible, scoring).weights


class Attention(BaseAttention):
    """Multi-head attention (Vaswani et al. 2017, arXiv 1706.03762), with or without shared keys and values.

    head_h = softmax(q_h k_gᵀ / √head_dim) v_g with g = h // (num_heads / num_kv_heads);  output = o_proj(concat(head))

    With `num_kv_heads == num_heads` it is multi-head attention, with 1 multi-query attention (Shazeer 2019, arXiv
    1911.02150), and with a number between them grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245).

    Args:
        num_kv_heads: number of heads of keys and values; None for `num_heads`.
        head_dim: size of each query and key; None for d_model / num_heads.
        v_head_dim: size of each value and of each head's output; None for `head_dim`.
        qk_norm: the norm of queries and keys, a name in `QK_NORMS`; `qk_norm_eps` is added to their mean squares.
        bias: the projections with a bias, see `by_letter`.
        input_dim: size of each vector of `x` and of the context; None for `d_model`, the size within a block.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        qk_norm: bool | str = False,
        bias: bool | str = False,
        input_dim: int | None = None,
        qk_norm_eps: float = 1e-6,
        **options: Unpack[AttentionOptions],
    ) -> None:
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        head_dim = head_dim_of(d_model, num_heads, num_kv_heads, head_dim)
        require_at_least(1, {"v_head_dim": head_dim, "input_dim": d_model}, v_head_dim=v_head_dim, input_dim=input_dim)
        v_head_dim, width = v_head_dim or head_dim, input_dim or d_model
        super().__init__(width, num_heads, head_dim // self.num_softmaxes, v_head_dim, None, num_kv_heads, **options)
        has_bias = by_letter("bias", bias, "qkvo")
        self.q_proj = nn.Linear(width, num_heads * head_dim, bias=has_bias["q"])
        self.k_proj = nn.Linear(width, num_kv_heads * head_dim, bias=has_bias["k"])
        self.v_proj = nn.Linear(width, num_kv_heads * v_head_dim, bias=has_bias["v"])
        self.o_proj = nn.Linear(num_heads * v_head_dim, d_model, bias=has_bias["o"])
        self.q_norm = make_qk_norm(qk_norm, num_heads * self.num_softmaxes, self.head_dim, qk_norm_eps)
        self.k_norm = make_qk_norm(qk_norm, num_kv_heads * self.num_softmaxes, self.head_dim, qk_norm_eps)

    def project(
        self,
        x: Tokens,
        context: Source | None = None,
        cache: LayerCache | None = None,
        side: SideInputs | None = None,
        mask: AttentionMask | None = None,
    ) -> QKV:
        """The queries, keys and values after normalisation and rotation by their positions."""
        q = self.sums.mixed("q", self.q_proj(x), mask, cache)
        q_BHTD = self.transform_queries(self.q_norm(split_heads(q, self.head_dim)))
        if context is not None and cache is not None and (known := cache.of_context(context)):
            k_BGSD, v_BGSV = known
            return QKV(q_BHTD.to(v_BGSV.dtype), k_BGSD, v_BGSV)
        source = x if context is None else context
        k_BGSD = self.k_norm(split_heads(self.sums.mixed("k", self.k_proj(source), mask, cache), self.head_dim))
        v_BGSV = split_heads(self.sums.mixed("v", self.v_proj(source), mask, cache), self.v_head_dim)
        v_BGSV = self.mix_values(v_BGSV, side)
        if context is None:
            offset = cache.length if cache else 0
            q_BHTD, k_BGSD = self.position.rotate(q_BHTD, offset), self.position.rotate(k_BGSD, offset)
        q_BHTD, k_BGSD = q_BHTD.to(v_BGSV.dtype), k_BGSD.to(v_BGSV.dtype)  # autocast keeps norms in fp32
        if cache is not None:
            k_BGSD, v_BGSV = cache.extend(k_BGSD, v_BGSV, window=None if context is not None else self.window)
        return QKV(q_BHTD, k_BGSD, v_BGSV)
