"""Rows of two texts in the cache folder: sources with their targets, questions with their contexts."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import ClassVar

import datasets
import pyarrow as pa

from tinyformer.data.cache import Prepared, Recipe
from tinyformer.data.documents import TEXTS, iterate_rows
from tinyformer.data.stream import with_progress, write_split
from tinyformer.data.tokenizer import TextTokenizer
from tinyformer.errors import argument_path


@dataclass(frozen=True)
class TwoTextRecipe(Recipe[Prepared]):
    """Everything that determines the tokenised rows of a source whose rows have two texts.

    What a method `caveat` of the source says of the splits is kept beside them.
    """

    compared: ClassVar[tuple[str, ...]] = TEXTS

    @abstractmethod
    def _load(self) -> dict[str, datasets.Dataset]:
        """The rows of the source's splits."""

    def _write(self, folder: Path, name: str, rows: datasets.Dataset, tokenizer: TextTokenizer) -> None:
        """Write the rows of a split as they stand in the source, which tokens need not tell."""
        with pa.ipc.new_file(str(folder / f"{name}.arrow"), rows.features.arrow_schema) as file:
            for table in rows.with_format("arrow").iter(10_000):
                file.write_table(table)

    def _build(self, folder: Path) -> None:
        with argument_path("source"):
            splits, facts = self._divide(self._load())
        if (caveat := getattr(self.source, "caveat", None)) and not self.whole:
            facts["division"] = caveat(splits)
        with argument_path("tokenizer"):
            tokenizer = self.tokenizer.build(_texts(next(iter(splits.values()))))
        folder.mkdir()
        counts = {}
        for name, rows in splits.items():
            texts = with_progress(_texts(rows), 2 * len(rows), name)
            counts[name] = write_split(texts, tokenizer, folder, name)
            self._write(folder, name, rows, tokenizer)
        self._write_meta(folder, tokenizer, counts, splits, **facts)


def open_rows(folder: Path, name: str) -> pa.Table:
    """The rows of a split, in a memory map."""
    return pa.ipc.open_file(pa.memory_map(str(folder / f"{name}.arrow"))).read_all()


def _texts(rows: datasets.Dataset) -> Iterator[str]:
    """The two texts of each row, in order."""
    return chain.from_iterable(iterate_rows(rows))
