"""Lightning data modules: the base of all, and the base of those that read a source."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from jaxtyping import Int, Int64, UInt64
from torch.utils.data import DataLoader

from tinyformer.batch import Batch
from tinyformer.data.batches.loader import EpochLoader
from tinyformer.data.batches.share import share
from tinyformer.data.batches.similar_lengths import EvaluationBatches, SimilarLengthLoader
from tinyformer.data.batches.windows import Rows
from tinyformer.data.cache import LeftOut, Prepared, Recipe
from tinyformer.data.sources.source import SPLITS, Source, in_use
from tinyformer.data.sources.text_files import LocalFiles
from tinyformer.data.sources.text_paths import hidden_files
from tinyformer.data.stream import Split
from tinyformer.data.tokenizer.recipes import MaskedTokenizer, TokenizerRecipe
from tinyformer.data.tokenizer.tokenizer import TextTokenizer
from tinyformer.errors import ArgumentError, argument_path, require_at_least, require_at_most

SAMPLE_SEED = 0
"""The seed of `DataModule.sample`: not that of a run, so that runs with different seeds draw the same rows."""


class DataModule(lightning.LightningDataModule):
    """The data of a run. A subclass prepares the splits and makes the batches.

    Args:
        seq_len: maximum number of tokens in a row of a batch.
        batch_size: rows in a batch, on each device.
        num_workers: processes that read training batches ahead. A batch takes less than 0.1 ms, so 0 is fast.
        seed: determines the order of training.
        split_seed: determines what is held out, and which data are drawn at random.

    Attributes:
        tokenizer: after `prepare`, the tokenizer.
        splits: after `prepare`, the tokens by split.
        fingerprint: after `prepare`, identifies the content of all splits.
        name: short name, for the summary.
        labels: after `prepare`, the names of the classes; None where there are none.
        num_texts: after `prepare`, the number of texts of a labelled example; None where there are none.
        files: after `prepare`, the names of the files of each split, where data are read from files.
        num_hidden: after `prepare`, the number of hidden files in their folders, which are not read.
        left_out: after `prepare`, what each split leaves out; see `LeftOut`.
        trained_on: after `prepare`, the fingerprints of the training split; None where they are not taken.
        without: set before `prepare`, the fingerprints of text to leave out of all splits but "train".
        row: what a row of a batch is, in the singular.
        document: what `num_documents` of a split counts, in the singular.
        varying_length: whether the rows of one batch may be longer than those of another.

    Raises:
        ArgumentError: a number is out of range.
    """

    tokenizer: TextTokenizer
    splits: Mapping[str, Split]
    fingerprint: str
    name: str
    labels: list[str] | None = None
    num_texts: int | None = None
    files: dict[str, list[str]]
    num_hidden = 0
    left_out: LeftOut
    trained_on: UInt64[np.ndarray, " fingerprints"] | None = None
    without: UInt64[np.ndarray, " fingerprints"] | None = None
    row = "window"
    document = "document"
    varying_length = False

    def __init__(self, seq_len: int, batch_size: int, num_workers: int = 0, seed: int = 0, split_seed: int = 0) -> None:
        super().__init__()
        require_at_least(1, {"batch_size": 16}, batch_size=batch_size)
        require_at_least(0, num_workers=num_workers, seed=seed, split_seed=split_seed)
        require_at_most(256, {"num_workers": 2}, num_workers=num_workers)
        self.seq_len, self.batch_size, self.num_workers = seq_len, batch_size, num_workers
        self.seed, self.split_seed = seed, split_seed
        self.files, self.left_out = {}, {}

    def __deepcopy__(self, memo: dict) -> "DataModule":
        """Itself: copies of a model, such as those that average its weights, share its data."""
        return self

    @property
    def content(self) -> str | None:
        """Identifies the texts of all splits, whatever tokenizer encodes them; None where that is not known."""
        return None

    @abstractmethod
    def prepare(self, whole: bool = False) -> None:
        """Make the tokens, or open what was made before.

        Args:
            whole: hold nothing out: everything becomes the one split "all".
        """

    @abstractmethod
    def is_prepared(self, tokenizer: TextTokenizer, whole: bool = False) -> bool:
        """Whether `prepare` would only open files, and give the tokens of this tokenizer."""

    def require_device(self, device: str) -> None:
        """Refuse to train on a type of device that cannot hold the data."""

    @property
    def completion(self) -> tuple[str, str] | None:
        """The beginning of a validation text, and how it ends; None where the beginning does not determine the end."""
        return None

    @property
    def title(self) -> str:
        """The name in pictures, with what distinguishes these data from others of the same name."""
        return self.name

    @property
    def caveats(self) -> list[str]:
        """After `prepare`, what the scores of held-out data do not show, a phrase each."""
        return []

    @property
    def scored_whole(self) -> bool:
        """Whether an evaluation on these data, if they are not the run's own, scores all of them.

        True where no split is meant for evaluation.
        """
        return False

    @abstractmethod
    def _training_loader(self, **settings: Any) -> EpochLoader:
        """The training split's batches; the settings are those that `train_dataloader` passes."""

    @abstractmethod
    def _rows(self, split: str) -> Rows:
        """A split's rows, as they are evaluated.

        Raises:
            ArgumentError: there are none, or they cannot be scored.
        """

    def _judged(self, split: str) -> Int[np.ndarray, " rows"]:
        """The indices of the rows that `sample` draws from; by default, of all."""
        return np.arange(len(self._rows(split)))

    @abstractmethod
    def _evaluation_loader(self, split: str, rank: int, world_size: int) -> DataLoader:
        """A split's batches, or one process's share of them."""

    def setup(self, stage: str) -> None:
        """Lightning's hook: prepare, unless that was done before."""
        if not hasattr(self, "splits"):
            self.prepare()

    def train_dataloader(self) -> EpochLoader:
        """Shuffled training batches; their order is resumed from a checkpoint.

        Raises:
            ArgumentError: there are fewer rows than devices.
        """
        loader = self._training_loader(
            batch_size=self.batch_size,
            seed=self.seed,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            rank=self._rank,
            world_size=self._world_size,
        )
        if not len(loader):
            reason = f"there are fewer training {self.row}s than devices"
            raise ArgumentError("trainer.devices", self._world_size, reason, {"devices": 1})
        if self.trainer is not None:
            limit, length = self.trainer.limit_train_batches, len(loader)
            loader.limit(limit, is_repeated=self.trainer.overfit_batches > 0)  # type: ignore[attr-defined]
            if not len(loader):
                name, reason = "trainer.limit_train_batches", f"is less than one of the {length} batches of an epoch"
                raise ArgumentError(name, limit, reason, {"limit_train_batches": 1})
        return loader

    def val_dataloader(self) -> DataLoader | list[DataLoader]:
        """The whole validation split; an empty list if there is none."""
        return self.evaluation_dataloader("validation") if "validation" in self.splits else []

    def test_dataloader(self) -> DataLoader:
        """The whole test split."""
        return self.evaluation_dataloader("test")

    def evaluation_dataloader(self, split: str) -> DataLoader:
        """The whole split, each target once, always in the same order; with several processes, this one's share of it.

        Raises:
            ArgumentError: the split does not exist, or is empty.
        """
        self.require_split(split)
        return self._evaluation_loader(split, self._rank, self._world_size)

    def sample(self, split: str, num_rows: int) -> Iterator[Batch]:
        """Batches of rows of a split, drawn at random without replacement, always the same, in the split's order.

        They have at most `batch_size` rows, and differ in size by one at most.

        Args:
            split: the split.
            num_rows: number of rows; all of them where there are fewer.

        Raises:
            ArgumentError: the split does not exist, or is empty.
        """
        self.require_split(split)
        rows, numbers = self._rows(split), self._judged(split)
        chosen = np.sort(np.random.default_rng(SAMPLE_SEED).permutation(numbers)[:num_rows])
        for part in np.array_split(chosen, -(-len(chosen) // self.batch_size)):
            yield rows.__getitems__(part.tolist())

    def require_split(self, split: str) -> None:
        """Refuse a split that does not exist.

        Raises:
            ArgumentError: there is no such split.
        """
        if split not in self.splits:
            reason = f"there is no such split, only {', '.join(self.splits)}"
            raise ArgumentError("split", split, reason, {"split": list(self.splits)[-1]})

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer is not None else 0

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer is not None else 1


def count(number: float, noun: str) -> str:
    """A number with its noun, as in "1 batch", "2.5 epochs" or "2,000 documents"."""
    shown = f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
    return f"{shown} {noun}{'' if shown == '1' else 'es' if noun.endswith('tch') else 's'}"


def shortened(names: Sequence[str]) -> str:
    """The first two names, and the number of the others."""
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


class SourceDataModule(DataModule):
    """Data from a source, tokenised once and kept in the cache folder.

    Args:
        source: where the text comes from.
        tokenizer: a recipe, built on the training documents, or a finished tokenizer.
        seq_len: see `DataModule`.
        validation_fraction: share of the training text, or of the rows, to hold out, unless the source has a validation
            split.
        test_fraction: the same for testing.
        group_near_copies: keep near-copies on one side of the hold-out, see `hold_out`.
        cache_dir: where tokenised text is kept; None: see `default_cache_dir`.
        settings: further arguments of `DataModule` or `TokenDataModule`.

    Raises:
        ArgumentError: a number is out of range.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: TokenizerRecipe,
        seq_len: int,
        *,
        validation_fraction: float | int = 0.05,
        test_fraction: float | int = 0.05,
        group_near_copies: bool = True,
        cache_dir: str | None = None,
        **settings: Any,
    ) -> None:
        require_at_least(1, {"seq_len": 256}, seq_len=seq_len)
        fractions = {"validation_fraction": validation_fraction, "test_fraction": test_fraction}
        for argument, fraction in fractions.items():
            if not 0 <= fraction < 1:
                raise ArgumentError(argument, fraction, "must be at least 0 and less than 1", {argument: 0.05})
        if sum(fractions.values()) >= 1:
            reason = f"leaves no text to train on, with `validation_fraction`={validation_fraction}"
            raise ArgumentError("test_fraction", test_fraction, reason, dict.fromkeys(fractions, 0.05))
        super().__init__(seq_len=seq_len, **settings)
        self.source, self.name, self.cache_dir = source, source.name, cache_dir
        self._tokenizer_recipe, self._group_near_copies = tokenizer, group_near_copies
        self._held_out = {name: float(fraction) for name, fraction in fractions.items()}

    @abstractmethod
    def _recipe(self, whole: bool) -> Recipe:
        """Everything that determines the tokens."""

    @abstractmethod
    def _take(self, prepared: Prepared, whole: bool) -> None:
        """Make the splits of what the recipe has prepared."""

    @property
    def content(self) -> str:
        """See `Recipe.content`."""
        return self._recipe(whole=False).content

    def prepare(self, whole: bool = False) -> None:
        """Tokenise the source, or open what was tokenised before.

        Args:
            whole: hold nothing out: everything becomes the one split "all", to evaluate on other than the run's data.

        Raises:
            ArgumentError: the source or the tokenizer cannot be read, or the run cannot be trained on what they give.
        """
        prepared = self._recipe(whole).prepare(self.cache_dir)
        self.tokenizer, self.fingerprint = prepared.tokenizer, prepared.fingerprint
        self.left_out, self._division = prepared.facts["left_out"], prepared.facts["division"]
        self.trained_on = prepared.trained_on
        source = in_use(self.source)
        if isinstance(source, LocalFiles):
            self.files = {split: [file.name for file in files] for split, files in source.of_splits.items()}
            self.files["all"] = [name for split in SPLITS for name in self.files.get(split, [])]
            self.num_hidden = len(hidden_files(source.files))
        self._take(prepared, whole)

    def _hold_out(self, whole: bool) -> dict[str, Any]:
        """The arguments of a recipe about holding out."""
        if whole:
            return {"whole": True, "without": self.without}
        settings = {"group_near_copies": self._group_near_copies, "seed": self.split_seed, "without": self.without}
        return {**self._held_out, **settings}

    @property
    def caveats(self) -> list[str]:
        """What `hold_out` says, or the source."""
        return [*filter(None, [self._division])]

    @property
    def title(self) -> str:
        """The name, with the files that were given: "text (a.txt, b.txt and 3 more)"."""
        source = in_use(self.source)
        if not isinstance(source, LocalFiles):
            return self.name
        return f"{self.name} ({shortened([Path(name).name for name in source.files])})"

    @property
    def scored_whole(self) -> bool:
        """True for files without a validation split."""
        with argument_path("source"):
            return not getattr(in_use(self.source), "has_own_splits", True)

    def is_prepared(self, tokenizer: TextTokenizer, whole: bool = False) -> bool:
        """Whether the tokens of a given tokenizer (with a mask token if these data need one) are in the cache."""
        if isinstance(self._tokenizer_recipe, MaskedTokenizer):
            tokenizer = tokenizer.with_mask()
        prepared = self._recipe(whole).open(self.cache_dir)
        return prepared is not None and prepared.tokenizer.fingerprint == tokenizer.fingerprint

    def _require_rows(self, split: str) -> None:
        """Refuse an empty split.

        Raises:
            ArgumentError: it is empty.
        """
        if self.splits[split].num_tokens:
            return
        argument = f"{split}_fraction"
        if self._held_out.get(argument):
            reason = f"leaves the {split} split empty: there are too few different {self.document}s for every split"
            raise ArgumentError(argument, self._held_out[argument], reason)
        raise ArgumentError("source", self.name, f"its {split} split is empty")


class RowDataModule(SourceDataModule):
    """Rows of a source, such as pairs of texts, in batches of similar length.

    Args:
        max_examples: maximum number of training rows; they are drawn at random, by `split_seed`.
        settings: further arguments of `SourceDataModule`.

    Raises:
        ArgumentError: the source has no such rows, or a number is out of range.
    """

    kind: type  # of sources that have such rows
    lacking: str  # what other sources lack, for errors
    recipe: type[Recipe]
    rows: Callable[[Any], Rows]  # of a split
    varying_length = True

    def __init__(
        self,
        source: Source,
        tokenizer: TokenizerRecipe,
        seq_len: int,
        *,
        max_examples: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(source, tokenizer, seq_len, **settings)
        if not isinstance(source, self.kind):
            raise ArgumentError("source", source.name, self.lacking)
        require_at_least(1, {"max_examples": 1000}, max_examples=max_examples)
        self._max_examples = max_examples

    def _recipe(self, whole: bool) -> Recipe:
        hold_out = self._hold_out(whole)
        return self.recipe(self.source, self._tokenizer_recipe, max_examples=self._max_examples, **hold_out)

    @abstractmethod
    def _order(self, split: str) -> Int64[np.ndarray, " rows"]:
        """A number for each row of a split, by which similar lengths are found."""

    def _rows(self, split: str) -> Rows:
        self._require_rows(split)
        return self.rows(self.splits[split])

    def _training_rows(self, epoch: int) -> Rows:
        """The training rows of an epoch."""
        return self._rows("train")

    def _training_loader(self, **settings: Any) -> SimilarLengthLoader:
        self._require_rows("train")
        return SimilarLengthLoader(self._training_rows, self._order("train"), **settings)

    def _evaluation_loader(self, split: str, rank: int, world_size: int) -> DataLoader[Batch]:
        return share(EvaluationBatches(self._rows(split), self._order(split), self.batch_size), None, rank, world_size)
