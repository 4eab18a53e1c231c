"""Tokenised text on disk: flat files of token ids that are memory-mapped, built once."""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import datasets
import filelock
import numpy as np
from jaxtyping import Bool, Int64, UInt
from rich.console import Console
from rich.progress import Progress

from tinyformer.data.documents import iterate_texts
from tinyformer.data.sources import Source
from tinyformer.data.splits import hold_out
from tinyformer.data.tokenizer import TextTokenizer, TokenizerRecipe

_FORMAT = 1  # raise it when the same input would give other files
_SPLITS = ("train", "validation", "test")
_BATCH = 2**22  # characters tokenised at a time: their encodings take about 1 GB at most


@dataclass(frozen=True)
class TokenSplit:
    """The token ids of one split: `eos d1 eos d2 ... eos dn`, one `eos` before each document and none after.

    Inputs are all ids but the last and targets all but the first, so every token of the text is scored
    exactly once, unless `scored` leaves it out.

    Attributes:
        ids: The stream, memory-mapped.
        offsets: Where in `ids` each document's `eos` stands, and the length of `ids`.
        num_bytes: Length of the raw text in UTF-8.
        num_characters: The same in Unicode code points.
        num_unknown: Tokens that stand for text outside of the vocabulary.
        scored: Which ids are scored as targets; all of them if None.
    """

    ids: UInt[np.ndarray, " tokens"]
    offsets: Int64[np.ndarray, " documents_and_end"]
    num_bytes: int
    num_characters: int
    num_unknown: int
    scored: Bool[np.ndarray, " tokens"] | None = None

    @property
    def num_documents(self) -> int:
        """Documents with text; empty ones are left out."""
        return len(self.offsets) - 1

    @property
    def num_targets(self) -> int:
        """Tokens that follow another, scored or not."""
        return max(len(self.ids) - 1, 0)

    @property
    def num_tokens(self) -> int:
        """Scored tokens."""
        return self.num_targets if self.scored is None else int(np.count_nonzero(self.scored[1:]))


