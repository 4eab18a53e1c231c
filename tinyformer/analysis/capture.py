"""The exact attention weights of a batch, whichever kernel computes the attention."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tinyformer.errors import ArgumentError, require_at_least
from tinyformer.nn import AttentionMaps, BaseAttention, Transformer


class CapturedMaps(list[Tensor]):
    """The attention weights of each layer, `batch maps rows k_seq`, in the order of the forward passes.

    Attributes:
        layers: the same weights together with their logits.
        rows: positions of the captured queries in the sequence, counting cached tokens; None before the first forward
            pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[AttentionMaps] = []
        self.rows: Int[Tensor, " rows"] | None = None

    def add(self, maps: AttentionMaps, rows: Int[Tensor, " rows"]) -> None:
        """Append the maps of a layer."""
        self.append(maps.weights)
        self.layers.append(maps)
        self.rows = rows


@contextmanager
def capture_attention(model: Transformer, rows: int | Int[Tensor, " rows"] | None = None) -> Iterator[CapturedMaps]:
    """Collect the attention weights of each layer during the forward passes inside the block.

        with capture_attention(model) as maps, torch.no_grad():
            model(tokens, AttentionMask(causal=True))

    A fused kernel never materialises the weights, so each layer computes them again from the same queries and keys
    (`BaseAttention.maps`). Outside of the block there is no cost.

    Args:
        model: the network; a compiled network runs uncompiled inside the block.
        rows: the queries to capture: their indices, or their number, sampled identically for all layers and calls;
            None captures all of them. Memory grows with rows times keys, not with the square of the sequence length.

    Raises:
        ArgumentError: `rows` is a number below 1, or an index is outside of the sequence.
    """
    if isinstance(rows, int):
        require_at_least(1, {"rows": 64}, rows=rows)
    maps = CapturedMaps()

    @functools.cache  # the same for all layers, and a GPU is waited for at each copy
    def rows_of(q_seq: int, device: torch.device) -> Int[Tensor, " rows"]:
        return _rows(rows, q_seq).to(device)

    def record(layer: BaseAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        q_seq = args[0].shape[1]
        chosen = rows_of(q_seq, args[0].device)
        captured = layer.maps(*args, **kwargs, rows=None if rows is None else chosen)
        maps.add(captured, chosen + captured.weights.shape[-1] - q_seq)

    # Before the layer runs, since a layer with a window drops keys from its cache that the first queries attend to.
    hooks = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in model.attentions()]
    try:
        with running_hooks(model):
            yield maps
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def running_hooks(model: Transformer) -> Iterator[None]:
    """Make every forward pass inside the block run the hooks of each module, and run them once."""
    # Activation checkpointing would run each layer, and its hook, a second time in the backward pass.
    checkpoint_activations, model.encoder.checkpoint_activations = model.encoder.checkpoint_activations, False
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled code skips hooks
            yield
    finally:
        model.encoder.checkpoint_activations = checkpoint_activations


def _rows(rows: int | Int[Tensor, " rows"] | None, q_seq: int) -> Int[Tensor, " rows"]:
    """The indices of the queries to capture."""
    if rows is None or (isinstance(rows, int) and rows >= q_seq):
        return torch.arange(q_seq)
    if isinstance(rows, int):
        # Its own generator, so that capturing during training leaves the global random state alone.
        return torch.randperm(q_seq, generator=torch.Generator().manual_seed(0))[:rows].sort().values
    if len(rows) == 0 or rows.min() < 0 or rows.max() >= q_seq:
        reason = f"must be indices from 0 to {q_seq - 1}, the queries of the sequence"
        raise ArgumentError("rows", rows.tolist(), reason, {"rows": [0]})
    return rows
