"""Loaders of training batches, which can resume within an epoch, and of one process's share of an evaluation."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sized
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Int, Int64
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tinyformer.data.batches.masking import MaskedWindows, Masker
from tinyformer.data.batches.windows import Batch, Pack, Rows, TensorWindows, Windows
from tinyformer.data.stream import TokenSplit
from tinyformer.errors import ArgumentError

_POOL = 50  # batches whose rows are sorted by length together


class EpochLoader(ABC):
    """Training batches, epoch after epoch, with a state that can be saved and resumed.

    Each iteration is one epoch, or the rest of an interrupted epoch. A subclass defines an epoch in `_epoch`.

    Args:
        length: number of batches in a whole epoch, the loader's `len`, to which Lightning applies its limits.
        pin_memory: put batches into page-locked memory, from which copying to a CUDA device is faster.
    """

    def __init__(self, length: int, pin_memory: bool) -> None:
        self.seconds = 0.0  # time for which the training loop has waited for batches
        self._length, self._pin_memory = length, pin_memory
        self.num_read, self._is_repeated = length, False  # number of batches to read in each epoch
        self._current_epoch = self._batch = 0

    @abstractmethod
    def _epoch(self, epoch: int) -> tuple[Dataset, list[list[int]] | Int[Tensor, "batches batch"]]:
        """The data set (whose `__getitems__` returns a whole batch), and the indices of the items of each batch.

        Both are functions of the epoch alone, so that an interrupted run continues with the same batches.
        """

    def limit(self, batches: int | float, is_repeated: bool = False) -> None:
        """Read only the first `batches` (a number or fraction) of each epoch; with `is_repeated`, always of epoch 0."""
        self.num_read = int(self._length * batches) if isinstance(batches, float) else min(batches, self._length)
        self._is_repeated = is_repeated

    def __len__(self) -> int:
        return self._length

    @property
    def position(self) -> int:
        """Number of batches read in all epochs."""
        return self._current_epoch * self.num_read + self._batch

    def __iter__(self) -> Iterator[Any]:
        requested = time.perf_counter()
        epoch, done = self._current_epoch, self._batch
        dataset, batches = self._epoch(0 if self._is_repeated else epoch)
        loader = DataLoader(
            dataset,
            batch_sampler=batches[done : self.num_read],
            collate_fn=identity,
            pin_memory=self._pin_memory,
            generator=torch.Generator(),  # else the global generator, which dropout uses, would be advanced
        )
        for batch in loader:
            done += 1
            # The end of an epoch is the beginning of the next: Lightning never requests the batch after the last.
            self._current_epoch, self._batch = divmod(epoch * self.num_read + done, self.num_read)
            self.seconds += time.perf_counter() - requested
            yield batch
            requested = time.perf_counter()

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._current_epoch, "batch": self._batch, "length": self._length}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next iteration continue after the batch at which `state` was saved.

        If the number of batches in an epoch has changed, the iteration continues after the same share of the epoch.
        """
        batch = state["batch"] * self._length // state.get("length", self._length)
        # The limit may be lower than before.
        self._current_epoch, self._batch = (state["epoch"], batch) if batch < self.num_read else (state["epoch"] + 1, 0)


