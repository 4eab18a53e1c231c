"""The memory of attention weights, for kernels that store them, estimated before the first step."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tinyformer.nn import BACKENDS, AttentionMask, BaseAttention, Network

STORING = ("eager", "math")
"""Kernels that store the weights of all queries and keys; `math` is what torch's sdpa falls back to."""

NOT_STORING = ("flash", "flex")
"""Backends that never store these weights."""


@dataclass(frozen=True)
class MemoryShortage:
    """The attention weights of a training step need more memory than there is."""

    kernels: str  # that store them
    needed: int  # bytes that they take at least
    free: int  # bytes of memory
    works: Mapping[tuple[str, ...], Any]  # settings that help, by path from `network`, `datamodule` or `trainer`
    effect: str  # of these settings

    def describe(self, name_of: Callable[[tuple[str, ...]], str] = ".".join, show: Callable[[Any], str] = repr) -> str:
        """The warning as one sentence, in the reader's names of arguments and way to write values."""
        settings = " ".join(dict.fromkeys(f"{name_of(path)}={show(value)}" for path, value in self.works.items()))
        return (
            f"The {self.kernels} kernel stores at least {self.needed / 1e9:,.1f} GB of attention weights for the "
            f"backward pass, but {self.free / 1e9:,.1f} GB of memory are free: {settings} {self.effect}."
        )


def stored_bytes(layer: BaseAttention, seq: int, device: str, dtype: torch.dtype) -> int:
    """Bytes of a layer's attention weights that autograd stores for the backward pass, for each sequence.

    The kernel of the layer is one of `STORING`. It stores the softmax, in fp32 or higher precision; if the values have
    a dtype of lower precision, a copy in that; and with dropout, the dropout mask and the weights after dropout.
    """
    softmax = torch.promote_types(dtype, torch.float32).itemsize
    factor = dtype.itemsize if dtype.itemsize < softmax or layer.dropout else 0
    # F.dropout stores the mask in the values' dtype on CPU, and as booleans on CUDA.
    dropped = (torch.bool if device == "cuda" else dtype).itemsize if layer.dropout else 0
    return layer.num_softmaxes * layer.num_heads * seq * seq * (softmax + factor + dropped)


def find_memory_shortage(
    network: Network,
    kernels: Sequence[str],
    device: str,
    dtype: torch.dtype,
    mask: AttentionMask,
    batch_size: int,
    free: int | None,
    longest: int | None = None,
) -> MemoryShortage | None:
    """Check whether the attention weights of a training step fit into the free bytes of memory; None if they do.

    `kernels` are those of the layers, whose backends have been resolved, and `longest` the number of tokens of the
    longest row, where rows differ in length.
    """
    layers = zip(network.attentions(), network.attention_masks(mask), network.attention_paths(), kernels, strict=True)
    storing = [(layer, layer_mask, path) for layer, layer_mask, path, kernel in layers if kernel in STORING]
    is_trained = any(parameter.requires_grad for stack in network.stacks() for parameter in stack.parameters())
    if free is None or not storing or not is_trained:
        return None
    seq = min(network.max_seq_len, longest or network.max_seq_len)
    recomputes = network.encoder.checkpoint_activations
    sizes = [batch_size * stored_bytes(layer, seq, device, dtype) for layer, _, _ in storing]
    needed = max(sizes) if recomputes else sum(sizes)
    if needed <= free:
        return None
    cases = [layer.planned_case(device, dtype, layer_mask, seq) for layer, layer_mask, _ in storing]
    able = [name for name in NOT_STORING if not any(BACKENDS[name].refusal(case) for case in cases)]
    works: dict[tuple[str, ...], Any]
    effect, rows = "stores less", batch_size * free // needed
    if able:
        works, effect = {("network", *path, "backend"): able[0] for _, _, path in storing}, "stores none"
    elif not recomputes and max(sizes) <= free:
        works, effect = {("network", "encoder", "checkpoint_activations"): True}, "stores those of one layer at a time"
    elif rows:
        works = {("datamodule", "batch_size"): rows}
        works |= {("trainer", "accumulate_grad_batches"): math.ceil(batch_size / rows)}
    else:
        works = {("network", "encoder", "max_seq_len"): max(math.isqrt(seq * seq * free // needed), 1)}
    names = ", ".join(sorted({kernel for kernel in kernels if kernel in STORING}))
    return MemoryShortage(names, needed, free, works, effect)
