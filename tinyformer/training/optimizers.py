"""Learning-rate schedules, AdamW, and Muon, which orthogonalises all matrices of one shape together."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tinyformer.errors import ArgumentError
from tinyformer.hardware import has_native_bf16
from tinyformer.training.step import of_all_processes, own_part, rows_of_whole, whole_of_own


@dataclass(frozen=True)
class Schedule:
    """A schedule with a linear warm-up; subclasses define the learning rate after it."""

    warmup_steps: int = 100  # optimizer steps

    def factor(self, step: int, total_steps: int | None) -> float:
        """The learning rate at a step, counted from 0, divided by its peak; `total_steps` is None if it is unknown."""
        raise NotImplementedError

    def _warmup(self, step: int) -> float:
        return min(1.0, (step + 1) / (self.warmup_steps + 1))


@dataclass(frozen=True)
class WarmupCosine(Schedule):
    """Linear warm-up, then cosine decay to `final_factor` (Loshchilov & Hutter 2016, arXiv 1608.03983)."""

    final_factor: float = 0.1

    def factor(self, step: int, total_steps: int | None) -> float:
        total = math.inf if total_steps is None else total_steps
        progress = (step - self.warmup_steps) / max(1, total - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress))))
        return self._warmup(step) * (self.final_factor + (1 - self.final_factor) * cosine)


@dataclass(frozen=True)
class WarmupStableDecay(Schedule):
    """Linear warm-up, a constant phase, then linear decay to `final_factor` (Hu et al. 2024, arXiv 2404.06395)."""

    decay_fraction: float = 0.2  # share of all steps
    final_factor: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.decay_fraction <= 1:
            raise ArgumentError("decay_fraction", self.decay_fraction, "must be from 0 to 1", {"decay_fraction": 0.2})

    def factor(self, step: int, total_steps: int | None) -> float:
        if total_steps is None:
            return self._warmup(step)
        left = (total_steps - step) / max(1.0, self.decay_fraction * total_steps)
        decay = self.final_factor + (1 - self.final_factor) * min(1.0, max(0.0, left))
        return self._warmup(step) * decay


@dataclass(frozen=True)
class InverseSquareRoot(Schedule):
    """Linear warm-up, then the inverse square root of the step (Vaswani et al. 2017, arXiv 1706.03762, §5.3)."""

    def factor(self, step: int, total_steps: int | None) -> float:
        return min(self._warmup(step), math.sqrt((self.warmup_steps + 1) / (step + 1)))


def _embeddings(network: nn.Module) -> set[Tensor]:
    """The parameters of the embeddings, which include the weight of a tied readout."""
    return {p for module in network.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}


def _adamw(
    network: nn.Module, parameters: Iterable[Tensor], weight_decay: float, decay_all: bool = False, **options: Any
) -> torch.optim.Optimizer:
    """AdamW on some parameters, with weight decay on all of them or on matrices other than embeddings."""
    embeddings = _embeddings(network)
    decayed: list[Tensor] = []
    undecayed: list[Tensor] = []
    for parameter in parameters:
        is_decayed = decay_all or (parameter.ndim == 2 and parameter not in embeddings)
        (decayed if is_decayed else undecayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], fused=True, **options)
    # A fused optimizer declares that it undoes fp16's loss scaling inside its step, and Lightning then refuses to clip
    # gradients. Without the declaration the gradient scaler unscales first, and the step is the same.
    optimizer._step_supports_amp_scaling = False
    return optimizer


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov & Hutter 2017, arXiv 1711.05101), by default without decay of norms, biases and embeddings."""

    lr: float = 1e-3  # at its peak
    betas: Sequence[float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1  # times the learning rate, the fraction of a weight that each step subtracts
    decay_all: bool = False  # whether norms, biases and embeddings decay, too

    def __call__(self, network: nn.Module) -> torch.optim.Optimizer:
        options: dict[str, Any] = {"lr": self.lr, "betas": tuple(self.betas), "eps": self.eps}
        return _adamw(network, network.parameters(), self.weight_decay, self.decay_all, **options)


@dataclass(frozen=True)
class MuonWithAdamW:
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for the layers' matrices, AdamW for other weights.

    `lr` and `adamw_lr` are the peak learning rates of Muon and AdamW; both use the same weight decay, see `AdamW`.
    """

    lr: float = 0.02
    momentum: float = 0.95
    weight_decay: float = 0.1
    adamw_lr: float = 3e-3
    adamw_betas: Sequence[float] = (0.9, 0.95)

    def __call__(self, network: nn.Module) -> torch.optim.Optimizer:
        embeddings = _embeddings(network)
        matrices: list[Tensor] = []
        others: list[Tensor] = []
        for name, parameter in network.named_parameters():
            is_inner = parameter not in embeddings and not name.startswith("readout.")
            (matrices if parameter.ndim == 2 and is_inner else others).append(parameter)
        muon = StackedMuon(matrices, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        options: dict[str, Any] = {"lr": self.adamw_lr, "betas": tuple(self.adamw_betas)}
        adamw = _adamw(network, others, self.weight_decay, **options)
        return CombinedOptimizer([muon, adamw])


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers that step as one, so that clipping, schedules and checkpoints see a single optimizer."""

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
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self._share_groups()  # loading creates new group dictionaries

    def _share_groups(self) -> None:
        """Use the optimizers' own group dictionaries, so that a learning rate set here is set in the optimizers."""
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]


