"""Tokenised labelled examples in the cache folder."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
from jaxtyping import Int64

from tinyformer.data.cache import Recipe, write_meta
from tinyformer.data.documents import iterate_rows, natural_order, text_columns
from tinyformer.data.sources import SPLITS, LabelledSource
from tinyformer.data.stream import TokenSplit, with_progress, write_split
from tinyformer.data.tokenizer import TextTokenizer
from tinyformer.errors import ArgumentError, argument_path

_FORMAT = 1  # increase it when the same input would give other files
_LONGEST = 2**20  # characters of a text that are kept: more than a model reads, few enough to tokenise in seconds


@dataclass(frozen=True)
class PreparedExamples:
    """Tokenised examples, opened.

    Attributes:
        tokenizer: the tokenizer of all splits.
        streams: for each split, all its texts in order: `texts_per_example` for each example.
        labels: for each split, the index in `names` of each example's label.
        names: the names of all labels in any split.
        classes: the names of the classes to train on.
        texts_per_example: 1, or 2 where examples are pairs of texts.
        without_labels: the source's splits that were left out because they have no labels.
        fingerprint: `ExampleRecipe.key`.
    """

    tokenizer: TextTokenizer
    streams: dict[str, TokenSplit]
    labels: dict[str, Int64[np.ndarray, " examples"]]
    names: list[str]
    classes: list[str]
    texts_per_example: int
    without_labels: list[str]
    fingerprint: str


@dataclass(frozen=True)
class ExampleRecipe(Recipe[PreparedExamples]):
    """Everything that determines the tokenised examples of a `LabelledSource`.

    Args:
        max_examples: upper bound on the examples of the first split (the training split, or "all"). They are drawn at
            random, by `seed`, since data sets may be sorted by label.
    """

    max_examples: int | None = None

    def _parts(self) -> list[Any]:
        return [*super()._parts(), self.max_examples, self.whole, "examples", _FORMAT]

    def _prepared(
        self, folder: Path, tokenizer: TextTokenizer, splits: dict[str, TokenSplit], meta: dict[str, Any]
    ) -> PreparedExamples:
        labels = {name: np.load(folder / f"{name}.labels.npy") for name in splits}
        return PreparedExamples(tokenizer, splits, labels, fingerprint=self.key, **meta)

    def _build(self, folder: Path) -> None:
        splits, division, classes, without_labels = self._load()
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
        write_meta(
            folder,
            tokenizer,
            counts,
            division=division,
            names=names,
            classes=classes,
            texts_per_example=num_columns,
            without_labels=without_labels,
        )

    def _load(self) -> tuple[dict[str, datasets.Dataset], str | None, list[str], list[str]]:
        """The examples of each split, a phrase of `hold_out`, the classes, and the source's splits without labels.

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
        splits, division = self._divide(own, keep_whole=True, classes="label")
        first, rows = next(iter(splits.items()))
        if self.max_examples is not None:
            chosen = np.random.default_rng(self.seed).permutation(len(rows))[: self.max_examples]
            splits[first] = rows.select(np.sort(chosen))
        return splits, division, sorted(classes, key=natural_order), without


def _texts(rows: datasets.Dataset) -> Iterator[str]:
    """All texts of the examples, in order."""
    return (text[:_LONGEST] for text in chain.from_iterable(iterate_rows(rows)))


def _labels(rows: datasets.Dataset) -> set[str]:
    return set(rows["label"]) - {None}
