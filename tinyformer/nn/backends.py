"""Attention from queries, keys and values, computed by kernels that agree: eager, sdpa and flash.

`attention_weights` is the definition. `eager` applies it as written and is what every test compares with; the others
hand the same description to a fused kernel that never holds the weights in memory. What a kernel cannot compute is
refused before the first step, in a sentence that names one that can.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from tinyformer.nn.mask import AttentionMask

# On CPU the fused kernel's backward pass in bf16 takes twice as long as in fp32 until the matrices are this long.
CPU_BF16_MIN_SEQ = 512

# On CPU plain matrix products beat torch's choice up to this length: in bf16, or with dropout; in bf16 and heads of
# 64 dimensions or more up to the other.
CPU_EAGER_MAX_SEQ, CPU_BF16_EAGER_MAX_SEQ = 96, 320


def attention_weights(
    q: Float[Tensor, "batch num_heads q_seq head_dim"],
    k: Float[Tensor, "batch num_kv_heads k_seq head_dim"],
    mask: AttentionMask,
    scale: float,
) -> Float[Tensor, "batch num_heads q_seq k_seq"]:
    """Scaled dot-product attention weights (Vaswani et al. 2017, arXiv 1706.03762): softmax(scale q kᵀ + mask).

    Query head `h` reads K/V head `h // (num_heads / num_kv_heads)` (grouped queries: Ainslie et al. 2023, arXiv
    2305.13245). The softmax is taken in fp32 at least. Rows sum to 1, or to 0 where the mask allows no key.
    """
    batch, num_heads, q_seq, head_dim = q.shape
    num_kv_heads, k_seq = k.shape[1:3]
    # The queries of a group stand one below the other, so that its one key head serves them without being copied.
    grouped = (q * scale).reshape(batch, num_kv_heads, -1, head_dim)
    scores = (grouped @ k.transpose(-2, -1)).view(batch, num_heads, q_seq, k_seq)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    allowed = mask.dense(q_seq, k_seq, q.device)
    if allowed is not None:
        # The smallest number, not -inf: a row of -inf alone would be NaN, and so would its gradient.
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1)
    if allowed is not None and mask.may_leave_rows_empty(q_seq, k_seq):
        weights = weights.masked_fill(~allowed, 0.0)
    return weights


def eager(
    q: Float[Tensor, "batch num_heads q_seq head_dim"],
    k: Float[Tensor, "batch num_kv_heads k_seq head_dim"],
    v: Float[Tensor, "batch num_kv_heads k_seq head_dim"],
    mask: AttentionMask,
    scale: float,
    dropout: float = 0.0,
) -> Float[Tensor, "batch num_heads q_seq head_dim"]:
    """Attention as it is written in the paper, its weights held in memory: any device, any dtype, any mask."""
    weights = attention_weights(q, k, mask, scale).to(v.dtype)
    if dropout:
        weights = F.dropout(weights, dropout)
    grouped = weights.view(v.shape[0], v.shape[1], -1, v.shape[2])
    return (grouped @ v).view(*q.shape[:3], v.shape[-1])


def sdpa(
    q: Float[Tensor, "batch num_heads q_seq head_dim"],
    k: Float[Tensor, "batch num_kv_heads k_seq head_dim"],
    v: Float[Tensor, "batch num_kv_heads k_seq head_dim"],
    mask: AttentionMask,
    scale: float,
    dropout: float = 0.0,
) -> Float[Tensor, "batch num_heads q_seq head_dim"]:
    """Attention by `torch.nn.functional.scaled_dot_product_attention`, which picks the kernel."""
    q_seq, k_seq = q.shape[2], k.shape[2]
    allowed, empty = None, None
    is_causal = mask.is_square_causal(q_seq, k_seq)
    if not is_causal:
        allowed = mask.dense(q_seq, k_seq, q.device)
        if allowed is not None and mask.may_leave_rows_empty(q_seq, k_seq) and q.device.type != "cpu":
            # A row without a key gives zeros on CPU; elsewhere that depends on the kernel, NaN included: let such
            # rows see all, then zero them. (On CPU that would cost short sequences a fifth of their time.)
            empty = ~allowed.any(dim=-1, keepdim=True)
            allowed = allowed | empty
        if allowed is not None:
            allowed = allowed.expand(q.shape[0], 1, q_seq, k_seq)
    dtype = q.dtype
    if q.device.type == "cpu" and dtype == torch.bfloat16 and max(q_seq, k_seq) < CPU_BF16_MIN_SEQ:
        q, k, v = q.float(), k.float(), v.float()
    # The dtype is decided above; autocast would take it down to bf16 again.
    with torch.autocast(q.device.type, enabled=False):
        out = F.scaled_dot_product_attention(
            q, k, v, allowed, dropout, is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    if empty is not None:
        out = out.masked_fill(empty, 0.0)
    return out.to(dtype)


def flash(
    q: Float[Tensor, "batch num_heads q_seq head_dim"],
    k: Float[Tensor, "batch num_kv_heads k_seq head_dim"],
    v: Float[Tensor, "batch num_kv_heads k_seq head_dim"],
    mask: AttentionMask,
    scale: float,
    dropout: float = 0.0,
) -> Float[Tensor, "batch num_heads q_seq head_dim"]:
    """FlashAttention (Dao et al. 2022, arXiv 2205.14135) by torch's kernel, and by no other."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return sdpa(q, k, v, mask, scale, dropout)


