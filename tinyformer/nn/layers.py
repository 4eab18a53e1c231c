"""The parts of a block other than attention: normalisation, feed-forward network, residual connection."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from tinyformer.errors import ArgumentError, require_at_least, require_choice
from tinyformer.nn.cache import LayerCache
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.shift import ShortConvolution

Stream: TypeAlias = Float[Tensor, "batch seq d_model"]
"""The residual stream: one vector for each token."""


class LayerNorm(nn.LayerNorm):
    """(x - mean) / standard deviation, scaled and shifted if `weight` (Ba et al. 2016, arXiv 1607.06450)."""

    def __init__(self, d_model: int, eps: float = 1e-5, bias: bool = True, weight: bool = True) -> None:
        super().__init__(d_model, eps=eps, bias=bias, elementwise_affine=weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise fp32 inputs in fp32 even if FSDP gathered the weights in bf16: torch mixes no dtypes on a CPU."""
        if x.dtype != torch.float32 or self.weight is None or self.weight.dtype == x.dtype:
            return super().forward(x)
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x, self.normalized_shape, self.weight.float(), bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """x / root mean square, scaled if `weight`; no mean, no bias (Zhang & Sennrich 2019, arXiv 1910.07467).

    Args:
        weight: whether there is a learned scale.
        zero_centered: whether the scale is 1 + weight, as in Gemma (Mesnard et al. 2024, arXiv 2403.08295).
    """

    def __init__(self, d_model: int, eps: float = 1e-6, weight: bool = True, zero_centered: bool = False) -> None:
        super().__init__(d_model, eps=eps, elementwise_affine=weight)
        self.zero_centered = zero_centered and weight
        if self.zero_centered:
            nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise in the higher precision of input and weight; torch would warn about mixed dtypes under autocast."""
        if self.weight is None:
            return super().forward(x)
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        weight = 1 + self.weight.to(dtype) if self.zero_centered else self.weight.to(dtype)
        return F.rms_norm(x.to(dtype), self.normalized_shape, weight, self.eps)


def weight_of(norm: nn.Module) -> Tensor:
    """The factor of each dimension after a norm has divided its input; 1 for a norm without a weight."""
    weight: Tensor | None = getattr(norm, "weight", None)
    if weight is None:
        return torch.ones(())
    return 1 + weight if getattr(norm, "zero_centered", False) else weight


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
    """The activation function with this name in `ACTIVATIONS`."""
    require_choice("activation", activation, ACTIVATIONS)
    return ACTIVATIONS[activation]


class FeedForward(nn.Module):
    """down(activation(up(x))) (Vaswani et al. 2017, arXiv 1706.03762, §3.3).

    Args:
        d_ff: width of the hidden layer; 4 d_model by default.
        activation: a name in `ACTIVATIONS`.
        convolution: whether a `ShortConvolution` is applied to up(x), before the activation.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        activation: str = "gelu",
        bias: bool = False,
        convolution: bool = False,
    ) -> None:
        super().__init__()
        require_at_least(1, {"d_model": 128, "d_ff": 4 * d_model}, d_model=d_model, d_ff=d_ff)
        d_ff = d_ff or 4 * d_model
        self.up_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.down_proj = nn.Linear(d_ff, d_model, bias=bias)
        self.activation = find_activation(activation)
        self.reads_earlier_tokens, self.convolution = convolution, ShortConvolution(d_ff) if convolution else None

    def forward(self, x: Stream, mask: AttentionMask | None = None, cache: LayerCache | None = None) -> Stream:
        up = self.up_proj(x)
        return self.down_proj(self.activation(self.convolution(up, mask, cache) if self.convolution else up))


class GatedFeedForward(nn.Module):
    """down(activation(gate(x)) * up(x)); with SiLU it is SwiGLU (Shazeer 2020, arXiv 2002.05202).

    Args:
        d_ff: width of the hidden layer; by default 8/3 d_model, rounded up to a multiple of 8, so that the three
            matrices have as many parameters as the two matrices of `FeedForward`.
        activation: a name in `ACTIVATIONS`.
        convolution: whether a `ShortConvolution` is applied to gate(x) and up(x), before the activation.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        activation: str = "silu",
        bias: bool = False,
        convolution: bool = False,
    ) -> None:
        super().__init__()
        default = -(-8 * d_model // 24) * 8
        require_at_least(1, {"d_model": 128, "d_ff": default}, d_model=d_model, d_ff=d_ff)
        d_ff = d_ff or default
        self.gate_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.up_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.down_proj = nn.Linear(d_ff, d_model, bias=bias)
        self.activation = find_activation(activation)
        self.reads_earlier_tokens, self.convolution = convolution, ShortConvolution(2 * d_ff) if convolution else None

    def forward(self, x: Stream, mask: AttentionMask | None = None, cache: LayerCache | None = None) -> Stream:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.convolution:
            gate, up = self.convolution(torch.cat([gate, up], dim=-1), mask, cache).chunk(2, dim=-1)
        return self.down_proj(self.activation(gate) * up)


class Residual(nn.Module):
    """skip · x + branch · f(x) (He et al. 2015, arXiv 1512.03385), in the dtype of x.

    `skip=0` removes the connection, and `branch=0` removes the sublayer. Both can be lists with one number per layer.

    Args:
        learned: whether the layer learns a factor of x, which starts at 1, as in nanochat.
        embedding: whether b · x₀ is added, where x₀ is the input of the first layer and the layer learns b, which
            starts at 0, as in nanochat.
    """

    def __init__(
        self,
        skip: int | float | Sequence[int | float] = 1.0,
        branch: int | float | Sequence[int | float] = 1.0,
        learned: bool = False,
        embedding: bool = False,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__()
        self.skip = _scale_of_layer("skip", skip, layer_index, num_layers)
        self.branch = _scale_of_layer("branch", branch, layer_index, num_layers)
        self.factor = nn.Parameter(torch.ones(1)) if learned else None  # one element: FSDP shards no scalars
        self.embedding_factor = nn.Parameter(torch.zeros(1)) if embedding else None

    @property
    def scale(self) -> float | Tensor:
        """The number that x is multiplied by: `skip`, times the learned factor if there is one."""
        return self.skip if self.factor is None else self.skip * self.factor

    @property
    def reads_side_inputs(self) -> bool:
        return self.embedding_factor is not None

    def forward(self, x: Stream, update: Stream, embedding: Stream | None = None) -> Stream:
        skipped = x if self.factor is None and self.skip == 1 else self.scale * x
        update = update if self.branch == 1 else self.branch * update
        if self.embedding_factor is not None:
            if embedding is None:
                raise ArgumentError("embedding", None, "is needed by a residual connection with `embedding=True`")
            update = update + self.embedding_factor * embedding
        return (skipped + update).to(x.dtype)

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
    """A dropout module with this probability; the identity if it is 0."""
    if not 0 <= dropout <= 1:
        raise ArgumentError("dropout", dropout, "must be between 0 and 1", {"dropout": 0.1})
    return nn.Dropout(dropout) if dropout else nn.Identity()
