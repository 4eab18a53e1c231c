"""Documents as a `datasets.Dataset`: the column `text`, and for pairs of texts the column `pair` beside it."""

from collections.abc import Iterable, Iterator

import datasets
import pyarrow as pa

TEXTS = ("text", "pair")
"""The columns of the first and the second text."""

_ROWS = 256  # rows read at a time: enough to hide the call, few enough for rows of megabytes


def from_texts(texts: Iterable[str]) -> datasets.Dataset:
    """A dataset in memory that holds each text as one document."""
    return from_columns(text=texts)


def from_columns(**columns: Iterable[str | None]) -> datasets.Dataset:
    """A dataset in memory with these columns of text."""
    # large_string: the offsets of a plain Arrow string end at 2 GB of text
    return datasets.Dataset(pa.table({name: pa.array(values, pa.large_string()) for name, values in columns.items()}))


def text_columns(documents: datasets.Dataset) -> list[str]:
    """The columns that hold text: `text`, and `pair` where there is one."""
    return [column for column in TEXTS if column in documents.column_names]


def iterate_rows(documents: datasets.Dataset) -> Iterator[tuple[str, ...]]:
    """The text of each row in order, or its two texts; a missing one (null) is the empty text."""
    columns = text_columns(documents)
    for rows in documents.iter(batch_size=_ROWS):
        yield from zip(*([text or "" for text in rows[column]] for column in columns), strict=True)


def iterate_texts(documents: datasets.Dataset) -> Iterator[str]:
    """The texts of a dataset in order; a pair is one text of two lines."""
    return map("\n".join, iterate_rows(documents))
