"""Normalisation of one token's vector; see `conf/norm` for the choices."""

from torch import Tensor, nn


class LayerNorm(nn.LayerNorm):
    """Subtracts the mean and divides by the standard deviation (Ba et al. 2016, arXiv 1607.06450)."""

    def __init__(self, d_model: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__(d_model, eps=eps, bias=bias)


class RMSNorm(nn.RMSNorm):
    """Divides by the root mean square, with no mean and no bias (Zhang & Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, d_model: int, eps: float = 1e-6) -> None:
        super().__init__(d_model, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise in the weight's dtype: torch warns of bf16 beside fp32, as under autocast."""
        return super().forward(x.to(self.weight.dtype))
