"""Documents and class labels in a `datasets.Dataset`.

The column `text` holds a document; for pairs of texts, `pair` holds the second one. In labelled data, `label` holds
the name of the class.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import datasets
import pyarrow as pa

from tinyformer.errors import ArgumentError

TEXTS = ("text", "pair")
"""The columns of the first and the second text."""

_ROWS = 256  # rows read at a time: enough to hide the call, few enough for rows of megabytes


def from_texts(texts: Iterable[str]) -> datasets.Dataset:
    """A dataset in memory with each text as one document."""
    return from_columns(text=texts)


def from_columns(**columns: Iterable[str | None]) -> datasets.Dataset:
    """A dataset in memory with these columns of strings."""
    # large_string: the offsets of a plain Arrow string end at 2 GB of text
    return datasets.Dataset(pa.table({name: pa.array(values, pa.large_string()) for name, values in columns.items()}))


def text_columns(documents: datasets.Dataset) -> list[str]:
    """The columns that hold text: `text`, and `pair` where there is one."""
    return [column for column in TEXTS if column in documents.column_names]


def iterate_rows(documents: datasets.Dataset) -> Iterator[tuple[str, ...]]:
    """The text of each row in order, or its two texts; null is read as the empty text."""
    columns = text_columns(documents)
    for rows in documents.iter(batch_size=_ROWS):
        yield from zip(*([text or "" for text in rows[column]] for column in columns), strict=True)


def iterate_texts(documents: datasets.Dataset) -> Iterator[str]:
    """The texts of a dataset in order; a pair is joined to one text of two lines."""
    return map("\n".join, iterate_rows(documents))


def class_name(value: Any, column: str, place: str) -> str | None:
    """The name of a class: a string, or a number in digits; None where there is no label.

    Args:
        value: the value in the column. The empty string, null and NaN mean no label.
        column: the name of the label column.
        place: where the value stands, for the error.

    Raises:
        ArgumentError: the value is neither text nor a number.
    """
    if value is None or value != value:  # noqa: PLR0124 -- NaN
        return None
    if not isinstance(value, str | int | float):
        raise ArgumentError(
            "label_column", column, f"{place} holds {value!r:.60} there, not the name or number of one class"
        )
    return str(value).strip() or None


def natural_order(name: str) -> list[tuple[int, str]]:
    """A sort key by which "2" comes before "10"."""
    parts = re.split(r"(\d+)", name)
    # By the number of digits, then by the digits: Python converts at most 4,300 digits to an integer.
    digits = (part.lstrip("0") if part.isdecimal() else None for part in parts)
    return [(-1, part) if known is None else (len(known), known) for part, known in zip(parts, digits, strict=True)]


def require_all_or_no_labels(labels: Sequence[str | None], column: str, place: Callable[[int], str]) -> None:
    """Refuse a split in which some examples have a label and others have none.

    Args:
        labels: of all examples of the split.
        column: the name of the label column.
        place: where an example stands, for the error.

    Raises:
        ArgumentError: some labels are missing.
    """
    missing = [row for row, label in enumerate(labels) if label is None]
    if 0 < len(missing) < len(labels):
        raise ArgumentError(
            "label_column",
            column,
            f"{place(missing[0])} has no label, the first of {len(missing):,} among {len(labels):,} rows; label every "
            "row, or remove those without a label",
        )
