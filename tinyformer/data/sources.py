"""Where text comes from, with or without labels: local files, or a copy in local files of what the Hub has."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import datasets

from tinyformer.data.documents import TEXTS, from_columns, from_texts
from tinyformer.data.files import Layout, find_files, read_rows
from tinyformer.data.labels import label_name, refuse_missing

# Words in file and split names, and the split that they stand for.
SPLIT_OF = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}
SPLITS = ("train", "validation", "test")


@runtime_checkable
class Source(Protocol):
    """What text comes from."""

    @property
    def name(self) -> str:
        """Short name for folder names."""
        ...

    def fingerprint(self) -> str:
        """Identifies the content, without tokenising it."""
        ...

    def load(self, max_characters: int | None = None) -> dict[str, datasets.Dataset]:
        """The documents, in the column `text`, of the splits that the source has: "train" at least.

        A document that is a pair of texts has the second one in the column `pair`.

        Args:
            max_characters: So many characters of each split are enough. A source that streams stops there.
        """
        ...


@runtime_checkable
class LabelledSource(Source, Protocol):
    """What text with labels comes from."""

    def load_examples(self) -> dict[str, datasets.Dataset]:
        """The documents that `load` gives, those without text too, with the column `label`.

        A split of which nothing is known has null in the place of all labels.

        Raises:
            ValueError: If some rows of a split have a label and others none.
        """
        ...


class TextFiles:
    r"""Local .txt (a file is one document), .csv, .tsv, .json, .jsonl and .parquet files (a row is one).

    Files whose names begin or end with a word such as `train`, `validation` (`valid`, `val`, `dev`) or `test`
    (`train.txt`, `train-00000-of-00002.parquet`) are the source's own splits, if there is one for training
    among them. Every character survives, `\r\n` too; only a byte-order mark at the beginning of a file is
    dropped. Rows without text (null) are left out, unless they have a label: then their text is empty. All texts
    are held in memory.

    Args:
        files: A path, a pattern such as `texts/*.txt`, a folder (searched through), or a list of these.
        text_column: The column or key that holds the text, or the two that hold a pair of texts; .txt files have
            none.
        label_column: The one that holds the label. A label is a name: the number 1 is "1".
        columns: The columns of .csv and .tsv files without a header.
        quoted: Whether quotation marks in .csv and .tsv files enclose fields; if not, each line is a row.
    """

    name = "text"

    def __init__(
        self,
        files: str | Iterable[str],
        text_column: str | Sequence[str] = "text",
        label_column: str | None = None,
        columns: Sequence[str] | None = None,
        quoted: bool = True,
    ) -> None:
        self.files = [files] if isinstance(files, str) else [str(file) for file in files]
        self.text_columns, self.label_column = one_or_two(text_column), label_column
        self.columns, self.quoted = columns and list(columns), quoted

    @property
    def has_own_splits(self) -> bool:
        """Whether the files bring a validation split."""
        return "validation" in self._files_of_splits()

    def fingerprint(self) -> str:
        """SHA-256 over the contents of the files, their kinds and splits; not over their places."""
        settings = [self.text_columns, self.label_column, self.columns, self.quoted]
        digest = hashlib.sha256(json.dumps(settings).encode())
        for split, files in self._files_of_splits().items():
            for file in files:
                with file.open("rb") as opened:
                    content = hashlib.file_digest(opened, "sha256").hexdigest()
                digest.update(f"{split} {file.suffix} {content}".encode())
        return digest.hexdigest()

    def load(self, max_characters: int | None = None) -> dict[str, datasets.Dataset]:
        """All documents, in the order of the files.

        Raises:
            ValueError: If a file is missing, unreadable, of an unknown kind, or has no such column.
        """
        return {
            split: from_texts("\n".join(texts) for texts, _, _ in self._rows(files, {}))
            for split, files in self._files_of_splits().items()
        }

    def load_examples(self) -> dict[str, datasets.Dataset]:
        """All documents with their labels, in the order of the files.

        Raises:
            ValueError: As `load` does; if no column is named for the labels, or only some rows have one.
        """
        label = {require_label_column(self.label_column, self.text_columns): "data.label_column"}
        return {split: self._examples(files, label) for split, files in self._files_of_splits().items()}

    def _examples(self, files: Sequence[Path], label: Mapping[str, str]) -> datasets.Dataset:
        rows = list(self._rows(files, label))
        labels = [name for _, name, _ in rows]
        refuse_missing(labels, lambda row: f"data.label_column={self.label_column}: {rows[row][2]}")
        texts = zip(*(texts for texts, _, _ in rows), strict=True) if rows else [[] for _ in self.text_columns]
        return from_columns(**dict(zip(TEXTS, texts, strict=False)), label=labels)

    def _rows(self, files: Iterable[Path], label: Mapping[str, str]) -> Iterator[tuple[list[str], str | None, str]]:
        """The texts of each row, its label if that is asked for, and where it stands."""
        layout = Layout({**dict.fromkeys(self.text_columns, "data.text_column"), **label}, self.columns, self.quoted)
        for file in files:
            for number, values in enumerate(read_rows(file, layout), start=1):
                texts = [self._text(file, *named) for named in zip(self.text_columns, values, strict=False)]
                if self.label_column or any(text is not None for text in texts):
                    name = label_name(values[-1], f"data.label_column={self.label_column}: {file}") if label else None
                    yield [text or "" for text in texts], name, f"row {number} of {file}"

    @staticmethod
    def _text(file: Path, column: str, value: Any) -> str | None:
        if value is not None and not isinstance(value, str):
            raise ValueError(f"data.text_column={column}: {file} holds {value!r} there, not text; name another column.")
        return value

    def _files_of_splits(self) -> dict[str, list[Path]]:
        files = find_files(self.files)
        splits: dict[str, list[Path]] = {}
        for file in files:
            splits.setdefault(_split_of(file), []).append(file)
        return splits if "train" in splits else {"train": files}


def _split_of(file: Path) -> str:
    words = re.split(r"[^a-z]+", file.stem.lower())
    return next((SPLIT_OF[word] for word in (words[0], words[-1]) if word in SPLIT_OF), "train")


class LocalOrHub:
    """A data set of the Hub, or a copy of it in local files, where these are named.

    Args:
        files: See `TextFiles`; None: the Hub's.
        local: Makes the source of the files; called with `files`.
        hub: The source without them.
    """

    def __init__(
        self, files: str | Iterable[str] | None, local: Callable[..., LabelledSource], hub: LabelledSource
    ) -> None:
        self.name = hub.name
        self._chosen = hub if files is None else local(files=files)

    @property
    def has_own_splits(self) -> bool:
        """Whether a validation split comes with it; the Hub's have one, or are divided as in training."""
        return getattr(self._chosen, "has_own_splits", True)

    def fingerprint(self) -> str:
        """That of the source that was chosen."""
        return self._chosen.fingerprint()

    def load(self, max_characters: int | None = None) -> dict[str, datasets.Dataset]:
        """The documents of the source that was chosen."""
        return self._chosen.load(max_characters)

    def load_examples(self) -> dict[str, datasets.Dataset]:
        """The examples of the source that was chosen."""
        return self._chosen.load_examples()


def lacks_own_splits(source: Source) -> bool:
    """Whether a source is files that bring no validation split."""
    return not getattr(source, "has_own_splits", True)


def one_or_two(text_column: str | Sequence[str]) -> list[str]:
    """The columns of a text, or of a pair of texts.

    Raises:
        ValueError: If they are more than two, or none.
    """
    columns = [text_column] if isinstance(text_column, str) else list(text_column)
    if not 1 <= len(set(columns)) == len(columns) <= len(TEXTS):
        raise ValueError(
            f"data.text_column={columns}: must be one column, or two for pairs of texts; "
            "data.text_column=[premise,hypothesis] works."
        )
    return columns


def require_label_column(column: str | None, text_columns: Sequence[str]) -> str:
    """The column of the labels.

    Raises:
        ValueError: If none is named, or one that holds a text.
    """
    if column is None:
        raise ValueError(
            "data.label_column=null: classification needs the column that holds the labels; "
            "data.label_column=label names it."
        )
    if column in text_columns:
        raise ValueError(
            f"data.label_column={column}: that column is the text (data.text_column); name the one with the labels."
        )
    return column
