"""Dropout (Srivastava et al. 2014, "Dropout: a simple way to prevent neural networks from overfitting")."""

from torch import nn

from tinyformer.errors import ArgumentError


def make_dropout(dropout: float) -> nn.Module:
    """Dropout of a probability; the identity, which costs nothing, for probability 0.

    Args:
        dropout: probability of zeroing an element in training.

    Raises:
        ArgumentError: it is not between 0 and 1.
    """
    if not 0 <= dropout <= 1:
        raise ArgumentError("dropout", dropout, "must be between 0 and 1", {"dropout": 0.1})
    return nn.Dropout(dropout) if dropout else nn.Identity()
