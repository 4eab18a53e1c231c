"""Attention by `torch.nn.functional.scaled_dot_product_attention`, which takes mask and bias as one dense tensor."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tinyformer.nn.mask import AttentionMask, Grid
from tinyformer.nn.score import Scoring

# On CPU the fused kernel's backward pass in bf16 takes twice as long as in fp32 for sequences shorter than this.
CPU_BF16_MIN_SEQ = 512

# The kernels on CUDA require head sizes that are multiples of this.
HEAD_DIM_STEP = 8

WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def sdpa(
    q: Float[Tensor, "batch num_heads q_seq head_dim"],
    k: Float[Tensor, "batch num_kv_heads k_seq head_dim"],
    v: Float[Tensor, "batch num_kv_heads k_seq v_head_dim"],
    mask: AttentionMask,
    scoring: Scoring,
    dropout: float = 0.0,
) -> Float[Tensor, "batch num_heads q_seq v_head_dim"]:
    """Attention by `torch.nn.functional.scaled_dot_product_attention`, which chooses among torch's kernels."""
    q_seq, k_seq, v_head_dim, own_dtype = q.shape[2], k.shape[2], v.shape[-1], q.dtype
    q, k, v, scoring = with_decay(q, k, v, scoring)
    bias = scoring.bias(Grid.of(q.shape[0], q.shape[1], q_seq, k_seq, q.device)) if scoring.mods else None
    plain = bias is None and mask.is_plain(q_seq, k_seq)
    is_causal = plain and mask.causal
    allowed = None if plain else mask.dense(q_seq, k_seq, q.device)
    empty = None
    if allowed is not None and mask.may_leave_rows_empty(q_seq, k_seq) and (q.device.type != "cpu" or bias is not None):
        # A row of a boolean mask without any key gives zeros on CPU; elsewhere the kernel decides, and may give NaN. So
        # such rows attend to all keys, and are zeroed below. (On CPU this would take short sequences a fifth longer.)
        empty = ~allowed.any(dim=-1, keepdim=True)
        allowed = allowed | empty
    if scoring.sink is not None:
        q, k, v, allowed, bias = _with_sink(q, k, v, scoring, is_causal, allowed, bias)
    # The kernels take values of the keys' size; zeros change neither the scores nor the output's first dimensions.
    width = max(q.shape[-1], v.shape[-1])
    q, k, v = (widened(x, width) for x in (q, k, v))
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and max(q_seq, k_seq) < CPU_BF16_MIN_SEQ:
        q, k, v = q.float(), k.float(), v.float()
    attn_mask: Tensor | None = allowed
    if bias is not None:
        attn_mask = _rounded_bias(bias if allowed is None else bias.masked_fill(~allowed, -torch.inf), q.dtype)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(q.shape[0], -1, -1, -1)
    if q.device.type == "cuda" and q.shape[1] != k.shape[1] and (attn_mask is not None or q.dtype == torch.float32):
        # The only fused kernel on CUDA that takes these is the memory-efficient one, which does not share K/V heads.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    # The dtype is decided above; autocast would cast to bf16 again.
    with torch.autocast(q.device.type, enabled=False), _right_gradients(q, attn_mask):
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout, is_causal, scale=scoring.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    out = out[:, :, -q_seq:, :v_head_dim]
    if empty is not None:
        out = out.masked_fill(empty, 0.0)
    return out.to(own_dtype)


def _right_gradients(q: Tensor, attn_mask: Tensor | None) -> AbstractContextManager[None]:
    """A context that excludes cuDNN's kernel from masked calls, whose gradients may be NaN (pytorch/pytorch#196678).

    It also excludes the kernel in cached generation (single queries), where each new number of keys needs a new plan.
    """
    is_right = attn_mask is None and (q.shape[2] > 1 or not torch.backends.cuda.cudnn_sdp_enabled())
    return nullcontext() if q.device.type != "cuda" or is_right else sdpa_kernel(WITHOUT_CUDNN)


