"""Initialisation of the weights."""

import math

from torch import nn

RESIDUAL_PROJECTIONS = ("o_proj", "down_proj")
"""Linear layers whose output is added to the residual stream."""


def init_weights(model: nn.Module, num_layers: int, std: float = 0.02) -> None:
    """GPT-2's initialisation (Radford et al. 2019, §2.3): N(0, std²), biases 0.

    The standard deviation of the two residual projections of each layer is divided by √(2 num_layers), so that the
    variance of the residual stream does not grow with depth. Norms keep their scale of 1.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            is_residual = name.rsplit(".", 1)[-1] in RESIDUAL_PROJECTIONS
            nn.init.normal_(module.weight, std=std / math.sqrt(2 * num_layers) if is_residual else std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
