"""One layer of the encoder: attention, then feed-forward, each with a norm and a residual connection."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn

from tinyformer.nn.cache import LayerCache
from tinyformer.nn.dropout import make_dropout
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.residual import Residual


class Block(nn.Module):
    """What pre- and post-norm blocks share: the parts, made by their factories for this layer.

    Args:
        d_model: width of the residual stream.
        attention: makes the attention, given `layer_index` and `num_layers`.
        feed_forward: makes the feed-forward network.
        norm: makes a norm.
        attention_residual: makes the connection around the attention, given `layer_index` and `num_layers`.
        feed_forward_residual: makes the connection around the feed-forward network, likewise.
        dropout: probability to drop an element of a sublayer's output in training.
        layer_index: which layer this is, from 0.
        num_layers: how many there are.
    """

    ends_normalised: bool
    """Whether the output of a layer is normalised already, so that the encoder adds no final norm."""

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
        self.attention = attention(**layer)
        self.attention_residual = attention_residual(name="block.attention_residual", **layer)
        self.feed_forward_norm = norm(d_model)
        self.feed_forward = feed_forward()
        self.feed_forward_residual = feed_forward_residual(name="block.feed_forward_residual", **layer)
        self.dropout = make_dropout(dropout, "model.dropout")


class PreNormBlock(Block):
    """x + f(norm(x)): the stream itself is never normalised (Xiong et al. 2020, arXiv 2002.04745; GPT-2)."""

    ends_normalised = False

    def forward(
        self, x: Float[Tensor, "batch seq d_model"], mask: AttentionMask, cache: LayerCache | None = None
    ) -> Float[Tensor, "batch seq d_model"]:
        x = self.attention_residual(x, self.dropout(self.attention(self.attention_norm(x), mask, cache=cache)))
        return self.feed_forward_residual(x, self.dropout(self.feed_forward(self.feed_forward_norm(x))))


class PostNormBlock(Block):
    """norm(x + f(x)): the original order (Vaswani et al. 2017, arXiv 1706.03762; BERT)."""

    ends_normalised = True

    def forward(
        self, x: Float[Tensor, "batch seq d_model"], mask: AttentionMask, cache: LayerCache | None = None
    ) -> Float[Tensor, "batch seq d_model"]:
        x = self.attention_norm(self.attention_residual(x, self.dropout(self.attention(x, mask, cache=cache))))
        return self.feed_forward_norm(self.feed_forward_residual(x, self.dropout(self.feed_forward(x))))
