"""A score function as a user would write one."""

from torch import Tensor

from tinyformer.nn import ScaledDotScore


class Negative(ScaledDotScore):
    """score(q, k) = -qᵀk / √head_dim."""

    def forward(self, q: Tensor) -> Tensor:
        return -q
