"""The data of a run as Lightning wants it, whatever the tokens stand for."""

from abc import abstractmethod
from collections.abc import Iterator, Sized
from typing import cast

import lightning
import torch
from torch.utils.data import DataLoader, DistributedSampler

from tinyformer.data.cache import TokenSplit
from tinyformer.data.loader import ResumableLoader, identity
from tinyformer.data.masking import MaskedWindows, Masker, Masking
from tinyformer.data.tokenizer import TextTokenizer
from tinyformer.data.windows import Batch, Pack, Windows


class TokenDataModule(lightning.LightningDataModule):
    """Batches of windows of token ids; a subclass says in `prepare` where the tokens come from.

    Args:
        seq_len: Tokens in a window.
        batch_size: Windows in a batch, on each device.
        pack: See `Windows`.
        document_mask: Whether batches say which document each token belongs to.
        num_workers: Processes that read training batches ahead. A batch takes less than 0.1 ms: 0 is fast.
        seed: Decides the order of the training windows, and what is hidden.
        masking: How tokens are hidden, for a model that predicts them from both sides; None: it predicts the next.

    Attributes:
        tokenizer: After `prepare`, the tokenizer.
        splits: After `prepare`, the tokens by split.
        fingerprint: After `prepare`, identifies the tokens of all splits.
        name: Short name, for the summary.
        labels: None: there are no classes.

    Raises:
        ValueError: If a number is not one that works.
    """

    tokenizer: TextTokenizer
    splits: dict[str, TokenSplit]
    fingerprint: str
    name: str
    labels: list[str] | None = None

    def __init__(
        self,
        seq_len: int,
        batch_size: int,
        pack: Pack,
        document_mask: bool,
        num_workers: int,
        seed: int,
        masking: Masking | None = None,
    ) -> None:
        super().__init__()
        require_at_least_one("data.batch_size", batch_size, 16)
        if num_workers < 0:
            raise ValueError(f"data.num_workers={num_workers}: must not be negative; data.num_workers=0 works.")
        self.seq_len, self.batch_size, self.pack = seq_len, batch_size, pack
        self.num_workers, self.seed, self._document_mask = num_workers, seed, document_mask
        self._masking = masking

    @abstractmethod
    def prepare(self, whole: bool = False) -> None:
        """Makes the tokens, or opens what was made before.

        Args:
            whole: Hold nothing out, where it would be held out: everything becomes the one split "all".
        """

    @abstractmethod
    def is_prepared(self, tokenizer: TextTokenizer, whole: bool = False) -> bool:
        """Whether `prepare` has no work to do, and gives tokens of this tokenizer."""

    @property
    def scored_whole(self) -> bool:
        """Whether data other than the run's is scored whole, for want of a split that is meant for it."""
        return False

    def setup(self, stage: str) -> None:
        """Lightning's hook: prepares, unless that was done already."""
        if not hasattr(self, "splits"):
            self.prepare()

    def train_dataloader(self) -> ResumableLoader:
        """Shuffled training batches; their order is resumed from a checkpoint."""
        loader = ResumableLoader(
            self.splits["train"],
            self.seq_len,
            self.batch_size,
            pack=self.pack,
            with_documents=self._document_mask,
            masker=self._masker,
            seed=self.seed,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            rank=self._rank,
            world_size=self._world_size,
        )
        if not len(loader):
            raise ValueError(
                f"trainer.devices={self._world_size}: there are fewer training windows than devices; "
                "trainer.devices=1 works."
            )
        return loader

    def val_dataloader(self) -> DataLoader[Batch] | list[DataLoader[Batch]]:
        """All of the validation split; an empty list where there is none."""
        return self.evaluation_dataloader("validation") if "validation" in self.splits else []

    def test_dataloader(self) -> DataLoader[Batch]:
        """All of the test split."""
        return self.evaluation_dataloader("test")

    def evaluation_dataloader(self, split_name: str) -> DataLoader[Batch]:
        """A split's windows in order, every target once; under several processes, each has its share.

        Raises:
            ValueError: If there is no such split.
        """
        split = self.splits.get(split_name)
        if split is None:
            raise ValueError(
                f"there is no split {split_name}, only {', '.join(self.splits)}{self._remedy(split_name)}."
            )
        windows = Windows(split, self.seq_len, self.pack, with_documents=self._document_mask)
        dataset = MaskedWindows(windows, self._masker) if self._masker else windows
        return DataLoader(
            dataset,
            self.batch_size,
            sampler=_Share(dataset, self._world_size, self._rank, shuffle=False),
            collate_fn=identity,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # evaluating draws nothing from the numbers of training
        )

    def _remedy(self, split_name: str) -> str:
        """How a missing split can be had, if it can."""
        return ""

    @property
    def _masker(self) -> Masker | None:
        return Masker(self._masking, self.tokenizer, self.seed) if self._masking else None

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer is not None else 0

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer is not None else 1


class _Share(DistributedSampler):
    """Every `num_replicas`-th window; unlike its base class, it repeats none to make the shares equal.

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
