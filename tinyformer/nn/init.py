"""Initialisation of the weights."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tinyformer.errors import require_at_least, require_choice
from tinyformer.nn.position import RelativePosition

RESIDUAL_PROJECTIONS = ("o_proj", "down_proj")
"""Linear layers whose output is added to the residual stream."""


def normal(model: nn.Module, num_branches: int, std: float) -> None:
    """GPT-2's initialisation (Radford et al. 2019, §2.3): N(0, std²).

    The standard deviation of the projections that end residual branches is divided by √num_branches, so that the
    variance of the residual stream does not grow with depth.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            is_residual = name.rsplit(".", 1)[-1] in RESIDUAL_PROJECTIONS
            nn.init.normal_(module.weight, std=std / math.sqrt(num_branches) if is_residual else std)


def xavier(model: nn.Module, num_branches: int, std: float) -> None:
    """Glorot & Bengio 2010: U(-a, a) with a = √(6 / (fan_in + fan_out)), so that variances pass through a layer.

    Each projection is a matrix of its own, also those of queries, keys and values, which `torch.nn.MultiheadAttention`
    initialises as one. Embeddings of tokens and positions, and a readout that is tied to one, are N(0, 1 / d_model), as
    in the code of the original transformer: multiplied by √d_model (arXiv 1706.03762, §3.4) they have a variance of 1.
    The tables of relative positions, which act on the scores of single heads, are N(0, std²), as with `normal`.
    `num_branches` is not used.
    """
    relative = {part for module in model.modules() if isinstance(module, RelativePosition) for part in module.modules()}
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std if module in relative else module.embedding_dim**-0.5)
        elif isinstance(module, nn.Linear) and not any(module.weight is weight for weight in embeddings):
            nn.init.xavier_uniform_(module.weight)


INITIALISATIONS: dict[str, Callable[[nn.Module, int, float], None]] = {"normal": normal, "xavier": xavier}


def init_weights(model: nn.Module, num_branches: int, std: float = 0.02, init: str = "normal") -> None:
    """Initialise the weights of a module; biases become 0, and norms keep their scale of 1.

    Args:
        model: the module.
        num_branches: residual branches of all its layers: two in each, or three with cross-attention.
        std: the standard deviation of `normal`, and of the tables of relative positions with either `init`.
        init: a name in `INITIALISATIONS`.
    """
    require_choice("init", init, INITIALISATIONS)
    require_at_least(0, {"init_std": 0.02}, init_std=std)
    INITIALISATIONS[init](model, num_branches, std)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


class NoInitialisation(TorchFunctionMode):
    """A context in which parameters are allocated and not initialised, for a network whose weights are loaded."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if getattr(func, "__module__", "") == "torch.nn.init" or func in (Tensor.normal_, Tensor.uniform_):
            return args[0] if args else named["tensor"]
        return func(*args, **named)
