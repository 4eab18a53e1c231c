"""Training batches in an order that a checkpoint can go on with."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tinyformer.data.cache import TokenSplit
from tinyformer.data.masking import MaskedWindows, Masker
from tinyformer.data.windows import Pack, TensorWindows, Windows


class EpochLoader(ABC):
    """Training batches, epoch after epoch; it goes on where its saved state was.

    Each iteration is one epoch, or the rest of one. A subclass says in `_epoch` what an epoch consists of.

    Args:
        length: Batches in an epoch.
        num_workers: Processes that read ahead; 0 reads in this one.
        pin_memory: Put batches into page-locked memory, from which copying to a CUDA device is faster.

    Attributes:
        seconds: That whoever iterates has waited so far; with workers that is less than reading takes.
    """

    def __init__(self, length: int, num_workers: int, pin_memory: bool) -> None:
        self.seconds = 0.0
        self._length, self._num_workers, self._pin_memory = length, num_workers, pin_memory
        self._current_epoch = self._batch = 0

    @abstractmethod
    def _epoch(self, epoch: int) -> tuple[torch.utils.data.Dataset, list[list[int]]]:
        """What batches are read from (`__getitems__` gives a whole one), and the numbers of the items of each.

        Both depend on nothing but the epoch, so that a run that was interrupted sees what it would have seen.
        """

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return self._length

    def __iter__(self) -> Iterator[Any]:
        asked = time.perf_counter()
        epoch, done = self._current_epoch, self._batch
        dataset, batches = self._epoch(epoch)
        loader = torch.utils.data.DataLoader(
            dataset,
            batch_sampler=batches[done:],
            collate_fn=identity,
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            generator=torch.Generator(),  # or it would draw its workers' seed from the numbers of dropout
        )
        for batch in loader:
            done += 1
            # Noted before the batch is handed out (workers are ahead of it), and an epoch's end is the next
            # one's beginning: Lightning never asks for the batch after the last.
            self._current_epoch, self._batch = divmod(epoch * self._length + done, self._length)
            self.seconds += time.perf_counter() - asked
            yield batch
            asked = time.perf_counter()

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its batches were handed out."""
        return {"epoch": self._current_epoch, "batch": self._batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on after the batch that `state` was saved at, in the next iteration."""
        self._current_epoch, self._batch = state["epoch"], state["batch"]


class ResumableLoader(EpochLoader):
    """Batches of training windows, shuffled anew in each epoch.

    In an epoch no window comes twice. With `pack="concat"` the windows begin at another phase in each epoch, so that
    a token is not always at the same position. The windows that do not fill a batch are left out, unless there are
    fewer than one batch.

    Args:
        split: The tokens: at least one window for each rank.
        seq_len: Length of a window.
        batch_size: Windows in a batch, on each rank.
        pack: See `Windows`.
        with_documents: See `Windows`.
        masker: Hides tokens, others in each epoch.
        seed: The order depends on it and on the epoch.
        num_workers: See `EpochLoader`.
        pin_memory: See `EpochLoader`.
        rank: Which of `world_size` processes this is; each gets other windows, and equally many batches.
        world_size: Number of processes that train together.
        device: Where all tokens are put, to make batches there; None: batches come from the memory map. Only for
            windows that run across documents and are scored whole, in which nothing is hidden.
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
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | None = None,
    ) -> None:
        self._split, self._seq_len, self._pack, self._seed = split, seq_len, pack, seed
        self._with_documents, self._masker = with_documents, masker
        self._rank, self._world_size = rank, world_size
        # The last phase at which at least one window is left; the number of windows is the smallest over all
        # phases, because Lightning asks for an epoch's length only once.
        self._last_phase = max(min(seq_len - 1, split.num_targets - seq_len), 0) if pack == "concat" else 0
        windows = len(self._windows(self._last_phase))
        self.batch_size = min(batch_size, windows // world_size)
        length = windows // (self.batch_size * world_size) if self.batch_size else 0
        self._tokens: torch.Tensor | None = None
        if device is not None:
            assert pack == "concat"
            assert masker is None
            assert not with_documents
            assert split.scored is None
            self._tokens = torch.from_numpy(split.ids.astype(np.int32)).to(device)
        # There is nothing for workers to read, and no memory to pin.
        super().__init__(length, 0 if device else num_workers, pin_memory and device is None)

    def _epoch(self, epoch: int) -> tuple[torch.utils.data.Dataset, list[list[int]]]:
        generator = np.random.default_rng((self._seed, epoch))
        phase = int(generator.integers(self._last_phase + 1))
        windows = self._windows(phase)
        order = generator.permutation(len(windows))[: self._length * self._world_size * self.batch_size]
        batches = order.reshape(self._length, self._world_size, self.batch_size)[:, self._rank]
        if self._tokens is not None:
            return TensorWindows(self._tokens, self._seq_len, phase), batches.tolist()
        return MaskedWindows(windows, self._masker, epoch + 1) if self._masker else windows, batches.tolist()

    def _windows(self, phase: int) -> Windows:
        return Windows(
            self._split,
            self._seq_len,
            self._pack,
            phase,
            drop_partial=self._pack == "concat",
            with_documents=self._with_documents,
        )


def identity(batch: Any) -> Any:
    """Collates nothing: whole batches are read."""
    return batch
