"""Tokenised text on disk: written once for each recipe, and read as arrays of tokens."""

import mmap
import os
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import datasets
import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int64, UInt, UInt64
from rich.console import Console
from rich.progress import track

from tinyformer.data.sources.documents import STRING, batches_of, dataset_of, strings
from tinyformer.data.tokenizer.tokenizer import TextTokenizer

T = TypeVar("T")

_ROOT = Path(__file__).parents[2]
_WRITTEN = 2**24  # characters written at a time

_BATCH = 2**20  # characters tokenised at a time: their encodings take about 0.3 GB at most


def default_cache_dir() -> Path:
    """The cache folder: TINYFORMER_CACHE, else `data/cache` in a clone, else the user's cache folder."""
    if chosen := os.environ.get("TINYFORMER_CACHE"):
        return Path(chosen).expanduser()
    if (_ROOT / "conf").is_dir() and (_ROOT / "pyproject.toml").is_file():
        return _ROOT / "data" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tinyformer"


def map_texts(texts: Iterable[str], folder: Path) -> datasets.Dataset:
    """A dataset of texts in an unnamed memory-mapped file, whose disk space is freed when the dataset is deleted.

    Args:
        texts: the texts, of which about `_WRITTEN` characters are in memory at a time.
        folder: a folder on the disk to use.
    """
    schema = pa.schema({"text": STRING})
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        with pa.ipc.new_stream(file, schema) as stream:
            for batch in batches_of(texts, _WRITTEN):
                stream.write_batch(pa.record_batch([strings(batch)], schema))
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return dataset_of(pa.ipc.open_stream(pa.py_buffer(mapped)).read_all())


def with_progress(parts: Iterable[T], number: int | None, action: str) -> Iterator[T]:
    """Yield `parts`, with a progress bar if standard error is a terminal; `number`: of parts, if known."""
    console, hidden = Console(stderr=True), not sys.stderr.isatty()
    yield from track(parts, action, number, console=console, transient=True, disable=hidden)


