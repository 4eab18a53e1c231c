"""Muon that orthogonalises matrices of one shape together."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import DTensor


class StackedMuon(torch.optim.Muon):
    """`torch.optim.Muon` (Jordan et al. 2024, kellerjordan.github.io/posts/muon) with fewer and larger products.

    Torch makes the 15 products of Newton–Schulz for one matrix after the other. A transformer has few shapes, so here
    the matrices of a shape are a batch. The weights are torch's to rounding, and the state is the same.

    Attributes:
        found_inf: 1.0 where the next step must change nothing, else 0.0, as torch's fused optimizers take it from a
            gradient scaler; None for 0.0.
    """

    found_inf: Float[Tensor, ""] | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure, if any, and update the matrices that have a gradient."""
        if any(isinstance(parameter, DTensor) for group in self.param_groups for parameter in group["params"]):
            return super().step(closure)  # sharded over devices, which a stack is not
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_shape: dict[Any, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape, parameter.device, parameter.dtype].append(parameter)
            for parameters in by_shape.values():
                self._update(parameters, group)
        return loss

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Update the matrices of one shape."""
        rate, momentum = float(group["lr"]), group["momentum"]
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        gradients = torch.stack([parameter.grad for parameter in parameters if parameter.grad is not None])
        means, kept = torch.stack(buffers), 1 - rate * group["weight_decay"]
        if self.found_inf is not None:  # the mean of a mean and itself is the same, bit by bit
            is_masked = self.found_inf > 0
            gradients, kept = torch.where(is_masked, means, gradients), torch.where(is_masked, 1.0, kept)
        means = means.lerp(gradients, 1 - momentum)
        torch._foreach_copy_(buffers, list(means.unbind()))
        updates = gradients.lerp(means, momentum) if group["nesterov"] else means
        directions = orthogonalise(updates, group["ns_coefficients"], group["ns_steps"], group["eps"])
        if self.found_inf is not None:
            directions = directions.masked_fill(is_masked, 0.0)
        rows, columns = parameters[0].shape
        is_matched = group["adjust_lr_fn"] == "match_rms_adamw"
        factor = 0.2 * math.sqrt(max(rows, columns)) if is_matched else math.sqrt(max(1, rows / columns))
        torch._foreach_mul_(parameters, kept)
        torch._foreach_add_(parameters, list(directions.to(parameters[0].dtype).unbind()), alpha=-rate * factor)


def orthogonalise(
    matrices: Float[Tensor, "matrices rows columns"], coefficients: Sequence[float], num_steps: int, eps: float
) -> Float[Tensor, "matrices rows columns"]:
    """U Vᵀ of each matrix U S Vᵀ, roughly: the Newton–Schulz iteration X ← a X + (b X Xᵀ + c (X Xᵀ)²) X, in bf16.

    Args:
        matrices: the matrices.
        coefficients: a, b and c.
        num_steps: number of iterations.
        eps: smallest Frobenius norm by which a matrix is divided before.
    """
    a, b, c = coefficients
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16()
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
