"""Attention from queries, keys and values, computed by kernels that agree: eager, sdpa, flash and flex.

`eager` applies the definition, `weights.attention_weights`, as written and is what every test compares with; the others
hand the same description, an `AttentionMask` and a `Scoring`, to a fused kernel that never holds the weights in memory.
Which of them can compute what is `support`'s table.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from tinyformer.nn.mask import AttentionMask, Grid, MaskMod
from tinyformer.nn.score import Scoring
from tinyformer.nn.weights import attention_weights

# On CPU the fused kernel's backward pass in bf16 takes twice as long as in fp32 until the matrices are this long.
CPU_BF16_MIN_SEQ = 512

# Torch 2.11's kernel for packed sequences shares K/V heads unasked; later ones want to be told.
VARLEN_ASKS_FOR_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters

# Kernels on CUDA want head sizes that are multiples of this.
HEAD_DIM_STEP = 8
FLEX_MIN_HEAD_DIM = 16


def eager(
    q: Float[Tensor, "batch num_heads q_seq head_dim"],
    k: Float[Tensor, "batch num_kv_heads k_seq head_dim"],
    v: Float[Tensor, "batch num_kv_heads k_seq v_head_dim"],
    mask: AttentionMask,
    scoring: Scoring,
    dropout: float = 0.0,
) -> Float[Tensor, "batch num_heads q_seq v_head_dim"]:
    """Attention as it is written in the papers, its weights held in memory: any device, any dtype, any description."""
    weights = attention_weights(q, k, mask, scoring).to(v.dtype)
    if dropout:
        weights = F.dropout(weights, dropout)
    grouped = weights.reshape(v.shape[0], v.shape[1], -1, v.shape[2])
    out = (grouped @ v).view(*q.shape[:3], v.shape[-1])
    return out if scoring.mix is None else out + scoring.mix(weights)


def sdpa(
    q: Float[Tensor, "batch num_heads q_seq head_dim"],
    k: Float[Tensor, "batch num_kv_heads k_seq head_dim"],
    v: Float[Tensor, "batch num_kv_heads k_seq v_head_dim"],
    mask: AttentionMask,
    scoring: Scoring,
    dropout: float = 0.0,
) -> Float[Tensor, "batch num_heads q_seq v_head_dim"]:
    """Attention by `torch.nn.functional.scaled_dot_product_attention`, which picks the kernel."""
    q_seq, k_seq, v_head_dim = q.shape[2], k.shape[2], v.shape[-1]
    bias = scoring.bias(Grid.of(q.shape[0], q.shape[1], q_seq, k_seq, q.device)) if scoring.mods else None
    plain = bias is None and mask.is_plain(q_seq, k_seq)
    is_causal = plain and mask.causal
    allowed = None if plain else mask.dense(q_seq, k_seq, q.device)
    empty = None
    if allowed is not None and mask.may_leave_rows_empty(q_seq, k_seq) and (q.device.type != "cpu" or bias is not None):
        # A boolean row without a key gives zeros on CPU; elsewhere that depends on the kernel, NaN included: let such
        # rows see all, then zero them. (On CPU that would cost short sequences a fifth of their time.)
        empty = ~allowed.any(dim=-1, keepdim=True)
        allowed = allowed | empty
    if scoring.sink is not None:
        q, k, v, allowed, bias = _with_sink(q, k, v, scoring, is_causal, allowed, bias)
    # The kernels take values of the keys' size; zeros change neither the scores nor what is kept of the output.
    width = max(q.shape[-1], v.shape[-1])
    q, k, v = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (q, k, v))
    dtype = q.dtype
    if q.device.type == "cpu" and dtype == torch.bfloat16 and max(q_seq, k_seq) < CPU_BF16_MIN_SEQ:
        q, k, v = q.float(), k.float(), v.float()
    attn_mask: Tensor | None = allowed
    if bias is not None:
        attn_mask = _rounded_bias(bias if allowed is None else bias.masked_fill(~allowed, -torch.inf), q.dtype)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(q.shape[0], -1, -1, -1)
    # The dtype is decided above; autocast would take it down to bf16 again.
    with torch.autocast(q.device.type, enabled=False):
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout, is_causal, scale=scoring.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    out = out[:, :, -q_seq:, :v_head_dim]
    if empty is not None:
        out = out.masked_fill(empty, 0.0)
    return out.to(dtype)


def _rounded_bias(
    bias: Float[Tensor, "#batch #num_heads q_seq k_seq"], dtype: torch.dtype
) -> Float[Tensor, "#batch #num_heads q_seq k_seq"]:
    """A bias as a kernel can take it, close to zero where it counts.

    A softmax does not see what is subtracted from a whole row, and numbers near zero are the ones that a lower
    precision tells apart: where a query's nearest keys are padding, ALiBi's bias of the others is in the hundreds. On
    CPU the kernels take fp32 beside lower precision, elsewhere they want the queries' own.
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
    allowed: Bool[Tensor, "#batch 1 #q_seq k_seq"] | None,
    bias: Float[Tensor, "#batch #num_heads q_seq k_seq"] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """A key in front, seen by all, that scores the sink's logit for each head and whose value is zero.

    One more dimension does it: the queries hold sink / scale there, the new key 1 and the others 0. So every kernel
    that computes a dot product computes sinks, gradient included.
    """
    assert scoring.sink is not None
    logits = (scoring.sink.to(q.dtype) / scoring.scale).view(1, -1, 1, 1).expand(*q.shape[:3], 1)
    q = torch.cat([q, F.pad(logits, (0, HEAD_DIM_STEP - 1))], dim=-1)
    sink_key = F.one_hot(torch.tensor(k.shape[-1], device=k.device), k.shape[-1] + HEAD_DIM_STEP).to(k.dtype)
    k = torch.cat([sink_key.expand(*k.shape[:2], 1, -1), F.pad(k, (0, HEAD_DIM_STEP))], dim=2)
    v = F.pad(v, (0, 0, 1, 0))
    if is_causal:
        q = F.pad(q, (0, 0, 1, 0))  # keeps the diagonal; the row is dropped from the output
    allowed = None if allowed is None else F.pad(allowed, (1, 0), value=True)
    bias = None if bias is None else F.pad(bias, (1, 0))
    return q, k, v, allowed, bias