class Split(ABC):
    """The tokens of one split."""

    ids: UInt[np.ndarray, " tokens"]
    num_bytes: int | None  # UTF-8 bytes of the scored tokens' raw text; None if it was truncated
    num_unknown: int  # `<unk>` tokens

    @property
    @abstractmethod
    def num_documents(self) -> int:
        """Number of texts, or of examples."""

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Number of scored tokens."""

    @property
    def num_targets(self) -> int:
        """Number of tokens that count for the measured speed; in a `TokenSplit`, all targets, scored or not."""
        return self.num_tokens


@dataclass(frozen=True)
class TokenSplit(Split):
    """The token ids of one split: `eos d1 eos d2 ... eos dn`, one `eos` before each document and none at the end.

    Inputs are all ids except the last, and targets all ids except the first. So every token of the text is scored
    exactly once, unless `scored` excludes it.
    """

    ids: UInt[np.ndarray, " tokens"]  # memory-mapped
    offsets: Int64[np.ndarray, " documents_and_end"]  # of each document's `eos` in `ids`, and the length of `ids`
    num_bytes: int
    num_characters: int  # of the raw text, in Unicode code points
    num_unknown: int
    lost_bytes: float  # see `tinyformer.data.lost_bytes`
    scored: Bool[np.ndarray, " tokens"] | None = None  # which ids are scored as targets; None: all of them
    tokenizer: TextTokenizer | None = None
    continues: Bool[np.ndarray, " tokens"] | None = None  # whether an id continues a word, if tokens do not show it

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_targets(self) -> int:
        return max(len(self.ids) - 1, 0)

    @property
    def num_tokens(self) -> int:
        return self.num_targets if self.scored is None else int(np.count_nonzero(self.scored[1:]))


@dataclass(frozen=True)
class Prepared:
    """A tokenised source, loaded from the cache folder."""

    tokenizer: TextTokenizer
    splits: dict[str, TokenSplit]  # for each split, the stream of its texts in order; a row may have several texts
    folder: Path
    fingerprint: str  # identifies text, tokenizer and hold-out together
    trained_on: UInt64[np.ndarray, " fingerprints"] | None  # of the training split; None: no such split, or too long
    facts: dict[str, Any]  # `left_out` (see `LeftOut`), `division` (see `hold_out`) and facts of `RowFormat.select`

    def rows(self, name: str) -> pa.Table:
        """The rows of a split that `write_rows` wrote, in a memory map."""
        return pa.ipc.open_file(pa.memory_map(str(self.folder / f"{name}.arrow"))).read_all()


def write_rows(folder: Path, name: str, rows: datasets.Dataset) -> None:
    """Write the rows of a split, with all their columns, to an Arrow file."""
    with pa.ipc.new_file(str(folder / f"{name}.arrow"), rows.features.arrow_schema) as file:
        for table in rows.with_format("arrow").iter(10_000):
            file.write_table(table)


def open_split(folder: Path, name: str, tokenizer: TextTokenizer, counts: dict[str, Any]) -> TokenSplit:
    """Load the split that `write_split` wrote; `continues` is None if its file was not written."""
    ids, offsets = np.load(folder / f"{name}.npy", mmap_mode="r"), np.load(folder / f"{name}.offsets.npy")
    words = folder / f"{name}.continues.npy"
    continues = np.load(words, mmap_mode="r") if words.exists() else None
    return TokenSplit(ids, offsets, tokenizer=tokenizer, continues=continues, **counts)


class Encoded(NamedTuple):
    """The tokens of some texts: `eos t1 eos t2 ...`."""

    ids: Int64[np.ndarray, " tokens"] | UInt[np.ndarray, " tokens"]
    lengths: Int64[np.ndarray, " texts"]  # of each text, its `eos` included
    num_bytes: int
    num_characters: int

    @classmethod
    def of(cls, texts: Sequence[str], documents: Sequence[Sequence[int]], tokenizer: TextTokenizer) -> "Encoded":
        """The stream of texts, given the tokens of each."""
        lengths = np.array([1 + len(tokens) for tokens in documents], np.int64)
        # One array for all documents of a batch: an array for each would take a fifth of the time of tokenising.
        tokens = chain.from_iterable((tokenizer.start_id, *tokens) for tokens in documents)
        ids = np.fromiter(tokens, dtype_of(tokenizer), int(lengths.sum()))
        return cls(ids, lengths, sum(len(text.encode()) for text in texts), sum(map(len, texts)))

    @property
    def offsets(self) -> Int64[np.ndarray, " texts_and_end"]:
        """The index in `ids` of the `eos` before each text, and the length of `ids`."""
        return np.concatenate([[0], self.lengths.cumsum()])


def dtype_of(tokenizer: TextTokenizer) -> np.dtype:
    """The dtype of token ids on disk."""
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)


def write_split(encoded: Iterable[Encoded], tokenizer: TextTokenizer, folder: Path, name: str) -> dict[str, int]:
    """Write the stream `eos t1 eos t2 ...` and the offset of each text's `eos`; return the counts of `TokenSplit`."""
    counts = dict.fromkeys(("num_bytes", "num_characters", "num_unknown"), 0)
    lengths = [np.zeros(1, np.int64)]
    with _ArrayWriter(folder / f"{name}.npy", dtype_of(tokenizer)) as ids:
        for part in encoded:
            lengths.append(part.lengths)
            ids.append(part.ids)
            counts["num_bytes"] += part.num_bytes
            counts["num_characters"] += part.num_characters
            counts["num_unknown"] += int((part.ids == tokenizer.unk_id).sum())
    np.save(folder / f"{name}.offsets.npy", np.concatenate(lengths).cumsum())
    return counts


class _ArrayWriter:
    """A one-dimensional `.npy` file that grows: its header is rewritten when the length is known."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._file, self._dtype, self.length = path.open("wb"), dtype, 0
        self._write_header()

    def append(self, values: np.ndarray) -> None:
        self._file.write(values.astype(self._dtype).tobytes())
        self.length += len(values)

    def __enter__(self) -> "_ArrayWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def _write_header(self) -> None:
        # NumPy pads the header so that the length can grow without changing the header's size.
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)


def encode(documents: Iterable[str], tokenizer: TextTokenizer, limit: int | None = None) -> Iterator[Encoded]:
    """Tokenise documents in batches, up to `limit` scored tokens in all; None: all documents."""
    room = sys.maxsize if limit is None else limit
    for texts in batches_of(documents, _BATCH):
        encoded = tokenizer.encode_batch(texts)
        for index, tokens in enumerate(encoded):
            if len(tokens) >= room:
                texts[index:], encoded[index:] = [tokenizer.prefix(texts[index], room)], [tokens[:room]]
                yield Encoded.of(texts, encoded, tokenizer)
                return
            room -= len(tokens) + 1  # the next document's eos is scored too
            if room <= 0:
                yield Encoded.of(texts[: index + 1], encoded[: index + 1], tokenizer)
                return
        yield Encoded.of(texts, encoded, tokenizer)
