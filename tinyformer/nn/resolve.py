"""The backend of a layer, fixed before its first step, and the kernel that it runs."""

import copy
from dataclasses import replace

import torch

from tinyformer.nn.attention import BaseAttention
from tinyformer.nn.kernels.observe import running_kernel
from tinyformer.nn.kernels.support import BACKENDS, Backend, select_backend
from tinyformer.nn.mask import AttentionMask


def resolve_backend(
    layer: BaseAttention,
    device: str,
    dtype: torch.dtype,
    mask: AttentionMask,
    seq: int | None = None,
    training: bool = True,
) -> Backend:
    """Select the backend of a layer for good, before the first step and before compiling.

    Args:
        layer: the layer, which from now on runs this backend.
        device: the type, "cpu" or "cuda".
        dtype: of queries, keys and values; the lower one under autocast.
        mask: an example of the masks that `forward` will get.
        seq: the length of the longest sequence; None for a long one.
        training: whether there will be backward passes, and dropout.

    Raises:
        ArgumentError: the named backend cannot compute this; the reason names those that can.
    """
    layer.resolved = select_backend(layer.backend, layer.planned_case(device, dtype, mask, seq, training))
    return layer.resolved


def backend_refusal(
    layer: BaseAttention, backend: str, device: str, dtype: torch.dtype, mask: AttentionMask, seq: int | None = None
) -> str | None:
    """Why the backend of this name cannot train a layer; None if it can; see `resolve_backend`."""
    return BACKENDS[backend].refusal(layer.planned_case(device, dtype, mask, seq))


def kernel_of_layer(
    layer: BaseAttention,
    device: str,
    dtype: torch.dtype,
    mask: AttentionMask,
    seq: int = 8,
    training: bool = True,
) -> str:
    """The kernel that the resolved backend runs on such input, observed in one call; see `resolve_backend`."""
    if layer.resolved is None or layer.resolved.name in ("eager", "flex"):
        return "eager" if layer.resolved is None else layer.resolved.name
    seq = seq if mask.documents is None else mask.documents.shape[1]
    heads, kv_heads = layer.num_heads, layer.num_kv_heads
    sizes = [(heads, layer.head_dim), (kv_heads, layer.head_dim), (kv_heads, layer.v_head_dim)]
    q, k, v = (torch.zeros(mask.num_rows, n, seq, dim, device=device, dtype=dtype) for n, dim in sizes)
    if mask.allowed is not None:  # one entry of it fits any number of queries and keys
        mask = replace(mask, allowed=mask.allowed[:1, :1, :1, :1])
    probe = copy.deepcopy(layer).to(device, dtype).train(training)
    with torch.set_grad_enabled(training):
        kernel = running_kernel(lambda: probe.softmax_attention(q, k, v, mask.within(layer.window)))
    return "flash" if kernel == "varlen" else kernel  # the same kernel over packed sequences
