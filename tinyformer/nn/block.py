"""One transformer layer: attention, then a feed-forward network, each with a norm and a residual connection."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn

from tinyformer.errors import argument_path
from tinyformer.nn.cache import LayerCache
from tinyformer.nn.dropout import make_dropout
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.residual import Residual


class Block(nn.Module):
    """Base of pre-norm and post-norm blocks: makes the parts of one layer from their factories.

    Args:
        d_model: width of the residual stream.
        attention: factory of the attention, called with `layer_index` and `num_layers`.
        feed_forward: factory of the feed-forward network, called without arguments.
        norm: factory of a norm, called with `d_model`.
        attention_residual: factory of the residual connection around attention, called with `layer_index` and
            `num_layers`.
        feed_forward_residual: the same for the feed-forward network.
        dropout: probability of zeroing an element of a sublayer's output in training.
        layer_index: index of this layer, from 0.
        num_layers: number of layers in the model.
    """

    ends_normalised: bool
    """Whether the layer's output is normalised, so that the encoder needs no final norm."""

    def __init__(
        self,
        d_model: int,
        attention: Callable[..., nn.Module],
        feed_forward: Callable[..., nn.Module],
        norm: Callable[..., nn.Module],
        attention_residual: Callable[..., nn.Module] = Residual,
        feed_forward_residual: Callable[..., nn.Module] = Residual,
        dropout: float = 0.0,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__()
        layer = {"layer_index": layer_index, "num_layers": num_layers}
        self.attention_norm = norm(d_model)
        with argument_path("attention"):
            self.attention = attention(**layer)
        with argument_path("attention_residual"):
            self.attention_residual = attention_residual(**layer)
        self.feed_forward_norm = norm(d_model)
        with argument_path("feed_forward"):
            self.feed_forward = feed_forward()
        with argument_path("feed_forward_residual"):
            self.feed_forward_residual = feed_forward_residual(**layer)
        self.dropout = make_dropout(dropout)


class PreNormBlock(Block):
    """x + f(norm(x)): the residual stream itself is not normalised (Xiong et al. 2020, arXiv 2002.04745; GPT-2)."""

    ends_normalised = False

    def forward(
        self, x: Float[Tensor, "batch seq d_model"], mask: AttentionMask, cache: LayerCache | None = None
    ) -> Float[Tensor, "batch seq d_model"]:
        x = self.attention_residual(x, self.dropout(self.attention(self.attention_norm(x), mask, cache=cache)))
        return self.feed_forward_residual(x, self.dropout(self.feed_forward(self.feed_forward_norm(x))))


class PostNormBlock(Block):
    """norm(x + f(x)): the order of the original transformer (Vaswani et al. 2017, arXiv 1706.03762; BERT)."""

    ends_normalised = True

    def forward(
        self, x: Float[Tensor, "batch seq d_model"], mask: AttentionMask, cache: LayerCache | None = None
    ) -> Float[Tensor, "batch seq d_model"]:
        # Autocast normalises in fp32; the residual stream keeps its own dtype.
        dtype = x.dtype
        x = self.attention_norm(self.attention_residual(x, self.dropout(self.attention(x, mask, cache=cache)))).to(
            dtype
        )
        return self.feed_forward_norm(self.feed_forward_residual(x, self.dropout(self.feed_forward(x)))).to(dtype)
