"""Optimizers, made for a network's parameters."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tinyformer.errors import ArgumentError, require_at_least
from tinyformer.training.stacked_muon import StackedMuon

WORKS = {"lr": 1e-3, "adamw_lr": 1e-3, "weight_decay": 0.1, "eps": 1e-8}


def _require_decay_rates(argument: str, betas: Sequence[float]) -> None:
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ArgumentError(argument, list(betas), "must be two numbers from 0 to below 1", {argument: [0.9, 0.95]})


def _split(network: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """The matrices of the layers, and all other parameters: embeddings, readouts, norms and biases."""
    embeddings = _embeddings(network)
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in network.named_parameters():
        is_inner = id(parameter) not in embeddings and not name.startswith("readout.")
        (matrices if parameter.ndim == 2 and is_inner else others).append(parameter)
    return matrices, others


def _embeddings(network: nn.Module) -> set[int]:
    """The ids of the embeddings' parameters, which include a tied readout's."""
    return {id(p) for m in network.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}


def _adamw(
    network: nn.Module, parameters: list[Tensor], weight_decay: float, decay_all: bool = False, **options: Any
) -> torch.optim.Optimizer:
    """AdamW on some parameters, with weight decay on all of them or on matrices other than embeddings."""
    embeddings = _embeddings(network)
    is_decayed = [decay_all or (p.ndim == 2 and id(p) not in embeddings) for p in parameters]
    decayed = list(itertools.compress(parameters, is_decayed))
    undecayed = [p for p, decays in zip(parameters, is_decayed, strict=True) if not decays]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], fused=True, **options)
    # A fused optimizer declares that it undoes fp16's loss scaling inside its step, and Lightning then refuses to clip
    # gradients. Without the declaration the gradient scaler unscales first, and the step is the same.
    optimizer._step_supports_amp_scaling = False
    return optimizer


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov & Hutter 2017, arXiv 1711.05101), by default without decay of norms, biases and embeddings.

    Args:
        lr: peak learning rate.
        betas: decay rates of the first and second moment.
        eps: added to the square root of the second moment.
        weight_decay: multiplied by the learning rate, the fraction of a weight that each step subtracts.
        decay_all: whether norms, biases and embeddings are decayed too.

    Raises:
        ArgumentError: a value is negative, or a decay rate is not below 1.
    """

    lr: float = 1e-3
    betas: Sequence[float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_all: bool = False

    def __post_init__(self) -> None:
        require_at_least(0, WORKS, lr=self.lr, weight_decay=self.weight_decay, eps=self.eps)
        _require_decay_rates("betas", self.betas)

    def __call__(self, network: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of a network's parameters."""
        options: dict[str, Any] = {"lr": self.lr, "betas": tuple(self.betas), "eps": self.eps}
        return _adamw(network, list(network.parameters()), self.weight_decay, self.decay_all, **options)


@dataclass(frozen=True)
class MuonWithAdamW:
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for the layers' matrices, AdamW for the others.

    Args:
        lr: peak learning rate of Muon.
        momentum: momentum of Muon.
        weight_decay: weight decay of both, see `AdamW`.
        adamw_lr: peak learning rate of AdamW.
        adamw_betas: decay rates of AdamW.

    Raises:
        ArgumentError: a value is negative, or a decay rate is not below 1.
    """

    lr: float = 0.02
    momentum: float = 0.95
    weight_decay: float = 0.1
    adamw_lr: float = 3e-3
    adamw_betas: Sequence[float] = (0.9, 0.95)

    def __post_init__(self) -> None:
        require_at_least(0, WORKS, lr=self.lr, weight_decay=self.weight_decay, adamw_lr=self.adamw_lr)
        if not 0 <= self.momentum < 1:
            raise ArgumentError("momentum", self.momentum, "must be at least 0 and below 1", {"momentum": 0.95})
        _require_decay_rates("adamw_betas", self.adamw_betas)

    def __call__(self, network: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of a network's parameters."""
        matrices, others = _split(network)
        muon = StackedMuon(matrices, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        options: dict[str, Any] = {"lr": self.adamw_lr, "betas": tuple(self.adamw_betas)}
        adamw = _adamw(network, others, self.weight_decay, **options)
        return CombinedOptimizer([muon, adamw])


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers that step as one, so that clipping, accumulation, schedules and resuming see one."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        super().__init__([group for optimizer in self.optimizers for group in optimizer.param_groups], {})
        self._share_groups()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure once, then step every optimizer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The states of all optimizers."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the states of all optimizers."""
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self._share_groups()  # loading creates new group dictionaries

    def _share_groups(self) -> None:
        """Share the optimizers' group dictionaries, so that a learning rate that a schedule sets here is set there."""
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
