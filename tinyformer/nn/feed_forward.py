"""The two or three matrices that act on every token alone."""

from collections.abc import Callable

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


def relu2(x: Tensor) -> Tensor:
    """ReLU(x)² (So et al. 2021, arXiv 2109.08668)."""
    return F.relu(x).square()


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU, its Gaussian approximated by a tanh, as in GPT-2 (Hendrycks & Gimpel 2016, arXiv 1606.08415)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu2": relu2,
    "silu": F.silu,
}


def find_activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function of a name in `ACTIVATIONS`.

    Raises:
        ValueError: there is none.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"feed_forward.activation={name}: choose one of {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


def _width(d_ff: int | None, usual: int) -> int:
    if d_ff is not None and d_ff < 1:
        raise ValueError(f"model.d_ff={d_ff} is no width; model.d_ff={usual} is, and null gives that.")
    return d_ff or usual


class FeedForward(nn.Module):
    """down(activation(up(x))) (Vaswani et al. 2017, arXiv 1706.03762, §3.3).

    Args:
        d_model: width of the residual stream.
        d_ff: width between the two matrices; 4 d_model unless given.
        activation: a name in `ACTIVATIONS`.
        bias: whether the matrices have one.
    """

    def __init__(self, d_model: int, d_ff: int | None = None, activation: str = "gelu", bias: bool = False) -> None:
        super().__init__()
        d_ff = _width(d_ff, 4 * d_model)
        self.up_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.down_proj = nn.Linear(d_ff, d_model, bias=bias)
        self.activation = find_activation(activation)

    def forward(self, x: Float[Tensor, "batch seq d_model"]) -> Float[Tensor, "batch seq d_model"]:
        return self.down_proj(self.activation(self.up_proj(x)))


class GatedFeedForward(nn.Module):
    """down(activation(gate(x)) * up(x)); with SiLU it is SwiGLU (Shazeer 2020, arXiv 2002.05202).

    Args:
        d_model: width of the residual stream.
        d_ff: width between the matrices; unless given 8/3 d_model, rounded up to a multiple of 8, so that three
            matrices hold as much as two of 4 d_model.
        activation: a name in `ACTIVATIONS`.
        bias: whether the matrices have one.
    """

    def __init__(self, d_model: int, d_ff: int | None = None, activation: str = "silu", bias: bool = False) -> None:
        super().__init__()
        d_ff = _width(d_ff, -(-8 * d_model // 24) * 8)
        self.gate_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.up_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.down_proj = nn.Linear(d_ff, d_model, bias=bias)
        self.activation = find_activation(activation)

    def forward(self, x: Float[Tensor, "batch seq d_model"]) -> Float[Tensor, "batch seq d_model"]:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
