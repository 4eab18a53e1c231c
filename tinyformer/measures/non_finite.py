"""The place where the values of a forward or backward pass stop being finite."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tinyformer.measures.capture import running_hooks
from tinyformer.nn import Network


def first_non_finite(network: Network, compute_loss: Callable[[], Tensor]) -> str | None:
    """The first NaN or infinite value of a training step, such as "the output of encoder.layers.3.attention".

    Weights come first, then the outputs of all modules in the order in which they are computed, the loss, the gradients
    of the outputs in the order of the backward pass, and the gradients of the weights. For this, the step is run again,
    uncompiled by `compute_loss`; the `grad` of the weights does not change. None if all values are finite.
    """
    parameters = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    for name, parameter in network.named_parameters():
        if not parameter.isfinite().all():
            return f"the weight {name}"
    places: list[str] = []

    def record(value: Tensor, place: str) -> None:
        if not places and not value.isfinite().all():
            places.append(place)

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for value in output if isinstance(output, tuple) else (output,):
                if isinstance(value, Tensor) and value.is_floating_point():
                    record(value, f"the output of {name}")
                    if value.requires_grad:
                        value.register_hook(lambda grad: record(grad, f"the gradient of the output of {name}"))

        return hook

    hooks = [module.register_forward_hook(watch(name)) for name, module in network.named_modules() if name]
    with running_hooks(network, hooks), torch.enable_grad():
        loss = compute_loss()
        record(loss, "the loss")
        if not places:
            # `backward` would add to `grad`, and run the hooks of DistributedDataParallel.
            gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            for name, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    record(gradient, f"the gradient of {name}")
    return places[0] if places else None
