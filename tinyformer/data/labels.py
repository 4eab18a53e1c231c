"""The names of classes, as they stand in a column of labels."""

import re
from collections.abc import Callable, Sequence
from typing import Any


def label_name(value: Any, key: str) -> str | None:
    """The name of a class: its text, or its number in digits; None where there is no label.

    Args:
        value: What the column holds. An empty text, null and NaN are no label.
        key: The config key and its value, to name in an error.

    Raises:
        ValueError: If it is neither text nor a number.
    """
    if value is None or value != value:  # noqa: PLR0124 -- NaN
        return None
    if not isinstance(value, str | int | float):
        raise ValueError(  # noqa: TRY004 -- what a user can get wrong is a ValueError
            f"{key}: holds {value!r:.60} there, not the name or number of one class; name another column."
        )
    return str(value).strip() or None


def natural_order(name: str) -> list[tuple[int, str]]:
    """The key to sort names by, such that "2" comes before "10"."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def refuse_missing(labels: Sequence[str | None], place: Callable[[int], str]) -> None:
    """Refuse examples of which some have a label and others none.

    Args:
        labels: Of all examples of a split.
        place: Where an example stands, for the error.

    Raises:
        ValueError: Not all of them have one, nor none of them.
    """
    missing = [row for row, label in enumerate(labels) if label is None]
    if 0 < len(missing) < len(labels):
        raise ValueError(
            f"{place(missing[0])} has no label, the first of {len(missing):,} among {len(labels):,} rows; give each "
            "row a label, or take those without one out."
        )
