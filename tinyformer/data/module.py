"""The data of a run as Lightning wants it."""

from collections.abc import Iterator
from typing import Any, cast

import lightning
import torch
from torch.utils.data import DataLoader, DistributedSampler

from tinyformer.data.cache import TextRecipe, TokenSplit, open_prepared, prepare_text
from tinyformer.data.loader import ResumableLoader, identity
from tinyformer.data.sources import Source
from tinyformer.data.tokenizer import TextTokenizer, TokenizerRecipe
from tinyformer.data.windows import PACKS, Batch, Pack, Windows

_HELD_OUT = ("validation", "test")


class TextDataModule(lightning.LightningDataModule):
    """Windows of token ids from a source of text.

    Args:
        source: Where the text comes from.
        tokenizer: A recipe, built on the training documents, or a finished tokenizer.
        seq_len: Tokens in a window.
        batch_size: Windows in a batch, on each device.
        pack: See `Windows`.
        validation_fraction: Share of the training text to hold out, unless the source has its own validation
            split.
        test_fraction: The same for testing.
        document_mask: Whether batches say which document each token belongs to.
        max_tokens: Train on no more tokens than this.
        group_near_copies: Keep documents that nearly equal one another on one side of the hold-out.
        cache_dir: Where tokenised text is kept.
        num_workers: Processes that read training batches ahead. A batch takes less than 0.1 ms: 0 is fast.
        seed: Decides which documents are held out, and the order of the training windows.

    Attributes:
        tokenizer: After `prepare`, the tokenizer.
        splits: After `prepare`, the tokens by split: train, validation, test, or "all" alone.
        fingerprint: After `prepare`, identifies text, tokenizer and hold-out together.
        has_own_validation: After `prepare`, whether the source brought its own validation split.

    Raises:
        ValueError: If a number or `pack` is not one that works.
    """

    tokenizer: TextTokenizer
    splits: dict[str, TokenSplit]
    fingerprint: str
    has_own_validation: bool

    def __init__(
        self,
        source: Source,
        tokenizer: TokenizerRecipe,
        seq_len: int,
        batch_size: int,
        *,
        pack: str = "concat",
        validation_fraction: float | int = 0.05,
        test_fraction: float | int = 0.05,
        max_tokens: int | None = None,
        document_mask: bool = False,
        group_near_copies: bool = True,
        cache_dir: str = "data/cache",
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        _check_at_least_one("model.max_seq_len", seq_len, 256)
        _check_at_least_one("data.batch_size", batch_size, 16)
        if max_tokens is not None:
            _check_at_least_one("data.max_tokens", max_tokens, 1_000_000)
        if num_workers < 0:
            raise ValueError(f"data.num_workers={num_workers}: must not be negative; data.num_workers=0 works.")
        if pack not in PACKS:
            raise ValueError(f"data.pack={pack}: must be {' or '.join(PACKS)}.")
        _check_fractions(validation_fraction, test_fraction)
        self.source, self.seq_len, self.batch_size, self.pack = source, seq_len, batch_size, cast(Pack, pack)
        self.num_workers, self.seed, self.cache_dir = num_workers, seed, cache_dir
        self._recipe = tokenizer
        self._held_out = {
            "validation_fraction": float(validation_fraction),
            "test_fraction": float(test_fraction),
            "group_near_copies": group_near_copies,
        }
        self._max_tokens, self._document_mask = max_tokens, document_mask

    def prepare(self, whole: bool = False) -> None:
        """Tokenises the text, or opens what was tokenised before.

        Args:
            whole: Hold nothing out: all documents become the one split "all", to evaluate other data than
                trained on.

        Raises:
            ValueError: If the source cannot be read, or the training text is shorter than one window.
        """
        prepared = prepare_text(self._text_recipe(whole), self.cache_dir)
        self.tokenizer, self.splits = prepared.tokenizer, prepared.splits
        self.fingerprint, self.has_own_validation = prepared.fingerprint, prepared.own_validation
        if not whole:
            self._check_length(self.splits["train"].num_tokens)

    def is_prepared(self, tokenizer: TextTokenizer, whole: bool = False) -> bool:
        """Whether the text lies in the cache already, in the tokens of a given tokenizer."""
        prepared = open_prepared(self._text_recipe(whole), self.cache_dir)
        return prepared is not None and prepared.tokenizer.fingerprint == tokenizer.fingerprint

    def _text_recipe(self, whole: bool) -> TextRecipe:
        settings: dict[str, Any] = {} if whole else self._held_out | {"seed": self.seed}
        return TextRecipe(self.source, self._recipe, max_tokens=self._max_tokens, whole=whole, **settings)

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
            seed=self.seed,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            rank=self._rank,
            world_size=self._world_size,
        )
        if not len(loader):
            raise ValueError(
                f"trainer.devices={self._world_size}: the training text has fewer windows than devices; "
                "trainer.devices=1 works."
            )
        return loader

    def val_dataloader(self) -> DataLoader[Batch] | list[DataLoader[Batch]]:
        """All of the validation split; an empty list where there is none (`validation_fraction=0`)."""
        return self.evaluation_dataloader("validation") if "validation" in self.splits else []

    def test_dataloader(self) -> DataLoader[Batch]:
        """All of the test split."""
        return self.evaluation_dataloader("test")

    def evaluation_dataloader(self, split_name: str) -> DataLoader[Batch]:
        """A split's windows in order, every target once; under several processes, each has its share.

        Raises:
            ValueError: If there is no such split, or no text in it.
        """
        split = self.splits.get(split_name)
        if split is None:
            fraction = f"; data.{split_name}_fraction=0.05 holds one out" if split_name in _HELD_OUT else ""
            raise ValueError(f"there is no split {split_name}, only {', '.join(self.splits)}{fraction}.")
        if split.num_tokens == 0:
            raise ValueError(
                f"the split {split_name} holds no text; give more text in data.files, or a larger "
                f"data.{split_name}_fraction, for instance 0.1."
            )
        windows = Windows(split, self.seq_len, self.pack, with_documents=self._document_mask)
        return DataLoader(
            windows,
            self.batch_size,
            sampler=_Share(windows, self._world_size, self._rank, shuffle=False),
            collate_fn=identity,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # evaluating draws nothing from the numbers of training
        )

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer is not None else 0

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer is not None else 1

    def _check_length(self, num_tokens: int) -> None:
        needed = self.seq_len if self.pack == "concat" else 1
        if num_tokens < needed:
            shorter = f"model.max_seq_len={num_tokens}" if num_tokens else "data=pydoc"
            raise ValueError(
                f"model.max_seq_len={self.seq_len}: the training text has only {num_tokens} tokens; "
                f"give more text in data.files, or {shorter} works."
            )


class _Share(DistributedSampler):
    """Every `num_replicas`-th window; unlike its base class, it repeats none to make the shares equal.

    It is a `DistributedSampler` because Lightning replaces any other under several processes.
    """

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, len(cast(Windows, self.dataset)), self.num_replicas))

    def __len__(self) -> int:
        return len(range(self.rank, len(cast(Windows, self.dataset)), self.num_replicas))


def _check_at_least_one(key: str, value: int, example: int) -> None:
    if value < 1:
        raise ValueError(f"{key}={value}: must be at least 1; {key}={example} works.")


def _check_fractions(validation: float | int, test: float | int) -> None:
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
