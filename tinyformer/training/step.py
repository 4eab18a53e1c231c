"""An optimizer step as functions of tensors: the mean over targets, the check for NaN and infinity, clipping.

Lightning's hooks in `TrainingModule` and `FiniteCheck` call them; `train_step` takes a whole step without Lightning.
The file begins with collective operations between the processes of a run; the host does not wait for them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from tinyformer.nn import Network

if TYPE_CHECKING:
    from tinyformer.tasks import Batch, Task


def has_processes() -> bool:
    """Return True if there is a process group, even with a single process."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def num_processes() -> int:
    """The number of processes that train a model together."""
    return torch.distributed.get_world_size() if has_processes() else 1


def sum_over_processes(values: Tensor) -> Tensor:
    """The sum of a tensor over all processes, without the barrier of Lightning's `reduce`, at which the host waits."""
    if not has_processes():
        return values
    total = values.clone()
    torch.distributed.all_reduce(total)
    return total


def max_over_processes(values: Tensor) -> Tensor:
    """The elementwise maximum of a tensor over all processes; see `sum_over_processes`."""
    if not has_processes():
        return values
    largest = values.clone()
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return largest


def own_part(x: Float[Tensor, "matrices rows columns"]) -> Float[Tensor, "own rows columns"]:
    """The share of the matrices that this process computes; shares are padded with zeros to the same size."""
    if not has_processes():
        return x
    share = math.ceil(len(x) / torch.distributed.get_world_size())
    first = torch.distributed.get_rank() * share
    return F.pad(own := x[first : first + share], (0, 0, 0, 0, 0, share - len(own)))


def of_all_processes(own: Float[Tensor, "own rows columns"], number: int) -> Float[Tensor, "matrices rows columns"]:
    """Gather the results of all processes, each for its `own_part`; `number` is the number of matrices."""
    if not has_processes():
        return own
    parts = [
        torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(torch.distributed.get_world_size())
    ]
    torch.distributed.all_gather(parts, own.contiguous())
    return torch.cat(parts)[:number]


def whole_of_own(rows: Float[Tensor, "matrices some columns"], num_rows: int) -> Float[Tensor, "own rows columns"]:
    """Send this process's rows (its `torch.chunk`) of all matrices, and get all rows of its share of the matrices."""
    size = torch.distributed.get_world_size()
    most, share = math.ceil(num_rows / size), math.ceil(len(rows) / size)
    sent = F.pad(rows, (0, 0, 0, most - rows.shape[1], 0, share * size - len(rows)))
    torch.distributed.all_to_all_single(received := torch.empty_like(sent), sent)
    return received.unflatten(0, (size, share)).transpose(0, 1).flatten(1, 2)[:, :num_rows]


def rows_of_whole(
    own: Float[Tensor, "own rows columns"], number: int, num_rows: int
) -> Float[Tensor, "{number} {num_rows} columns"]:
    """Undo `whole_of_own`: send the rows of the matrices in `own`, and receive this process's rows of all matrices."""
    size = torch.distributed.get_world_size()
    most = math.ceil(own.shape[1] / size)
    sent = F.pad(own, (0, 0, 0, most * size - own.shape[1])).unflatten(1, (size, most)).transpose(0, 1).contiguous()
    torch.distributed.all_to_all_single(received := torch.empty_like(sent), sent)
    return received.flatten(0, 1)[:number, :num_rows]


def whole(values: Any, is_kept: bool, device: torch.device | None = None, seen: dict | None = None) -> Any:
    """Gather the sharded tensors of a state, or return empty ones without `is_kept`; all processes call this together.

    Tied weights, which are one object, stay one object.
    """
    seen = {} if seen is None else seen
    if isinstance(values, DTensor):
        if id(values) not in seen:
            gathered = values.full_tensor().detach()
            seen[id(values)] = gathered.to(device or gathered.device) if is_kept else torch.empty(0)
        return seen[id(values)]
    if isinstance(values, Mapping):
        return {name: whole(value, is_kept, device, seen) for name, value in values.items()}
    return [whole(value, is_kept, device, seen) for value in values] if isinstance(values, list) else values


def sum_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums over targets: fp64, or fp32 on MPS, where a sum over 20 million tokens may be wrong by 1e-3."""
    return torch.float32 if device.type == "mps" else torch.float64


def target_unit(targets: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """The number of targets of a step's first batch, as a mean over processes.

    Summed losses are divided by it before the backward pass; without that, their gradients would overflow in fp16.
    """
    return sum_over_processes(targets).clamp(min=1) / num_processes()


def weighted_loss(loss: Float[Tensor, ""], targets: Float[Tensor, ""], unit: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """The sum of a batch's losses divided by `unit`, given the mean loss and the number of targets."""
    return loss * (targets / unit)


def mean_factor(targets: Sequence[Float[Tensor, ""]], unit: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """The factor that turns the sum of the weighted losses of a step into the mean over the targets of all processes.

    `targets` are the numbers of targets of this process's batches. The factor is for gradients averaged over processes.
    """
    return unit * num_processes() / sum_over_processes(torch.stack([*targets]).sum()).clamp(min=1)


def scale_gradients(weights: Sequence[nn.Parameter], factor: Float[Tensor, ""]) -> None:
    """Multiply the gradients of weights by a factor, in place."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    # One kernel for all gradients on CUDA, if the factor has their dtype.
    torch._foreach_mul_(gradients, factor.to(torch.promote_types(gradients[0].dtype, torch.float32)))


def gradient_norm(weights: Sequence[nn.Parameter]) -> Float[Tensor, ""]:
    """The norm of the gradients of weights, of which each process may have a part."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    return whole(torch.nn.utils.get_total_norm(gradients), True)


def is_nan_or_inf(total: Float[Tensor, ""]) -> Bool[Tensor, ""]:
    """True if the sum of a step's loss and gradient norm is NaN or infinite; the host does not wait for it."""
    return total - total != 0  # nan where the total is not finite; `isfinite` launches four kernels


def clip_gradients(weights: Sequence[nn.Parameter], max_norm: float, norm: Float[Tensor, ""]) -> None:
    """Scale the gradients of weights, in place, so that their norm, which is given, is at most `max_norm`."""
    torch.nn.utils.clip_grads_with_norm_(weights, max_norm, norm)


def train_step(
    network: Network, task: "Task", batches: "Sequence[Batch]", optimizer: torch.optim.Optimizer, max_norm: float = 1.0
) -> Float[Tensor, ""]:
    """Take one optimizer step on some batches, in one process, and return their mean loss in nats per target.

    The loss is averaged over the targets of all batches, as if they were one batch. If the loss or the gradient norm is
    NaN or infinite, the weights and the optimizer's state do not change.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    network.zero_grad()
    targets = [(number := task.num_targets(batch)).sum(dtype=sum_dtype(number.device)) for batch in batches]
    unit, total = target_unit(targets[0]), torch.tensor(0.0)
    for batch, number in zip(batches, targets, strict=True):
        loss = weighted_loss(task.loss(network, batch), number, unit)
        loss.backward()
        total = total + loss.detach()
    factor = mean_factor(targets, unit)
    scale_gradients(weights, factor)
    norm = gradient_norm(weights)
    if not is_nan_or_inf(total + norm):
        clip_gradients(weights, max_norm, norm)
        optimizer.step()
    return total * factor
