"""Normalisation of each token's vector."""

from torch import Tensor, nn

from tinyformer.errors import require_at_least


class LayerNorm(nn.LayerNorm):
    """(x - mean) / standard deviation, scaled and shifted (Ba et al. 2016, arXiv 1607.06450)."""

    def __init__(self, d_model: int, eps: float = 1e-5, bias: bool = True) -> None:
        require_at_least(0, {"eps": 1e-5}, eps=eps)
        super().__init__(d_model, eps=eps, bias=bias)


class RMSNorm(nn.RMSNorm):
    """x / root mean square, scaled; no mean, no bias (Zhang & Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, d_model: int, eps: float = 1e-6) -> None:
        require_at_least(0, {"eps": 1e-6}, eps=eps)
        super().__init__(d_model, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise in the dtype of the weight; under autocast torch would warn about mixed dtypes."""
        return super().forward(x.to(self.weight.dtype))
