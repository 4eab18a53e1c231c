"""What attention weights take where a kernel holds them in memory, known before the first step."""

import math
from collections.abc import Sequence

import torch

from tinyformer.nn import AttentionMask, BaseAttention, Transformer, backend_refusal

HOLDING = ("eager", "math")
"""Kernels that hold the weights of every query and key; `math` is what torch's sdpa falls back on."""

SPARING = ("flash", "flex")
"""Backends that never do."""


def kept_bytes(layer: BaseAttention, seq: int, device: str, dtype: torch.dtype) -> int:
    """Of the weights of one row of tokens, what autograd keeps of a layer for its backward pass, at least.

    That is the softmax, in fp32 or more; where the values have fewer bits, a copy in theirs; where weights are dropped,
    which ones, and those that are left.

    Args:
        layer: whose kernel is one of `HOLDING`.
        seq: the length of the row.
        device: the type.
        dtype: of the values.
    """
    softmax = torch.promote_types(dtype, torch.float32).itemsize
    factor = dtype.itemsize if dtype.itemsize < softmax or layer.dropout else 0
    # On CPU, F.dropout multiplies by numbers that are 0 or 1 / (1 - p); on CUDA it keeps booleans.
    dropped = (torch.bool if device == "cuda" else dtype).itemsize if layer.dropout else 0
    return layer.num_softmaxes * layer.num_heads * seq * seq * (softmax + factor + dropped)


def warn_of_weights(
    network: Transformer,
    kernels: Sequence[str],
    device: str,
    dtype: torch.dtype,
    mask: AttentionMask,
    batch_size: int,
    free: int | None,
) -> str | None:
    """A sentence where the attention weights of a training step will not fit, and what does; None where they will.

    Args:
        network: with its backends resolved.
        kernels: that run in its layers.
        device: the type.
        dtype: of matrix products.
        mask: of the task.
        batch_size: rows in a batch.
        free: bytes that there are; None if that is not known.
    """
    holding = [layer for layer, kernel in zip(network.attentions(), kernels, strict=True) if kernel in HOLDING]
    trains = any(parameter.requires_grad for parameter in network.encoder.parameters())
    if free is None or not holding or not trains:
        return None
    seq = network.encoder.max_seq_len
    layers = [batch_size * kept_bytes(layer, seq, device, dtype) for layer in holding]
    again = network.encoder.checkpoint_activations
    needed = max(layers) if again else sum(layers)
    if needed <= free:
        return None
    able = (
        name for name in SPARING if not any(backend_refusal(one, name, device, dtype, mask, seq) for one in holding)
    )
    rows = batch_size * free // needed
    if backend := next(able, None):
        remedy = f"attention.backend={backend} keeps none"
    elif not again and max(layers) <= free:
        remedy = "model.checkpoint_activations=true keeps one layer's at a time"
    elif rows:
        remedy = f"data.batch_size={rows} trainer.accumulate_grad_batches={math.ceil(batch_size / rows)} keeps fewer"
    else:
        remedy = f"model.max_seq_len={max(math.isqrt(seq * seq * free // needed), 1)} keeps fewer"
    kind = ", ".join(sorted({kernel for kernel in kernels if kernel in HOLDING}))
    return (
        f"The {kind} kernel keeps at least {needed / 1e9:,.1f} GB of attention weights for the backward pass, and "
        f"{free / 1e9:,.1f} GB of memory are free: {remedy}."
    )
