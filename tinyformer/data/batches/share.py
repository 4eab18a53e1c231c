"""One process's share of the items of a data set."""

from collections.abc import Iterator, Sized
from typing import cast

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tinyformer.data.batches.loader import identity
from tinyformer.errors import ArgumentError


def share(dataset: Dataset, batch_size: int | None, rank: int, world_size: int) -> DataLoader:
    """All items of a data set in order, or one process's share of them.

    Args:
        dataset: its `__getitems__` returns some of its items as one batch.
        batch_size: items in a batch; None where each item is a batch already.
        rank: index of the process.
        world_size: number of processes.

    Raises:
        ArgumentError: there are fewer items than processes, some of which would have nothing to evaluate.
    """
    if 0 < len(cast(Sized, dataset)) < world_size:
        reason = f"there are only {len(cast(Sized, dataset))} items to evaluate, fewer than devices"
        raise ArgumentError("trainer.devices", world_size, reason, {"devices": 1})
    return DataLoader(
        dataset,
        batch_size,
        sampler=_Share(dataset, world_size, rank, shuffle=False),
        collate_fn=identity,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # evaluating must not advance the random numbers of training
    )


class _Share(DistributedSampler):
    """Every `num_replicas`-th item; unlike the base class, it repeats none to make the shares equal.

    It is a `DistributedSampler` because Lightning replaces any other under several processes.
    """

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, len(cast(Sized, self.dataset)), self.num_replicas))

    def __len__(self) -> int:
        return len(range(self.rank, len(cast(Sized, self.dataset)), self.num_replicas))
