"""Labelled text as the data of a run."""

import sys
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader

from tinyformer.batch import Batch
from tinyformer.data.base import SourceDataModule
from tinyformer.data.example_cache import ExampleRecipe, PreparedExamples
from tinyformer.data.examples import ExampleLoader, Examples, LabelledSplit, truncate
from tinyformer.data.share import share
from tinyformer.data.similar_lengths import EvaluationBatches
from tinyformer.data.sources import LabelledSource, Source
from tinyformer.data.tokenizer_recipes import MaskedTokenizer, TokenizerRecipe
from tinyformer.errors import ArgumentError, require_at_least


class LabelledDataModule(SourceDataModule[PreparedExamples]):
    """Batches of texts, or of pairs of texts, and their classes.

    Args:
        source: where the texts and their labels come from: a `LabelledSource`.
        tokenizer: a recipe, built on the training texts, or a finished tokenizer; a mask token is added.
        seq_len: maximum number of tokens of a sequence; longer ones are truncated.
        batch_size: examples in a batch, on each device.
        labels: names of the classes, for a model that was trained on them; None: those of the training split.
        token_dropout: probability that a token is masked in training, see `Examples`.
        max_examples: maximum number of training examples; they are drawn at random, by `split_seed`.
        settings: further arguments of `SourceDataModule`.

    Raises:
        ArgumentError: the source has no labels, or a number is out of range.
    """

    splits: dict[str, LabelledSplit]
    row = "example"
    varying_length = True

    def __init__(
        self,
        source: Source,
        tokenizer: TokenizerRecipe,
        seq_len: int,
        batch_size: int,
        *,
        labels: list[str] | None = None,
        token_dropout: float | int = 0.0,
        max_examples: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(source, MaskedTokenizer(tokenizer), seq_len, batch_size=batch_size, **settings)
        if not isinstance(source, LabelledSource):
            reason = "its texts have no class labels; docstrings and files with a label column do"
            raise ArgumentError("source", source.name, reason)
        require_at_least(1, {"max_examples": 1000}, max_examples=max_examples)
        if not 0 <= token_dropout < 1:
            reason = "must be at least 0 and less than 1"
            raise ArgumentError("token_dropout", token_dropout, reason, {"token_dropout": 0.3})
        if labels is not None and not len(labels) == len(set(labels)) >= 2:
            raise ArgumentError("labels", labels, "must be at least two different names", {"labels": ["no", "yes"]})
        self._given_labels, self._token_dropout = labels, float(token_dropout)
        self._max_examples = max_examples

    def prepare(self, whole: bool = False) -> None:
        """Tokenise the examples, or open what was tokenised before.

        Args:
            whole: hold nothing out: all examples become the one split "all", to evaluate on other than the run's data.

        Raises:
            ArgumentError: the source or the tokenizer cannot be read, labels are missing, or there is only one class.
        """
        prepared = self._prepared(whole)
        self.labels = self._given_labels or prepared.classes
        if len(self.labels) < 2:
            reason = f"all examples have the label {self.labels[0]}; there must be at least two classes"
            raise ArgumentError("source", self.name, reason)
        if prepared.texts_per_example == 2 and self.tokenizer.has_segments:
            _warn(f"{self.name}: token_type_ids are left out: the tokens of both texts of a pair have type 0.")
        self.splits = {name: self._split(prepared, name) for name in prepared.streams}
        self._names = {name: [prepared.names[i] for i in np.unique(prepared.labels[name])] for name in self.splits}
        for name in prepared.without_labels:
            _warn(f"{self.name}: the {name} split has no labels and is left out.")
        for name in ("train", "validation"):
            if name in self.splits and not whole:
                self._require_known_labels(name)

    @property
    def caveats(self) -> list[str]:
        """Those of the hold-out, and the classes that a split has no example of."""
        absent = {name: split.absent for name, split in self.splits.items()}
        return [*super().caveats, *(f"the {name} split has no example of {x}" for name, x in absent.items() if x)]

    def _recipe(self, whole: bool) -> ExampleRecipe:
        hold_out = self._hold_out(whole)
        return ExampleRecipe(self.source, self._tokenizer_recipe, max_examples=self._max_examples, **hold_out)

    def _split(self, prepared: PreparedExamples, name: str) -> LabelledSplit:
        assert self.labels is not None
        stream = prepared.streams[name]
        ids, offsets, num_truncated = truncate(stream, prepared.texts_per_example, self.seq_len)
        numbers = {label: number for number, label in enumerate(self.labels)}
        number_of = np.array([numbers.get(label, -1) for label in prepared.names])
        return LabelledSplit(
            ids,
            offsets,
            number_of[prepared.labels[name]],
            self.labels,
            self.tokenizer,
            stream.num_bytes,
            stream.num_unknown,
            num_truncated,
        )

    def _training_loader(self, **settings: Any) -> ExampleLoader:
        return ExampleLoader(self.splits["train"], token_dropout=self._token_dropout, **settings)

    def _rows(self, split: str) -> Examples:
        self._require_rows(split, self.splits[split].num_documents)
        self._require_known_labels(split)
        return Examples(self.splits[split])

    def _evaluation_loader(self, split: str, rank: int, world_size: int) -> DataLoader[Batch]:
        batches = EvaluationBatches(self._rows(split), self.splits[split].lengths, self.batch_size)
        return share(batches, None, rank, world_size)

    def _require_known_labels(self, split: str) -> None:
        """Refuse a split with labels that the model has no class for.

        Raises:
            ArgumentError: there is such a label.
        """
        assert self.labels is not None
        unknown = [label for label in self._names[split] if label not in self.labels]
        if unknown:
            number = int((self.splits[split].labels < 0).sum())
            raise ArgumentError(
                "source",
                self.name,
                f"the label {unknown[0]} of the {split} split is not one of the classes trained on "
                f"({', '.join(self.labels)}); {number:,} examples have such labels: rename or remove them",
            )


@rank_zero_only
def _warn(line: str) -> None:
    print(line, file=sys.stderr)
