"""The data of a run as Lightning wants it, whatever the tokens stand for."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sized
from typing import Any, Literal, Protocol, cast

import lightning
import numpy as np
import torch
from jaxtyping import UInt
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tinyformer.batch import Batch
from tinyformer.data.cache import TokenSplit
from tinyformer.data.loader import EpochLoader, ResumableLoader, identity
from tinyformer.data.masking import MaskedWindows, Masker, Masking
from tinyformer.data.tokenizer import TextTokenizer
from tinyformer.data.windows import Pack, Windows

TokenDevice = Literal["auto", "cpu", "cuda"]
SHARE_OF_GPU = 0.1
"""Of a GPU's free memory, how much tokens may take unasked."""


class Split(Protocol):
    """What is known of a split, whatever it consists of."""

    @property
    def ids(self) -> UInt[np.ndarray, " tokens"]:
        """All of its tokens."""
        ...

    @property
    def num_bytes(self) -> int:
        """Length of the raw text in UTF-8."""
        ...

    @property
    def num_unknown(self) -> int:
        """Tokens that stand for text outside of the vocabulary."""
        ...

    @property
    def num_documents(self) -> int:
        """Texts, or examples."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens that count."""
        ...

    @property
    def num_targets(self) -> int:
        """Tokens that a model reads to see everything once."""
        ...


class DataModule(lightning.LightningDataModule):
    """The data of a run; a subclass says in `prepare` where they come from, and what a batch consists of.

    Args:
        seq_len: Tokens in a row of a batch, at most.
        batch_size: Rows in a batch, on each device.
        num_workers: Processes that read training batches ahead. A batch takes less than 0.1 ms: 0 is fast.
        seed: Decides the order of training.

    Attributes:
        tokenizer: After `prepare`, the tokenizer.
        splits: After `prepare`, the tokens by split.
        fingerprint: After `prepare`, identifies what is in all splits.
        name: Short name, for the summary.
        labels: After `prepare`, the names of the classes; None where there are none.
        row: What a row of a batch is called.

    Raises:
        ValueError: If a number is not one that works.
    """

    tokenizer: TextTokenizer
    splits: Mapping[str, Split]
    fingerprint: str
    name: str
    labels: list[str] | None = None
    row = "window"

    def __init__(self, seq_len: int, batch_size: int, num_workers: int, seed: int) -> None:
        super().__init__()
        require_at_least_one("data.batch_size", batch_size, 16)
        if num_workers < 0:
            raise ValueError(f"data.num_workers={num_workers}: must not be negative; data.num_workers=0 works.")
        self.seq_len, self.batch_size, self.num_workers, self.seed = seq_len, batch_size, num_workers, seed

    def __deepcopy__(self, memo: dict) -> "DataModule":
        """Itself: copies of a model, such as those that average its weights, share its data."""
        return self

    @abstractmethod
    def prepare(self, whole: bool = False) -> None:
        """Makes the tokens, or opens what was made before.

        Args:
            whole: Hold nothing out, where it would be held out: everything becomes the one split "all".
        """

    @abstractmethod
    def is_prepared(self, tokenizer: TextTokenizer, whole: bool = False) -> bool:
        """Whether `prepare` has no work to do, and gives tokens of this tokenizer."""

    def require_device(self, device: str) -> None:
        """Refuse to train on a device (its type) where the data cannot be put."""

    @property
    def scored_whole(self) -> bool:
        """Whether data other than the run's is scored whole, for want of a split that is meant for it."""
        return False

    @abstractmethod
    def _training_loader(self, **settings: Any) -> EpochLoader:
        """The training split's batches; the settings are those that every `EpochLoader` takes."""

    @abstractmethod
    def _evaluation_loader(self, split_name: str, rank: int, world_size: int) -> DataLoader:
        """A split's batches; under several processes, those of one of them."""

    def setup(self, stage: str) -> None:
        """Lightning's hook: prepares, unless that was done already."""
        if not hasattr(self, "splits"):
            self.prepare()

    def train_dataloader(self) -> EpochLoader:
        """Shuffled training batches; their order is resumed from a checkpoint."""
        loader = self._training_loader(
            batch_size=self.batch_size,
            seed=self.seed,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            rank=self._rank,
            world_size=self._world_size,
        )
        if not len(loader):
            raise ValueError(
                f"trainer.devices={self._world_size}: there are fewer training {self.row}s than devices; "
                "trainer.devices=1 works."
            )
        return loader

    def val_dataloader(self) -> DataLoader | list[DataLoader]:
        """All of the validation split; an empty list where there is none."""
        return self.evaluation_dataloader("validation") if "validation" in self.splits else []

    def test_dataloader(self) -> DataLoader:
        """All of the test split."""
        return self.evaluation_dataloader("test")

    def evaluation_dataloader(self, split_name: str) -> DataLoader:
        """All of a split, each target once, in the same order each time; under several processes, each has its share.

        Raises:
            ValueError: If there is no such split.
        """
        if split_name not in self.splits:
            raise ValueError(
                f"there is no split {split_name}, only {', '.join(self.splits)}{self._remedy(split_name)}."
            )
        return self._evaluation_loader(split_name, self._rank, self._world_size)

    def _remedy(self, split_name: str) -> str:
        """How a missing split can be had, if it can."""
        return ""

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer is not None else 0

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer is not None else 1


