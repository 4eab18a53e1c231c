"""Whole networks: an encoder and a readout, or an encoder, a decoder and a readout, with initialised weights."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tinyformer.errors import ArgumentError, argument_path, require_at_least, require_choice
from tinyformer.nn.attention import BaseAttention
from tinyformer.nn.block import Context
from tinyformer.nn.cache import Cache
from tinyformer.nn.maps import NoMapsError
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.network import Decoder, Encoder, Network
from tinyformer.nn.position import RelativePosition
from tinyformer.nn.readout import IGNORED, TokenReadout

RESIDUAL_PROJECTIONS = ("o_proj", "down_proj")
"""The names of linear layers whose output is added to the residual stream."""


def normal(model: nn.Module, num_branches: int, std: float) -> None:
    """GPT-2's initialisation (Radford et al. 2019, §2.3): N(0, std²).

    The standard deviation of the projections that end residual branches is divided by √num_branches, so that the
    variance of the residual stream does not grow with depth.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            is_residual = name.rsplit(".", 1)[-1] in RESIDUAL_PROJECTIONS
            nn.init.normal_(module.weight, std=std / math.sqrt(num_branches) if is_residual else std)


def xavier(model: nn.Module, num_branches: int, std: float) -> None:
    """Glorot & Bengio 2010: U(-a, a) with a = √(6 / (fan_in + fan_out)), so that a layer preserves variances.

    Each projection is initialised separately, whereas q, k and v share a matrix in `torch.nn.MultiheadAttention`.
    Token and position embeddings, and a readout tied to an embedding, are N(0, 1 / d_model), as in the code of the
    original transformer: multiplied by √d_model (arXiv 1706.03762, §3.4), they have a variance of 1. The tables of
    relative positions, which act on scores of single heads, are N(0, std²), as in `normal`. `num_branches` is unused.
    """
    relative = {part for module in model.modules() if isinstance(module, RelativePosition) for part in module.modules()}
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std if module in relative else module.embedding_dim**-0.5)
        elif isinstance(module, nn.Linear) and not any(module.weight is weight for weight in embeddings):
            nn.init.xavier_uniform_(module.weight)


INITIALISATIONS: dict[str, Callable[[nn.Module, int, float], None]] = {"normal": normal, "xavier": xavier}


def init_weights(model: nn.Module, num_branches: int, std: float = 0.02, init: str = "normal") -> None:
    """Initialise the weights of a module; biases become 0, and norms keep their scale of 1.

    Args:
        model: the module whose weights are initialised.
        num_branches: number of residual branches in all layers, see `count_branches`.
        std: standard deviation of all weights with `normal`, and of tables of relative positions with either `init`.
        init: a name in `INITIALISATIONS`.
    """
    require_choice("init", init, INITIALISATIONS)
    require_at_least(0, {"init_std": 0.02}, init_std=std)
    INITIALISATIONS[init](model, num_branches, std)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def count_branches(stack: Encoder, per_layer: int) -> int:
    """The number of residual branches in all layers; 1 if norms of the sublayers' outputs set the size of each branch.

    A layer has two branches, or three with cross-attention.
    """
    has_output_norms = (
        "output" in getattr(stack.layers[-1], "norm_names", ()) and type(stack.final_norm) is not nn.Identity
    )
    return 1 if has_output_norms else per_layer * len(stack.layers)


class NoInitialisation(TorchFunctionMode):
    """A context that skips the initialisation of parameters, for a network whose weights are loaded afterwards."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if getattr(func, "__module__", "") == "torch.nn.init" or func in (Tensor.normal_, Tensor.uniform_):
            return args[0] if args else named["tensor"]
        return func(*args, **named)


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
        init_weights(self, count_branches(encoder, 2), init_std, init)

    def forward(
        self,
        tokens: Int[Tensor, "batch seq"],
        mask: AttentionMask | None = None,
        cache: Cache | None = None,
        targets: Int[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, "batch seq vocab_size"] | Float[Tensor, "batch classes"] | Float[Tensor, ""]:
        """Return the logits of the readout; if `targets` are given, their mean cross-entropy in nats.

        A target is the token to predict at a position, or `IGNORED`. The cross-entropy does not hold the logits of a
        large vocabulary in memory all at once.
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
        init_weights(self.readout, 1, init_std, init)  # before the embedding, which may be tied to the readout
        init_weights(encoder, count_branches(encoder, 2), init_std, init)
        init_weights(decoder, count_branches(decoder, 3), init_std, init)

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
        """The context of the decoder: one vector for each source token, and a mask that hides padding.

        The `lengths` of `source_mask` hide padding from the encoder and the decoder. An `ArgumentError` is raised for
        a mask with documents, which the decoder cannot tell apart.
        """
        mask = source_mask or AttentionMask()
        if mask.documents is not None:
            raise ArgumentError("source_mask.documents", "…", "must be None: each source needs a separate row")
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

        Given `targets` (tokens to predict, or `IGNORED`), return their mean cross-entropy in nats. The default mask is
        causal. With a cache, `tokens` are only the new tokens; keys and values of the source are computed once.
        """
        x = self.decoder(tokens, mask or AttentionMask(causal=True), cache, context)
        return self.readout(x) if targets is None else self.readout.cross_entropy(x, targets, label_smoothing)

    def attentions_by_kind(self) -> dict[str, list[BaseAttention]]:
        """The `BaseAttention` modules, from the first layer to the last, by kind: "encoder", "decoder" or "cross"."""
        by_kind = defaultdict[str, list[BaseAttention]](list)
        for (kind, _), layer in self.attentions_by_address().items():
            by_kind[str(kind)].append(layer)
        return dict(by_kind)

    def cross_attentions(self) -> list[BaseAttention]:
        """The cross-attention modules; raises a `NoMapsError` if there are none."""
        if not (found := self.attentions_by_kind().get("cross")):
            last = self.other_attentions()[-1]
            raise NoMapsError(last, "is no BaseAttention, so it has no heads", "cross_attention")
        return found

    def attention_masks(self, mask: AttentionMask) -> list[AttentionMask]:
        """The masks of `attentions`: `mask` (encoder), a causal mask (decoder), padding of the source (cross)."""
        masks = {"encoder": mask, "decoder": AttentionMask(causal=True), "cross": AttentionMask(lengths=mask.lengths)}
        return [
            masks[kind].aligned(layer.window, 0, 1, 1) if kind == "cross" and layer.window else masks[str(kind)]
            for (kind, _), layer in self.attentions_by_address().items()
        ]
