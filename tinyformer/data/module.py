"""The data of a run as a Lightning data module, which prepares the splits and makes batches of their rows."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from jaxtyping import UInt64
from torch.utils.data import DataLoader

from tinyformer.data.batches.loader import EpochLoader
from tinyformer.data.batches.windows import Batch, Rows
from tinyformer.data.recipe import LeftOut, Recipe
from tinyformer.data.row_format import RowFormat
from tinyformer.data.sources.documents import SPLITS, Source, in_use, rows_of
from tinyformer.data.sources.text_files import LocalFiles
from tinyformer.data.sources.text_paths import unread_files
from tinyformer.data.tokenizer.recipes import TokenizerRecipe
from tinyformer.data.tokenizer.tokenizer import TextTokenizer
from tinyformer.errors import ArgumentError, argument_path, printable, require_at_least


class DataModule(lightning.LightningDataModule):
    """The data of a run. A subclass prepares the splits.

    Args:
        row_format: what a row of a batch is, such as a window of text or a pair, and how batches are made.
        batch_size: number of rows in a batch, on each device.
        seed: determines the order of the training rows.
        split_seed: determines which rows are held out, and which data are drawn at random.
    """

    name: str  # short, for the summary
    without: UInt64[np.ndarray, " fingerprints"] | None = None  # of text to leave out of all splits except "train"
    # Set by `prepare`:
    tokenizer: TextTokenizer
    splits: Mapping[str, Any]  # the tokens of train, validation and test, or of "all" alone
    fingerprint: str  # identifies the content of all splits
    labels: list[str] | None = None  # the names of the classes
    num_texts: int | None = None  # number of texts in a labelled example
    lost_bytes = 0.0  # share of the first split's bytes that the tokenizer loses, see `tinyformer.data.lost_bytes`
    unread: Mapping[str, int] = {}  # number of ignored files by reason, such as "hidden file", see `unread_files`
    trained_on: UInt64[np.ndarray, " fingerprints"] | None = None  # of the training split; None: not computed

    def __init__(self, row_format: RowFormat, batch_size: int, seed: int = 0, split_seed: int = 0) -> None:
        super().__init__()
        require_at_least(1, {"batch_size": 16}, batch_size=batch_size)
        require_at_least(0, seed=seed, split_seed=split_seed)
        self.row_format, self.seq_len, self.document = row_format, row_format.seq_len, row_format.document
        self.batch_size, self.seed, self.split_seed = batch_size, seed, split_seed
        self.files: dict[str, list[str]] = {}  # the names of the files of each split, if data are loaded from files
        self.left_out: LeftOut = {}

    def __deepcopy__(self, memo: dict) -> "DataModule":
        """Return this object, not a copy: copies of a model, such as its weight average, share its data."""
        return self

    @property
    @abstractmethod
    def content(self) -> str | None:
        """A hash of the texts of all splits, independent of the tokenizer; None if it is not known."""

    @abstractmethod
    def prepare(self, whole: bool = False) -> None:
        """Make the splits, or load them from the cache; with `whole`, all data are the one split "all"."""

    @abstractmethod
    def is_prepared(self, tokenizer: TextTokenizer, whole: bool = False) -> bool:
        """Return True if `prepare` would only load existing tokens, and `tokenizer` has made these tokens."""

    @property
    def title(self) -> str:
        """The name in figures; a subclass adds details, such as file names, if different data have the same name."""
        return self.name

    @property
    def caveats(self) -> list[str]:
        """The limitations of scores on held-out data, one phrase each; available after `prepare`."""
        return []

    @property
    def scored_whole(self) -> bool:
        """Return True if a checkpoint of other data is scored on the split "all", for lack of a validation split."""
        return False

    def setup(self, stage: str) -> None:
        if not hasattr(self, "splits"):
            self.prepare()

    def train_dataloader(self) -> EpochLoader:
        """The shuffled training batches; a run that is resumed from a checkpoint continues in the same order."""
        loader = self._training_loader(
            batch_size=self.batch_size,
            seed=self.seed,
            pin_memory=torch.cuda.is_available(),
            rank=self._rank,
            world_size=self._world_size,
        )
        if not len(loader):
            reason = f"there are fewer training {self.row_format.row}s than devices"
            raise ArgumentError("trainer.devices", self._world_size, reason, {"devices": 1})
        if self.trainer is not None:
            limit, is_repeated = self.trainer.limit_train_batches, self.trainer.overfit_batches > 0  # type: ignore[attr-defined]
            loader.limit(limit, is_repeated)
            if not loader.num_read:
                name = "overfit_batches" if is_repeated else "limit_train_batches"
                reason = f"is a share of less than one batch: an epoch has {len(loader)} batches"
                raise ArgumentError(f"trainer.{name}", limit, reason, {name: 1})
        return loader

    def val_dataloader(self) -> DataLoader | list[DataLoader]:
        return self.evaluation_dataloader("validation") if "validation" in self.splits else []

    def test_dataloader(self) -> DataLoader:
        return self.evaluation_dataloader("test")

    def evaluation_dataloader(self, split: str) -> DataLoader:
        """Batches of the whole split in a fixed order; with several processes, the share of this process.

        Raise an `ArgumentError` if the split does not exist, is empty, or cannot be scored.
        """
        self.require_split(split)
        settings = self.batch_size, self._rank, self._world_size
        return self.row_format.evaluation_loader(self.splits[split], self._rows(split), *settings)

    def sample(self, split: str, num_rows: int) -> Iterator[Batch]:
        """Batches of `num_rows` rows of a split, drawn without replacement by a fixed seed, in the split's order.

        A batch has at most `batch_size` rows; batch sizes differ by at most one. Errors: see `evaluation_dataloader`.
        """
        self.require_split(split)
        rows = self._rows(split)
        judged = self.row_format.judged(self.splits[split], rows)
        # Not the seed of a run: runs with different seeds draw the same rows.
        chosen = np.sort(np.random.default_rng(0).permutation(judged)[:num_rows])
        for part in np.array_split(chosen, -(-len(chosen) // self.batch_size)):
            yield rows.__getitems__(part.tolist())

    def require_split(self, split: str) -> None:
        if split not in self.splits:
            reason = f"there is no such split, only {', '.join(self.splits)}"
            raise ArgumentError("split", split, reason, {"split": list(self.splits)[-1]})

    def _training_loader(self, **settings: Any) -> EpochLoader:
        device = self.trainer.strategy.root_device if self.trainer is not None else torch.device("cpu")
        with argument_path("row_format", passed=_OF_MODULE):
            return self.row_format.training_loader(self.splits["train"], device, **settings)

    def _rows(self, split: str) -> Rows:
        return self.row_format.rows(self.splits[split], self.split_seed)

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer is not None else 0

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer is not None else 1


_OF_MODULE = {"source": "source"}
"""Arguments of a data module that errors of its row format may name, see `argument_path`."""


class SourceDataModule(DataModule):
    """Data from a source, tokenised once and kept in the cache folder.

    Args:
        source: the source of the text.
        tokenizer: a recipe that is built on the training split, or a trained tokenizer; a mask token is added if the
            row format needs one.
        row_format: the rows to load: windows of text, labelled examples, pairs or questions.
        validation_fraction: share of the training text, or of its rows, to hold out if the source has no such split.
        test_fraction: the same for the test split.
        group_near_copies: keep near-copies of a text in the same split, see `hold_out`.
        cache_dir: the folder of the tokenised text; None: see `default_cache_dir`.
        settings: further arguments of `DataModule`.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: TokenizerRecipe,
        row_format: RowFormat,
        batch_size: int,
        *,
        validation_fraction: float | int = 0.05,
        test_fraction: float | int = 0.05,
        group_near_copies: bool = True,
        cache_dir: str | None = None,
        **settings: Any,
    ) -> None:
        fractions = {"validation_fraction": validation_fraction, "test_fraction": test_fraction}
        for argument, fraction in fractions.items():
            if not 0 <= fraction < 1:
                raise ArgumentError(argument, fraction, "must be at least 0 and less than 1", {argument: 0.05})
        if sum(fractions.values()) >= 1:
            raise ArgumentError("test_fraction", test_fraction, "leaves no text to train on", {"test_fraction": 0.05})
        if not isinstance(source, Source) or row_format.source_rows not in rows_of(source):
            raise ArgumentError("source", source.name, row_format.lacking)
        super().__init__(row_format, batch_size, **settings)
        self.source, self.name, self.cache_dir = source, source.name, cache_dir
        self._tokenizer_recipe = tokenizer
        self._held_out = {name: float(fraction) for name, fraction in fractions.items()}
        self._group_near_copies = group_near_copies

    def _recipe(self, whole: bool) -> Recipe:
        hold_out: dict[str, Any] = {"whole": True}
        if not whole:
            hold_out = {**self._held_out, "seed": self.split_seed, "group_near_copies": self._group_near_copies}
        return Recipe(self.source, self._tokenizer_recipe, self.row_format, without=self.without, **hold_out)

    @cached_property
    def content(self) -> str:
        return self._recipe(whole=False).content

    def prepare(self, whole: bool = False) -> None:
        prepared = (recipe := self._recipe(whole)).prepare(self.cache_dir)
        if not whole:
            self.content = recipe.content  # of the text that was loaded; the source may change later
        self.tokenizer, self.fingerprint = prepared.tokenizer, prepared.fingerprint
        self.left_out, self._division = prepared.facts["left_out"], prepared.facts["division"]
        self.trained_on, self.lost_bytes = prepared.trained_on, next(iter(prepared.splits.values())).lost_bytes
        source = in_use(self.source)
        if isinstance(source, LocalFiles):
            parts = source.of_splits | {split: [] for split in prepared.facts.get("without_labels", ())}
            self.files = {split: [file.name for file in files] for split, files in parts.items()}
            self.files["all"] = [name for split in SPLITS for name in self.files.get(split, [])]
            self.unread = unread_files(source.files)
        with argument_path("row_format", passed=_OF_MODULE):
            self.splits = self.row_format.open(prepared, self.source, whole)
        split = next(iter(self.splits.values()))
        self.labels, self.num_texts = getattr(split, "classes", None), getattr(split, "num_texts", None)

    def is_prepared(self, tokenizer: TextTokenizer, whole: bool = False) -> bool:
        """Return True if the cache folder has the tokens of `tokenizer` (with a mask token if these data need one)."""
        if self.row_format.needs_mask:
            tokenizer = tokenizer.with_mask()
        prepared = self._recipe(whole).open(self.cache_dir)
        return prepared is not None and prepared.tokenizer.fingerprint == tokenizer.fingerprint

    @property
    def caveats(self) -> list[str]:
        return [*filter(None, [self._division]), *self.row_format.caveats(self.splits)]

    @property
    def title(self) -> str:
        """The name, with the files that were given: "text (a.txt, b.txt and 3 more)"."""
        source = in_use(self.source)
        if not isinstance(source, LocalFiles):
            return self.name
        return f"{self.name} ({shortened([Path(name).name for name in source.files])})"

    @property
    def scored_whole(self) -> bool:
        with argument_path("source"):
            return not getattr(in_use(self.source), "has_own_splits", True)

    def _training_loader(self, **settings: Any) -> EpochLoader:
        self._require_rows("train")
        return super()._training_loader(**settings)

    def _rows(self, split: str) -> Rows:
        self._require_rows(split)
        with argument_path("row_format", passed=_OF_MODULE):
            self.row_format.check(self.splits[split], split, self.source)
        return super()._rows(split)

    def _require_rows(self, split: str) -> None:
        if self.splits[split].num_tokens:
            return
        if self.left_out.get(split) and self.without is not None:
            known = "the text that the weights were trained on"
            reason = f"its {split} split is empty without {known}; choose other data"
            raise ArgumentError("source", self.name, reason)
        argument = f"{split}_fraction"
        if self._held_out.get(argument):
            reason = f"leaves the {split} split empty: there are too few different {self.document}s for every split"
            raise ArgumentError(argument, self._held_out[argument], reason)
        raise ArgumentError("source", self.name, f"its {split} split is empty")


def count(number: float, noun: str) -> str:
    """A number with its noun, as in "1 batch", "2.5 epochs" or "2,000 documents"."""
    shown = f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
    return f"{shown} {noun}{'' if shown == '1' else 'es' if noun.endswith('tch') else 's'}"


def shortened(names: Sequence[str], most: int = 2) -> str:
    """The first `most` names, and the number of the other names, as in "a, b and 3 more"."""
    return ", ".join(map(printable, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")
