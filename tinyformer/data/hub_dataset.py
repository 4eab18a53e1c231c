"""Text from the Hugging Face Hub."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import filelock

from tinyformer.data import hub
from tinyformer.data.documents import TEXTS, from_columns, from_texts
from tinyformer.data.labels import label_name, refuse_missing
from tinyformer.data.sources import SPLIT_OF, SPLITS, one_or_two, require_label_column
from tinyformer.files import atomic_write


class HubDataset:
    """A data set of the Hugging Face Hub that holds data files (loading scripts are not run).

    Args:
        path: The repository, "owner/name".
        name: The configuration, where the repository has several.
        revision: Branch, tag or commit; None is the main branch.
        text_column: The column that holds the text, or the two that hold a pair of texts.
        label_column: The one that holds the label: a class, whose name the data set gives, a text or a number.
        rejoin_splits: The splits are consecutive parts of one text: join all of it into one document again.
        document_start: Rows are parts of documents; a new document starts with each row that this regular
            expression matches. None: each row is a document.
        cache_dir: Where to note the commit that was used last, so that a prepared data set works offline.
    """

    def __init__(
        self,
        path: str,
        name: str | None = None,
        *,
        revision: str | None = None,
        text_column: str | Sequence[str] = "text",
        label_column: str | None = None,
        rejoin_splits: bool = False,
        document_start: str | None = None,
        cache_dir: str = "data/cache",
    ) -> None:
        self.path = path
        self.config = name
        self.revision = revision
        self.text_columns, self.label_column = one_or_two(text_column), label_column
        self.rejoin_splits = rejoin_splits
        self.document_start = document_start
        self._commits_file = Path(cache_dir) / "hub_commits.json"

    @property
    def name(self) -> str:
        """The repository's name without its owner, and the configuration."""
        return "-".join(filter(None, [self.path.rsplit("/", 1)[-1], self.config]))

    def fingerprint(self) -> str:
        """SHA-256 over the commit and what is made of it; offline, over the commit that was used last.

        Raises:
            ValueError: If the Hub cannot be reached and this data set was never used before, or does not
                exist.
        """
        commits = self._noted()
        key = f"{self.path}@{self.revision}"
        try:
            commit = hub.resolve(self.path, self.revision, hub.DATASET)
        except hub.HubUnreachableError:
            if key not in commits:
                raise
            commit = commits[key]
        if commits.get(key) != commit:
            self._note(key, commit)
        parts = [self.path, self.config, commit, self.text_columns, self.rejoin_splits, self.document_start]
        return hashlib.sha256(json.dumps([*parts, self.label_column]).encode()).hexdigest()

    def _note(self, key: str, commit: str) -> None:
        self._commits_file.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{self._commits_file}.lock"), atomic_write(self._commits_file) as temporary:
            temporary.write_text(json.dumps(self._noted() | {key: commit}, indent=1))

    def _noted(self) -> dict[str, str]:
        return json.loads(self._commits_file.read_text()) if self._commits_file.exists() else {}

    def load(self, max_characters: int | None = None) -> dict[str, datasets.Dataset]:
        """The documents of each split; with `max_characters`, streamed and no further than that.

        Raises:
            ValueError: If the Hub cannot be reached, or has no such data set, configuration or column.
        """
        streaming = max_characters is not None
        splits = self._open(hub.resolve(self.path, self.revision, hub.DATASET), streaming)
        if not streaming and not self.rejoin_splits and not self.document_start:
            return {split: self._text_only(rows) for split, rows in splits.items()}  # stays a memory map
        documents = {
            split: take_characters(join_rows(map(self._text, rows), self.document_start), max_characters)
            for split, rows in splits.items()
        }
        if self.rejoin_splits:
            whole = "".join(text for split in SPLITS for text in documents.get(split, ()))
            return {"train": from_texts([whole])}
        return {split: from_texts(texts) for split, texts in documents.items()}

    def _open(self, commit: str, streaming: bool) -> dict[str, Any]:
        try:
            loaded = datasets.load_dataset(self.path, self.config, revision=commit, streaming=streaming)
        except (FileNotFoundError, ValueError) as error:  # no data files, gated, or an unknown configuration
            raise ValueError(f"data.path={self.path} data.name={self.config}: {error}") from error
        splits = {SPLIT_OF[split]: rows for split, rows in loaded.items() if split in SPLIT_OF}
        if "train" not in splits:
            raise ValueError(f"data.path={self.path}: there is no split `train`, only {', '.join(map(str, loaded))}.")
        return splits

    def load_examples(self) -> dict[str, datasets.Dataset]:
        """The rows of each split with their labels; -1 in the place of a class is no label.

        Raises:
            ValueError: As `load` does; if no column is named for the labels, or only some rows have one.
        """
        column = require_label_column(self.label_column, self.text_columns)
        splits = self._open(hub.resolve(self.path, self.revision, hub.DATASET), streaming=False)
        return {split: self._with_labels(split, rows, column) for split, rows in splits.items()}

    def _with_labels(self, split: str, rows: datasets.Dataset, column: str) -> datasets.Dataset:
        self._check(rows.column_names, "data.label_column", column)
        feature, key = rows.features[column], f"data.label_column={column}: {self.path}"
        if isinstance(feature, datasets.ClassLabel):
            labels = [None if number in (None, -1) else feature.int2str(number) for number in rows[column]]
        else:
            labels = [label_name(value, key) for value in rows[column]]
        refuse_missing(labels, lambda row: f"{key}: row {row + 1} of the split {split}")
        return datasets.concatenate_datasets([self._text_only(rows), from_columns(label=labels)], axis=1)

    def _text_only(self, rows: datasets.Dataset) -> datasets.Dataset:
        for column in self.text_columns:
            self._check(rows.column_names, "data.text_column", column)
        rows = rows.select_columns(self.text_columns)
        return rows.rename_columns(dict(zip(self.text_columns, TEXTS, strict=False)))

    def _text(self, row: Mapping[str, Any]) -> str:
        for column in self.text_columns:
            self._check(row, "data.text_column", column)
        return "\n".join(row[column] or "" for column in self.text_columns)

    def _check(self, columns: Iterable[str], key: str, column: str) -> None:
        if column not in columns:
            raise ValueError(f"{key}={column}: {self.path} has no such column; it has {', '.join(columns)}.")


def join_rows(rows: Iterable[str], document_start: str | None) -> Iterator[str]:
    """Documents from rows: each row is one, or one starts where a row matches the regular expression."""
    if document_start is None:
        yield from rows
        return
    starts = re.compile(document_start).match
    document: list[str] = []
    for row in rows:
        if document and starts(row):
            yield "".join(document)
            document = []
        document.append(row)
    yield "".join(document)


def take_characters(texts: Iterable[str], max_characters: int | None) -> Iterator[str]:
    """The first texts, up to the one that reaches so many characters; None: all of them."""
    taken = 0
    for text in texts:
        yield text
        taken += len(text)
        if max_characters is not None and taken >= max_characters:
            return