class ResumableLoader(EpochLoader):
    """Batches of training windows, reshuffled in each epoch.

    No window occurs twice in an epoch. With `pack="concat"`, each epoch has its own random phase, so that a token is
    not always at the same position. Windows that do not fill a batch are left out; if not even one batch is full, the
    batch size is reduced. For arguments without a description, see `Windows` and `EpochLoader`.

    Args:
        split: the tokens, at least one window for each rank.
        batch_size: number of windows in a batch, on each rank.
        masker: masks tokens, at different positions in each epoch; None: no token is masked.
        seed: determines the order, together with the epoch.
        split_of: maps an epoch's number to the epoch's tokens, with as many windows as `split`; None: always `split`.
        rank: index of this process; every process has different windows and the same number of batches.
        world_size: number of processes that train together.
        device: the device that holds all tokens and makes the batches; None: batches are read from the memory map. A
            device requires windows that run across documents, with all targets scored and no token masked.
    """

    def __init__(
        self,
        split: TokenSplit,
        seq_len: int,
        batch_size: int,
        *,
        pack: Pack = "concat",
        with_documents: bool = False,
        masker: Masker | None = None,
        split_of: Callable[[int], TokenSplit] | None = None,
        seed: int = 0,
        pin_memory: bool = False,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | None = None,
    ) -> None:
        self._split, self._seq_len, self._pack, self._seed = split, seq_len, pack, seed
        self._with_documents, self._masker, self._split_of = with_documents, masker, split_of
        self._rank, self._world_size = rank, world_size
        # The last phase that leaves at least one window. The number of windows is the minimum over all phases, because
        # Lightning asks for an epoch's length only once.
        self._last_phase = max(min(seq_len - 1, split.num_targets - seq_len), 0) if pack == "concat" else 0
        windows = len(self._windows(self._last_phase))
        self.batch_size = min(batch_size, windows // world_size)
        length = windows // (self.batch_size * world_size) if self.batch_size else 0
        self._tokens = None if device is None else torch.from_numpy(split.ids.astype(np.int32)).to(device)
        # With the tokens on a device, there is no memory to pin.
        super().__init__(length, pin_memory and device is None)

    def _epoch(self, epoch: int) -> tuple[Dataset, list[list[int]] | Int[Tensor, "batches batch"]]:
        generator = np.random.default_rng((self._seed, epoch))
        phase = int(generator.integers(self._last_phase + 1))
        if self._split_of is not None:
            self._split = self._split_of(epoch)
        windows = self._windows(phase)
        order = generator.permutation(len(windows))[: self._length * self._world_size * self.batch_size]
        batches = order.reshape(self._length, self._world_size, self.batch_size)[:, self._rank]
        if self._tokens is not None:
            # Copied at once, since the host would wait for each copy of a batch.
            return TensorWindows(self._tokens, self._seq_len, phase), torch.from_numpy(batches).to(self._tokens.device)
        return MaskedWindows(windows, self._masker, epoch + 1) if self._masker else windows, batches.tolist()

    def _windows(self, phase: int) -> Windows:
        is_concat = self._pack == "concat"
        return Windows(self._split, self._seq_len, self._pack, phase, is_concat, self._with_documents)


class SimilarLengthLoader(EpochLoader):
    """Batches of training rows of similar length, every row once an epoch.

    Rows are regrouped in each epoch, see `group_by_length`. The sizes of batches differ by at most one row, and at each
    step the batches of all ranks have similar lengths, so that no rank waits long for another. For arguments without a
    description, see `ResumableLoader`.

    Args:
        rows_of: returns the rows of an epoch, given its number.
        lengths: lengths of the rows, or other sort keys, see `RowFormat.lengths`; at least one row for each rank.
        batch_size: maximum number of rows in a batch, on each rank.
    """

    def __init__(
        self,
        rows_of: Callable[[int], Rows],
        lengths: Int64[np.ndarray, " rows"],
        batch_size: int,
        *,
        seed: int = 0,
        pin_memory: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._rows_of, self._lengths, self._seed = rows_of, lengths, seed
        self._rank, self._world_size = rank, world_size
        # Rounded up so that all rows are read; but each batch must have a row on every rank.
        length = min(-(-len(lengths) // (batch_size * world_size)), len(lengths) // world_size)
        super().__init__(length, pin_memory)

    def _epoch(self, epoch: int) -> tuple[Rows, list[list[int]]]:
        generator = np.random.default_rng((self._seed, epoch))
        pool = min(_POOL, max(self._length // 4, 1))  # otherwise, few batches would be the same in each epoch
        steps = group_by_length(self._lengths, self._length, pool, generator)
        return self._rows_of(epoch), [step[self._rank :: self._world_size].tolist() for step in steps]


def group_by_length(
    lengths: Int64[np.ndarray, " rows"], num_groups: int, pool: int, generator: np.random.Generator
) -> list[Int64[np.ndarray, " group"]]:
    """The indices of rows in groups of similar length; the sizes of groups differ by at most one.

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


class EvaluationBatches(Dataset):
    """All rows of a split in batches of similar length, the same batches each time.

    The batch with the longest sequence comes first, so that an out-of-memory error occurs at once. The other batches
    are in random order, so that the first few batches are a random sample, even of sorted data.
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


def identity(batch: Any) -> Any:
    """Return the batch unchanged: data sets return whole batches, so that nothing has to be collated."""
    return batch


def share(dataset: Dataset, batch_size: int | None, rank: int, world_size: int) -> DataLoader:
    """The items of a data set in order, or one process's share of them; `batch_size`: None if items are batches."""
    number = len(cast(Sized, dataset))
    if 0 < number < world_size:  # some processes would have nothing to evaluate
        reason = f"must be at most {number}, the number of items to evaluate"
        raise ArgumentError("trainer.devices", world_size, reason, {"devices": 1})
    return DataLoader(
        dataset,
        batch_size,
        sampler=range(rank, number, world_size),
        collate_fn=identity,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # evaluating must not advance the random numbers of training
    )
