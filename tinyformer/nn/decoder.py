"""The decoder of an encoder–decoder: a stack of layers that attend to their own past and to another sequence."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from tinyformer.errors import ArgumentError
from tinyformer.nn.encoder import Encoder


class Decoder(Encoder):
    """An encoder whose blocks have cross-attention: it maps token ids and a `Context` to one vector for each token.

    A causal mask makes it a decoder. Relative positions act in its self-attention only, since positions in two
    sequences have no distance.

    Args:
        arguments: `vocab_size`, `num_layers`, `d_model` and `max_seq_len`, see `Encoder`.
        block: factory of a block, called with `cross_attention`, `layer_index` and `num_layers`.
        cross_attention: factory of the cross-attention, called with `layer_index` and `num_layers`.
        options: the other arguments of `Encoder`, such as `norm`.

    Raises:
        ArgumentError: an argument is refused by `Encoder`, or the cross-attention has a window.
    """

    def __init__(
        self,
        *arguments: Any,
        block: Callable[..., nn.Module],
        cross_attention: Callable[..., nn.Module],
        **options: Any,
    ) -> None:
        try:
            attending = partial(block, cross_attention=cross_attention)
            super().__init__(*arguments, block=attending, kind="decoder", **options)
        except ArgumentError as error:
            if error.path[:2] == ("block", "cross_attention"):
                error.path = error.path[1:]  # the block was given what is an argument of this class
            raise
        for layer in self.layers:
            if (window := getattr(layer.cross_attention, "window", None)) is not None:
                reason = "must be None in cross-attention: positions in two sequences have no distance"
                raise ArgumentError("cross_attention.window", window, reason, {"window": None})