class StackedMuon(torch.optim.Muon):
    """`torch.optim.Muon` (Jordan et al. 2024, kellerjordan.github.io/posts/muon) with fewer and larger products.

    Torch computes the 15 products of Newton–Schulz for one matrix after the other. A transformer has few shapes, so
    here all matrices of a shape are a batch. The weights equal torch's up to rounding, and the state is the same. Torch
    iterates in bf16 everywhere; here fp32 is used where the hardware emulates bf16, which takes about forty times as
    long. All processes of a process group have to step together, with the same gradients.
    """

    # 1.0 if the next step must change nothing, as a gradient scaler sets it for torch's optimizers; else 0 or None.
    found_inf: Float[Tensor, ""] | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        is_masked = None if self.found_inf is None else self.found_inf > 0
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            if by_shape:
                self._update(by_shape, group, is_masked)

    def _update(
        self, by_shape: dict[torch.Size, list[Tensor]], group: dict[str, Any], is_masked: Bool[Tensor, ""] | None
    ) -> None:
        lr = float(group["lr"])
        kept: Any = 1 - lr * group["weight_decay"]
        if is_masked is not None:
            kept = torch.where(is_masked, 1.0, kept)
        parameters = [parameter for stack in by_shape.values() for parameter in stack]
        stacks = [list(map(_own, stack)) for stack in by_shape.values()]
        parts = self._average(parameters, group, is_masked).split([len(stack) * stack[0].numel() for stack in stacks])
        updates = [part.view(len(stack), *stack[0].shape) for part, stack in zip(parts, stacks, strict=True)]
        is_sharded = isinstance(parameters[0], DTensor)
        if is_sharded:
            updates = [whole_of_own(update, shape[0]) for update, shape in zip(updates, by_shape, strict=True)]
        options = group["ns_coefficients"], group["ns_steps"], group["eps"]
        directions = orthogonalise(updates, *options, shared=not is_sharded)
        torch._foreach_mul_([own for stack in stacks for own in stack], kept)
        for shape, stack, direction in zip(by_shape, stacks, directions, strict=True):
            changes = rows_of_whole(direction, len(stack), len(stack[0])) if is_sharded else direction
            changes = changes if is_masked is None else changes.masked_fill(is_masked, 0.0)
            rows, columns = shape
            is_matched = group["adjust_lr_fn"] == "match_rms_adamw"
            factor = 0.2 * math.sqrt(max(rows, columns)) if is_matched else math.sqrt(max(1, rows / columns))
            torch._foreach_add_(stack, list(changes.unbind()), alpha=-lr * factor)

    def _average(
        self, parameters: list[Tensor], group: dict[str, Any], is_masked: Bool[Tensor, ""] | None
    ) -> Float[Tensor, " elements"]:
        """Update the running means of gradients, and return the updates of all matrices, flattened and concatenated."""
        momentum = group["momentum"]
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [_own(self.state[parameter]["momentum_buffer"]) for parameter in parameters]
        gradients = torch.cat([_own(parameter.grad).flatten() for parameter in parameters])
        means = torch.cat([buffer.flatten() for buffer in buffers])
        if is_masked is not None:  # averaging a mean with itself changes no bit of it
            gradients = torch.where(is_masked, means, gradients)
        means = means.lerp(gradients, 1 - momentum)
        parts = means.split([buffer.numel() for buffer in buffers])
        torch._foreach_copy_(buffers, [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)])
        return gradients.lerp(means, momentum) if group["nesterov"] else means


def _own(weight: Any) -> Tensor:
    """The part of a weight that this process has: all of it, or some of its rows."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def orthogonalise(
    stacks: Sequence[Float[Tensor, "_matrices _rows _columns"]],
    coefficients: Sequence[float],
    num_steps: int,
    eps: float,
    shared: bool = True,
) -> list[Float[Tensor, "_matrices _rows _columns"]]:
    """Approximately U Vᵀ for each matrix with the singular value decomposition U S Vᵀ, by Newton–Schulz iteration.

    A step replaces a matrix X by a X + (b X Xᵀ + c (X Xᵀ)²) X, where a, b and c are the `coefficients`. The stacks of
    matrices have one device and dtype. Matrices of transposed shapes are iterated together, in bf16 where the hardware
    supports it; each is first divided by its Frobenius norm, or by `eps` if that is larger. With `shared`, all
    processes have the same matrices; each iterates a part of them and sends the result to the other processes.
    """
    a, b, c = coefficients
    wide = [stack.mT if stack.shape[1] > stack.shape[2] else stack for stack in stacks]
    results: list[Tensor] = [*stacks]
    shapes = [stack.shape[1:] for stack in wide]
    for shape in dict.fromkeys(shapes):
        numbers = [number for number, other in enumerate(shapes) if other == shape]
        x = torch.cat([wide[number] for number in numbers])
        x = x.bfloat16() if has_native_bf16(x.device.type) else x.float()
        x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
        own = own_part(x) if shared else x
        for _ in range(num_steps):
            gram = own @ own.mT
            own = torch.baddbmm(own, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), own, beta=a)
        x = (of_all_processes(own, len(x)) if shared else own).to(stacks[0].dtype)
        for number, part in zip(numbers, x.split([len(wide[number]) for number in numbers]), strict=True):
            results[number] = part if part.shape == stacks[number].shape else part.mT
    return results
