"""Residual connections around sublayers, and the dropout of what is added to the residual stream."""

from collections.abc import Sequence
from typing import TypeAlias

from jaxtyping import Float
from torch import Tensor, nn

from tinyformer.errors import ArgumentError

Stream: TypeAlias = Float[Tensor, "batch seq d_model"]
"""The residual stream: one vector for each token."""


class Residual(nn.Module):
    """skip * x + branch * f(x) (He et al. 2015, arXiv 1512.03385), in the dtype of x.

    `skip=0` removes the connection, `branch=0` the sublayer. Each is one number, or a list with one for each layer.
    """

    def __init__(
        self,
        skip: int | float | Sequence[int | float] = 1.0,
        branch: int | float | Sequence[int | float] = 1.0,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__()
        self.skip = _scale_of_layer("skip", skip, layer_index, num_layers)
        self.branch = _scale_of_layer("branch", branch, layer_index, num_layers)

    def forward(self, x: Stream, update: Stream) -> Stream:
        x = x if self.skip == 1 else self.skip * x
        update = update if self.branch == 1 else self.branch * update
        return (x + update).to(x.dtype)

    def extra_repr(self) -> str:
        return f"skip={self.skip}, branch={self.branch}"


def _scale_of_layer(
    argument: str, scale: int | float | Sequence[int | float], layer_index: int, num_layers: int
) -> float:
    if isinstance(scale, int | float):
        return float(scale)
    if len(scale) != num_layers:
        reason = f"must be one number, or one for each of the {num_layers} layers, not {len(scale)}"
        raise ArgumentError(argument, list(scale), reason, {argument: [1] * num_layers})
    return float(scale[layer_index])


def make_dropout(dropout: float) -> nn.Module:
    """Dropout of a probability; for 0 the identity, which costs nothing."""
    if not 0 <= dropout <= 1:
        raise ArgumentError("dropout", dropout, "must be between 0 and 1", {"dropout": 0.1})
    return nn.Dropout(dropout) if dropout else nn.Identity()
