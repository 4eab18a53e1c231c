"""Small models that the tests of blocks, encoders and whole networks share."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tinyformer import nn as ours
from tinyformer.nn import (
    Attention,
    Decoder,
    Encoder,
    EncoderDecoder,
    FeedForward,
    LayerNorm,
    LearnedPosition,
    PreNormBlock,
    TokenReadout,
    Transformer,
)

BLOCKS: dict[str, Any] = {
    **{"pre_norm": PreNormBlock, "post_norm": ours.PostNormBlock},
    **{"sandwich": ours.SandwichBlock, "reordered": ours.ReorderedBlock},
    **{"parallel": ours.ParallelBlock, "shared": partial(ours.ParallelBlock, shared_norm=True)},
}


def block_factory(
    kind: type[nn.Module] = PreNormBlock,
    *,
    d_model: int = 32,
    num_heads: int = 4,
    bias: bool = False,
    norm: Callable[..., nn.Module] | None = None,
    attention_position: Callable[..., nn.Module] | None = None,
    **options: Any,
) -> Callable[..., nn.Module]:
    """The block that `conf/block` composes, which still lacks its `layer_index` and `num_layers`.

    `options` are those of the block and of its attention.
    """
    of_block = taken(options, "attention_residual", "feed_forward_residual", "dropout")
    attention = partial(Attention, d_model, num_heads, bias=bias, position=attention_position, **options)
    feed_forward = partial(FeedForward, d_model, bias=bias)
    return partial(kind, d_model, attention, feed_forward, norm or partial(LayerNorm, bias=bias), **of_block)


def taken(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """Those of the options with one of the names, which are removed."""
    return {name: options.pop(name) for name in names if name in options}


def make_encoder(
    *,
    vocab_size: int = 50,
    num_layers: int = 2,
    d_model: int = 32,
    max_seq_len: int = 16,
    position: bool = True,
    embedding_dropout: float = 0.0,
    **options: Any,
) -> Encoder:
    """An encoder; `options` are its own and those of `block_factory`."""
    own = taken(options, "embedding_norm", "scaled_embedding", "checkpoint_activations", "autocast_residual")
    block, norm = block_factory(d_model=d_model, **options), partial(LayerNorm, bias=options.get("bias", False))
    learned = partial(LearnedPosition, max_seq_len, d_model) if position else None
    return Encoder(vocab_size, num_layers, d_model, max_seq_len, block, norm, learned, embedding_dropout, **own)


def make_transformer(*, tied: bool = True, **encoder: Any) -> Transformer:
    """A language model; `encoder` goes to `make_encoder`."""
    return Transformer(make_encoder(**encoder), readout=partial(TokenReadout, tied=tied))


def token_ids(batch: int = 2, seq: int = 8, vocab_size: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randint(vocab_size, (batch, seq), generator=torch.Generator().manual_seed(seed))


def randomised(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def make_encoder_decoder(
    kind: type[nn.Module] = PreNormBlock,
    cross: Any = None,
    std: float = 0.3,
    shared: bool = True,
    bias: bool = True,
    **block: Any,
) -> EncoderDecoder:
    """A translator with weights large enough to tell tokens apart; `block` goes to `block_factory`."""
    torch.manual_seed(0)
    sizes = (50, 2, 32, 16)
    parts = {
        "block": block_factory(kind, bias=bias, **block),
        "norm": partial(LayerNorm, bias=bias),
        "position": partial(LearnedPosition, 16, 32),
    }
    decoder = Decoder(*sizes, cross_attention=cross or partial(Attention, 32, 4, bias=bias), **parts)
    network = EncoderDecoder(Encoder(*sizes, kind="encoder", **parts), decoder, TokenReadout, shared_embedding=shared)
    for name, parameter in network.named_parameters():
        nn.init.normal_(parameter, 1.0 if "norm.weight" in name else 0.0, std)
    return network.eval()
