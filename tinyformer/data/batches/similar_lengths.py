"""Batches of rows of similar length, so that little of them is padding."""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Int64

from tinyformer.batch import Batch
from tinyformer.data.batches.loader import EpochLoader
from tinyformer.data.batches.windows import Rows

_POOL = 50  # batches whose rows are sorted by length together


class SimilarLengthLoader(EpochLoader):
    """Batches of training rows of similar length, every row once an epoch.

    They are regrouped in each epoch, see `group_by_length`. The sizes of batches differ by at most one row, and at each
    step the batches of all ranks have similar lengths, so that no rank waits long for another. For arguments without a
    description, see `ResumableLoader`.

    Args:
        rows_of: returns the rows of an epoch, given its number.
        lengths: of the rows, at least one for each rank.
        batch_size: maximum number of rows in a batch, on each rank.
    """

    def __init__(
        self,
        rows_of: Callable[[int], Rows],
        lengths: Int64[np.ndarray, " rows"],
        batch_size: int,
        *,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._rows_of, self._lengths, self._seed = rows_of, lengths, seed
        self._rank, self._world_size = rank, world_size
        # Rounded up so that all rows are read; but each batch must have a row on every rank.
        length = min(-(-len(lengths) // (batch_size * world_size)), len(lengths) // world_size)
        super().__init__(length, num_workers, pin_memory)

    def _epoch(self, epoch: int) -> tuple[Rows, list[list[int]]]:
        generator = np.random.default_rng((self._seed, epoch))
        pool = min(_POOL, max(self._length // 4, 1))  # else few batches would be the same ones in each epoch
        steps = group_by_length(self._lengths, self._length, pool, generator)
        return self._rows_of(epoch), [step[self._rank :: self._world_size].tolist() for step in steps]


def group_by_length(
    lengths: Int64[np.ndarray, " rows"], num_groups: int, pool: int, generator: np.random.Generator
) -> list[Int64[np.ndarray, " group"]]:
    """The indices of rows in groups of similar length and of equal size, give or take one.

    The rows are shuffled and divided into pools of `pool` groups; a pool is sorted by length and divided into
    groups; then the groups are shuffled. The larger a pool, the less padding, and the more often the same rows share a
    group.
    """
    unsorted = np.array_split(generator.permutation(len(lengths)), num_groups)
    groups: list[Int64[np.ndarray, " group"]] = []
    for begin in range(0, num_groups, pool):
        pooled = np.concatenate(unsorted[begin : begin + pool])
        by_length = pooled[np.argsort(lengths[pooled], kind="stable")]
        groups += np.array_split(by_length, len(unsorted[begin : begin + pool]))
    return [groups[group] for group in generator.permutation(num_groups)]


class EvaluationBatches(torch.utils.data.Dataset):
    """All rows of a split in batches of similar length, the same batches each time.

    The batch with the longest sequence comes first, so that running out of memory shows at once. The others are in
    random order, so that the first few are a sample even of sorted data.
    """

    def __init__(self, rows: Rows, lengths: Int64[np.ndarray, " rows"], batch_size: int) -> None:
        batches = group_by_length(lengths, -(-len(lengths) // batch_size), _POOL, np.random.default_rng(0))
        longest = max(range(len(batches)), key=lambda number: lengths[batches[number]].max())
        self._batches = [batches[longest], *batches[:longest], *batches[longest + 1 :]]
        self._rows = rows

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Batch:
        return self._rows.__getitems__(self._batches[index].tolist())
