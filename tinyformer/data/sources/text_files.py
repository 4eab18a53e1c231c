"""Text of local files, with or without labels, or as pairs."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets

from tinyformer.data.sources.documents import (
    PAIR_ARGUMENTS,
    SPLIT_OF,
    SPLITS,
    TEXTS,
    class_name,
    from_columns,
    label_column_of,
    one_or_two,
    require_all_or_no_labels,
    require_pair,
    two_columns,
)
from tinyformer.data.sources.files import Layout, read_rows, read_whole_rows
from tinyformer.data.sources.text_paths import find_files, folder_of, stem_and_format
from tinyformer.data.stream import default_cache_dir, map_texts, with_progress
from tinyformer.errors import ArgumentError

_FORMAT = 4  # increase it when the same files would give other texts

_LINE_END = r"\r\n?"  # becomes \n, as Python reads files

_SPLIT_NAME = re.compile(rf"({'|'.join(SPLIT_OF)})([-_.]?v?\d[\d.]*(-of-\d+)?(-[0-9a-f]{{8,}})?)?")
"""The name of a split, optionally with a number: train-00000-of-00002 as on the Hub, dev-v2.0 as in SQuAD."""


class LocalFiles:
    """Local files, divided into splits by the names of files, or of folders below the common folder of all files.

    Args:
        files: a path, a pattern such as `texts/*.txt`, a folder (searched recursively), or a list of these.
    """

    is_labelled = True  # whether labels, targets and answers are loaded; if False, they may be missing, and are empty
    layout_of: Callable[[str], Layout]  # the layout of files for a type of rows, without labels

    def __init__(self, files: str | Iterable[str]) -> None:
        self.files = [files] if isinstance(files, str) else [str(file) for file in files]

    @property
    def of_splits(self) -> dict[str, list[Path]]:
        """The distinct files of each split, links resolved; if no name is `train`, all files are for training."""
        root = os.path.commonpath([str(folder_of(name)) for name in self.files] or ["/"])
        found = [(file, os.path.realpath(file), _split_of(file, root)) for file in find_files(self.files)]
        named = {real for _, real, split in found if split}
        splits: dict[str, dict[str, Path]] = {}
        for file, real, split in found:
            if split or real not in named:  # a link in a split's folder takes precedence
                splits.setdefault(split or "train", {}).setdefault(real, file)
        splits = splits if "train" in splits else {"train": {real: file for file, real, _ in found}}
        return {split: list(files.values()) for split, files in splits.items()}

    @property
    def has_own_splits(self) -> bool:
        """Return True if the files include a validation split."""
        return "validation" in self.of_splits

    def hash(self, settings: bytes) -> str:
        """SHA-256 of `settings` and of the files' contents, formats and splits, but not of their paths."""
        digest = hashlib.sha256(settings if self.is_labelled else b"unlabelled " + settings)
        for split, files in self.of_splits.items():
            for file in files:
                with file.open("rb") as opened:
                    content = hashlib.file_digest(opened, "sha256").hexdigest()
                digest.update(f"{split} {stem_and_format(file)[1]} {content}".encode())
        return digest.hexdigest()

    def whole_rows(self, rows: str) -> Iterator[dict[str, Any]]:
        """The rows of all splits in order, each as a dictionary of all its columns."""
        for file in (file for split in SPLITS for file in self.of_splits.get(split, ())):
            yield from read_whole_rows(file, replace(self.layout_of(rows), whole=True))


def _split_of(file: Path, root: str) -> str | None:
    """The split in a file's name or, without one, in that of the innermost folder below the root that names a split."""
    names = stem_and_format(file)[0], *(parent.name for parent in Path(os.path.relpath(file, root)).parents)
    matches = (_SPLIT_NAME.fullmatch(name.lower()) for name in names)
    return next((SPLIT_OF[match[1]] for match in matches if match), None)


