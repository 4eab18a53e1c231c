"""One transformer layer: attention, then a feed-forward network, each with norms and a residual connection.

In a decoder that attends to an encoder's output, cross-attention comes between the two. In a parallel layer, both read
the input of the layer.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tinyformer.errors import ArgumentError, argument_path
from tinyformer.nn.cache import LayerCache
from tinyformer.nn.kernels.choose import require_possible
from tinyformer.nn.layers import Residual, Stream, make_dropout
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.pattern import call_accepted
from tinyformer.nn.shift import ShortConvolution
from tinyformer.nn.side_inputs import SideInputs
from tinyformer.nn.softmax import SoftmaxAttention
from tinyformer.nn.textbook import TextbookAttention


class Context(NamedTuple):
    """The sequence that cross-attention attends to: a vector for each token, and a mask of the visible tokens.

    A layer projects the vectors to keys and values if the cache is empty, and stores keys and values in the cache.
    """

    vectors: Float[Tensor, "batch k_seq d_model"]
    mask: AttentionMask
    cache: LayerCache | None = None


class Norms(NamedTuple):
    """The norms of a sublayer f: stream(x + output(f(input(x)))). A norm that a block lacks is the identity."""

    input: nn.Module = nn.Identity()
    output: nn.Module = nn.Identity()
    stream: nn.Module = nn.Identity()


def make_attention(factory: Callable[..., Any], d_model: int, **layer: Any) -> nn.Module:
    """Call a factory of attention with the arguments that it accepts; textbook attention is wrapped in an adapter."""
    made: nn.Module = call_accepted(factory, **layer)
    roles = [name[0] for name in inspect.signature(made.forward).parameters][:3]
    return TextbookAttention(made, d_model) if sorted(roles) == ["k", "q", "v"] else made


def _possible(attention: nn.Module) -> nn.Module:
    """Return the attention, or raise an `ArgumentError` if its backend can compute it on no device."""
    for part in attention.modules():
        if isinstance(part, SoftmaxAttention):
            require_possible(part.backend, part.planned_case("cpu", torch.bfloat16, AttentionMask(), training=False))
    return attention


class Block(nn.Module):
    """Base class of blocks, which creates the modules of one layer from their factories and runs them in sequence.

    Args:
        attention: factory of the attention, called with `layer_index` and `num_layers` if it accepts them. The module's
            `forward` takes the tokens' vectors and the mask, or the arguments that `TextbookAttention` describes. Only
            a `BaseAttention` has heads and attention maps.
        feed_forward: factory of the feed-forward network, called without arguments.
        norm: factory of a norm, called with `d_model`; `nn.Identity` for none.
        attention_residual: factory of the residual connection around attention, called with `layer_index` and
            `num_layers`.
        feed_forward_residual: factory of the residual connection around the feed-forward network, called likewise.
        cross_attention: factory of the cross-attention, called like `attention`; None for a block without it. The
            module's `forward` takes the tokens' vectors, `context` and `context_mask`.
        cross_attention_residual: factory of the residual connection around cross-attention, called likewise.
        dropout: dropout probability of each sublayer's output.
        attention_convolution: whether a `ShortConvolution` is applied to the input of the attention, after its norm.
        feed_forward_convolution: whether one is applied to the input of the feed-forward network, after its norm.
        layer_index: index of this layer, from 0.
        kind: in a network with two stacks, the stack of the layer, "encoder" or "decoder". The factory of the attention
            is then called with this `kind`, too, and the factory of the cross-attention with `kind="cross"`.
    """

    norm_names: ClassVar[Mapping[str, str]]
    """The norms of each sublayer: the field of `Norms`, and the end of the module's name, as in `attention_norm`."""

    @property
    def ends_normalised(self) -> bool:
        """True if the layer's output is normalised, so that the encoder needs no final norm."""
        return "stream" in self.norm_names

    def __init__(
        self,
        d_model: int,
        attention: Callable[..., nn.Module],
        feed_forward: Callable[..., nn.Module],
        norm: Callable[..., nn.Module],
        attention_residual: Callable[..., nn.Module] = Residual,
        feed_forward_residual: Callable[..., nn.Module] = Residual,
        cross_attention: Callable[..., nn.Module] | None = None,
        cross_attention_residual: Callable[..., nn.Module] = Residual,
        dropout: float = 0.0,
        layer_index: int = 0,
        num_layers: int = 1,
        kind: str | None = None,
        attention_convolution: bool = False,
        feed_forward_convolution: bool = False,
    ) -> None:
        super().__init__()
        layer = {"layer_index": layer_index, "num_layers": num_layers}
        own, cross = ({}, {}) if kind is None else ({"kind": kind}, {"kind": "cross"})

        def add_norms(sublayer: str) -> None:
            with argument_path("norm"):
                for name in self.norm_names.values():
                    self.add_module(f"{sublayer}_{name}", norm(d_model))

        add_norms("attention")
        with argument_path("attention"):
            self.attention = _possible(make_attention(attention, d_model, **layer, **own))
        with argument_path("attention_residual"):
            self.attention_residual = attention_residual(**layer)
        self.cross_attention = None
        if cross_attention is not None:
            add_norms("cross_attention")
            with argument_path("cross_attention"):
                self.cross_attention = _possible(make_attention(cross_attention, d_model, **layer, **cross))
            with argument_path("cross_attention_residual"):
                self.cross_attention_residual = cross_attention_residual(**layer)
            self.residual_cross_mid_hook = nn.Identity()  # its hooks see the residual stream after the cross-attention
        self.residual_mid_hook = nn.Identity()  # its hooks see the residual stream after the attention
        add_norms("feed_forward")
        with argument_path("feed_forward"):
            self.feed_forward = feed_forward()
        with argument_path("feed_forward_residual"):
            self.feed_forward_residual = feed_forward_residual(**layer)
        self.dropout = make_dropout(dropout)
        self.attention_convolution = ShortConvolution(d_model) if attention_convolution else None
        self.feed_forward_convolution = ShortConvolution(d_model) if feed_forward_convolution else None

    def forward(
        self,
        x: Stream,
        mask: AttentionMask,
        cache: LayerCache | None = None,
        context: Context | None = None,
        side: SideInputs | None = None,
    ) -> Stream | tuple[Stream, SideInputs]:
        """The residual stream after this layer; with `side`, also the side inputs of the next layer."""
        following = side

        def attend(x: Stream) -> Stream:
            nonlocal following
            output, following = self.attend(self.convolved("attention", x, mask, cache), mask, cache, side)
            return output

        x = self.residual_mid_hook(self.sublayer(x, attend, "attention", side))
        if self.cross_attention is not None:
            if context is None:
                raise ArgumentError("context", None, "is needed by a block with cross-attention")
            cached = {} if context.cache is None else {"cache": context.cache}
            across = partial(self.cross_attention, context=context.vectors, context_mask=context.mask, **cached)
            x = self.residual_cross_mid_hook(self.sublayer(x, across, "cross_attention", side))
        x = self.sublayer(x, partial(self.transform, mask=mask, cache=cache), "feed_forward", side)
        return x if following is None else (x, following)

    def attend(
        self, x: Stream, mask: AttentionMask, cache: LayerCache | None = None, side: SideInputs | None = None
    ) -> tuple[Stream, SideInputs | None]:
        """The output of the attention, of any module that takes x and mask, and the side inputs of the next layer."""
        options: dict[str, Any] = {} if cache is None else {"cache": cache}
        if side is None or not getattr(self.attention, "reads_side_inputs", False):
            return self.attention(x, mask, **options), side
        output, values = self.attention(x, mask, **options, side=side)
        return output, side if side.first_values is not None else side._replace(first_values=values)

    def convolved(self, sublayer: str, x: Stream, mask: AttentionMask, cache: LayerCache | None = None) -> Stream:
        """The input of "attention" or "feed_forward": x, or the short convolution of x if the block has one."""
        convolution: nn.Module | None = getattr(self, f"{sublayer}_convolution")
        return x if convolution is None else convolution(x, mask, cache and cache.part(f"{sublayer}_convolution"))

    def transform(self, x: Stream, mask: AttentionMask, cache: LayerCache | None = None) -> Stream:
        """The output of the feed-forward network, which may be any module that takes x."""
        x = self.convolved("feed_forward", x, mask, cache)
        if not getattr(self.feed_forward, "reads_earlier_tokens", False):
            return self.feed_forward(x)
        return self.feed_forward(x, mask, cache and cache.part("feed_forward"))

    def add(self, sublayer: str, x: Stream, update: Tensor, side: SideInputs | None) -> Stream:
        """The residual stream after the output of a sublayer is added."""
        residual = getattr(self, f"{sublayer}_residual")
        if side is None or getattr(residual, "embedding_factor", None) is None:
            return residual(x, update)
        return residual(x, update, side.embedding)

    def norms(self, sublayer: str) -> Norms:
        """The norms of "attention", "cross_attention" or "feed_forward"."""
        return Norms(**{place: getattr(self, f"{sublayer}_{name}") for place, name in self.norm_names.items()})

    def normed(self, sublayer: str, place: str, x: Stream) -> Stream:
        """The vectors x after the norm at a place of `Norms`; x itself if the block has no norm there."""
        name = self.norm_names.get(place)
        return x if name is None else getattr(self, f"{sublayer}_{name}")(x)

    def sublayer(self, x: Stream, f: Callable[[Tensor], Tensor], name: str, side: SideInputs | None = None) -> Stream:
        """The residual stream after a sublayer f: stream(x + output(f(input(x)))), with the norms of its name."""
        added = self.dropout(self.normed(name, "output", f(self.normed(name, "input", x))))
        # Autocast normalises in fp32; the residual stream keeps its own dtype.
        return self.normed(name, "stream", self.add(name, x, added, side)).to(x.dtype)