class AttentionCase(NamedTuple):
    """What a model asks of its backend: all that decides whether a kernel can serve it.

    Args:
        device: the type, "cpu" or "cuda".
        dtype: that of queries, keys and values inside the kernel, under autocast the lower one.
        head_dim: of each head.
        dropout: whether attention weights are dropped.
        needs_mask: whether the mask is more than none or plain causal self-attention.
        seq: the longest sequence, in tokens; long unless given.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    dropout: bool = False
    needs_mask: bool = False
    seq: int | None = None


@runtime_checkable
class AttentionFunction(Protocol):
    """The signature that all backends share; see `eager` for the shapes."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, dropout: float = 0.0
    ) -> Tensor:
        """Attend."""
        ...


@dataclass(frozen=True)
class Backend:
    """A way to compute attention.

    Args:
        name: the value of `attention.backend`.
        compute: the function.
        refusal: why it cannot serve a case, or None if it can.
    """

    name: str
    compute: AttentionFunction
    refusal: Callable[[AttentionCase], str | None]


def _refuse_nothing(case: AttentionCase) -> str | None:
    return None


def _flash_refusal(case: AttentionCase) -> str | None:
    """What torch's FlashAttention kernels lack, per device (torch 2.11 to 2.13)."""
    if case.device not in ("cpu", "cuda"):
        return f"has no kernel for the device '{case.device}'"
    if case.device == "cpu":
        return "has no attention dropout on CPU" if case.dropout else None
    if case.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bf16 or fp16 on CUDA, not in {case.dtype} (trainer.precision=bf16-mixed works)"
    if case.needs_mask:
        return "takes no padding mask on CUDA"
    if case.head_dim > 256:
        return f"takes heads of at most 256 dimensions on CUDA, not {case.head_dim}"
    return None


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("eager", eager, _refuse_nothing),
        Backend("sdpa", sdpa, _refuse_nothing),
        Backend("flash", flash, _flash_refusal),
    )
}


def _fastest(case: AttentionCase) -> str:
    """The name of the fastest backend for a case, by measurement on CPU and by torch's documentation on CUDA."""
    if case.device == "cpu":
        # Torch's own choice on CPU is its flash kernel wherever that can run, so sdpa is flash without the switch
        # around each call. With dropout that is left to unfused arithmetic, in bf16 and for short sequences less
        # well than by eager, whose plain bf16 matrix products also win while sequences are short.
        seq = case.seq or sys.maxsize
        if case.dtype == torch.bfloat16:
            longest = CPU_BF16_EAGER_MAX_SEQ if case.head_dim >= 64 else CPU_EAGER_MAX_SEQ
            return "eager" if case.dropout or seq <= longest else "sdpa"
        return "eager" if case.dropout and seq <= CPU_EAGER_MAX_SEQ else "sdpa"
    return "sdpa" if _flash_refusal(case) else "flash"


def select_backend(name: str, case: AttentionCase) -> Backend:
    """The backend that computes a case: the named one, or for "auto" the fastest that can.

    Raises:
        ValueError: there is no such backend, or it cannot compute the case; the sentence names one that can.
    """
    if name == "auto":
        return BACKENDS[_fastest(case)]
    if name not in BACKENDS:
        raise ValueError(f"attention.backend={name}: choose one of {', '.join(['auto', *BACKENDS])}.")
    reason = BACKENDS[name].refusal(case)
    if reason is not None:
        able = [other.name for other in BACKENDS.values() if other.refusal(case) is None]
        raise ValueError(f"attention.backend={name} {reason}; attention.backend={' or '.join(['auto', *able])} can.")
    return BACKENDS[name]


class _KernelNames(TorchDispatchMode):
    """Collects which of torch's attention operators run inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith("_scaled_dot_product"):
            # _scaled_dot_product_flash_attention_for_cpu -> flash
            self.found.append(name.removeprefix("_scaled_dot_product_").partition("_attention")[0])
        return func(*args, **(kwargs or {}))


def running_kernel(call: Callable[[], Any]) -> str:
    """Which kernel computes attention in a call, as seen from torch's dispatcher and not from what was asked.

    Returns:
        "flash", "efficient", "cudnn" or another of torch's fused kernels; "math" where none of them ran.
    """
    with torch.no_grad(), _KernelNames() as names:
        call()
    return names.found[0] if names.found else "math"
