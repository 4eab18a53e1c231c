"""Position-wise feed-forward networks: each token is transformed on its own."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from tinyformer.errors import require_at_least, require_choice
from tinyformer.nn.residual import Stream


def relu2(x: Tensor) -> Tensor:
    """ReLU(x)² (So et al. 2021, arXiv 2109.08668)."""
    return F.relu(x).square()


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU with the tanh approximation, as in GPT-2 (Hendrycks & Gimpel 2016, arXiv 1606.08415)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": F.relu,
    "relu2": relu2,
    "silu": F.silu,
}


def find_activation(activation: str) -> Callable[[Tensor], Tensor]:
    """The activation function of a name in `ACTIVATIONS`."""
    require_choice("activation", activation, ACTIVATIONS)
    return ACTIVATIONS[activation]


class FeedForward(nn.Module):
    """down(activation(up(x))) (Vaswani et al. 2017, arXiv 1706.03762, §3.3).

    Args:
        d_ff: width of the hidden layer; 4 d_model by default.
        activation: a name in `ACTIVATIONS`.
    """

    def __init__(self, d_model: int, d_ff: int | None = None, activation: str = "gelu", bias: bool = False) -> None:
        super().__init__()
        require_at_least(1, {"d_model": 128, "d_ff": 4 * d_model}, d_model=d_model, d_ff=d_ff)
        d_ff = d_ff or 4 * d_model
        self.up_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.down_proj = nn.Linear(d_ff, d_model, bias=bias)
        self.activation = find_activation(activation)

    def forward(self, x: Stream) -> Stream:
        return self.down_proj(self.activation(self.up_proj(x)))


class GatedFeedForward(nn.Module):
    """down(activation(gate(x)) * up(x)); with SiLU it is SwiGLU (Shazeer 2020, arXiv 2002.05202).

    Args:
        d_ff: width of the hidden layer; by default 8/3 d_model, rounded up to a multiple of 8, so that the three
            matrices have as many parameters as the two of `FeedForward`.
        activation: a name in `ACTIVATIONS`.
    """

    def __init__(self, d_model: int, d_ff: int | None = None, activation: str = "silu", bias: bool = False) -> None:
        super().__init__()
        default = -(-8 * d_model // 24) * 8
        require_at_least(1, {"d_model": 128, "d_ff": default}, d_model=d_model, d_ff=d_ff)
        d_ff = d_ff or default
        self.gate_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.up_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.down_proj = nn.Linear(d_ff, d_model, bias=bias)
        self.activation = find_activation(activation)

    def forward(self, x: Stream) -> Stream:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
