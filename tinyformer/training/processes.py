"""What the processes of a run tell one another, without barriers: on a GPU the host waits for nothing."""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F


def has_processes() -> bool:
    """Whether there is a process group, even if of one process."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def sum_over_processes(values: Tensor) -> Tensor:
    """The sum of a tensor over all processes, without the barrier of Lightning's `reduce`, at which the host waits."""
    if not has_processes():
        return values
    total = values.clone()
    torch.distributed.all_reduce(total)
    return total


def max_over_processes(values: Tensor) -> Tensor:
    """The largest values of a tensor over all processes; see `sum_over_processes`."""
    if not has_processes():
        return values
    largest = values.clone()
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return largest


def own_part(x: Float[Tensor, "matrices rows columns"]) -> Float[Tensor, "own rows columns"]:
    """The share of the matrices that this process computes. All shares have one size; zeros stand for missing ones."""
    if not has_processes():
        return x
    share = math.ceil(len(x) / torch.distributed.get_world_size())
    first = torch.distributed.get_rank() * share
    return F.pad(own := x[first : first + share], (0, 0, 0, 0, 0, share - len(own)))


def of_all_processes(own: Float[Tensor, "own rows columns"], number: int) -> Float[Tensor, "matrices rows columns"]:
    """What all processes have computed, each of its `own_part`."""
    if not has_processes():
        return own
    parts = [
        torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(torch.distributed.get_world_size())
    ]
    torch.distributed.all_gather(parts, own.contiguous())
    return torch.cat(parts)[:number]
