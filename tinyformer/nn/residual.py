"""The connection around a sublayer (He et al. 2015, arXiv 1512.03385), with both of its parts adjustable."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, nn


class Residual(nn.Module):
    """skip * x + branch * f(x): `skip=0` removes the connection, `branch=0` removes the sublayer.

    Args:
        skip: factor of the connection; a number, or one for each layer.
        branch: factor of the sublayer; a number, or one for each layer.
        layer_index: which layer this is, from 0.
        num_layers: how many there are.
        name: the config key, for errors.
    """

    def __init__(
        self,
        skip: int | float | Sequence[int | float] = 1.0,
        branch: int | float | Sequence[int | float] = 1.0,
        layer_index: int = 0,
        num_layers: int = 1,
        name: str = "residual",
    ) -> None:
        super().__init__()
        self.skip = _of_layer(skip, layer_index, num_layers, f"{name}.skip")
        self.branch = _of_layer(branch, layer_index, num_layers, f"{name}.branch")

    def forward(
        self, x: Float[Tensor, "batch seq d_model"], update: Float[Tensor, "batch seq d_model"]
    ) -> Float[Tensor, "batch seq d_model"]:
        x = x if self.skip == 1 else self.skip * x
        update = update if self.branch == 1 else self.branch * update
        return x + update

    def extra_repr(self) -> str:
        return f"skip={self.skip}, branch={self.branch}"


def _of_layer(scale: int | float | Sequence[int | float], layer_index: int, num_layers: int, key: str) -> float:
    if isinstance(scale, int | float):
        return float(scale)
    if len(scale) != num_layers:
        raise ValueError(
            f"{key} has {len(scale)} numbers and the model {num_layers} layers: give one number, "
            f"or one for each layer such as [{','.join(['1'] * num_layers)}]."
        )
    return float(scale[layer_index])
