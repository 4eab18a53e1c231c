"""Text of local files, with or without labels, or as pairs."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import datasets

from tinyformer.data.sources.documents import (
    PAIR_ARGUMENTS,
    TEXTS,
    class_name,
    from_columns,
    label_column_of,
    map_texts,
    one_or_two,
    require_all_or_no_labels,
    require_pair,
    two_columns,
)
from tinyformer.data.sources.files import Layout, read_rows
from tinyformer.data.sources.source import SPLIT_OF
from tinyformer.data.sources.text_paths import find_files
from tinyformer.data.storage import default_cache_dir
from tinyformer.data.stream import with_progress
from tinyformer.errors import ArgumentError

_FORMAT = 3  # increase it when the same files would give other texts

IN_MEMORY_BYTES = 2**28
"""The size of the files of a split, together, up to which their texts are held in memory."""

_LINE_END = r"\r\n?"  # becomes \n, as Python reads files

_SPLIT_NAME = re.compile(rf"({'|'.join(SPLIT_OF)})([-_.]?v?\d[\d.]*(-of-\d+)?(-[0-9a-f]{{8,}})?)?")
"""The name of a split, perhaps with a number: train-00000-of-00002 as on the Hub, dev-v2.0 as SQuAD's."""


class LocalFiles:
    """Local files, and the splits that their names say.

    Args:
        files: a path, a pattern such as `texts/*.txt`, a folder (searched recursively), or a list of these.
    """

    def __init__(self, files: str | Iterable[str]) -> None:
        self.files = [files] if isinstance(files, str) else [str(file) for file in files]

    @property
    def of_splits(self) -> dict[str, list[Path]]:
        """The files by split; all are for training if none is said to be."""
        parts: dict[Path, tuple[str, ...]] = {}
        for name in self.files:
            path = Path(name).expanduser()
            root = path if len(self.files) == 1 else path.parent  # of several folders, their own names count
            for file in find_files([name]):
                folders = file.relative_to(root).parts[:-1] if path.is_dir() else (file.parent.name,)
                parts.setdefault(file, (*folders, file.stem))
        splits: dict[str, list[Path]] = {}
        for file, names in parts.items():
            splits.setdefault(_split_of(names), []).append(file)
        return splits if "train" in splits else {"train": list(parts)}

    @property
    def has_own_splits(self) -> bool:
        """Whether the files include a validation split."""
        return "validation" in self.of_splits

    def hash(self, settings: bytes) -> str:
        """SHA-256 of the files' contents, formats and splits, but not of their paths; and of settings for reading."""
        digest = hashlib.sha256(settings)
        for split, files in self.of_splits.items():
            for file in files:
                with file.open("rb") as opened:
                    content = hashlib.file_digest(opened, "sha256").hexdigest()
                digest.update(f"{split} {file.suffix} {content}".encode())
        return digest.hexdigest()


def _split_of(names: Sequence[str]) -> str:
    """The split that the last of some names, of folders and the file in them, stands for; "train" if none does."""
    matches = (_SPLIT_NAME.fullmatch(name.lower()) for name in reversed(names))
    return next((SPLIT_OF[match[1]] for match in matches if match), "train")


