"""Initialisation of the weights."""

import math

from torch import nn

RESIDUAL_PROJECTIONS = ("o_proj", "down_proj")
"""Linear layers whose output is added to the residual stream."""


def init_weights(model: nn.Module, num_branches: int, std: float = 0.02) -> None:
    """GPT-2's initialisation (Radford et al. 2019, §2.3): N(0, std²), biases 0.

    The standard deviation of the projections that end residual branches is divided by √num_branches, so that the
    variance of the residual stream does not grow with depth. Norms keep their scale of 1.

    Args:
        model: the module whose weights are initialised.
        num_branches: residual branches of all its layers: two in each, or three with cross-attention.
        std: the standard deviation.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            is_residual = name.rsplit(".", 1)[-1] in RESIDUAL_PROJECTIONS
            nn.init.normal_(module.weight, std=std / math.sqrt(num_branches) if is_residual else std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