def flash(
    q: Float[Tensor, "batch num_heads q_seq head_dim"],
    k: Float[Tensor, "batch num_kv_heads k_seq head_dim"],
    v: Float[Tensor, "batch num_kv_heads k_seq v_head_dim"],
    mask: AttentionMask,
    scoring: Scoring,
    dropout: float = 0.0,
) -> Float[Tensor, "batch num_heads q_seq v_head_dim"]:
    """FlashAttention (Dao et al. 2022, arXiv 2205.14135) by torch's kernel, and by no other."""
    if q.device.type == "cuda" and not mask.is_plain(q.shape[2], k.shape[2]):
        if dropout or scoring.sink is not None or scoring.mods:
            raise ValueError(
                "attention.backend=flash computes no sinks, biases or dropout beside a mask on CUDA; "
                "attention.backend=sdpa does."
            )
        return _flash_varlen(q, k, v, mask, scoring)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return sdpa(q, k, v, mask, scoring, dropout)


def _flash_varlen(
    q: Float[Tensor, "batch num_heads q_seq head_dim"],
    k: Float[Tensor, "batch num_kv_heads k_seq head_dim"],
    v: Float[Tensor, "batch num_kv_heads k_seq v_head_dim"],
    mask: AttentionMask,
    scoring: Scoring,
) -> Float[Tensor, "batch num_heads q_seq v_head_dim"]:
    """The kernel for packed sequences, which takes padding, documents and windows where the dense one takes no mask.

    CUDA only; it has not run on a GPU yet.
    """
    (batch, _, q_seq, _), k_seq, v_head_dim = q.shape, k.shape[2], v.shape[-1]
    width = -(-max(q.shape[-1], v_head_dim) // HEAD_DIM_STEP) * HEAD_DIM_STEP
    # batch heads seq dim -> (batch seq) heads dim: rows one behind the other.
    q, k, v = (F.pad(x, (0, width - x.shape[-1])).transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    starts_q, starts_k = _segments(mask, batch, q_seq, k_seq, q.device)
    sharing: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1]} if VARLEN_ASKS_FOR_GQA else {}
    out = varlen_attn(
        q,
        k,
        v,
        starts_q,
        starts_k,
        q_seq,
        k_seq,
        scale=scoring.scale,
        window_size=mask.span,
        **sharing,
    )
    assert isinstance(out, Tensor)
    out = out.unflatten(0, (batch, q_seq)).transpose(1, 2)[..., :v_head_dim]
    if mask.lengths is not None:
        out = out.masked_fill((mask.lengths == 0).view(-1, 1, 1, 1), 0.0)
    return out