def _rounded_bias(
    bias: Float[Tensor, "#batch #num_heads q_seq k_seq"], dtype: torch.dtype
) -> Float[Tensor, "#batch #num_heads q_seq k_seq"]:
    """A bias in the dtype that a kernel takes, shifted so that its largest values are exact.

    A constant subtracted from a row does not change the softmax, and lower precision is finest near zero. Without the
    shift, ALiBi's bias would be in the hundreds for queries whose nearest keys are padding. On CPU the kernels take a
    bias in fp32 with queries of lower precision; on other devices, the bias has the queries' dtype.
    """
    if dtype == bias.dtype:
        return bias
    highest = bias.detach().amax(dim=-1, keepdim=True)
    shifted = bias - highest.masked_fill(highest == -torch.inf, 0.0)
    return shifted if bias.device.type == "cpu" else shifted.to(dtype)


def _with_sink(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scoring: Scoring,
    is_causal: bool,
    allowed: Bool[Tensor, "#batch #num_heads #q_seq k_seq"] | None,
    bias: Float[Tensor, "#batch #num_heads q_seq k_seq"] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Prepend a key that no mask hides, whose score is the head's sink logit and whose value is zero.

    An extra dimension gives this score: it is sink / scale in the queries, 1 in the new key and 0 in the other keys. So
    every kernel that computes dot products can compute sinks and their gradients.
    """
    assert scoring.sink is not None
    logits = (scoring.sink.to(q.dtype) / scoring.scale).view(1, -1, 1, 1).expand(*q.shape[:3], 1)
    q = torch.cat([q, F.pad(logits, (0, HEAD_DIM_STEP - 1))], dim=-1)
    sink_key = F.pad(k.new_ones(1), (k.shape[-1], HEAD_DIM_STEP - 1))  # on the device: no wait
    k = torch.cat([sink_key.expand(*k.shape[:2], 1, -1), F.pad(k, (0, HEAD_DIM_STEP))], dim=2)
    v = F.pad(v, (0, 0, 1, 0))
    if is_causal:
        q = F.pad(q, (0, 0, 1, 0))  # an extra query keeps the diagonal; its output is dropped
    allowed = None if allowed is None else F.pad(allowed, (1, 0), value=True)
    bias = None if bias is None else F.pad(bias, (1, 0))
    return q, k, v, allowed, bias


def with_decay(
    q: Float[Tensor, "batch num_heads q_seq head_dim"],
    k: Float[Tensor, "batch num_kv_heads k_seq head_dim"],
    v: Float[Tensor, "batch num_kv_heads k_seq v_head_dim"],
    scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor, Scoring]:
    """Add dimensions to queries and keys, so that their dot product includes the decay c_i - c_j of a forget gate.

    Queries begin with c_i and 1, keys with 1 and -c_j; keys and values are copied for each query head. In bf16, values
    near c = -216, which 2,048 tokens with f = 0.9 reach, are 1 apart. So three values that add up to c take its place,
    whose differences are exact if a kernel adds them in fp32 before the other products. The gradient of f_l is a sum
    over all later tokens, in which rounding errors add up, too, so gates are trained in fp32.
    """
    c = scoring.log_decay
    if c is None:
        return q, k, v, scoring
    if c.requires_grad:
        q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    k, v = (x.unsqueeze(2).expand(-1, -1, q.shape[1] // x.shape[1], -1, -1).flatten(1, 2) for x in (k, v))
    high = c.detach().bfloat16()
    middle = (c.detach() - high).bfloat16()
    parts = torch.stack([high.to(c.dtype), middle.to(c.dtype), c - high - middle], dim=-1).to(q.dtype)
    ones = torch.ones_like(parts)
    of_queries, of_keys = (torch.stack(pair, dim=-1).flatten(-2) for pair in ((parts, ones), (ones, -parts)))
    width = k.shape[-1] + HEAD_DIM_STEP
    q = widened(torch.cat([of_queries[:, :, -q.shape[2] :], q * scoring.scale], dim=-1), width)
    k = widened(torch.cat([of_keys, k], dim=-1), width)
    return q, k, v, replace(scoring, scale=1.0, log_decay=None)


def widened(x: Float[Tensor, "*sizes head_dim"], width: int) -> Float[Tensor, "*sizes width"]:
    """Pad the last dimension with zeros to `width`; if it is wide enough, return `x` itself, without a copy."""
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
