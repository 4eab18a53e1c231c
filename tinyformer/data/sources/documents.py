"""The interface of sources, and helpers for the rows of texts that a source loads as a `datasets.Dataset`.

The column `text` holds a document; for pairs of texts, `pair` holds the second text. In labelled data, `label` holds
the name of the class.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets.fingerprint import generate_random_fingerprint
from jaxtyping import Int64

from tinyformer.errors import ArgumentError, argument_path

TEXTS = ("text", "pair")
"""The columns of the first and the second text."""

PAIR_ARGUMENTS = ("source_column", "target_column")
"""The names of the arguments that choose the columns of sources and targets."""

STRING = pa.large_string()  # a column of plain Arrow strings is limited to 2 GB of text

_ROWS = 256  # rows read at a time: enough to hide the call, few enough for rows of megabytes


def from_columns(**columns: Iterable[str | None]) -> datasets.Dataset:
    """A dataset in memory with these columns of strings."""
    return dataset_of(pa.table({name: strings(values) for name, values in columns.items()}))


def strings(texts: Iterable[str | None]) -> pa.Array:
    """Texts as an Arrow array; an unpaired surrogate (from JSON), which UTF-8 cannot encode, is refused."""
    try:
        return pa.array(texts, STRING)
    except UnicodeEncodeError as error:
        around = error.object[max(0, error.start - 20) : error.end + 20]
        raise ArgumentError("text", around, "contains half of a surrogate pair, which is no text; remove it") from error


def dataset_of(table: pa.Table) -> datasets.Dataset:
    """A `datasets.Dataset` of an Arrow table, without a copy of the table."""
    # Without a fingerprint `datasets` would pickle the table, which takes four times its memory.
    return datasets.Dataset(table, fingerprint=generate_random_fingerprint())


def batches_of(texts: Iterable[str], num_characters: int) -> Iterator[list[str]]:
    """Lists of successive texts; a list is complete when it has at least `num_characters` characters."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= num_characters:
            yield batch
            batch, characters = [], 0
    yield batch


def text_columns(documents: datasets.Dataset) -> list[str]:
    """The columns that hold text: `text`, and `pair` if it exists."""
    return [column for column in TEXTS if column in documents.column_names]


def iterate_rows(documents: datasets.Dataset) -> Iterator[tuple[str, ...]]:
    """The text of each row, or its two texts, in order; null becomes the empty text."""
    columns = text_columns(documents)
    for rows in documents.iter(batch_size=_ROWS):
        yield from zip(*([text or "" for text in rows[column]] for column in columns), strict=True)


def iterate_texts(documents: datasets.Dataset) -> Iterator[str]:
    """The texts of a dataset in order; a pair is joined to one text of two lines."""
    return map("\n".join, iterate_rows(documents))


def text_lengths(documents: datasets.Dataset) -> Int64[np.ndarray, " rows"]:
    """The number of characters of each text of `iterate_texts`."""
    columns = text_columns(documents)
    lengths = [np.zeros(0, np.int64)]
    for table in documents.with_format("arrow").iter(10_000):
        counted = [pc.utf8_length(table[column].cast(pa.large_string())).fill_null(0).to_numpy() for column in columns]
        lengths.append(np.stack(counted).sum(axis=0) + len(columns) - 1)
    return np.concatenate(lengths)


def one_or_two(text_column: str | Sequence[str]) -> list[str]:
    """The text column's name, or both names for pairs of texts, as a list; any other number of names is refused."""
    columns = [text_column] if isinstance(text_column, str) else list(text_column)
    if not 1 <= len(set(columns)) == len(columns) <= len(TEXTS):
        raise ArgumentError("text_column", columns, "must be one column, or two for pairs of texts")
    return columns


def two_columns(source_column: str, target_column: str) -> tuple[str, str]:
    """The columns of the sources and of the targets of pairs, which must differ."""
    if source_column == target_column:
        raise ArgumentError("target_column", target_column, "must not be the column of the sources, too")
    return source_column, target_column


def require_pair(values: Sequence[Any], columns: Sequence[str], place: str) -> None:
    """Refuse a row whose source or target is empty; `place` describes the row in the error."""
    for argument, column, value in zip(PAIR_ARGUMENTS, columns, values, strict=False):
        if not (value or "").strip():
            raise ArgumentError(argument, column, f"{place} has no text in this column; remove the row, or fill it in")