class TextFiles(LocalFiles):
    r"""Local .txt files (a document each) and .csv, .tsv, .json, .jsonl and .parquet files (a document in each row).

    All but .parquet may be compressed: .txt.gz, .csv.zst. Files and folders that are named `train`, `validation`
    (`valid`, `val`, `dev`) or `test`, optionally with a number (`train.txt`, `train-00000-of-00002.parquet`,
    `test/a.txt`), form these splits, and other files are for training. If no name is `train`, all files are for
    training. In texts of every format, the line ends `\r\n` and `\r` become `\n`. Every other character is kept, except
    a byte-order mark at the beginning of a file. A row with a label, but without text (null), has the empty text. Texts
    are loaded into a memory map, one file at a time; rows with labels and pairs are held in memory.

    Args:
        files: see `LocalFiles`.
        text_column: the column or key that holds the text (a nested key: `translation.en`), or both keys of a pair.
        label_column: the column that holds the label, by default "label". A label is a name: the number 1 is "1".
        source_column: the column that holds the sources of pairs.
        target_column: the column that holds the targets of pairs.
        columns: the names of the columns of .csv and .tsv files without a header.
        quoted: whether quotation marks in .csv and .tsv files enclose fields; if False, each line is a row.
        separator: the string between two documents of a text, such as "<|endoftext|>"; None: a text is one document.
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

    def layout_of(self, rows: str) -> Layout:
        pair = self.pair_columns if self.is_labelled else self.pair_columns[:1]
        columns, arguments = (pair, PAIR_ARGUMENTS) if rows == "pairs" else (self.text_columns, ())
        return Layout(columns, None, self.columns, self.quoted, arguments)

    def load(self, rows: str = "texts", max_characters: int | None = None) -> dict[str, datasets.Dataset]:
        """All rows, in the order of the files."""
        if rows != "texts" and self.separator is not None:
            reason = "divides texts into documents, but rows with labels and pairs cannot be divided"
            raise ArgumentError("separator", self.separator.replace("\n", r"\n"), reason, {"separator": None})
        read = {"texts": self._texts, "examples": self._examples, "pairs": self._pairs}[rows]
        return {split: read(split, files) for split, files in self.of_splits.items()}

    def _texts(self, split: str, files: Sequence[Path]) -> datasets.Dataset:
        rows = (texts for texts, _, _ in self._rows(files, self.layout_of("texts")))
        documents = (text for texts in rows for text in self._documents(texts))
        folder = Path(self.cache_dir or default_cache_dir())
        return map_texts(with_progress(documents, None, "Reading the files"), folder)

    def _documents(self, texts: Sequence[str]) -> Iterable[str]:
        text = "\n".join(texts) if any(texts) else ""
        if self.separator is None:
            return [text]
        return (part.strip("\n") for part in text.split(self.separator) if part.strip())

    def _examples(self, split: str, files: Sequence[Path]) -> datasets.Dataset:
        column = label_column_of(self.label_column, self.text_columns)
        label, optional = column if self.is_labelled else None, () if split == "train" else (column,)
        rows = list(self._rows(files, replace(self.layout_of("examples"), label_column=label, optional=optional)))
        labels = [label if self.is_labelled else "" for _, label, _ in rows]
        require_all_or_no_labels(labels, column, lambda row: rows[row][2])
        texts = zip(*(texts for texts, _, _ in rows), strict=True) if rows else [[] for _ in self.text_columns]
        return from_columns(**dict(zip(TEXTS, texts, strict=False)), label=labels)

    def _pairs(self, split: str, files: Sequence[Path]) -> datasets.Dataset:
        layout, pairs = self.layout_of("pairs"), []
        for texts, _, place in self._rows(files, layout):
            require_pair(texts, layout.text_columns, place)
            pairs.append((*texts, "")[:2])
        sources, targets = zip(*pairs, strict=True) if pairs else ([], [])
        return from_columns(text=sources, pair=targets)

    def _rows(self, files: Iterable[Path], layout: Layout) -> Iterator[tuple[list[str], str | None, str]]:
        """The texts of each row, its label (None without a label column), and a description of the row for errors."""
        columns, label_column = layout.text_columns, layout.label_column
        for file in files:
            for number, values in enumerate(read_rows(file, layout), start=1):
                place = f"row {number} of {file}"
                for column, value in zip(columns, values, strict=False):
                    if value is not None and not isinstance(value, str):
                        raise layout.error(column, f"{place} has {value!r:.60} in this column, not text")
                texts = [re.sub(_LINE_END, "\n", text or "") for text in values[: len(columns)]]
                label = None if label_column is None else class_name(values[-1], label_column, place)
                yield texts, label, place
