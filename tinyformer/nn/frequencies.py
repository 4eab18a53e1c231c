"""The frequencies of rotary and sinusoidal positions, and their scaling for texts longer than those of training."""

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from tinyformer.errors import require_at_least

Frequencies: TypeAlias = Float[Tensor, " half_dim"]
"""The angle between neighbouring positions for each pair of dimensions, in radians, from the highest to the lowest."""


def geometric(dim: int, base: float) -> Frequencies:
    """base^(-2i / dim) for i = 0, …, dim / 2 - 1 (arXiv 1706.03762, §3.5): from 1 down to almost 1 / base."""
    # In fp32 the angle at position 10,000 would be wrong by 1e-3 radians.
    return base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def angles(max_seq_len: int, frequencies: Frequencies) -> Float[Tensor, "max_seq_len half_dim"]:
    """The product of each position and each frequency, in radians."""
    require_at_least(1, {"max_seq_len": 256}, max_seq_len=max_seq_len)
    return torch.outer(torch.arange(max_seq_len, dtype=torch.float64), frequencies)


def linear(frequencies: Frequencies, base: float, factor: float, seq_len: float) -> Frequencies:
    """Position interpolation (Chen et al. 2023, arXiv 2306.15595): every frequency is divided by the factor."""
    return frequencies / factor


def ntk(frequencies: Frequencies, base: float, factor: float, seq_len: float) -> Frequencies:
    """NTK-aware scaling (bloc97 2023; arXiv 2309.00071, §3.1): the base is multiplied by factor^(dim / (dim - 2)).

    The highest frequency does not change, and the lowest is divided by the factor.
    """
    index = torch.arange(len(frequencies), dtype=frequencies.dtype)
    return frequencies * factor ** (-index / max(len(frequencies) - 1, 1))


def yarn(frequencies: Frequencies, base: float, factor: float, seq_len: float) -> Frequencies:
    """YaRN (Peng et al. 2023, arXiv 2309.00071, §3.2): frequencies of few rotations are divided by the factor.

    Those that rotate more than 32 times in `seq_len` positions do not change, and those that rotate less than once are
    divided; between them, the share of the division rises linearly with the index of the frequency.
    """
    count = len(frequencies)
    first, last = (count * math.log(seq_len / (2 * math.pi * turns)) / math.log(base) for turns in (32, 1))
    low, high = max(math.floor(first), 0), min(math.ceil(last), 2 * count - 1)
    index = torch.arange(count, dtype=frequencies.dtype)
    share = ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
    return torch.lerp(frequencies, frequencies / factor, share)


def llama3(frequencies: Frequencies, base: float, factor: float, seq_len: float) -> Frequencies:
    """Llama 3.1's scaling (Grattafiori et al. 2024, arXiv 2407.21783): low frequencies are divided by the factor.

    Those that rotate more than 4 times in `seq_len` positions do not change, and those that rotate less than once are
    divided; between them, the share of the division falls linearly with the number of rotations.
    """
    turns = seq_len * frequencies / (2 * math.pi)
    return torch.lerp(frequencies / factor, frequencies, ((turns - 1) / 3).clamp(0, 1))


SCALINGS: dict[str, Callable[[Frequencies, float, float, float], Frequencies]] = {
    "linear": linear,
    "ntk": ntk,
    "yarn": yarn,
    "llama3": llama3,
}
"""The scalings by name: functions of frequencies, base, factor, and the number of tokens of a text of training."""


def magnitude(scaling: str | None, factor: float) -> float:
    """The factor of rotated queries and keys, 0.1 ln(factor) + 1 in YaRN (arXiv 2309.00071, §3.4), else 1."""
    return 0.1 * math.log(factor) + 1 if scaling == "yarn" else 1.0
