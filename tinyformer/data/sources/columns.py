"""The columns of rows that hold texts, pairs of texts and labels."""

from collections.abc import Sequence
from typing import Any

from tinyformer.data.sources.documents import TEXTS
from tinyformer.errors import ArgumentError

PAIR_ARGUMENTS = ("source_column", "target_column")
"""The arguments that name the columns of pairs."""


def one_or_two(text_column: str | Sequence[str]) -> list[str]:
    """The column of a text, or the two columns of a pair of texts.

    Raises:
        ArgumentError: there are more than two, none, or the same twice.
    """
    columns = [text_column] if isinstance(text_column, str) else list(text_column)
    if not 1 <= len(set(columns)) == len(columns) <= len(TEXTS):
        works = {"text_column": list(dict.fromkeys(columns))[: len(TEXTS)] or "text"}
        raise ArgumentError("text_column", columns, "must be one column, or two for pairs of texts", works)
    return columns


def two_columns(source_column: str, target_column: str) -> tuple[str, str]:
    """The columns of the sources and of the targets of pairs.

    Raises:
        ArgumentError: they are the same.
    """
    if source_column == target_column:
        works = {"source_column": "source", "target_column": "target"}
        raise ArgumentError("target_column", target_column, "must not be the column of the sources, too", works)
    return source_column, target_column


def require_pair(values: Sequence[Any], columns: Sequence[str], place: str) -> None:
    """Refuse a row without its source or its target.

    Args:
        values: the source and the target.
        columns: their columns.
        place: where the row stands, for the error.

    Raises:
        ArgumentError: one of them is empty, or not a text.
    """
    for argument, column, value in zip(PAIR_ARGUMENTS, columns, values, strict=True):
        if value is not None and not isinstance(value, str):
            raise ArgumentError(argument, column, f"{place} holds {value!r:.60} there, not text")
        if not (value or "").strip():
            raise ArgumentError(argument, column, f"{place} has no text there; remove the row, or fill it in")


def require_label_column(label_column: str | None, text_columns: Sequence[str]) -> str:
    """The column of the labels.

    Raises:
        ArgumentError: it is None, or one of the columns that hold text.
    """
    if label_column is None:
        works = {"label_column": "label"}
        raise ArgumentError("label_column", None, "classification needs the column that holds the labels", works)
    if label_column in text_columns:
        raise ArgumentError("label_column", label_column, "this column holds the text (`text_column`)")
    return label_column
