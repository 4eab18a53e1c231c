"""Collectives between the processes of a run, without host synchronisation."""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F


def has_processes() -> bool:
    """Return True if there is a process group, even if of one process."""
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
    """The results of all processes, each of its `own_part`."""
    if not has_processes():
        return own
    parts = [
        torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(torch.distributed.get_world_size())
    ]
    torch.distributed.all_gather(parts, own.contiguous())
    return torch.cat(parts)[:number]


def whole_of_own(rows: Float[Tensor, "matrices some columns"], num_rows: int) -> Float[Tensor, "own rows columns"]:
    """The `own_part` of matrices, whole, of which each process has some of the rows: as many as `torch.chunk` gives."""
    size = torch.distributed.get_world_size()
    most, share = math.ceil(num_rows / size), math.ceil(len(rows) / size)
    sent = F.pad(rows, (0, 0, 0, most - rows.shape[1], 0, share * size - len(rows)))
    torch.distributed.all_to_all_single(received := torch.empty_like(sent), sent)
    return received.unflatten(0, (size, share)).transpose(0, 1).flatten(1, 2)[:, :num_rows]


def rows_of_whole(
    own: Float[Tensor, "own rows columns"], number: int, num_rows: int
) -> Float[Tensor, "{number} {num_rows} columns"]:
    """The rows that this process has of all matrices, of which each process has a part; undoes `whole_of_own`."""
    size = torch.distributed.get_world_size()
    most = math.ceil(own.shape[1] / size)
    sent = F.pad(own, (0, 0, 0, most * size - own.shape[1])).unflatten(1, (size, most)).transpose(0, 1).contiguous()
    torch.distributed.all_to_all_single(received := torch.empty_like(sent), sent)
    return received.flatten(0, 1)[:number, :num_rows]
