"""The whole network: an encoder and what is read from it."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.nn.attention import BaseAttention
from tinyformer.nn.cache import Cache
from tinyformer.nn.encoder import Encoder
from tinyformer.nn.init import init_weights
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.prune import prune_model
from tinyformer.nn.readout import TokenReadout
from tinyformer.nn.resolve import resolve_backend


class Transformer(nn.Module):
    """An encoder with a readout, initialised.

    Args:
        encoder: the encoder.
        readout: makes the readout, given the encoder's `token_embedding`.
        init_std: standard deviation of the initial weights.
        pruned_heads: `[layer, head]` pairs of heads that the model was made with and has no more, see `prune_heads`.
    """

    def __init__(
        self,
        encoder: Encoder,
        readout: Callable[..., nn.Module],
        init_std: float = 0.02,
        pruned_heads: Sequence[Sequence[int]] = (),
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.readout = readout(encoder.token_embedding)
        prune_model(self.attentions(), pruned_heads)
        init_weights(self, len(encoder.layers), init_std)

    def forward(
        self,
        tokens: Int[Tensor, "batch seq"],
        mask: AttentionMask | None = None,
        cache: Cache | None = None,
        targets: Int[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, "batch seq vocab_size"] | Float[Tensor, "batch classes"] | Float[Tensor, ""]:
        """The readout's scores, or how well they predict.

        Args:
            tokens: that are read.
            mask: who may attend to whom; everybody to everybody unless given.
            cache: of the tokens before these.
            targets: the token to be predicted at each position, or `IGNORED`. Where they are given, the mean
                cross-entropy is returned, for which the scores of a large vocabulary are never all in memory.
        """
        x = self.encoder(tokens, mask, cache)
        if targets is None:
            return self.readout(x, mask)
        assert isinstance(self.readout, TokenReadout)
        return self.readout.cross_entropy(x, targets)

    def attentions(self) -> list[BaseAttention]:
        """The attention of each layer, from the first to the last."""
        return [module for module in self.modules() if isinstance(module, BaseAttention)]

    def pruned_heads(self) -> list[list[int]]:
        """The `[layer, head]` pairs that the model was made with and has no more."""
        return [[index, head] for index, layer in enumerate(self.attentions()) for head in layer.pruned]

    def resolve_backends(self, device: str, dtype: torch.dtype, mask: AttentionMask, training: bool = True) -> str:
        """Fix the backend of every layer, before the first step and before compiling; see `resolve_backend`.

        Returns:
            Their names; one name where all layers have the same.
        """
        seq = self.encoder.max_seq_len
        resolved = [resolve_backend(layer, device, dtype, mask, seq, training) for layer in self.attentions()]
        return ", ".join(sorted({backend.name for backend in resolved}))

    def num_parameters(self) -> int:
        """Unique trainable parameters, embeddings included; tied ones count once."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)
