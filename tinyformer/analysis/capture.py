"""The exact attention weights of a batch, whatever kernel computes the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tinyformer.nn import AttentionMaps, BaseAttention, Transformer


class CapturedMaps(list[Tensor]):
    """The weights of each layer, `batch maps rows k_seq`, in the order of the forward passes.

    Attributes:
        layers: the same weights, with the logits that they are made from.
        rows: where in the sequence, a cache's tokens included, the queries stand that they are of; None before the
            first forward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[AttentionMaps] = []
        self.rows: Int[Tensor, " rows"] | None = None

    def add(self, maps: AttentionMaps, rows: Int[Tensor, " rows"]) -> None:
        """Keep a layer's."""
        self.append(maps.weights)
        self.layers.append(maps)
        self.rows = rows


@contextmanager
def capture_attention(model: Transformer, rows: int | Int[Tensor, " rows"] | None = None) -> Iterator[CapturedMaps]:
    """Collect the weights of each layer, first to last, of the forward passes made inside the block.

        with capture_attention(model) as maps, torch.no_grad():
            model(tokens, AttentionMask(causal=True))

    A fused kernel never holds the weights, so each layer computes them once more from the same queries and keys, by
    `tinyformer.nn.weights.attention_maps`. Outside of the block nothing is kept and nothing is slower.

    Args:
        model: the network; a compiled one runs uncompiled inside the block, since compiled code skips hooks.
        rows: the queries whose weights are kept, as indices or as a number of them, which is sampled alike for all
            layers and every time; all unless given. Memory is `rows` times the keys, not the square of the sequence.

    Raises:
        ValueError: `rows` is no positive number, or an index is outside of the sequence.
    """
    if isinstance(rows, int) and rows < 1:
        raise ValueError(f"rows={rows}: at least one query has to be kept, rows=64 works.")
    maps = CapturedMaps()

    def record(layer: BaseAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        q_seq = args[0].shape[1]
        chosen = _rows(rows, q_seq).to(args[0].device)
        found = layer.maps(*args, **kwargs, rows=None if rows is None else chosen)
        maps.add(found, chosen + found.weights.shape[-1] - q_seq)

    # Before the layer runs: afterwards its cache may have let go of what the first queries see.
    hooks = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in model.attentions()]
    # What is captured is kept anyhow, and a layer that is computed again would be captured again.
    computed_again, model.encoder.checkpoint_activations = model.encoder.checkpoint_activations, False
    try:
        with torch.compiler.set_stance("force_eager"):
            yield maps
    finally:
        model.encoder.checkpoint_activations = computed_again
        for hook in hooks:
            hook.remove()


def _rows(rows: int | Int[Tensor, " rows"] | None, q_seq: int) -> Int[Tensor, " rows"]:
    """The indices of the queries to keep."""
    if rows is None or (isinstance(rows, int) and rows >= q_seq):
        return torch.arange(q_seq)
    if isinstance(rows, int):
        # A generator of its own: looking at a model must not change what training draws next.
        return torch.randperm(q_seq, generator=torch.Generator().manual_seed(0))[:rows].sort().values
    if len(rows) == 0 or rows.min() < 0 or rows.max() >= q_seq:
        raise ValueError(f"rows={rows.tolist()}: a sequence of {q_seq} tokens has the queries 0 to {q_seq - 1}.")
    return rows
