"""The interfaces of sources of text, and the source that is local files or a data set of the Hub."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import datasets

from tinyformer.errors import ArgumentError, argument_path

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
    """A source of text."""

    @property
    def name(self) -> str:
        """Short name, for folder names."""
        ...

    def fingerprint(self) -> str:
        """Identifies the content, without tokenising it."""
        ...

    def load(self, max_characters: int | None = None) -> dict[str, datasets.Dataset]:
        """The documents of each split that the source has, in the column `text`; it has a split "train".

        A document that is a pair of texts has the second one in the column `pair`. A source that streams may stop after
        `max_characters` of each split.
        """
        ...


@runtime_checkable
class LabelledSource(Source, Protocol):
    """A source of text with class labels."""

    def load_examples(self) -> dict[str, datasets.Dataset]:
        """The documents of `load`, those without text included, with the column `label`.

        Either all rows of a split have a label, or none has, where it is null.
        """
        ...


@runtime_checkable
class PairSource(Source, Protocol):
    """A source of pairs of a source text and its target, such as a sentence and its translation."""

    @property
    def pair_columns(self) -> tuple[str, str]:
        """The names of the columns of sources and targets."""
        ...

    def load_pairs(self) -> dict[str, datasets.Dataset]:
        """The pairs of each split: the source in the column `text`, its target in `pair`; neither is empty."""
        ...


@runtime_checkable
class QuestionSource(Source, Protocol):
    """A source of questions whose answers are spans of a context."""

    def load_questions(self) -> dict[str, datasets.Dataset]:
        """The questions of each split, see `tinyformer.data.sources.squad.from_questions`."""
        ...


class LocalOrHub:
    """A data set of the Hub, or local files in its place if they are given.

    Args:
        files: see `TextFiles`; None: the data set is loaded from the Hub.
        local: factory of the source of the files, called with `files`.
        hub: the source that is used without files.
    """

    def __init__(self, files: str | Iterable[str] | None, local: Callable[..., Source], hub: Source) -> None:
        self.name, self._files = hub.name, files
        self._argument = "hub" if files is None else "local"
        with self._path():
            self._source = hub if files is None else local(files=files)

    def fingerprint(self) -> str:
        """The fingerprint of the source in use."""
        with self._path():
            return self._source.fingerprint()

    def load(self, max_characters: int | None = None) -> dict[str, datasets.Dataset]:
        """The documents of the source in use."""
        with self._path():
            return self._source.load(max_characters)

    def load_examples(self) -> dict[str, datasets.Dataset]:
        """The examples of the source in use; it may have none."""
        if not isinstance(self._source, LabelledSource):
            raise ArgumentError("files", self._files, f"files for {self.name} have no class labels")
        with self._path():
            return self._source.load_examples()

    def load_questions(self) -> dict[str, datasets.Dataset]:
        """The questions of the source in use; it may have none."""
        if not isinstance(self._source, QuestionSource):
            raise ArgumentError("files", self._files, f"files for {self.name} have no questions about contexts")
        with self._path():
            return self._source.load_questions()

    def _path(self) -> AbstractContextManager[None]:
        return argument_path(self._argument, passed={"files": "files"})


def in_use(source: Source) -> Source:
    """The source itself, or the one that takes its place."""
    return source._source if isinstance(source, LocalOrHub) else source
