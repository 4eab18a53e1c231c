"""Text from the Hugging Face Hub."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import filelock

from tinyformer.data.sources import hub
from tinyformer.data.sources.documents import (
    PAIR_ARGUMENTS,
    SPLIT_OF,
    SPLITS,
    TEXTS,
    class_name,
    from_columns,
    iterate_rows,
    label_column_of,
    one_or_two,
    require_all_or_no_labels,
    require_pair,
    two_columns,
)
from tinyformer.data.sources.files import flatten
from tinyformer.data.sources.squad import Question, from_questions, make_question
from tinyformer.data.stream import default_cache_dir, map_texts, with_progress
from tinyformer.errors import ArgumentError
from tinyformer.files import atomic_write


class HubDataset:
    """A data set of the Hugging Face Hub that consists of data files (loading scripts are not run).

    Args:
        path: the repository, "owner/name".
        name: the configuration, if the repository has several.
        revision: a branch, tag or commit; None: the main branch.
        text_column: the column that holds the text, or the two columns of a pair of texts.
        label_column: the column that holds the label, by default "label"; a label is a named class of the data set, a
            text or a number.
        source_column: the column that holds the sources of pairs; "translation.en" is the key `en` of `translation`.
        target_column: the column that holds the targets of pairs.
        rejoin_splits: whether the splits are consecutive parts of one text, to be joined into one document again.
        document_start: a regular expression; a document starts at each row that matches and continues until the next
            such row. None: each row is a document.
        cache_dir: the folder that stores the last used commit, so that a prepared data set works offline; None: see
            `default_cache_dir`.
    """

    rows = ("texts", "examples", "pairs", "questions")

    def __init__(
        self,
        path: str,
        name: str | None = None,
        *,
        revision: str | None = None,
        text_column: str | Sequence[str] = "text",
        label_column: str | None = None,
        source_column: str = "source",
        target_column: str = "target",
        rejoin_splits: bool = False,
        document_start: str | None = None,
        cache_dir: str | None = None,
    ) -> None:
        self.path, self.config, self.revision = path, name, revision
        self.text_columns, self.label_column = one_or_two(text_column), label_column
        self.pair_columns = two_columns(source_column, target_column)
        self.rejoin_splits, self.document_start = rejoin_splits, document_start
        self._commits_file = Path(cache_dir or default_cache_dir()) / "hub_commits.json"

    @property
    def name(self) -> str:
        """The repository's name without its owner, and the configuration."""
        return "-".join(filter(None, [self.path.rsplit("/", 1)[-1], self.config]))

    def fingerprint(self) -> str:
        """SHA-256 of the commit and of the arguments; without a network, of the commit that was used last."""
        key = f"{self.path}@{self.revision}"
        try:
            commit = hub.resolve(self.path, self.revision, "dataset")
        except hub.HubUnreachableError:
            if key not in self._noted():
                raise
            commit = self._noted()[key]
        if self._noted().get(key) != commit:
            self._commits_file.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(f"{self._commits_file}.lock"), atomic_write(self._commits_file) as temporary:
                temporary.write_text(json.dumps(self._noted() | {key: commit}, indent=1), encoding="utf-8")
        parts = [self.path, self.config, commit, self.text_columns, self.rejoin_splits, self.document_start]
        return hashlib.sha256(json.dumps([*parts, self.label_column]).encode()).hexdigest()

    def _noted(self) -> dict[str, str]:
        """The commit that was used last for each "repository@revision"."""
        return json.loads(self._commits_file.read_text(encoding="utf-8")) if self._commits_file.exists() else {}

    def load(self, rows: str = "texts", max_characters: int | None = None) -> dict[str, datasets.Dataset]:
        """The rows of each split; with `max_characters`, texts are streamed until they have that many characters.

        The class number -1 means no label. Questions must have the columns of `rajpurkar/squad`.
        """
        if rows == "texts":
            return self._documents(max_characters)
        read = {"examples": self._examples, "pairs": self._pairs, "questions": self._questions}[rows]
        return {split: read(split, table) for split, table in self._open(streaming=False).items()}

    def _documents(self, max_characters: int | None) -> dict[str, datasets.Dataset]:
        streaming = max_characters is not None
        splits = self._open(streaming)
        if not streaming and not self.rejoin_splits and not self.document_start:
            return {split: self._text_only(rows) for split, rows in splits.items()}  # remains a memory map
        if not streaming:
            splits = {split: self._columns(rows, self.text_columns) for split, rows in splits.items()}
        documents = {
            split: take_characters(join_rows(map(self._text, rows), self.document_start), max_characters)
            for split, rows in splits.items()
        }
        if self.rejoin_splits:
            whole = "".join(text for split in SPLITS for text in documents.get(split, ()))
            return {"train": from_columns(text=[whole])}
        folder = self._commits_file.parent
        return {s: map_texts(with_progress(texts, None, f"Reading {s}"), folder) for s, texts in documents.items()}

    def _open(self, streaming: bool) -> dict[str, Any]:
        commit = hub.resolve(self.path, self.revision, "dataset")
        hub.require_plain_card(self.path, commit)
        try:
            loaded = datasets.load_dataset(self.path, self.config, revision=commit, streaming=streaming)
        except Exception as error:  # of many classes: for gated data sets, missing files, unknown configurations, …
            problem = f"`datasets` cannot read {self.path} ({type(error).__name__}: {error})"
            name, value = ("path", self.path) if self.config is None else ("name", self.config)
            raise ArgumentError(name, value, problem) from error
        splits = {SPLIT_OF[split]: rows for split, rows in loaded.items() if split in SPLIT_OF}
        if "train" not in splits:
            raise ArgumentError("path", self.path, f"has no split train, only {', '.join(map(str, loaded))}")
        # A stream's rows are not decoded, since decoding could download pictures from other servers.
        return {split: rows.decode(False) if streaming else rows.flatten() for split, rows in splits.items()}

    def _pairs(self, split: str, rows: datasets.Dataset) -> datasets.Dataset:
        rows = self._columns(rows, self.pair_columns, PAIR_ARGUMENTS)
        pairs = rows.rename_columns(dict(zip(self.pair_columns, TEXTS, strict=True)))
        for number, values in enumerate(iterate_rows(pairs), start=1):
            require_pair(values, self.pair_columns, f"row {number} of the split {split} of {self.path}")
        return pairs

    def _questions(self, split: str, rows: datasets.Dataset) -> datasets.Dataset:
        refuse = partial(ArgumentError, "path", self.path)
        for column, kinds in _QUESTIONS.items():
            feature = rows.features.get(column)
            if not _is_of(getattr(feature, "feature", None) if "." in column else feature, kinds):
                columns = ", ".join(rows.column_names)
                raise refuse(f"has no questions: no column {column} of {kinds[0]} values; it has {columns}")
        questions: list[Question] = []
        for row in rows.select_columns(list(_QUESTIONS)):
            texts, starts = row["answers.text"], row["answers.answer_start"]
            answers = None if texts is None else {"text": texts, "answer_start": starts}
            place = f"row {len(questions) + 1} of the split {split}"
            questions.append(make_question(row["question"], row["context"], answers, place, refuse))
        return from_questions(questions)

    def _examples(self, split: str, rows: datasets.Dataset) -> datasets.Dataset:
        column = label_column_of(self.label_column, self.text_columns)
        self._require_column(rows.column_names, "label_column", column)
        feature = rows.features[column]
        if not isinstance(feature, datasets.ClassLabel | datasets.Value):
            raise ArgumentError(
                "label_column", column, f"in {self.path}, this column holds no classes, texts or numbers"
            )
        values = rows[column]
        if isinstance(feature, datasets.ClassLabel):
            values = [None if number in (None, -1) else feature.int2str(number) for number in values]
        labels = [class_name(value, column, self.path) for value in values]
        require_all_or_no_labels(labels, column, lambda row: f"row {row + 1} of the split {split} of {self.path}")
        return datasets.concatenate_datasets([self._text_only(rows), from_columns(label=labels)], axis=1)

    def _text_only(self, rows: datasets.Dataset) -> datasets.Dataset:
        rows = self._columns(rows, self.text_columns)
        return rows.rename_columns(dict(zip(self.text_columns, TEXTS, strict=False)))

    def _columns(
        self, rows: datasets.Dataset, columns: Sequence[str], arguments: Sequence[str] = ("text_column",) * len(TEXTS)
    ) -> datasets.Dataset:
        """Select text columns: decoding others could download pictures. An error names one of `arguments`."""
        for argument, column in zip(arguments, columns, strict=False):
            self._require_column(rows.column_names, argument, column)
            if not _is_of(rows.features[column], _TEXT):
                raise self._no_texts(column, argument)
        return rows.select_columns(list(columns))

    def _text(self, row: dict[str, Any]) -> str:
        row = flatten(row, self.text_columns)
        for column in self.text_columns:
            self._require_column(row, "text_column", column)
            if not isinstance(row[column], str | None):
                raise self._no_texts(column)
        return "\n".join(row[column] or "" for column in self.text_columns)

    def _no_texts(self, column: str, argument: str = "text_column") -> ArgumentError:
        return ArgumentError(argument, column, f"this column of {self.path} does not contain text; choose another")

    def _require_column(self, existing: Iterable[str], argument: str, column: str) -> None:
        if column not in existing:
            raise ArgumentError(argument, column, f"{self.path} has no such column; it has {', '.join(existing)}")


_TEXT, _INTEGER = ("string", "large_string", "null"), ("int64", "int32", "null")
"""The types of columns, as `datasets` names them."""

_QUESTIONS = {"question": _TEXT, "context": _TEXT, "answers.text": _TEXT, "answers.answer_start": _INTEGER}
"""The columns of questions and their types, as in `rajpurkar/squad`; the columns of answers hold lists of values."""


def _is_of(feature: Any, kinds: Sequence[str]) -> bool:
    """Return True if a column holds single values (not lists) of one of the types `kinds`."""
    return isinstance(feature, datasets.Value) and feature.dtype in kinds


def join_rows(rows: Iterable[str], document_start: str | None) -> Iterator[str]:
    """Join rows to documents, which start at rows that match a regular expression; None: each row is a document."""
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
    """The first texts, until they have `max_characters` characters in all; None: all texts."""
    taken = 0
    for text in texts:
        yield text
        taken += len(text)
        if max_characters is not None and taken >= max_characters:
            return
