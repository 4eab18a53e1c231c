"""Dropout (Srivastava et al. 2014), or nothing at all."""

from torch import nn


def make_dropout(probability: float, key: str) -> nn.Module:
    """What drops elements in training with a probability; without one it costs nothing.

    Args:
        probability: to drop an element.
        key: of the config, for the error.

    Raises:
        ValueError: it is no probability.
    """
    if not 0 <= probability <= 1:
        raise ValueError(f"{key}={probability} is no probability; {key}=0.1 is.")
    return nn.Dropout(probability) if probability else nn.Identity()
