"""One transformer layer: attention, then a feed-forward network, each with a norm and a residual connection.

In a decoder that attends to an encoder's output, cross-attention comes between the two.
"""

import copy
import inspect
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tinyformer.errors import ArgumentError, argument_path
from tinyformer.nn.cache import LayerCache
from tinyformer.nn.kernels.choose import require_possible
from tinyformer.nn.layers import Residual, Stream, make_dropout
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.side_inputs import SideInputs
from tinyformer.nn.softmax import SoftmaxAttention
from tinyformer.nn.textbook import TextbookAttention

AddTo: TypeAlias = Callable[[Stream, Tensor], Stream]
"""A residual connection: the residual stream after an update, given the stream and the update."""


class Context(NamedTuple):
    """The sequence that cross-attention attends to: a vector for each token, and a mask of the visible tokens.

    A layer projects the vectors to keys and values if the cache is empty, and stores keys and values in the cache.
    """

    vectors: Float[Tensor, "batch k_seq d_model"]
    mask: AttentionMask
    cache: LayerCache | None = None


def make_attention(factory: Callable[..., Any], d_model: int, **layer: Any) -> nn.Module:
    """Call a factory of attention with the arguments that it accepts; textbook attention is wrapped in an adapter."""
    maker = factory if isinstance(factory, partial) else partial(factory)
    named, given = inspect.signature(maker.func).parameters, maker.keywords | layer
    if not any(each.kind is each.VAR_KEYWORD for each in named.values()):
        for name in list(named)[len(maker.args) :]:
            if name not in given and named[name].default is inspect.Parameter.empty:
                reason = f"is required by {maker.func.__name__}; on a command line, +KEY=VALUE with this key sets it"
                raise ArgumentError(name, None, reason)
        given = {name: value for name, value in given.items() if name in named}
    bare: Any = copy.copy(maker)  # of Hydra's class of partials, which checks what it calls
    bare.__setstate__((maker.func, maker.args, {}, vars(maker)))
    made: nn.Module = bare(**given)
    roles = [name[0] for name in inspect.signature(made.forward).parameters][:3]
    return TextbookAttention(made, d_model) if sorted(roles) == ["k", "q", "v"] else made


def _possible(attention: nn.Module) -> nn.Module:
    """Return the attention, or raise an `ArgumentError` if its backend can compute it on no device."""
    for part in attention.modules():
        if isinstance(part, SoftmaxAttention):
            require_possible(part.backend, part.planned_case("cpu", torch.bfloat16, AttentionMask(), training=False))
    return attention


class Block(nn.Module):
    """Base class of pre-norm and post-norm blocks, which creates the modules of one layer from their factories.

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
        layer_index: index of this layer, from 0.
        kind: in a network with two stacks, the stack of the layer, "encoder" or "decoder". The factory of the attention
            is then called with this `kind`, too, and the factory of the cross-attention with `kind="cross"`.
    """

    ends_normalised: bool
    """True if the layer's output is normalised, so that the encoder needs no final norm."""

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
    ) -> None:
        super().__init__()
        layer = {"layer_index": layer_index, "num_layers": num_layers}
        own, cross = ({}, {}) if kind is None else ({"kind": kind}, {"kind": "cross"})
        with argument_path("norm"):
            self.attention_norm = norm(d_model)
        with argument_path("attention"):
            self.attention = _possible(make_attention(attention, d_model, **layer, **own))
        with argument_path("attention_residual"):
            self.attention_residual = attention_residual(**layer)
        self.cross_attention = None
        if cross_attention is not None:
            self.cross_attention_norm = norm(d_model)
            with argument_path("cross_attention"):
                self.cross_attention = _possible(make_attention(cross_attention, d_model, **layer, **cross))
            with argument_path("cross_attention_residual"):
                self.cross_attention_residual = cross_attention_residual(**layer)
            self.residual_cross_mid_hook = nn.Identity()  # its hooks see the residual stream after the cross-attention
        self.residual_mid_hook = nn.Identity()  # its hooks see the residual stream after the attention
        self.feed_forward_norm = norm(d_model)
        with argument_path("feed_forward"):
            self.feed_forward = feed_forward()
        with argument_path("feed_forward_residual"):
            self.feed_forward_residual = feed_forward_residual(**layer)
        self.dropout = make_dropout(dropout)

    def forward(
        self,
        x: Stream,
        mask: AttentionMask,
        cache: LayerCache | None = None,
        context: Context | None = None,
        side: SideInputs | None = None,
    ) -> Stream | tuple[Stream, SideInputs]:
        """The residual stream after this layer; with `side`, also the side inputs of the next layer."""
        options: dict[str, Any] = {} if cache is None else {"cache": cache}  # any module takes x and mask
        values = None

        def attend(x: Tensor) -> Tensor:
            nonlocal values
            if side is None or not getattr(self.attention, "reads_side_inputs", False):
                return self.attention(x, mask, **options)
            output, values = self.attention(x, mask, **options, side=side)
            return output

        def around(residual: nn.Module) -> AddTo:
            if side is None or getattr(residual, "embedding_factor", None) is None:
                return residual
            return partial(residual, embedding=side.embedding)

        x = self.residual_mid_hook(self.sublayer(x, attend, self.attention_norm, around(self.attention_residual)))
        if self.cross_attention is not None:
            if context is None:
                raise ArgumentError("context", None, "is needed by a block with cross-attention")
            cached = {} if context.cache is None else {"cache": context.cache}
            across = partial(self.cross_attention, context=context.vectors, context_mask=context.mask, **cached)
            x = self.sublayer(x, across, self.cross_attention_norm, around(self.cross_attention_residual))
            x = self.residual_cross_mid_hook(x)
        x = self.sublayer(x, self.feed_forward, self.feed_forward_norm, around(self.feed_forward_residual))
        if side is None:
            return x
        return x, side if side.first_values is not None else side._replace(first_values=values)

    @abstractmethod
    def sublayer(
        self, x: Stream, f: Callable[[Tensor], Tensor], norm: nn.Module, residual: Callable[..., Stream]
    ) -> Stream:
        """The residual stream after a sublayer f."""


class PreNormBlock(Block):
    """x + f(norm(x)): the residual stream itself is not normalised (Xiong et al. 2020, arXiv 2002.04745; GPT-2)."""

    ends_normalised = False

    def sublayer(
        self, x: Stream, f: Callable[[Tensor], Tensor], norm: nn.Module, residual: Callable[..., Stream]
    ) -> Stream:
        return residual(x, self.dropout(f(norm(x))))


class PostNormBlock(Block):
    """norm(x + f(x)): the order of the original transformer (Vaswani et al. 2017, arXiv 1706.03762; BERT)."""

    ends_normalised = True

    def sublayer(
        self, x: Stream, f: Callable[[Tensor], Tensor], norm: nn.Module, residual: Callable[..., Stream]
    ) -> Stream:
        # Autocast normalises in fp32; the residual stream keeps its own dtype.
        return norm(residual(x, self.dropout(f(x)))).to(x.dtype)