def _segments(mask: AttentionMask, batch: int, q_seq: int, k_seq: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where each sequence begins among the packed queries and keys, and at the end where the last one ends.

    With lengths, a row is two sequences: all its queries with its real keys, and no queries with the padding. So the
    number of sequences is known without asking the GPU. With documents it has to be asked.
    """
    rows = torch.arange(batch + 1, device=device, dtype=torch.int32)
    starts_q, starts_k = rows * q_seq, rows * k_seq
    if mask.lengths is not None:
        between = starts_k[:-1] + mask.lengths.to(torch.int32)
        starts_k = torch.cat([torch.stack([starts_k[:-1], between], dim=1).flatten(), starts_k[-1:]])
        starts_q = torch.cat([torch.stack([starts_q[:-1], starts_q[1:]], dim=1).flatten(), starts_q[-1:]])
    if mask.documents is not None:
        begins = F.pad(mask.documents[:, 1:] != mask.documents[:, :-1], (1, 0), value=True).flatten()
        starts_q = starts_k = F.pad(begins.nonzero().flatten(), (0, 1), value=batch * k_seq).to(torch.int32)
    return starts_q, starts_k


def flex(
    q: Float[Tensor, "batch num_heads q_seq head_dim"],
    k: Float[Tensor, "batch num_kv_heads k_seq head_dim"],
    v: Float[Tensor, "batch num_kv_heads k_seq v_head_dim"],
    mask: AttentionMask,
    scoring: Scoring,
    dropout: float = 0.0,
) -> Float[Tensor, "batch num_heads q_seq v_head_dim"]:
    """FlexAttention (Dong et al. 2024, arXiv 2412.05496): the mask and the score modification compiled into a kernel.

    On CUDA it is compiled; on CPU it runs unfused, and forward only.
    """
    q_seq, k_seq, v_head_dim = q.shape[2], k.shape[2], v.shape[-1]
    first = k_seq - q_seq
    if q.device.type == "cuda":
        # The kernel takes no smaller heads; zeros change neither the scores nor what is kept of the output.
        q, k, v = (F.pad(x, (0, max(0, FLEX_MIN_HEAD_DIM - x.shape[-1]))) for x in (q, k, v))

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return scoring.modify(score, Grid(batch, head, q_idx + first, kv_idx))

    attend: Any = _compiled_flex() if q.device.type == "cuda" and not torch.compiler.is_compiling() else flex_attention
    out, aux = attend(
        q,
        k,
        v,
        score_mod=score_mod if scoring.mods else None,
        block_mask=block_mask(mask, q_seq, k_seq, q.device),
        scale=scoring.scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=scoring.sink is not None),
    )
    if scoring.sink is not None:
        # Of the softmax over keys and sink, the keys have exp(lse) / (exp(lse) + exp(sink)).
        share = torch.sigmoid(aux.lse - scoring.sink.view(1, -1, 1))
        out = out * share.unsqueeze(-1).to(out.dtype)
    return out[..., :v_head_dim]


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def block_mask(mask: AttentionMask, q_seq: int, k_seq: int, device: torch.device) -> BlockMask | None:
    """The mask as FlexAttention wants it: blocks that are skipped, full or partly seen. None for no mask."""
    if mask.num_rows == 1 and mask.lengths is None and mask.documents is None:
        return _block_mask_of_shape(mask, q_seq, k_seq, device)
    return _make_block_mask(mask, q_seq, k_seq, device)


def _make_block_mask(mask: AttentionMask, q_seq: int, k_seq: int, device: torch.device) -> BlockMask | None:
    mods, first = mask.mask_mods(), k_seq - q_seq
    if not mods:
        return None

    def allows(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        allowed = mods[0](batch, head, q_idx, kv_idx)
        for mod in mods[1:]:
            allowed = allowed & mod(batch, head, q_idx, kv_idx)
        return allowed

    # Torch counts the arguments, which it cannot where a type checker wraps the function; a lambda stays bare.
    mask_mod: MaskMod = lambda batch, head, q_idx, kv_idx: allows(batch, head, q_idx + first, kv_idx)  # noqa: E731
    rows = None if mask.num_rows == 1 else mask.num_rows
    # It may be kept: one that is made while nothing is recorded must serve training, too.
    with torch.inference_mode(False), torch.no_grad():
        return create_block_mask(mask_mod, rows, None, q_seq, k_seq, device=str(device))


# Of a mask without tensors there is one for each shape: it is not made again at every step.
_block_mask_of_shape = functools.lru_cache(maxsize=32)(_make_block_mask)