class PreNormBlock(Block):
    """x + f(norm(x)): the residual stream itself is not normalised (Xiong et al. 2020, arXiv 2002.04745; GPT-2).

    Args:
        first_norm: whether the first layer normalises the input of attention; ModernBERT, which normalises the
            embeddings, does not (Warner et al. 2024, arXiv 2412.13663).
        *arguments: see `Block`.
        **options: see `Block`.
    """

    norm_names: ClassVar = {"input": "norm"}

    def __init__(self, *arguments: Any, first_norm: bool = True, layer_index: int = 0, **options: Any) -> None:
        super().__init__(*arguments, layer_index=layer_index, **options)
        if layer_index == 0 and not first_norm:
            self.attention_norm = nn.Identity()


class PostNormBlock(Block):
    """norm(x + f(x)): the order of the original transformer (Vaswani et al. 2017, arXiv 1706.03762; BERT)."""

    norm_names: ClassVar = {"stream": "norm"}


class SandwichBlock(Block):
    """x + norm_out(f(norm_in(x))): input and output of each sublayer are normalised.

    The order is that of Gemma 2 (arXiv 2408.00118) and Gemma 3, called Peri-LN by Kim et al. 2025 (arXiv 2502.02732).
    """

    norm_names: ClassVar = {"input": "norm", "output": "output_norm"}