class TokenDataModule(DataModule):
    """Batches of windows of token ids.

    Args:
        seq_len: Tokens in a window.
        batch_size: Windows in a batch, on each device.
        pack: See `Windows`.
        document_mask: Whether batches say which document each token belongs to.
        num_workers: See `DataModule`.
        seed: Decides the order of the training windows, and what is hidden.
        masking: How tokens are hidden, for a model that predicts them from both sides; None: it predicts the next.
        device: Where training tokens lie: in a memory map ("cpu") or on the GPU that trains ("cuda"). "auto" is the GPU
            where they fit into a tenth of its free memory and windows are plain: whole, across documents, none hidden.

    Raises:
        ValueError: If windows that are not plain are asked for on the GPU.
    """

    splits: dict[str, TokenSplit]

    def __init__(
        self,
        seq_len: int,
        batch_size: int,
        pack: Pack,
        document_mask: bool,
        num_workers: int,
        seed: int,
        masking: Masking | None = None,
        device: TokenDevice = "auto",
    ) -> None:
        super().__init__(seq_len, batch_size, num_workers, seed)
        self.pack, self._document_mask, self._masking, self._device = pack, document_mask, masking, device
        if device == "cuda" and not self._is_plain:
            raise ValueError(
                "data.device=cuda: windows within documents, or with hidden tokens, are read from the memory map; "
                "data.device=auto works."
            )

    def _training_loader(self, **settings: Any) -> ResumableLoader:
        return ResumableLoader(
            self.splits["train"],
            self.seq_len,
            pack=self.pack,
            with_documents=self._document_mask,
            masker=self._masker,
            device=self._token_device(),
            **settings,
        )

    @property
    def _is_plain(self) -> bool:
        return self.pack == "concat" and not self._document_mask and self._masking is None

    def require_device(self, device: str) -> None:
        """Refuse to train on a device (its type) where the tokens cannot be put.

        Raises:
            ValueError: They are to lie on a GPU, and this is none.
        """
        if self._device == "cuda" and device != "cuda":
            raise ValueError(f"data.device=cuda: the run is on {device}; data.device=auto works.")

    def _token_device(self) -> torch.device | None:
        """Where training tokens are put; None: they stay in the memory map."""
        device = self.trainer.strategy.root_device if self.trainer is not None else torch.device("cpu")
        self.require_device(device.type)
        if device.type != "cuda":
            return None
        if self._device == "cuda":
            return device
        split = self.splits["train"]
        fits = 4 * len(split.ids) <= SHARE_OF_GPU * torch.cuda.mem_get_info(device)[0]
        return device if self._device == "auto" and self._is_plain and split.scored is None and fits else None

    def _evaluation_loader(self, split_name: str, rank: int, world_size: int) -> DataLoader[Batch]:
        split = self.splits[split_name]
        windows = Windows(split, self.seq_len, self.pack, with_documents=self._document_mask)
        dataset = MaskedWindows(windows, self._masker) if self._masker else windows
        return share(dataset, self.batch_size, rank, world_size)

    @property
    def _masker(self) -> Masker | None:
        return Masker(self._masking, self.tokenizer, self.seed) if self._masking else None


def share(dataset: Dataset, batch_size: int | None, rank: int, world_size: int) -> DataLoader:
    """All items of a data set in order, or those of one of several processes.

    Args:
        dataset: Gives whole batches: through `__getitems__` of `batch_size` items, or, where that is None, as items.
        batch_size: Items in a batch.
        rank: Which of the processes.
        world_size: Their number.
    """
    return DataLoader(
        dataset,
        batch_size,
        sampler=_Share(dataset, world_size, rank, shuffle=False),
        collate_fn=identity,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # evaluating draws nothing from the numbers of training
    )


class _Share(DistributedSampler):
    """Every `num_replicas`-th item; unlike its base class, it repeats none to make the shares equal.

    It is a `DistributedSampler` because Lightning replaces any other under several processes.
    """

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, len(cast(Sized, self.dataset)), self.num_replicas))

    def __len__(self) -> int:
        return len(range(self.rank, len(cast(Sized, self.dataset)), self.num_replicas))


def require_at_least_one(key: str, value: int, example: int) -> None:
    """Refuse a number below 1.

    Raises:
        ValueError: It is one.
    """
    if value < 1:
        raise ValueError(f"{key}={value}: must be at least 1; {key}={example} works.")


def hold_out_settings(validation: float | int, test: float | int, group_near_copies: bool) -> dict[str, Any]:
    """What `hold_out` is given beside a seed, by name.

    Args:
        validation: Share of the training text.
        test: The same.
        group_near_copies: Whether texts that nearly equal one another stay on one side.

    Raises:
        ValueError: One is no share, or they leave nothing to train on.
    """
    for name, fraction in (("validation", validation), ("test", test)):
        if not 0 <= fraction < 1:
            raise ValueError(
                f"data.{name}_fraction={fraction}: must be at least 0 and less than 1; data.{name}_fraction=0.05 works."
            )
    if validation + test >= 1:
        raise ValueError(
            f"data.validation_fraction={validation} and data.test_fraction={test} leave no text to train on; "
            "0.05 and 0.05 work."
        )
    return {
        "validation_fraction": float(validation),
        "test_fraction": float(test),
        "group_near_copies": group_near_copies,
    }


def how_to_hold_out(split_name: str) -> str:
    """What a sentence about a missing split ends with, if the split could be held out."""
    held_out = ("validation", "test")
    return f"; data.{split_name}_fraction=0.05 holds one out" if split_name in held_out else ""
