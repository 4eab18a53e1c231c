"""Row formats: the rows that a task loads from a source, and the batches that are made of their tokens."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, cast

import datasets
import numpy as np
import torch
from jaxtyping import Int, Int64
from torch.utils.data import DataLoader

from tinyformer.data.batches.loader import EpochLoader, EvaluationBatches, ResumableLoader, SimilarLengthLoader, share
from tinyformer.data.batches.masking import MaskedWindows, Masker, Masking
from tinyformer.data.batches.windows import Batch, Pack, Rows, Windows
from tinyformer.data.sources.documents import Source, batches_of, iterate_rows, iterate_texts
from tinyformer.data.stream import Prepared, Split, TokenSplit, write_rows
from tinyformer.data.tokenizer.tokenizer import TextTokenizer
from tinyformer.errors import ArgumentError, require_at_least, require_choice

SHARE_OF_GPU = 0.1
"""Maximum share of a GPU's free memory for the training tokens."""


class RowFormat(ABC):
    """The format of a task's rows: how rows are loaded and tokenised, and how batches are made of them.

    Args:
        seq_len: maximum number of tokens in a row of a batch.
        max_examples: maximum number of the source's rows to train on, drawn at random; None: all rows.
    """

    source_rows: ClassVar[str]  # the rows to load: "texts", "examples", "pairs" or "questions", see `Source`
    lacking: ClassVar[str]  # the reason in the error about a source without such rows
    row: ClassVar[str]  # the noun for a row of a batch, in the singular
    document: ClassVar[str] = "document"  # the noun for the items that `num_documents` counts, in the singular
    varying_length: ClassVar[bool] = True  # whether the length of rows may differ between batches
    keep_whole: ClassVar[bool] = True  # see `hold_out`
    compared: ClassVar[tuple[str, ...]] = ()  # columns in which copies are found, by `hold_out` and in evaluation
    classes: ClassVar[str | None] = None  # see `hold_out`
    too_long: str = "truncate"  # "truncate" or "skip" rows of more than `seq_len` tokens
    needs_mask: bool = False  # whether the tokenizer needs a mask token
    max_tokens: int | None = None  # maximum number of training tokens, for documents that may be cut; None: no limit

    def __init__(self, seq_len: int, max_examples: int | None = None) -> None:
        require_at_least(1, {"seq_len": 256, "max_examples": 1000}, seq_len=seq_len, max_examples=max_examples)
        self.seq_len, self.max_examples = seq_len, max_examples

    def key(self, source: Source) -> list[Any]:
        """The values that, with the source and its division into splits, determine the tokens; serialisable as JSON."""
        return [type(self).__name__, self.max_examples, self.max_tokens]

    def select(
        self, splits: dict[str, datasets.Dataset], source: Source, whole: bool
    ) -> tuple[dict[str, datasets.Dataset], dict[str, Any]]:
        """Return the usable splits, and JSON facts about them; if `whole` is True, these splits will be joined."""
        return splits, {}

    def texts(self, rows: datasets.Dataset) -> Iterator[str]:
        """The texts of rows to tokenise, in order."""
        return chain.from_iterable(iterate_rows(rows))

    def write(self, folder: Path, name: str, rows: datasets.Dataset, tokenizer: TextTokenizer) -> None:
        """Write what cannot be recovered from the tokens of a split: by default, the rows with all their columns."""
        write_rows(folder, name, rows)

    @abstractmethod
    def open(self, prepared: Prepared, source: Source, whole: bool) -> Mapping[str, Any]:
        """Return the tokenised splits; without `whole`, raise an `ArgumentError` if no model can be trained on them."""

    def check(self, split: Any, name: str, source: Source) -> None:  # noqa: B027 -- most formats refuse none
        """Refuse a split that cannot be scored, by an `ArgumentError`."""

    def caveats(self, splits: Mapping[str, Any]) -> list[str]:
        """The limitations of scores on held-out rows, one phrase each."""
        return []

    @abstractmethod
    def rows(self, split: Any, seed: int) -> Rows:
        """The rows of a split for evaluation; the seed determines random choices, such as masked tokens."""

    def training_rows(self, split: Any, seed: int, epoch: int) -> Rows:
        """The rows of a split for training in a given epoch."""
        return self.rows(split, seed)

    def lengths(self, split: Any) -> Int64[np.ndarray, " rows"]:
        """A sort key for each row of a split; rows with similar keys have similar lengths and share batches."""
        raise NotImplementedError

    def judged(self, split: Any, rows: Rows) -> Int[np.ndarray, " judged"]:
        """The indices of the rows that a sample is drawn from; by default, of all rows."""
        return np.arange(len(rows))

    def training_loader(self, split: Any, device: torch.device, seed: int, **settings: Any) -> EpochLoader:
        """The batches of the training split, in an order that `seed` determines; `device` is the training device."""
        rows, lengths = (lambda epoch: self.training_rows(split, seed, epoch)), self.lengths(split)
        return SimilarLengthLoader(rows, lengths, seed=seed, **settings)

    def evaluation_loader(
        self, split: Any, rows: Rows, batch_size: int, rank: int, world_size: int
    ) -> DataLoader[Batch]:
        """The batches of a split, or one process's share of them."""
        return share(EvaluationBatches(rows, self.lengths(split), batch_size), None, rank, world_size)


