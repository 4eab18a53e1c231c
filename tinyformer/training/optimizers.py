"""Optimizers, made for a network's parameters."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


def _refuse_negative(**values: float) -> None:
    for name, value in values.items():
        if value < 0:
            works = 0.001 if name.endswith("lr") else 0.1
            raise ValueError(f"optimizer.{name}={value} is negative; optimizer.{name}={works} works.")


def _split(network: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """The matrices of the layers, and the rest: embeddings, readouts, norms and biases."""
    embeddings = _embeddings(network)
    matrices: list[Tensor] = []
    rest: list[Tensor] = []
    for name, parameter in network.named_parameters():
        is_inner = id(parameter) not in embeddings and not name.startswith("readout.")
        (matrices if parameter.ndim == 2 and is_inner else rest).append(parameter)
    return matrices, rest


def _embeddings(network: nn.Module) -> set[int]:
    """The ids of the parameters that are looked up, tied readouts among them."""
    return {id(p) for m in network.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}


def _adamw(network: nn.Module, parameters: list[Tensor], **options: Any) -> torch.optim.Optimizer:
    """AdamW on some parameters; those that should not decay, do not: all but matrices, and embeddings."""
    embeddings = _embeddings(network)
    decaying = [p for p in parameters if p.ndim == 2 and id(p) not in embeddings]
    constant = [p for p in parameters if p.ndim != 2 or id(p) in embeddings]
    groups: list[dict[str, Any]] = [{"params": decaying}, {"params": constant, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], fused=True, **options)
    # A fused optimizer offers to undo fp16's loss scaling inside its step, which forbids clipping before it. Without
    # the offer the scaler does that first, and the step is the same.
    optimizer._step_supports_amp_scaling = False
    return optimizer


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov & Hutter 2017, arXiv 1711.05101) with no decay on norms, biases and embeddings.

    Args:
        lr: learning rate at its highest.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: share of a weight, times the learning rate, that each step takes off.

    Raises:
        ValueError: the rate or the decay is negative.
    """

    lr: float = 1e-3
    betas: Sequence[float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        _refuse_negative(lr=self.lr, weight_decay=self.weight_decay)

    def __call__(self, network: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of a network's parameters."""
        options = {"lr": self.lr, "betas": tuple(self.betas), "eps": self.eps}
        return _adamw(network, list(network.parameters()), weight_decay=self.weight_decay, **options)


@dataclass(frozen=True)
class MuonWithAdamW:
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for the layers' matrices, else AdamW.

    Args:
        lr: of Muon, at its highest.
        momentum: of Muon.
        weight_decay: of both, see `AdamW`.
        adamw_lr: of AdamW, at its highest.
        adamw_betas: of AdamW.

    Raises:
        ValueError: a rate or the decay is negative.
    """

    lr: float = 0.02
    momentum: float = 0.95
    weight_decay: float = 0.1
    adamw_lr: float = 3e-3
    adamw_betas: Sequence[float] = (0.9, 0.95)

    def __post_init__(self) -> None:
        _refuse_negative(lr=self.lr, weight_decay=self.weight_decay, adamw_lr=self.adamw_lr)

    def __call__(self, network: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of a network's parameters."""
        matrices, rest = _split(network)
        muon = torch.optim.Muon(matrices, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        options = {"lr": self.adamw_lr, "betas": tuple(self.adamw_betas)}
        adamw = _adamw(network, rest, weight_decay=self.weight_decay, **options)
        return CombinedOptimizer([muon, adamw])


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers that step as one, so that clipping, accumulation, schedules and resuming see one."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        super().__init__([group for optimizer in self.optimizers for group in optimizer.param_groups], {})
        # Theirs and ours are the same dictionaries: a schedule that sets a learning rate here sets it there.
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]

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
        """The states of all."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the states of all."""
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        # Loading makes new group dictionaries.
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
