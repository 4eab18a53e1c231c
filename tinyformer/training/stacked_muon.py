"""Muon that orthogonalises matrices of the same shape together."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.distributed.tensor import DTensor

from tinyformer.hardware import has_native_bf16


class StackedMuon(torch.optim.Muon):
    """`torch.optim.Muon` (Jordan et al. 2024, kellerjordan.github.io/posts/muon) with fewer and larger products.

    Torch computes the 15 products of Newton–Schulz for one matrix after the other. A transformer has few shapes, so
    here all matrices of a shape are a batch. The weights equal torch's up to rounding, and the state is the same. Torch
    iterates in bf16 everywhere; here fp32 is used where the hardware emulates bf16, which takes about forty times as
    long.

    Attributes:
        found_inf: 1.0 if the next step must change nothing, else 0.0, as a gradient scaler sets it for torch's fused
            optimizers; None for 0.0.
    """

    found_inf: Float[Tensor, ""] | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether matrices are sharded across devices; they cannot be stacked, so torch's own step runs."""
        return any(isinstance(parameter, DTensor) for group in self.param_groups for parameter in group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure, if any, and update the matrices that have a gradient."""
        if self.is_sharded:
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        is_masked = None if self.found_inf is None else self.found_inf > 0
        for group in self.param_groups:
            by_kind: dict[Any, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_kind[parameter.device, parameter.dtype].append(parameter)
            for parameters in by_kind.values():
                self._update(parameters, group, is_masked)
        return loss

    def _update(self, parameters: list[Tensor], group: dict[str, Any], is_masked: Bool[Tensor, ""] | None) -> None:
        """Update matrices of one device and dtype."""
        kept: Any = 1 - float(group["lr"]) * group["weight_decay"]
        if is_masked is not None:
            kept = torch.where(is_masked, 1.0, kept)
        by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            by_shape[parameter.shape].append(parameter)
        parameters = [parameter for of_shape in by_shape.values() for parameter in of_shape]
        sizes = [len(of_shape) * shape.numel() for shape, of_shape in by_shape.items()]
        parts = self._average(parameters, group, is_masked).split(sizes)
        updates = [part.view(-1, *shape) for part, shape in zip(parts, by_shape, strict=True)]
        directions = orthogonalise(updates, group["ns_coefficients"], group["ns_steps"], group["eps"])
        torch._foreach_mul_(parameters, kept)
        for of_shape, stack in zip(by_shape.values(), directions, strict=True):
            self._move(of_shape, stack, group, is_masked)

    def _average(
        self, parameters: list[Tensor], group: dict[str, Any], is_masked: Bool[Tensor, ""] | None
    ) -> Float[Tensor, " elements"]:
        """Update the running means of gradients, and return the updates of all matrices, flattened and concatenated."""
        momentum = group["momentum"]
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        gradients = torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
        means = torch.cat([buffer.flatten() for buffer in buffers])
        if is_masked is not None:  # averaging a mean with itself changes no bit of it
            gradients = torch.where(is_masked, means, gradients)
        means = means.lerp(gradients, 1 - momentum)
        parts = means.split([buffer.numel() for buffer in buffers])
        torch._foreach_copy_(buffers, [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)])
        return gradients.lerp(means, momentum) if group["nesterov"] else means

    def _move(
        self,
        parameters: list[Tensor],
        directions: Float[Tensor, "matrices rows columns"],
        group: dict[str, Any],
        is_masked: Bool[Tensor, ""] | None,
    ) -> None:
        """Move matrices of one shape."""
        if is_masked is not None:
            directions = directions.masked_fill(is_masked, 0.0)
        rows, columns = parameters[0].shape
        is_matched = group["adjust_lr_fn"] == "match_rms_adamw"
        factor = 0.2 * math.sqrt(max(rows, columns)) if is_matched else math.sqrt(max(1, rows / columns))
        torch._foreach_add_(parameters, list(directions.unbind()), alpha=-float(group["lr"]) * factor)


def orthogonalise(
    stacks: Sequence[Float[Tensor, "_matrices _rows _columns"]],
    coefficients: Sequence[float],
    num_steps: int,
    eps: float,
) -> list[Float[Tensor, "_matrices _rows _columns"]]:
    """Approximately U Vᵀ for each matrix U S Vᵀ, by the Newton–Schulz iteration X ← a X + (b X Xᵀ + c (X Xᵀ)²) X.

    Matrices of transposed shapes are iterated together, in bf16 where the hardware supports it.

    Args:
        stacks: stacks of matrices, on the same device and of the same dtype.
        coefficients: a, b and c.
        num_steps: number of iterations.
        eps: lower bound of the Frobenius norm by which each matrix is first divided.
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
        for _ in range(num_steps):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        x = x.to(stacks[0].dtype)
        for number, part in zip(numbers, x.split([len(wide[number]) for number in numbers]), strict=True):
            results[number] = part if part.shape == stacks[number].shape else part.mT
    return results