@dataclass(frozen=True)
class TextRecipe:
    """Everything that shapes the tokenised splits of a source.

    Args:
        source: Where the text comes from.
        tokenizer: What is built on the training documents, or a finished tokenizer.
        validation_fraction: See `hold_out`.
        test_fraction: See `hold_out`.
        seed: See `hold_out`.
        group_near_copies: See `hold_out`.
        max_tokens: Upper bound of the first split's scored tokens (of the training split, or of the whole).
        whole: Hold nothing out; the documents of all the source's splits are one split "all".
    """

    source: Source
    tokenizer: TokenizerRecipe
    validation_fraction: float = 0.0
    test_fraction: float = 0.0
    seed: int = 0
    group_near_copies: bool = False
    max_tokens: int | None = None
    whole: bool = False

    def key(self) -> str:
        """SHA-256 over all of it."""
        parts = [
            _FORMAT,
            self.source.fingerprint(),
            self.tokenizer.key(),
            *(self.validation_fraction, self.test_fraction, self.seed, self.group_near_copies),
            *(self.max_tokens, self.whole),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def folder(self, cache_dir: str | Path) -> Path:
        """Where the tokenised splits lie."""
        return Path(cache_dir) / f"{self.source.name}-{self.tokenizer.name}-{self.key()[:12]}"

    def load(self) -> tuple[dict[str, datasets.Dataset], bool]:
        """The documents of the splits to tokenise, and whether validation is the source's own.

        The first split is the training split, or the whole: the one that the tokenizer is built on.
        """
        own = self.source.load(self._max_characters())
        if self.whole:
            parts = [own[split] for split in _SPLITS if split in own]
            return {"all": datasets.concatenate_datasets(parts)}, "validation" in own
        splits = hold_out(own, self.validation_fraction, self.test_fraction, self.seed, self.group_near_copies)
        return {split: splits[split] for split in _SPLITS if split in splits}, "validation" in own

    def _max_characters(self) -> int | None:
        if self.max_tokens is None:
            return None
        training_share = 1 - self.validation_fraction - self.test_fraction
        return int(self.max_tokens * self.tokenizer.characters_per_token / training_share) + 1


@dataclass(frozen=True)
class PreparedText:
    """What `prepare_text` leaves on disk, opened.

    Attributes:
        tokenizer: The tokenizer of all splits.
        splits: By name.
        fingerprint: `TextRecipe.key`.
        own_validation: Whether the validation split is the source's own, and not held out.
        folder: Where it is.
    """

    tokenizer: TextTokenizer
    splits: dict[str, TokenSplit]
    fingerprint: str
    own_validation: bool
    folder: Path


def prepare_text(recipe: TextRecipe, cache_dir: str | Path) -> PreparedText:
    """Tokenises the source's splits, or opens what an earlier call (of any process) has left in `cache_dir`.

    A folder appears under its final name only when it is complete; one that is damaged is built again.
    """
    key = recipe.key()
    folder = Path(cache_dir) / f"{recipe.source.name}-{recipe.tokenizer.name}-{key[:12]}"
    if prepared := _open(folder, key):
        return prepared
    folder.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{folder}.lock"):
        if prepared := _open(folder, key):  # by the process that held the lock
            return prepared
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        try:
            _build(recipe, partial)
            shutil.rmtree(folder, ignore_errors=True)  # damaged, or it would have been opened
            os.replace(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        prepared = _open(folder, key)
    assert prepared is not None
    return prepared


def open_prepared(recipe: TextRecipe, cache_dir: str | Path) -> PreparedText | None:
    """Opens what `prepare_text` left; None if there is nothing, or nothing whole."""
    return _open(recipe.folder(cache_dir), recipe.key())


def _open(folder: Path, key: str) -> PreparedText | None:
    """None if the folder is missing, or lacks a part of its contents."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        splits = {
            name: TokenSplit(
                np.load(folder / f"{name}.npy", mmap_mode="r"),
                np.load(folder / f"{name}.offsets.npy"),
                **counts,
            )
            for name, counts in meta["splits"].items()
        }
        tokenizer = TextTokenizer.from_json((folder / "tokenizer.json").read_text())
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None
    return PreparedText(tokenizer, splits, key, meta["own_validation"], folder)


def _build(recipe: TextRecipe, folder: Path) -> None:
    documents, own_validation = recipe.load()
    tokenizer = recipe.tokenizer.build(iterate_texts(next(iter(documents.values()))))
    folder.mkdir()
    meta: dict = {"own_validation": own_validation, "splits": {}}
    limits = [recipe.max_tokens] + [None] * (len(documents) - 1)
    for (name, split), limit in zip(documents.items(), limits, strict=True):
        meta["splits"][name] = asdict(_write_split(split, tokenizer, folder, name, limit))
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


@dataclass
class _Counts:
    num_bytes: int = 0
    num_characters: int = 0
    num_unknown: int = 0


class _Writer:
    """A one-dimensional `.npy` file that grows: its header is written again when the length is known."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._file = path.open("wb")
        self._dtype = dtype
        self.length = 0
        self._write_header()

    def append(self, values: np.ndarray) -> None:
        self._file.write(values.astype(self._dtype).tobytes())
        self.length += len(values)

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def _write_header(self) -> None:
        # NumPy leaves room for the length to grow, so that the header's own size stays what it is.
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)


def _write_split(
    documents: datasets.Dataset, tokenizer: TextTokenizer, folder: Path, name: str, limit: int | None
) -> _Counts:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    counts = _Counts()
    with (
        _Writer(folder / f"{name}.npy", dtype) as ids,
        _Writer(folder / f"{name}.offsets.npy", np.dtype(np.int64)) as offsets,
    ):
        for text, tokens in _encode(_with_progress(documents, name), tokenizer, limit):
            offsets.append(np.array([ids.length]))
            document = np.array([tokenizer.eos_id, *tokens])
            ids.append(document)
            counts.num_bytes += len(text.encode())
            counts.num_characters += len(text)
            counts.num_unknown += int((document == tokenizer.unk_id).sum())  # 0 where unk_id is None
        offsets.append(np.array([ids.length]))
    return counts


def _encode(documents: Iterable[str], tokenizer: TextTokenizer, limit: int | None) -> Iterator[tuple[str, list[int]]]:
    """Each document and its tokens; the last one is cut where the stream reaches `limit` scored tokens."""
    room = sys.maxsize if limit is None else limit
    for texts in _batches(documents):
        for text, tokens in zip(texts, tokenizer.encode_batch(texts), strict=True):
            if len(tokens) >= room:
                yield tokenizer.prefix(text, room), tokens[:room]
                return
            yield text, tokens
            room -= len(tokens) + 1  # the next document's eos is scored too
            if room <= 0:
                return


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Documents with text, in lists of about `_BATCH` characters."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        if text:
            batch.append(text)
            characters += len(text)
        if characters >= _BATCH:
            yield batch
            batch, characters = [], 0
    yield batch


def _with_progress(documents: datasets.Dataset, name: str) -> Iterator[str]:
    """The documents, with a progress bar on a terminal's standard error."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        yield from progress.track(iterate_texts(documents), len(documents), description=f"Tokenising {name}")
