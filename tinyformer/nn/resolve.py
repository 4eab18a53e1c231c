"""The backend of a layer, settled before its first step, and the kernel that is then seen to run."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tinyformer.nn.attention import BaseAttention
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.support import BACKENDS, Backend, select_backend


def resolve_backend(
    layer: BaseAttention,
    device: str,
    dtype: torch.dtype,
    mask: AttentionMask,
    seq: int | None = None,
    training: bool = True,
) -> Backend:
    """Choose the backend of a layer once and for all, before the first step and before compiling.

    Args:
        layer: that will run on it.
        device: the type, "cpu" or "cuda".
        dtype: that of queries, keys and values, under autocast the lower one.
        mask: of the kind that `forward` will get.
        seq: the longest sequence, in tokens; long unless given.
        training: whether there will be backward passes, and dropout.

    Raises:
        ValueError: the named backend cannot compute this; the sentence names one that can.
    """
    layer.resolved = select_backend(layer.backend, layer.planned_case(device, dtype, mask, seq, training))
    return layer.resolved


def backend_refusal(
    layer: BaseAttention, backend: str, device: str, dtype: torch.dtype, mask: AttentionMask, seq: int | None = None
) -> str | None:
    """Why a backend of this name cannot train a layer; None if it can; see `resolve_backend`."""
    return BACKENDS[backend].refusal(layer.planned_case(device, dtype, mask, seq))


def kernel_of_layer(
    layer: BaseAttention,
    device: str,
    dtype: torch.dtype,
    mask: AttentionMask,
    seq: int = 8,
    training: bool = True,
) -> str:
    """The kernel that the resolved backend runs on such input, found by running it once; see `resolve_backend`."""
    if layer.resolved is None or layer.resolved.name in ("eager", "flex"):
        return "eager" if layer.resolved is None else layer.resolved.name
    seq = seq if mask.documents is None else mask.documents.shape[1]
    num_kv_heads = layer.num_kv_heads if layer.kv_index is None else layer.num_heads
    sizes = [(layer.num_heads, layer.head_dim), (num_kv_heads, layer.head_dim), (num_kv_heads, layer.v_head_dim)]
    q, k, v = (torch.zeros(mask.num_rows, heads, seq, dim, device=device, dtype=dtype) for heads, dim in sizes)
    probe = copy.deepcopy(layer).to(device, dtype).train(training)
    with torch.set_grad_enabled(training):
        # Of one softmax, where a subclass has more.
        return running_kernel(lambda: BaseAttention.attend(probe, q, k, v, mask.within(layer.window), crosses=False))


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
        if name == "_varlen_attn":
            self.found.append("flash")
        return func(*args, **(kwargs or {}))


def running_kernel(call: Callable[[], Any]) -> str:
    """Which kernel computes attention in a call, as seen from torch's dispatcher and not from what was asked.

    Returns:
        "flash", "efficient", "cudnn" or another of torch's fused kernels; "math" where none of them ran.
    """
    with _KernelNames() as names:
        call()
    return names.found[0] if names.found else "math"
