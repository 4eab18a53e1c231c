"""Normalisation of each token's vector."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LayerNorm(nn.LayerNorm):
    """(x - mean) / standard deviation, scaled and shifted (Ba et al. 2016, arXiv 1607.06450)."""

    def __init__(self, d_model: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__(d_model, eps=eps, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise in fp32 also where the weights were gathered in bf16, which torch refuses to mix on a CPU."""
        if x.dtype != torch.float32 or self.weight.dtype == x.dtype:
            return super().forward(x)
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x, self.normalized_shape, self.weight.float(), bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """x / root mean square, scaled; no mean, no bias (Zhang & Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, d_model: int, eps: float = 1e-6) -> None:
        super().__init__(d_model, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise in the higher dtype of input and weight; under autocast torch would warn about mixed ones."""
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        return F.rms_norm(x.to(dtype), self.normalized_shape, self.weight.to(dtype), self.eps)
