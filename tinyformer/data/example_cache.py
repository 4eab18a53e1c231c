"""Tokenised labelled examples in the cache folder."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
from jaxtyping import Int64

from tinyformer.data.cache import PreparedSource, Recipe
from tinyformer.data.documents import iterate_rows, natural_order, text_columns
from tinyformer.data.sources import SPLITS, LabelledSource
from tinyformer.data.stream import TokenSplit, with_progress, write_split
from tinyformer.errors import ArgumentError, argument_path

_FORMAT = 1  # increase it when the same input would give other files
_LONGEST = 2**20  # characters of a text that are kept: more than a model reads, few enough to tokenise in seconds


@dataclass(frozen=True)
class PreparedExamples(PreparedSource):
    """Tokenised examples, opened.

    Attributes:
        streams: for each split, all its texts in order: `texts_per_example` for each example.
        labels: for each split, the index in `names` of each example's label.
        names: the names of all labels in any split.
        classes: the names of the classes to train on.
        texts_per_example: 1, or 2 where examples are pairs of texts.
        without_labels: the source's splits that were left out because they have no labels.
    """

    streams: dict[str, TokenSplit]
    labels: dict[str, Int64[np.ndarray, " examples"]]
    names: list[str]
    classes: list[str]
    texts_per_example: int
    without_labels: list[str]


@dataclass(frozen=True)
class ExampleRecipe(Recipe[PreparedExamples]):
    """Everything that determines the tokenised examples of a `LabelledSource`."""

    classes = "label"

    def _parts(self) -> list[Any]:
        return [*super()._parts(), "examples", _FORMAT]

    def _prepared(
        self, folder: Path, opened: PreparedSource, splits: dict[str, TokenSplit], meta: dict[str, Any]
    ) -> PreparedExamples:
        labels = {name: np.load(folder / f"{name}.labels.npy") for name in splits}
        return PreparedExamples(**vars(opened), streams=splits, labels=labels, **meta)

    def _build(self, folder: Path) -> None:
        splits, facts, classes, without_labels = self._load()
        first = next(iter(splits.values()))
        with argument_path("tokenizer"):
            tokenizer = self.tokenizer.build(_texts(first))
        names = sorted(set[str]().union(*map(_labels, splits.values())), key=natural_order)
        number = {name: i for i, name in enumerate(names)}
        num_columns = len(text_columns(first))
        folder.mkdir()
        counts = {}
        for name, rows in splits.items():
            texts = with_progress(_texts(rows), len(rows) * num_columns, name)
            counts[name] = write_split(texts, tokenizer, folder, name)
            labels = np.fromiter((number[label] for label in rows["label"]), np.int64, len(rows))
            np.save(folder / f"{name}.labels.npy", labels)
        self._write_meta(
            folder,
            tokenizer,
            counts,
            splits,
            **facts,
            names=names,
            classes=classes,
            texts_per_example=num_columns,
            without_labels=without_labels,
        )

    def _load(self) -> tuple[dict[str, datasets.Dataset], dict[str, Any], list[str], list[str]]:
        """The examples and facts that `_divide` returns, the classes, and the source's splits without labels.

        The classes are those of the training examples before any are held out, or of all examples.

        Raises:
            ArgumentError: there is no label to train on.
        """
        with argument_path("source"):
            loaded = cast(LabelledSource, self.source).load_examples()
        own = {split: rows for split, rows in loaded.items() if _labels(rows)}
        without = [split for split in SPLITS if split in loaded and split not in own]
        if not own or not (self.whole or "train" in own):
            raise ArgumentError("source", self.source.name, f"no example of its split {without[0]} has a class label")
        classes = set[str]().union(*map(_labels, own.values() if self.whole else [own["train"]]))
        return *self._divide(own), sorted(classes, key=natural_order), without


def _texts(rows: datasets.Dataset) -> Iterator[str]:
    """All texts of the examples, in order."""
    return (text[:_LONGEST] for text in chain.from_iterable(iterate_rows(rows)))


def _labels(rows: datasets.Dataset) -> set[str]:
    return set(rows["label"]) - {None}