class TextFiles(LocalFiles):
    r"""Local .txt files (each is one document) and .csv, .tsv, .json, .jsonl and .parquet files (each row is one).

    Files and folders that are named `train`, `validation` (`valid`, `val`, `dev`) or `test`, perhaps with a number
    (`train.txt`, `train-00000-of-00002.parquet`, `test/a.txt`), are these splits, if one of them is for training; other
    files are for training. Line ends are those of Python's universal newlines in texts of every format: `\r\n` and `\r`
    become `\n`. Every other character is kept, except a byte-order mark at the beginning of a file. The text of a row
    without text (null) that has a label is empty. If the files of a split have more than `IN_MEMORY_BYTES`, their texts
    are read into a memory map, one file at a time; otherwise, and with labels or pairs, they are held in memory.

    Args:
        files: see `LocalFiles`.
        text_column: the column or key that holds the text, or the two that hold a pair of texts; .txt files have none.
        label_column: the column that holds the label, by default "label". A label is a name: the number 1 is "1".
        source_column: the column that holds the sources of pairs.
        target_column: the column that holds their targets.
        columns: the columns of .csv and .tsv files without a header.
        quoted: whether quotation marks in .csv and .tsv files enclose fields; if not, each line is a row.
        separator: what stands between the documents of a text, such as "<|endoftext|>"; None: each text is one.
        cache_dir: the folder of the memory map; None: see `default_cache_dir`.
    """

    name = "text"
    rows = ("texts", "examples", "pairs")

    def __init__(
        self,
        files: str | Iterable[str],
        text_column: str | Sequence[str] = "text",
        label_column: str | None = None,
        columns: Sequence[str] | None = None,
        quoted: bool = True,
        source_column: str = "source",
        target_column: str = "target",
        separator: str | None = None,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__(files)
        self.cache_dir = cache_dir
        self.text_columns, self.label_column = one_or_two(text_column), label_column
        self.columns, self.quoted = columns and list(columns), quoted
        self.pair_columns = two_columns(source_column, target_column)
        # A shell passes on \n as it is typed.
        self.separator = separator.replace(r"\n", "\n") if separator else None

    def fingerprint(self) -> str:
        settings = [_FORMAT, self.text_columns, self.label_column, self.columns, self.quoted, self.separator]
        return self.hash(json.dumps(settings).encode())

    def load(self, rows: str = "texts", max_characters: int | None = None) -> dict[str, datasets.Dataset]:
        """All rows, in the order of the files."""
        if rows != "texts" and self.separator is not None:
            reason = "divides texts into documents, but not rows with labels or pairs, which are whole"
            raise ArgumentError("separator", self.separator.replace("\n", r"\n"), reason, {"separator": None})
        read = {"texts": self._texts, "examples": self._examples, "pairs": self._pairs}[rows]
        return {split: read(files) for split, files in self.of_splits.items()}

    def _texts(self, files: Sequence[Path]) -> datasets.Dataset:
        rows = (texts for texts, _, _ in self._rows(files, None))
        documents = (text for texts in rows for text in self._documents(texts))
        if sum(file.stat().st_size for file in files) <= IN_MEMORY_BYTES:
            return from_columns(text=documents)
        return map_texts(
            with_progress(documents, None, "Reading the files"), Path(self.cache_dir or default_cache_dir())
        )

    def _documents(self, texts: Sequence[str]) -> Iterable[str]:
        text = "\n".join(texts) if any(texts) else ""
        if self.separator is None:
            return [text]
        return (part.strip("\n") for part in text.split(self.separator) if part.strip())

    def _examples(self, files: Sequence[Path]) -> datasets.Dataset:
        column = label_column_of(self.label_column, self.text_columns)
        rows = list(self._rows(files, column))
        labels = [label for _, label, _ in rows]
        require_all_or_no_labels(labels, column, lambda row: rows[row][2])
        texts = zip(*(texts for texts, _, _ in rows), strict=True) if rows else [[] for _ in self.text_columns]
        return from_columns(**dict(zip(TEXTS, texts, strict=False)), label=labels)

    def _pairs(self, files: Sequence[Path]) -> datasets.Dataset:
        layout = Layout(self.pair_columns, None, self.columns, self.quoted, PAIR_ARGUMENTS)
        pairs = []
        for file in files:
            for number, values in enumerate(read_rows(file, layout), start=1):
                require_pair(values, self.pair_columns, f"row {number} of {file}")
                pairs.append([re.sub(_LINE_END, "\n", text) for text in values])
        sources, targets = zip(*pairs, strict=True) if pairs else ([], [])
        return from_columns(text=sources, pair=targets)

    def _rows(self, files: Iterable[Path], label_column: str | None) -> Iterator[tuple[list[str], str | None, str]]:
        """The texts of each row, its label if there is a label column, and its place, for errors."""
        layout = Layout(self.text_columns, label_column, self.columns, self.quoted)
        for file in files:
            for number, values in enumerate(read_rows(file, layout), start=1):
                for column, value in zip(self.text_columns, values, strict=False):
                    if value is not None and not isinstance(value, str):
                        raise ArgumentError("text_column", column, f"{file} holds {value!r:.60} there, not text")
                texts = [re.sub(_LINE_END, "\n", text or "") for text in values[: len(self.text_columns)]]
                label = None if label_column is None else class_name(values[-1], label_column, str(file))
                yield texts, label, f"row {number} of {file}"
