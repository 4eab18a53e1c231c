"""Whole networks with initialised weights: an encoder and a readout, or an encoder, a decoder and a readout."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.batch import IGNORED
from tinyformer.errors import ArgumentError, argument_path
from tinyformer.nn.attention import BaseAttention
from tinyformer.nn.block import Context
from tinyformer.nn.cache import Cache
from tinyformer.nn.encoder import Decoder, Encoder
from tinyformer.nn.init import init_weights
from tinyformer.nn.maps import NoMapsError
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.network import Network
from tinyformer.nn.readout import TokenReadout


class Transformer(Network):
    """An encoder followed by a readout.

    Args:
        readout: factory of the readout, called with the encoder's `token_embedding`.
        init_std: see `init_weights`.
        pruned_heads: `[layer, head]` pairs of the heads to remove, see `prune_heads`.
        init: see `init_weights`.
    """

    kinds: ClassVar = {(): ("encoder", "block", "attention")}

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
        self.prune(pruned_heads)
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


class EncoderDecoder(Network):
    """The original transformer (Vaswani et al. 2017, arXiv 1706.03762).

    The encoder turns the source into one vector for each token. Each layer of the decoder attends to the earlier tokens
    of the target, and then to these vectors.

    Args:
        readout: factory of the readout, called with the decoder's `token_embedding`.
        init_std: see `init_weights`.
        shared_embedding: whether source and target share one token embedding, and so one vocabulary.
        pruned_heads: `[kind, layer, head]` of the heads to remove, see `KINDS` and `prune_heads`.
        init: see `init_weights`.
    """

    readout: TokenReadout

    kinds: ClassVar = {
        ("encoder",): ("encoder", "block", "attention"),
        ("decoder",): ("decoder", "block", "attention"),
        ("cross",): ("decoder", "cross_attention"),
    }

    def __init__(
        self,
        encoder: Encoder,
        decoder: Decoder,
        readout: Callable[..., TokenReadout],
        init_std: float = 0.02,
        shared_embedding: bool = True,
        pruned_heads: Sequence[Sequence[str | int]] = (),
        init: str = "normal",
    ) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        if shared_embedding:
            shape, encoder_shape = (tuple(stack.token_embedding.weight.shape) for stack in (decoder, encoder))
            if shape != encoder_shape:
                sizes = f"encoder and decoder have embeddings of the shapes {encoder_shape} and {shape}"
                raise ArgumentError("shared_embedding", True, sizes, {"shared_embedding": False})
            decoder.token_embedding = encoder.token_embedding
        with argument_path("readout"):
            self.readout = readout(decoder.token_embedding)
        self.prune(pruned_heads)
        init_weights(self.readout, 1, init_std, init)  # before the embedding that it may be tied to
        init_weights(encoder, 2 * len(encoder.layers), init_std, init)
        init_weights(decoder, 3 * len(decoder.layers), init_std, init)

    def forward(
        self,
        source: Int[Tensor, "batch source_seq"],
        tokens: Int[Tensor, "batch seq"],
        source_mask: AttentionMask | None = None,
        mask: AttentionMask | None = None,
        targets: Int[Tensor, "batch seq"] | None = None,
        label_smoothing: float = 0.0,
    ) -> Float[Tensor, "batch seq vocab_size"] | Float[Tensor, ""]:
        """The logits of the next token at each position of the target, or their cross-entropy; see `decode`."""
        context = self.encode(source, source_mask)
        return self.decode(tokens, context, mask, targets=targets, label_smoothing=label_smoothing)

    def encode(self, source: Int[Tensor, "batch source_seq"], source_mask: AttentionMask | None = None) -> Context:
        """The source as the decoder attends to it: a vector for each token, and a mask that hides padding.

        The `lengths` of `source_mask` hide padding from the decoder, too; its documents, which the decoder could not
        tell apart, are refused.
        """
        mask = source_mask or AttentionMask()
        if mask.documents is not None:
            raise ArgumentError("source_mask.documents", "…", "must be None: each source is a row of its own")
        return Context(self.encoder(source, mask), AttentionMask(lengths=mask.lengths))

    def decode(
        self,
        tokens: Int[Tensor, "batch seq"],
        context: Context,
        mask: AttentionMask | None = None,
        cache: Cache | None = None,
        targets: Int[Tensor, "batch seq"] | None = None,
        label_smoothing: float = 0.0,
    ) -> Float[Tensor, "batch seq vocab_size"] | Float[Tensor, ""]:
        """The logits of the next token at each position of the target, given the encoded source.

        Given targets, the tokens to predict or `IGNORED`, their mean cross-entropy in nats instead. Without a mask the
        decoder is causal. With a cache, `tokens` are those that are not in it; the source is projected into it once.
        """
        x = self.decoder(tokens, mask or AttentionMask(causal=True), cache, context)
        return self.readout(x) if targets is None else self.readout.cross_entropy(x, targets, label_smoothing)

    def attentions_by_kind(self) -> dict[str, list[BaseAttention]]:
        """The attention modules, from the first layer to the last, of "encoder", "decoder" and "cross", if any."""
        by_kind = defaultdict[str, list[BaseAttention]](list)
        for (kind, _), layer in self.attentions_by_address().items():
            by_kind[str(kind)].append(layer)
        return dict(by_kind)

    def cross_attentions(self) -> list[BaseAttention]:
        """The cross-attention modules; a `NoMapsError` if there is none."""
        if not (found := self.attentions_by_kind().get("cross")):
            last = self.other_attentions()[-1]
            raise NoMapsError(last, "is no BaseAttention, so it has no heads", "cross_attention")
        return found

    def attention_masks(self, mask: AttentionMask) -> list[AttentionMask]:
        """The source's mask for the encoder, a causal one for the decoder, the source's padding for cross-attention."""
        masks = {"encoder": mask, "decoder": AttentionMask(causal=True), "cross": AttentionMask(lengths=mask.lengths)}
        return [
            masks[kind].aligned(layer.window, 0, 1, 1) if kind == "cross" and layer.window else masks[str(kind)]
            for (kind, _), layer in self.attentions_by_address().items()
        ]
