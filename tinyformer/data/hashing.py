"""Hashes of whole arrays of numbers."""

import numpy as np
from jaxtyping import UInt64


def mix(x: UInt64[np.ndarray, "..."]) -> UInt64[np.ndarray, "..."]:
    """One step of the SplitMix64 generator: every bit of the input changes half of the output's."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