class ReorderedBlock(Block):
    """x + norm(f(x)): the output of each sublayer is normalised, and its input is not (OLMo 2, arXiv 2501.00656)."""

    norm_names: ClassVar = {"output": "norm"}


class ParallelBlock(Block):
    """x + attention(norm_1(x)) + feed_forward(norm_2(x)): both sublayers read the input of the layer.

    The order is that of GPT-J and Phi, with a single norm, and of GPT-NeoX (Black et al. 2022, arXiv 2204.06745) and
    Pythia, with two. `residual_mid` is x + attention(norm_1(x)), to which the feed-forward network adds but which it
    does not read; so the skip of `attention_residual` is the factor of x, and that of `feed_forward_residual` the
    factor of this sum.

    Args:
        shared_norm: whether the feed-forward network reads the same norm of x as attention.
        *arguments: see `Block`.
        **options: see `Block`; cross-attention is not supported.
    """

    norm_names: ClassVar = {"input": "norm"}

    def __init__(self, *arguments: Any, shared_norm: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.shared_norm = shared_norm
        if self.cross_attention is not None:
            reason = "has no cross-attention, which a decoder needs; use PreNormBlock, which has it"
            raise ArgumentError("block", type(self).__name__, reason)
        if shared_norm:
            del self.feed_forward_norm

    def norms(self, sublayer: str) -> Norms:
        return super().norms("attention" if self.shared_norm else sublayer)

    def forward(
        self,
        x: Stream,
        mask: AttentionMask,
        cache: LayerCache | None = None,
        context: Context | None = None,
        side: SideInputs | None = None,
    ) -> Stream | tuple[Stream, SideInputs]:
        """The residual stream after this layer, see `Block`."""
        normed = self.normed("attention", "input", x)
        attended, following = self.attend(self.convolved("attention", normed, mask, cache), mask, cache, side)
        mid = self.residual_mid_hook(self.add("attention", x, self.dropout(attended), side))
        read = normed if self.shared_norm else self.normed("feed_forward", "input", x)
        x = self.add("feed_forward", mid, self.dropout(self.transform(read, mask, cache)), side)
        return x if following is None else (x, following)
