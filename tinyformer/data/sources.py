"""Where text comes from: local files, or the Hugging Face Hub. The third source is `pydoc.py`."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import datasets

from tinyformer.data import hub
from tinyformer.data.documents import from_texts
from tinyformer.data.files import find_files, read_documents

# Words in file and split names, and the split that they stand for.
_SPLIT_OF = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}
_SPLITS = ("train", "validation", "test")


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

        Args:
            max_characters: So many characters of each split are enough. A source that streams stops there.
        """
        ...


class TextFiles:
    r"""Local .txt (a file is one document), .csv, .tsv, .json, .jsonl and .parquet files (a row is one).

    Files whose names begin or end with a word such as `train`, `validation` (`valid`, `val`, `dev`) or `test`
    (`train.txt`, `train-00000-of-00002.parquet`) are the source's own splits, if there is one for training
    among them. Every character survives, `\r\n` too; only a byte-order mark at the beginning of a file is
    dropped. Rows without text (null) are left out. All texts are held in memory.

    Args:
        files: A path, a pattern such as `texts/*.txt`, a folder (searched through), or a list of these.
        text_column: The column or key that holds the text; .txt files have none.
    """

    name = "text"

    def __init__(self, files: str | Iterable[str], text_column: str = "text") -> None:
        self.files = [files] if isinstance(files, str) else [str(file) for file in files]
        self.text_column = text_column

    @property
    def has_own_splits(self) -> bool:
        """Whether the files bring a validation split."""
        return "validation" in self._files_of_splits()

    def fingerprint(self) -> str:
        """SHA-256 over the contents of the files, their kinds and splits; not over their places."""
        digest = hashlib.sha256(self.text_column.encode())
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
            split: from_texts(text for file in files for text in read_documents(file, self.text_column))
            for split, files in self._files_of_splits().items()
        }

    def _files_of_splits(self) -> dict[str, list[Path]]:
        files = find_files(self.files)
        splits: dict[str, list[Path]] = {}
        for file in files:
            splits.setdefault(_split_of(file), []).append(file)
        return splits if "train" in splits else {"train": files}


def _split_of(file: Path) -> str:
    words = re.split(r"[^a-z]+", file.stem.lower())
    return next((_SPLIT_OF[word] for word in (words[0], words[-1]) if word in _SPLIT_OF), "train")


class HubDataset:
    """A data set of the Hugging Face Hub that holds data files (loading scripts are not run).

    Args:
        path: The repository, "owner/name".
        name: The configuration, where the repository has several.
        revision: Branch, tag or commit; None is the main branch.
        text_column: The column that holds the text.
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
        text_column: str = "text",
        rejoin_splits: bool = False,
        document_start: str | None = None,
        cache_dir: str = "data/cache",
    ) -> None:
        self.path = path
        self.config = name
        self.revision = revision
        self.text_column = text_column
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
        commits = json.loads(self._commits_file.read_text()) if self._commits_file.exists() else {}
        key = f"{self.path}@{self.revision}"
        try:
            commit = hub.resolve(self.path, self.revision, "dataset")
        except hub.HubUnreachableError:
            if key not in commits:
                raise
            commit = commits[key]
        if commits.get(key) != commit:
            self._note(commits | {key: commit})
        parts = [self.path, self.config, commit, self.text_column, self.rejoin_splits, self.document_start]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _note(self, commits: Mapping[str, str]) -> None:
        self._commits_file.parent.mkdir(parents=True, exist_ok=True)
        new = self._commits_file.with_suffix(f".{os.getpid()}")  # other processes never see half a file
        new.write_text(json.dumps(commits, indent=1))
        new.replace(self._commits_file)

    def load(self, max_characters: int | None = None) -> dict[str, datasets.Dataset]:
        """The documents of each split; with `max_characters`, streamed and no further than that.

        Raises:
            ValueError: If the Hub cannot be reached, or has no such data set, configuration or column.
        """
        streaming = max_characters is not None
        splits = self._open(hub.resolve(self.path, self.revision, "dataset"), streaming)
        if not streaming and not self.rejoin_splits and not self.document_start:
            return {split: self._text_only(rows) for split, rows in splits.items()}  # stays a memory map
        documents = {
            split: take_characters(join_rows(map(self._text, rows), self.document_start), max_characters)
            for split, rows in splits.items()
        }
        if self.rejoin_splits:
            whole = "".join(text for split in _SPLITS for text in documents.get(split, ()))
            return {"train": from_texts([whole])}
        return {split: from_texts(texts) for split, texts in documents.items()}

    def _open(self, commit: str, streaming: bool) -> dict[str, Any]:
        try:
            loaded = datasets.load_dataset(self.path, self.config, revision=commit, streaming=streaming)
        except (FileNotFoundError, ValueError) as error:  # no data files, gated, or an unknown configuration
            raise ValueError(f"data.path={self.path} data.name={self.config}: {error}") from error
        splits = {_SPLIT_OF[split]: rows for split, rows in loaded.items() if split in _SPLIT_OF}
        if "train" not in splits:
            raise ValueError(f"data.path={self.path}: there is no split `train`, only {', '.join(map(str, loaded))}.")
        return splits

    def _text_only(self, rows: datasets.Dataset) -> datasets.Dataset:
        self._check(rows[:1])
        rows = rows.select_columns(self.text_column)
        return rows if self.text_column == "text" else rows.rename_column(self.text_column, "text")

    def _text(self, row: Mapping[str, Any]) -> str:
        self._check(row)
        return row[self.text_column] or ""

    def _check(self, row: Mapping[str, Any]) -> None:
        if self.text_column not in row:
            raise ValueError(
                f"data.text_column={self.text_column}: {self.path} has no such column; it has {', '.join(row)}."
            )


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
