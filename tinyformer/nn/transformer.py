"""The whole network: an encoder and a readout."""

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.batch import IGNORED
from tinyformer.errors import argument_path
from tinyformer.nn.attention import BaseAttention
from tinyformer.nn.cache import Cache
from tinyformer.nn.encoder import Encoder
from tinyformer.nn.heads import Address
from tinyformer.nn.init import init_weights
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.network import Network, attentions_in
from tinyformer.nn.prune import prune_model
from tinyformer.nn.readout import TokenReadout


class Transformer(Network):
    """An encoder followed by a readout, with initialised weights.

    Args:
        readout: factory of the readout, called with the encoder's `token_embedding`.
        init_std: see `init_weights`.
        pruned_heads: `[layer, head]` pairs of the heads to remove, see `prune_heads`.
        init: see `init_weights`.
    """

    def __init__(
        self,
        encoder: Encoder,
        readout: Callable[..., nn.Module],
        init_std: float = 0.02,
        pruned_heads: Sequence[Sequence[int]] = (),
        init: str = "normal",
    ) -> None:
        super().__init__()
        self.encoder = encoder
        with argument_path("readout"):
            self.readout = readout(encoder.token_embedding)
        prune_model(self, pruned_heads)
        init_weights(self, 2 * len(encoder.layers), init_std, init)

    def forward(
        self,
        tokens: Int[Tensor, "batch seq"],
        mask: AttentionMask | None = None,
        cache: Cache | None = None,
        targets: Int[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, "batch seq vocab_size"] | Float[Tensor, "batch classes"] | Float[Tensor, ""]:
        """The logits of the readout.

        Given targets, the token to predict at each position or `IGNORED`, their mean cross-entropy in nats instead,
        without holding the logits of a large vocabulary in memory all at once.
        """
        x = self.encoder(tokens, mask, cache)
        if targets is not None and isinstance(self.readout, TokenReadout):
            return self.readout.cross_entropy(x, targets)
        logits = self.readout(x, mask)
        return logits if targets is None else F.cross_entropy(logits.mT.float(), targets, ignore_index=IGNORED)

    def stacks(self) -> list[Encoder]:
        """The encoder alone."""
        return [self.encoder]

    def attentions(self) -> list[BaseAttention]:
        """The attention modules, from the first layer to the last."""
        return attentions_in(self)

    def layer_addresses(self) -> list[Address]:
        """(0,), (1,), and so on: the indices of the layers, or of the modules where a layer has several."""
        indices = [index for index, layer in enumerate(self.encoder.layers) for _ in attentions_in(layer)]
        return [(index,) for index in (indices if len(set(indices)) == len(indices) else range(len(indices)))]

    def attention_masks(self, mask: AttentionMask) -> list[AttentionMask]:
        """The mask itself, for every layer."""
        return [mask] * len(self.attentions())

    def attention_paths(self) -> list[tuple[str, ...]]:
        """The block's attention, for every layer."""
        return [("encoder", "block", "attention")] * len(self.attentions())
