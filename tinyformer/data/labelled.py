"""Labelled text as the data of a run."""

import sys
from typing import Any

import numpy as np
from jaxtyping import Int64
from lightning.pytorch.utilities import rank_zero_only

from tinyformer.data.base import RowDataModule
from tinyformer.data.batches.windows import Rows
from tinyformer.data.cache import Prepared, open_rows
from tinyformer.data.example_cache import ExampleRecipe
from tinyformer.data.examples import Examples, LabelledSplit, truncate
from tinyformer.data.sources.documents import natural_order
from tinyformer.data.sources.source import LabelledSource, Source, in_use
from tinyformer.data.stream import TokenSplit
from tinyformer.data.tokenizer.recipes import MaskedTokenizer, TokenizerRecipe
from tinyformer.errors import ArgumentError


class LabelledDataModule(RowDataModule):
    """Batches of texts, or of pairs of texts, and their classes.

    Args:
        source: where the texts and their labels come from: a `LabelledSource`.
        tokenizer: a recipe, built on the training texts, or a finished tokenizer; a mask token is added.
        seq_len: maximum number of tokens of a sequence; longer ones are truncated.
        batch_size: examples in a batch, on each device.
        labels: names of the classes, for a model that was trained on them; None: those of the training split.
        num_texts: number of texts of an example, for a model that was trained on such; None: that of the data.
        token_dropout: probability that a token is masked in training, see `Examples`.
        settings: further arguments of `RowDataModule`.

    Raises:
        ArgumentError: the source has no labels, or a number is out of range.
    """

    splits: dict[str, LabelledSplit]
    row = "example"
    kind, lacking = LabelledSource, "its texts have no class labels; docstrings and files with a label column do"
    recipe, rows = ExampleRecipe, Examples

    def __init__(
        self,
        source: Source,
        tokenizer: TokenizerRecipe,
        seq_len: int,
        batch_size: int,
        *,
        labels: list[str] | None = None,
        num_texts: int | None = None,
        token_dropout: float | int = 0.0,
        **settings: Any,
    ) -> None:
        super().__init__(source, MaskedTokenizer(tokenizer), seq_len, batch_size=batch_size, **settings)
        if not 0 <= token_dropout < 1:
            reason = "must be at least 0 and less than 1"
            raise ArgumentError("token_dropout", token_dropout, reason, {"token_dropout": 0.3})
        if labels is not None and not len(labels) == len(set(labels)) >= 2:
            raise ArgumentError("labels", labels, "must be at least two different names", {"labels": ["no", "yes"]})
        self._given_labels, self._token_dropout, self._given_num_texts = labels, float(token_dropout), num_texts

    def _take(self, prepared: Prepared, whole: bool) -> None:
        self.labels = self._given_labels or prepared.facts["classes"]
        if len(self.labels) < 2:
            reason = f"all examples have the label {self.labels[0]}; there must be at least two classes"
            raise ArgumentError("source", self.name, reason)
        labels = {name: open_rows(prepared.folder, name)["label"].to_pylist() for name in prepared.splits}
        has_pairs = any(len(rows.offsets) - 1 > len(labels[name]) for name, rows in prepared.splits.items())
        self.num_texts = 2 if has_pairs else 1
        if self._given_num_texts not in (None, self.num_texts):
            kinds = ("pairs of texts", "single texts") if has_pairs else ("single texts", "pairs of texts")
            columns = getattr(in_use(self.source), "text_columns", ())
            works = {"source.text_column": columns[0]} if len(columns) == 2 else {}
            raise ArgumentError("source", self.name, f"has {kinds[0]}, and the model classifies {kinds[1]}", works)
        if has_pairs and self.tokenizer.has_segments:
            _warn(f"{self.name}: token_type_ids are left out: the tokens of both texts of a pair have type 0.")
        self.splits = {name: self._split(stream, labels[name]) for name, stream in prepared.splits.items()}
        self._names = {name: sorted(set(labels[name]), key=natural_order) for name in labels}
        for name in prepared.facts["without_labels"]:
            _warn(f"{self.name}: the {name} split has no labels and is left out.")
        for name in ("train", "validation"):
            if name in self.splits and not whole:
                self._require_known_labels(name)

    @property
    def caveats(self) -> list[str]:
        """Those of the hold-out, and the classes that a split has no example of."""
        absent = {name: split.absent for name, split in self.splits.items()}
        return [*super().caveats, *(f"the {name} split has no example of {x}" for name, x in absent.items() if x)]

    def _split(self, stream: TokenSplit, labels: list[str]) -> LabelledSplit:
        assert self.labels is not None
        texts_per_example = (len(stream.offsets) - 1) // len(labels) if labels else 1
        ids, offsets, num_truncated = truncate(stream, texts_per_example, self.seq_len)
        number = {label: number for number, label in enumerate(self.labels)}
        return LabelledSplit(
            ids,
            offsets,
            np.fromiter((number.get(label, -1) for label in labels), np.int64, len(labels)),
            self.labels,
            self.tokenizer,
            stream.num_bytes,
            stream.num_unknown,
            num_truncated,
        )

    def _training_rows(self, epoch: int) -> Examples:
        return Examples(self.splits["train"], self._token_dropout, (self.seed, epoch))

    def _rows(self, split: str) -> Rows:
        self._require_known_labels(split)
        return super()._rows(split)

    def _order(self, split: str) -> Int64[np.ndarray, " examples"]:
        return self.splits[split].lengths

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
