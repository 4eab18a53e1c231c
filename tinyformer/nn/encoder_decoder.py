"""The encoder–decoder: one sequence is read, another is predicted from it."""

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.errors import ArgumentError, argument_path, require_at_least
from tinyformer.nn.attention import BaseAttention
from tinyformer.nn.block import Context
from tinyformer.nn.cache import Cache
from tinyformer.nn.decoder import Decoder
from tinyformer.nn.encoder import Encoder
from tinyformer.nn.init import init_weights
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.readout import TokenReadout


class EncoderDecoder(nn.Module):
    """The original transformer (Vaswani et al. 2017, arXiv 1706.03762), with initialised weights.

    The encoder turns the source into one vector for each token. Each layer of the decoder attends to the earlier tokens
    of the target, and then to these vectors.

    Args:
        encoder: of the source.
        decoder: of the target.
        readout: factory of the readout, called with the decoder's `token_embedding`.
        init_std: standard deviation of the initial weights.
        shared_embedding: whether source and target have one token embedding, as with one vocabulary for both.

    Raises:
        ArgumentError: the widths differ, the embedding cannot be shared, or `init_std` is negative.
    """

    def __init__(
        self,
        encoder: Encoder,
        decoder: Decoder,
        readout: Callable[..., TokenReadout],
        init_std: float = 0.02,
        shared_embedding: bool = True,
    ) -> None:
        super().__init__()
        require_at_least(0, {"init_std": 0.02}, init_std=init_std)
        self.encoder, self.decoder = encoder, decoder
        own, other = tuple(decoder.token_embedding.weight.shape), tuple(encoder.token_embedding.weight.shape)
        if own[1] != other[1]:
            raise ArgumentError("decoder", own[1], f"must have the width of the encoder, {other[1]}")
        if shared_embedding:
            if own != other:
                sizes = f"encoder and decoder have embeddings of {other} and {own} numbers"
                raise ArgumentError("shared_embedding", True, sizes, {"shared_embedding": False})
            decoder.token_embedding = encoder.token_embedding
        with argument_path("readout"):
            self.readout = readout(decoder.token_embedding)
        init_weights(self.readout, 1, init_std)
        init_weights(encoder, 2 * len(encoder.layers), init_std)
        init_weights(decoder, 3 * len(decoder.layers), init_std)

    def forward(
        self,
        source: Int[Tensor, "batch source_seq"],
        tokens: Int[Tensor, "batch seq"],
        source_mask: AttentionMask | None = None,
        mask: AttentionMask | None = None,
        targets: Int[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, "batch seq vocab_size"] | Float[Tensor, ""]:
        """The logits of the next token at each position of the target, or their cross-entropy with `targets`.

        Args:
            source: token ids of the source.
            tokens: token ids of the target so far, as in teacher forcing.
            source_mask: see `encode`.
            mask: see `decode`.
            targets: see `decode`.
        """
        return self.decode(tokens, self.encode(source, source_mask), mask, targets=targets)

    def encode(self, source: Int[Tensor, "batch source_seq"], source_mask: AttentionMask | None = None) -> Context:
        """The source as the decoder sees it: one vector for each token, of which padding is masked.

        Args:
            source: token ids of the source.
            source_mask: the tokens of the source that each of them may attend to; all of them by default. Its
                `lengths` hide padding from the decoder, too.

        Raises:
            ArgumentError: the mask has documents, which the decoder could not tell apart.
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
    ) -> Float[Tensor, "batch seq vocab_size"] | Float[Tensor, ""]:
        """The logits of the next token at each position of the target, given the encoded source.

        Args:
            tokens: token ids of the target so far; with a cache, those that it does not hold.
            context: the encoded source.
            mask: the tokens of the target that each of them may attend to; by default, itself and those before it.
            cache: KV cache of the preceding tokens, extended by these, and of the source, which is projected once.
            targets: the token to predict at each position, or `IGNORED`. If given, the mean cross-entropy in nats is
                returned, see `Transformer.forward`.
        """
        x = self.decoder(tokens, mask or AttentionMask(causal=True), cache, context)
        return self.readout(x) if targets is None else self.readout.cross_entropy(x, targets)

    def attentions_by_kind(self) -> dict[str, list[BaseAttention]]:
        """The attention modules, from the first layer to the last: "encoder", "decoder" and "cross"."""
        return {
            "encoder": [layer.attention for layer in self.encoder.layers],
            "decoder": [layer.attention for layer in self.decoder.layers],
            "cross": [layer.cross_attention for layer in self.decoder.layers],
        }

    def num_parameters(self) -> int:
        """The number of trainable parameters, embeddings included; shared ones count once."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)
