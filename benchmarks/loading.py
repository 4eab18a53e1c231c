"""Loading a batch of token windows from files: by our loader, and in the ways of other libraries.

`python benchmarks/run.py --bench loading` measures it.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import alternate
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tinyformer.data import TokenSplit
from tinyformer.data.batches.loader import ResumableLoader

BATCH_SIZE, SEQ_LEN = 64, 256
VOCAB_SIZE = 50_257


def our_batches(ids: np.ndarray) -> Iterator[Any]:
    """Our loader: windows in an order that is shuffled in each epoch and can be resumed; a batch is one gather."""
    split = TokenSplit(ids, np.array([0, len(ids)]), 0, 0, 0, 0)
    loader = ResumableLoader(split, SEQ_LEN, BATCH_SIZE)
    while True:
        yield from loader


def nano_gpt_batches(ids: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
    """As nanoGPT's `get_batch`: windows at random positions of a memory map, cut one by one and stacked."""
    while True:
        places = torch.randint(len(ids) - SEQ_LEN, (BATCH_SIZE,)).tolist()
        inputs = [torch.from_numpy(ids[place : place + SEQ_LEN].astype(np.int64)) for place in places]
        targets = [torch.from_numpy(ids[place + 1 : place + 1 + SEQ_LEN].astype(np.int64)) for place in places]
        yield torch.stack(inputs), torch.stack(targets)


class ItemByItem(Dataset):
    """Windows of a memory map, one at a time, as most data sets for `DataLoader` are written.

    Args:
        ids: the tokens.
    """

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return (len(self.ids) - 1) // SEQ_LEN

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = torch.from_numpy(self.ids[index * SEQ_LEN : (index + 1) * SEQ_LEN + 1].astype(np.int64))
        return window[:-1], window[1:]


def data_loader_batches(ids: np.ndarray) -> Iterator[list[Tensor]]:
    """`torch.utils.data.DataLoader` over `ItemByItem`, shuffled."""
    loader = DataLoader(ItemByItem(ids), BATCH_SIZE, shuffle=True, drop_last=True)
    return itertools.chain.from_iterable(itertools.repeat(loader))


def datasets_batches(ids: np.ndarray, folder: Path) -> Iterator[tuple[Tensor, Tensor]]:
    """`datasets` in torch format: its rows are windows in an Arrow file, and a batch is requested at once."""
    from datasets import Dataset as Table
    from datasets import disable_progress_bars, load_from_disk

    disable_progress_bars()

    rows = ids[: len(ids) // (SEQ_LEN + 1) * (SEQ_LEN + 1)].reshape(-1, SEQ_LEN + 1)
    Table.from_dict({"ids": list(rows)}).save_to_disk(folder)
    table = load_from_disk(folder).with_format("torch")
    while True:
        order = np.random.default_rng(0).permutation(len(table))
        for batch in order[: len(order) // BATCH_SIZE * BATCH_SIZE].reshape(-1, BATCH_SIZE):
            windows = table[batch.tolist()]["ids"]
            yield windows[:, :-1], windows[:, 1:]


def load_in_turn(folder: Path, num_tokens: int, rounds: int, batches_per_block: int) -> dict[str, list[float]]:
    """The seconds of blocks of batches, by reader; our loader is "ours".

    Args:
        folder: where the files are written.
        num_tokens: number of tokens in the file.
        rounds: number of blocks.
        batches_per_block: number of batches that are timed together.
    """
    tokens = np.random.default_rng(0).integers(VOCAB_SIZE, size=num_tokens, dtype=np.uint16)
    np.save(folder / "ids.npy", tokens)
    ids = np.load(folder / "ids.npy", mmap_mode="r")
    readers: dict[str, Iterator[Any]] = {
        "ours": our_batches(ids),
        "nanoGPT get_batch": nano_gpt_batches(ids),
        "DataLoader, item by item": data_loader_batches(ids),
        "datasets, torch format": datasets_batches(ids, folder / "rows"),
    }

    def block(reader: Iterator[Any]) -> Callable[[], None]:
        def read() -> None:
            for _ in range(batches_per_block):
                next(reader)

        return read

    return alternate({name: block(reader) for name, reader in readers.items()}, rounds)
