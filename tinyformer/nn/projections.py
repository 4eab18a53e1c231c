"""The biases of attention's projections, by letter, and the norms of its queries and keys."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn

from tinyformer.errors import ArgumentError, require_choice
from tinyformer.nn.layers import RMSNorm


def by_letter(argument: str, value: bool | str, known: str) -> dict[str, bool]:
    """Map each letter of `known`, a projection, to True if `value` is True or contains the letter.

    The biases of Qwen 2 (Yang et al. 2024, arXiv 2407.10671) are "qkv", the bias of GPT-Neo (Black et al. 2021) is "o".
    """
    letters = value if isinstance(value, str) else known * value
    if not set(letters) <= set(known):
        reason = f"must be true, false, or some of the letters {', '.join(known[:-1])} and {known[-1]}"
        raise ArgumentError(argument, value, reason, {argument: "qkv"})
    return {letter: letter in letters for letter in known}


class ProjectionNorm(RMSNorm):
    """RMSNorm of a projection before it is split into heads (OLMo 2, Walsh et al. 2024, arXiv 2501.00656)."""

    def __init__(self, num_heads: int, head_dim: int, eps: float = 1e-6) -> None:
        super().__init__(num_heads * head_dim, eps)
        self.num_heads = num_heads

    def forward(self, x: Float[Tensor, "batch heads seq head_dim"]) -> Float[Tensor, "batch heads seq head_dim"]:
        """Normalise the vectors of all heads together."""
        return super().forward(x.transpose(1, 2).flatten(-2)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


QK_NORMS: dict[bool | str, Callable[[int, int, float], nn.Module]] = {
    False: lambda num_heads, head_dim, eps: nn.Identity(),
    True: lambda num_heads, head_dim, eps: RMSNorm(head_dim, eps),
    "zero_centered": lambda num_heads, head_dim, eps: RMSNorm(head_dim, eps, zero_centered=True),
    "unscaled": lambda num_heads, head_dim, eps: RMSNorm(head_dim, eps, weight=False),
    "projection": ProjectionNorm,
}
"""Factories of the norm of queries or keys, called with `num_heads`, `head_dim` and `eps`.

True divides each query and key by its root mean square, with a learned scale that the heads share (Henry et al. 2020,
arXiv 2010.04245; Dehghani et al. 2023, arXiv 2302.05442). The scale is 1 + weight with "zero_centered", as in Gemma 3
(arXiv 2503.19786), and there is none with "unscaled", as in nanochat.
"""


def make_qk_norm(qk_norm: bool | str, num_heads: int, head_dim: int, eps: float) -> nn.Module:
    """The norm of queries or keys with this name in `QK_NORMS`."""
    require_choice("qk_norm", qk_norm, QK_NORMS)
    return QK_NORMS[qk_norm](num_heads, head_dim, eps)
