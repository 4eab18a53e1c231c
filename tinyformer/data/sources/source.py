"""The interface of sources of text, and the source that is local files or a data set of the Hub."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import datasets

from tinyformer.errors import argument_path

SPLIT_OF = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}
"""Words in the names of files and splits, and the split that they stand for."""

SPLITS = ("train", "validation", "test")


@runtime_checkable
class Source(Protocol):
    """A source of text, which loads one kind of rows or several.

    | rows | columns |
    |---|---|
    | texts | `text`; a document that is a pair of texts has the second one in `pair` |
    | examples | as of texts, rows without text included, and `label`, which is null in all rows of a split or in none |
    | pairs | `text` is the source and `pair` its target, neither of them empty |
    | questions | `text`, its context `pair`, `answers` and `starts`: see `tinyformer.data.Question` |

    A source without the attribute `rows` has texts alone, and its `load` needs no argument of this name.
    """

    @property
    def name(self) -> str:
        """Short name, for folder names."""
        ...

    def fingerprint(self) -> str:
        """Identifies the content, without tokenising it."""
        ...

    def load(self, rows: str = "texts", max_characters: int | None = None) -> dict[str, datasets.Dataset]:
        """The rows of each split that the source has, "train" among them.

        A source that streams texts may stop after `max_characters` of each split.
        """
        ...


def rows_of(source: Source) -> tuple[str, ...]:
    """The kinds of rows that a source has."""
    return getattr(source, "rows", ("texts",))


class LocalOrHub:
    """A data set of the Hub, or local files in its place if they are given.

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
    """The source itself, or the one that takes its place."""
    return source._source if isinstance(source, LocalOrHub) else source
