"""The exact attention weights of a batch, whatever kernel computes the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tinyformer.nn import BaseAttention, Transformer


@contextmanager
def capture_attention(
    model: Transformer,
) -> Iterator[list[Float[Tensor, "batch num_heads q_seq k_seq"]]]:
    """Collect the weights of each layer, first to last, of the forward passes made inside the block.

        with capture_attention(model) as maps, torch.no_grad():
            model(tokens, AttentionMask(causal=True))

    A fused kernel never holds the weights, so each layer computes them once more from the same queries and keys, by
    `tinyformer.nn.attention_weights`. Outside of the block nothing is kept and nothing is slower.

    Args:
        model: the network; a compiled one runs uncompiled inside the block, since compiled code skips hooks.
    """
    maps: list[Tensor] = []

    def record(layer: BaseAttention, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        maps.append(layer.weights(*args, **kwargs))

    hooks = [layer.register_forward_hook(record, with_kwargs=True) for layer in model.attentions()]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield maps
    finally:
        for hook in hooks:
            hook.remove()
