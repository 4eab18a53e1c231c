"""FlashAttention by torch's dense kernel, or on CUDA by torch's kernel for packed sequences ("varlen")."""

import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from tinyformer.errors import ArgumentError
from tinyformer.nn.kernels.sdpa import HEAD_DIM_STEP, sdpa, widened, with_decay
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.score import Scoring

# Torch 2.11's kernel for packed sequences shares K/V heads without this argument, which later versions require.
VARLEN_TAKES_ENABLE_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


def flash(
    q: Float[Tensor, "batch num_heads q_seq head_dim"],
    k: Float[Tensor, "batch num_kv_heads k_seq head_dim"],
    v: Float[Tensor, "batch num_kv_heads k_seq v_head_dim"],
    mask: AttentionMask,
    scoring: Scoring,
    dropout: float = 0.0,
) -> Float[Tensor, "batch num_heads q_seq v_head_dim"]:
    """FlashAttention (Dao et al. 2022, arXiv 2205.14135) by torch's flash kernel, without any fallback."""
    if q.device.type == "cuda":
        is_packed = not mask.is_plain(q.shape[2], k.shape[2])
        if mask.allowed is not None or scoring.mods or (is_packed and (dropout or scoring.sink is not None)):
            reason = "cannot compute a pattern or a bias on CUDA, nor sinks or dropout together with a mask"
            raise ArgumentError("backend", "flash", reason, {"backend": "sdpa"})
        if is_packed:
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
    """The CUDA kernel for packed sequences; unlike the dense kernel, it takes padding, documents and windows."""
    (batch, _, q_seq, _), k_seq, v_head_dim = q.shape, k.shape[2], v.shape[-1]
    q, k, v, scoring = with_decay(q, k, v, scoring)
    width = -(-max(q.shape[-1], v_head_dim) // HEAD_DIM_STEP) * HEAD_DIM_STEP
    # batch heads seq dim -> (batch seq) heads dim: the rows are concatenated.
    q, k, v = (widened(x, width).transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    segments = _segments if torch.compiler.is_compiling() else _known_segments
    starts_q, starts_k = segments(mask, batch, q_seq, k_seq, q.device)
    sharing: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1]} if VARLEN_TAKES_ENABLE_GQA else {}
    # At least 2: with 1 and shared K/V heads, the kernel expects a query in each segment, which padding does not have.
    sizes = (starts_q, starts_k, max(q_seq, 2), k_seq)
    out = varlen_attn(q, k, v, *sizes, scale=scoring.scale, window_size=mask.span, **sharing)
    assert isinstance(out, Tensor)
    out = out.unflatten(0, (batch, q_seq)).transpose(1, 2)[..., :v_head_dim]
    if mask.lengths is not None:
        out = out.masked_fill((mask.lengths == 0).view(-1, 1, 1, 1), 0.0)
    return out


def _segments(mask: AttentionMask, batch: int, q_seq: int, k_seq: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cumulative sequence lengths of the packed queries and of the packed keys, starting with 0.

    With lengths, each row becomes two sequences: all queries with the real keys, and no queries with the padding. So
    the number of sequences is known without waiting for the GPU. With documents, only `document_starts` avoids waiting.
    """
    if mask.document_starts is not None:
        return mask.document_starts, mask.document_starts
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


@functools.lru_cache(maxsize=4)
def _known_segments(mask: AttentionMask, *sizes: Any) -> tuple[Tensor, Tensor]:
    """`_segments`, cached: all layers of a step share one mask, whose tensors are compared by identity."""
    with torch.inference_mode(False), torch.no_grad():  # see `flex._make_block_mask`
        return _segments(mask, *sizes)