class WindowFormat(RowFormat):
    """Windows of consecutive tokens of documents.

    In training on a GPU, its memory holds the training tokens if they fit into a tenth of the free memory and windows
    run across documents, without masking or `document_mask`. Otherwise, the tokens are read from a memory map.

    Args:
        pack: see `Windows`.
        document_mask: whether batches contain the index of each token's document.
        masking: the masking of tokens, for a masked language model; None: no token is masked.
    """

    source_rows, lacking = "texts", "is no source of text"
    row, varying_length, keep_whole = "window", False, False

    def __init__(
        self,
        seq_len: int,
        pack: str = "concat",
        document_mask: bool = False,
        max_tokens: int | None = None,
        masking: Masking | None = None,
    ) -> None:
        super().__init__(seq_len)
        require_at_least(1, {"max_tokens": 1_000_000}, max_tokens=max_tokens)
        require_choice("pack", pack, ("concat", "document"))
        self.pack, self.max_tokens, self.masking = cast(Pack, pack), max_tokens, masking
        self.needs_mask = masking is not None
        self._document_mask = document_mask
        self._is_plain = pack == "concat" and not document_mask and masking is None

    def texts(self, rows: datasets.Dataset) -> Iterator[str]:
        return filter(None, iterate_texts(rows))  # the two texts of a pair become one text of two lines

    def write(self, folder: Path, name: str, rows: datasets.Dataset, tokenizer: TextTokenizer) -> None:
        """Write flags of tokens that continue a word, for masked models whose tokens do not show where words begin."""
        if self.needs_mask and not tokenizer.shows_words:
            parts = batches_of(self.texts(rows), 2**20)
            np.save(folder / f"{name}.continues.npy", np.concatenate([*map(tokenizer.continuations, parts)]))

    def open(self, prepared: Prepared, source: Source, whole: bool) -> dict[str, TokenSplit]:
        num_tokens = next(iter(prepared.splits.values())).num_tokens
        if not whole and num_tokens < (self.seq_len if self.pack == "concat" else 1):
            reason = f"the training text is too short: it has {num_tokens} tokens and needs at least {self.seq_len}"
            raise ArgumentError("seq_len", self.seq_len, reason)
        return prepared.splits

    def rows(self, split: TokenSplit, seed: int) -> Rows:
        windows = Windows(split, self.seq_len, self.pack, with_documents=self._document_mask)
        masker = self._masker(split, seed)
        return MaskedWindows(windows, masker) if masker else windows

    def token_device(self, split: TokenSplit, device: torch.device) -> torch.device | None:
        """The device to hold the training tokens, given the training device; None: they stay in the memory map."""
        if device.type != "cuda" or not self._is_plain or split.scored is not None:
            return None
        fits = 4 * len(split.ids) <= SHARE_OF_GPU * torch.cuda.mem_get_info(device)[0]
        return device if fits else None

    def training_loader(self, split: TokenSplit, device: torch.device, seed: int, **settings: Any) -> ResumableLoader:
        return ResumableLoader(
            split,
            self.seq_len,
            pack=self.pack,
            with_documents=self._document_mask,
            masker=self._masker(split, seed),
            device=self.token_device(split, device),
            seed=seed,
            **settings,
        )

    def evaluation_loader(
        self, split: Split, rows: Rows, batch_size: int, rank: int, world_size: int
    ) -> DataLoader[Batch]:
        return share(rows, batch_size, rank, world_size)

    def _masker(self, split: TokenSplit, seed: int) -> Masker | None:
        if self.masking is None:
            return None
        assert split.tokenizer is not None
        return Masker(self.masking, split.tokenizer, seed)
