"""Tokenised examples and their labels on disk, built once."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
from jaxtyping import Int64

from tinyformer.data.cache import Recipe, TokenSplit, open_split, with_progress, write_split
from tinyformer.data.documents import iterate_rows, text_columns
from tinyformer.data.labels import natural_order
from tinyformer.data.sources import SPLITS, LabelledSource
from tinyformer.data.storage import build_once
from tinyformer.data.tokenizer import TextTokenizer

_FORMAT = 1  # raise it when the same input would give other files
_LONGEST = 2**20  # characters of a text: more than a model reads, few enough to tokenise in seconds


@dataclass(frozen=True)
class ExampleRecipe(Recipe):
    """Everything that shapes the tokenised examples of a source, which is a `LabelledSource`.

    Args:
        max_examples: Upper bound of the first split's examples (of the training split, or of the whole). They are
            drawn by the seed: data sets may be sorted by label.
    """

    max_examples: int | None = None

    def _parts(self) -> list[Any]:
        return [*super()._parts(), self.max_examples, self.whole, "examples", _FORMAT]

    def load(self) -> tuple[dict[str, datasets.Dataset], list[str], list[str]]:
        """The examples of the splits, the classes, and the source's splits that have no labels.

        The first split is the training split, or the whole: the one that the tokenizer is built on. The classes are
        those of the training examples before any are held out, or of the whole.

        Raises:
            ValueError: If there is no label to train on.
        """
        found = cast(LabelledSource, self.source).load_examples()
        own = {split: rows for split, rows in found.items() if _labels(rows)}
        without = [split for split in SPLITS if split in found and split not in own]
        if not own or not (self.whole or "train" in own):
            raise ValueError(
                f"data={self.source.name}: no example of the split {without[0]} has a label; data.label_column=label "
                "names the column that holds them."
            )
        classes = set[str]().union(*map(_labels, own.values() if self.whole else [own["train"]]))
        splits = self._divided(own, keep_whole=True)
        first, rows = next(iter(splits.items()))
        if self.max_examples is not None:
            chosen = np.random.default_rng(self.seed).permutation(len(rows))[: self.max_examples]
            splits[first] = rows.select(np.sort(chosen))
        return splits, sorted(classes, key=natural_order), without


@dataclass(frozen=True)
class PreparedExamples:
    """What `prepare_examples` leaves on disk, opened.

    Attributes:
        tokenizer: The tokenizer of all splits.
        streams: Of each split, all its texts one after the other: `texts_per_example` for each example.
        labels: Of each split, the number of each example's label in `names`.
        names: All labels of all splits.
        classes: Those that there are to train on.
        texts_per_example: 1, or 2 where examples are pairs of texts.
        without_labels: The source's splits that were left out for want of labels.
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


def prepare_examples(recipe: ExampleRecipe, cache_dir: str | Path) -> PreparedExamples:
    """Tokenises the source's examples, or opens what an earlier call (of any process) has left in `cache_dir`."""
    key = recipe.key()
    return build_once(
        recipe.folder(cache_dir), lambda folder: _open(folder, key), lambda folder: _build(recipe, folder)
    )


def open_examples(recipe: ExampleRecipe, cache_dir: str | Path) -> PreparedExamples | None:
    """Opens what `prepare_examples` left; None if there is nothing, or nothing whole."""
    return _open(recipe.folder(cache_dir), recipe.key())


def _open(folder: Path, key: str) -> PreparedExamples | None:
    """None if the folder is missing, or lacks a part of its contents."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        counts = meta.pop("splits")
        streams = {name: open_split(folder, name, counts[name]) for name in counts}
        labels = {name: np.load(folder / f"{name}.labels.npy") for name in counts}
        tokenizer = TextTokenizer.from_json((folder / "tokenizer.json").read_text())
        return PreparedExamples(tokenizer, streams, labels, fingerprint=key, **meta)
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


def _build(recipe: ExampleRecipe, folder: Path) -> None:
    splits, classes, without_labels = recipe.load()
    first = next(iter(splits.values()))
    tokenizer = recipe.tokenizer.build(_texts(first))
    names = sorted(set[str]().union(*map(_labels, splits.values())), key=natural_order)
    number = {name: i for i, name in enumerate(names)}
    folder.mkdir()
    counts = {}
    for name, rows in splits.items():
        texts = with_progress(_texts(rows), len(rows) * len(text_columns(rows)), name)
        counts[name] = write_split(texts, tokenizer, folder, name)
        labels = np.fromiter((number[label] for label in rows["label"]), np.int64, len(rows))
        np.save(folder / f"{name}.labels.npy", labels)
    meta = {
        "splits": counts,
        "names": names,
        "classes": classes,
        "texts_per_example": len(text_columns(first)),
        "without_labels": without_labels,
    }
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


def _texts(rows: datasets.Dataset) -> Iterator[str]:
    """All texts of the examples, one after the other."""
    return (text[:_LONGEST] for text in chain.from_iterable(iterate_rows(rows)))


def _labels(rows: datasets.Dataset) -> set[str]:
    return set(rows["label"]) - {None}