def label_column_of(label_column: str | None, text_columns: Sequence[str]) -> str:
    """The name of the label column, by default "label"; a column of text is refused."""
    if label_column in text_columns:
        raise ArgumentError("label_column", label_column, "must not be a column of the text, `text_column`")
    return label_column or "label"


def class_name(value: Any, column: str = "label", place: str = "the label") -> str | None:
    """The name of a class: a string, or a number in digits; None for "", null and NaN, which mean no label.

    1, 1.0, "1" and "1.0" are one class, since some tools convert a column of integers with missing values to floats.
    `place` describes the row in the error about a value of another type.
    """
    if value is not None and not isinstance(value, str | int | float):
        reason = f"{place} has {value!r:.60} in this column, not the name or number of one class"
        raise ArgumentError("label_column", column, reason)
    name = "" if value is None else str(value).strip()
    return None if name.lower() in ("", "nan") else re.sub(r"^([+-]?\d+)\.0*$", r"\1", name)


def require_all_or_no_labels(labels: Sequence[str | None], column: str, place: Callable[[int], str]) -> None:
    """Refuse a split in which some, but not all examples have a label; `place` describes an example in the error."""
    missing = [row for row, label in enumerate(labels) if label is None]
    if 0 < len(missing) < len(labels):
        reason = f"{len(missing):,} of {len(labels):,} rows have no label, the first is {place(missing[0])}; "
        raise ArgumentError("label_column", column, reason + "label every row, or remove those without a label")


def natural_order(name: str) -> list[tuple[int, str]]:
    """A sort key by which "2" comes before "10"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


SPLIT_OF = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}
"""The split that each word stands for in the names of files and of splits."""

SPLITS = ("train", "validation", "test")


@runtime_checkable
class Source(Protocol):
    """A source of text, which loads one or more of the following types of rows.

    | rows | columns |
    |---|---|
    | texts | `text`; a document that is a pair of texts has the second text in `pair` |
    | examples | the columns of texts, where a text may be null; and `label`, null in all rows of a split or in none |
    | pairs | `text` is the source and `pair` its target, neither of them empty |
    | questions | `text`, its context `pair`, `answers` and `starts`: see `tinyformer.data.Question` |

    The attribute `rows` lists the types. A source without it has only texts, and its `load` needs no argument `rows`.
    """

    @property
    def name(self) -> str:
        """Short name, for folder names."""
        ...

    def fingerprint(self) -> str:
        """A hash that identifies the content, computed without tokenising it."""
        ...

    def load(self, rows: str = "texts", max_characters: int | None = None) -> dict[str, datasets.Dataset]:
        """The rows of each split that the source has, including "train".

        A source that streams texts may stop after `max_characters` of each split.
        """
        ...


def rows_of(source: Source) -> tuple[str, ...]:
    """The types of rows that a source can load, such as ("texts", "pairs"); see `Source`."""
    return getattr(source, "rows", ("texts",))


class LocalOrHub:
    """A data set of the Hugging Face Hub, or local files that replace it.

    Args:
        files: see `TextFiles`; None: the data set is loaded from the Hub.
        local: factory of the source of the files, called with `files`.
        hub: the source that is used without files.
    """

    def __init__(self, files: str | Iterable[str] | None, local: Callable[..., Source], hub: Source) -> None:
        self.name, self._argument = hub.name, "hub" if files is None else "local"
        with self._path():
            self._source = hub if files is None else local(files=files)
        self.rows = rows_of(self._source)

    def fingerprint(self) -> str:
        with self._path():
            return self._source.fingerprint()

    def load(self, rows: str = "texts", max_characters: int | None = None) -> dict[str, datasets.Dataset]:
        with self._path():
            return self._source.load(rows, max_characters)

    def _path(self) -> AbstractContextManager[None]:
        return argument_path(self._argument, passed={"files": "files"})


def in_use(source: Source) -> Source:
    """The source that a `LocalOrHub` has chosen; any other source itself."""
    return source._source if isinstance(source, LocalOrHub) else source
