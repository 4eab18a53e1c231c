"""Stacks of layers: from token ids to one vector for each token."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tinyformer.errors import ArgumentError, argument_path
from tinyformer.nn.block import Context
from tinyformer.nn.cache import Cache
from tinyformer.nn.layers import make_dropout
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.sizes import require_sizes


class Encoder(nn.Module):
    """Token embeddings and positional encodings, followed by a stack of blocks.

    BERT's encoder and GPT's decoder are both this class: only the mask differs.

    Args:
        max_seq_len: length of the longest sequence, in tokens.
        block: factory of a block, called with `layer_index` and `num_layers`.
        norm: factory of the final norm, called with `d_model`; `nn.Identity` for none. Post-norm blocks need none.
        position: factory of the absolute positional encoding, if any.
        dropout: of the embeddings.
        embedding_norm: whether to normalise the sum of embeddings and positional encodings, as in BERT and BLOOM.
        checkpoint_activations: whether to store only the input of each layer in training and to recompute the other
            activations in the backward pass: about a third more time, activation memory of one layer instead of all
            (Chen et al. 2016, arXiv 1604.06174).
        autocast_residual: whether the residual stream has autocast's dtype, such as bf16, in place of fp32: half the
            memory traffic between the layers, but sums of 8 significant bits.
        kind: "encoder" or "decoder" in a network that has both, see `Block`.
    """

    def __init__(
        self,
        vocab_size: int,
        num_layers: int,
        d_model: int,
        max_seq_len: int,
        block: Callable[..., nn.Module],
        norm: Callable[..., nn.Module],
        position: Callable[..., nn.Module] | None = None,
        dropout: float = 0.0,
        embedding_norm: bool = False,
        checkpoint_activations: bool = False,
        autocast_residual: bool = False,
        kind: str | None = None,
    ) -> None:
        super().__init__()
        self.checkpoint_activations, self.autocast_residual = checkpoint_activations, autocast_residual
        require_sizes(num_layers, d_model, max_seq_len, vocab_size)
        self.vocab_size, self.max_seq_len = vocab_size, max_seq_len
        self.token_embedding = nn.Embedding(vocab_size, d_model)
        with argument_path("position"):
            self.position = position() if position else None
        self.embedding_norm = norm(d_model) if embedding_norm else nn.Identity()
        if embedding_norm and isinstance(self.embedding_norm, nn.Identity):
            raise ArgumentError("embedding_norm", True, "needs a `norm`", {"embedding_norm": False})
        self.dropout = make_dropout(dropout)
        with argument_path("block"):
            options = {} if kind is None else {"kind": kind}
            layers = (block(layer_index=i, num_layers=num_layers, **options) for i in range(num_layers))
            self.layers = nn.ModuleList(layers)
        for part in self.modules():
            if part is not self and (longest := getattr(part, "max_seq_len", max_seq_len)) < max_seq_len:
                reason = f"must be at most {longest}, the number of positions of {type(part).__name__}"
                raise ArgumentError("max_seq_len", max_seq_len, reason, {"max_seq_len": longest})
        self.final_norm = nn.Identity() if self.layers[-1].ends_normalised else norm(d_model)

    @property
    def takes_cache(self) -> bool:
        """Return True if the attention of every layer can keep keys and values, or its state, in a cache."""
        parts = [getattr(layer, name, None) for layer in self.layers for name in ("attention", "cross_attention")]
        return all("cache" in inspect.signature(part.forward).parameters for part in parts if part is not None)

    def forward(
        self,
        tokens: Int[Tensor, "batch seq"],
        mask: AttentionMask | None = None,
        cache: Cache | None = None,
        context: Context | None = None,
    ) -> Float[Tensor, "batch seq d_model"]:
        """Encode a batch of sequences; without a mask each token attends to all.

        The cache holds the tokens before these, and is extended by them. Blocks with cross-attention attend to the
        context. More than `max_seq_len` tokens are an `ArgumentError`.
        """
        first = cache.length if cache else 0
        if first + tokens.shape[1] > self.max_seq_len:
            cached = f" after {first} in the cache" if first else ""
            reason = f"must be at most max_seq_len={self.max_seq_len} tokens{cached}"
            raise ArgumentError("tokens.shape[1]", tokens.shape[1], reason)
        x = self.token_embedding(tokens)
        x = self.position(x, first) if self.position else x
        x = self.dropout(self.embedding_norm(x))
        device = x.device.type
        if self.autocast_residual and torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        recompute = self.checkpoint_activations and self.training and torch.is_grad_enabled() and cache is None
        for index, layer in enumerate(self.layers):
            if context is not None and cache is not None:
                context = context._replace(cache=cache.context_layers[index])
            inputs: tuple[Any, ...] = (x, mask or AttentionMask(), cache.layers[index] if cache else None)
            if context is not None:  # blocks without cross-attention take none
                inputs = (*inputs, context)
            x = checkpoint(layer, *inputs, use_reentrant=False) if recompute else layer(*inputs)
        return self.final_norm(x)


class Decoder(Encoder):
    """An encoder whose blocks have cross-attention: it maps token ids and a `Context` to one vector for each token.

    A causal mask makes it a decoder. Relative positions act in its self-attention only, since positions in two
    sequences have no distance.

    Args:
        block: factory of a block, called with `cross_attention`, `layer_index` and `num_layers`.
        cross_attention: factory of the cross-attention, called with `layer_index` and `num_layers`.
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
