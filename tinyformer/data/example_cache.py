"""Tokenised labelled examples in the cache folder."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from tinyformer.data.cache import Recipe
from tinyformer.data.sources.documents import natural_order
from tinyformer.data.sources.source import SPLITS
from tinyformer.data.tokenizer.tokenizer import TextTokenizer
from tinyformer.errors import ArgumentError

_LONGEST = 2**20  # characters of a text that are kept: more than a model reads, few enough to tokenise in seconds


@dataclass(frozen=True)
class ExampleRecipe(Recipe):
    """Everything that determines the tokenised examples of a `LabelledSource`."""

    method, classes = "load_examples", "label"

    def _divide(self, own: dict[str, datasets.Dataset]) -> tuple[dict[str, datasets.Dataset], dict[str, Any]]:
        """The splits that have labels, and facts about them: see `Recipe._divide`.

        Returns:
            The splits; and as further facts `classes`, the labels to train on: those of the training examples before
            any are held out, or of all examples; and `without_labels`, the source's splits that are left out.

        Raises:
            ArgumentError: there is no label to train on.
        """
        labels = {split: _labels(rows) for split, rows in own.items()}
        without = [split for split in SPLITS if split in own and not labels[split]]
        if not any(labels.values()) or ("train" in without and not self.whole):
            raise ArgumentError("source", self.source.name, f"no example of its split {without[0]} has a class label")
        classes = set[str]().union(*labels.values()) if self.whole else labels["train"]
        splits, facts = super()._divide({split: rows for split, rows in own.items() if labels[split]})
        return splits, facts | {"classes": sorted(classes, key=natural_order), "without_labels": without}

    def _texts(self, rows: datasets.Dataset) -> Iterator[str]:
        return (text[:_LONGEST] for text in super()._texts(rows))

    def _write(self, folder: Path, name: str, rows: datasets.Dataset, tokenizer: TextTokenizer) -> None:
        super()._write(folder, name, rows.select_columns("label"), tokenizer)


def _labels(rows: datasets.Dataset) -> set[str]:
    return set(rows["label"]) - {None}
