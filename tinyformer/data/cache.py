"""Tokenised text on disk: flat files of token ids that are memory-mapped, built once."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from jaxtyping import Bool, Int64, UInt
from rich.console import Console
from rich.progress import Progress

from tinyformer.data.documents import iterate_texts
from tinyformer.data.sources import SPLITS, Source
from tinyformer.data.splits import hold_out
from tinyformer.data.storage import ArrayWriter, build_once
from tinyformer.data.tokenizer import TextTokenizer
from tinyformer.data.tokenizer_recipes import TokenizerRecipe

_FORMAT = 1  # raise it when the same input would give other files
_BATCH = 2**21  # characters tokenised at a time: the encodings of two batches take about 1 GB at most


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
class Recipe:
    """What shapes the tokenised splits of a source, whatever they are for.

    Args:
        source: Where the text comes from.
        tokenizer: What is built on the training documents, or a finished tokenizer.
        validation_fraction: See `hold_out`.
        test_fraction: See `hold_out`.
        seed: See `hold_out`.
        group_near_copies: See `hold_out`.
        whole: Hold nothing out; the documents of all the source's splits are one split "all".
    """

    source: Source
    tokenizer: TokenizerRecipe
    validation_fraction: float = 0.0
    test_fraction: float = 0.0
    seed: int = 0
    group_near_copies: bool = False
    whole: bool = False

    def key(self) -> str:
        """SHA-256 over all of it."""
        return hashlib.sha256(json.dumps(self._parts()).encode()).hexdigest()

    def folder(self, cache_dir: str | Path) -> Path:
        """Where the tokenised splits lie."""
        return Path(cache_dir) / f"{self.source.name}-{self.tokenizer.name}-{self.key()[:12]}"

    def _parts(self) -> list[Any]:
        return [
            *(_FORMAT, self.source.fingerprint(), self.tokenizer.key()),
            *(self.validation_fraction, self.test_fraction, self.seed, self.group_near_copies),
        ]

    def _divided(self, own: dict[str, datasets.Dataset], keep_whole: bool) -> dict[str, datasets.Dataset]:
        """What becomes of the source's own splits; the first one is for training, or the whole.

        Args:
            own: The source's splits.
            keep_whole: See `hold_out`.
        """
        if self.whole:
            return {"all": datasets.concatenate_datasets([own[split] for split in SPLITS if split in own])}
        fractions = self.validation_fraction, self.test_fraction
        splits = hold_out(own, *fractions, self.seed, self.group_near_copies, keep_whole)
        return {split: splits[split] for split in SPLITS if split in splits}


@dataclass(frozen=True)
class TextRecipe(Recipe):
    """Everything that shapes the token streams of a source.

    Args:
        max_tokens: Upper bound of the first split's scored tokens (of the training split, or of the whole).
    """

    max_tokens: int | None = None

    def _parts(self) -> list[Any]:
        return [*super()._parts(), self.max_tokens, self.whole]

    def load(self) -> tuple[dict[str, datasets.Dataset], bool]:
        """The documents of the splits to tokenise, and whether validation is the source's own.

        The first split is the training split, or the whole: the one that the tokenizer is built on.
        """
        own = self.source.load(self._max_characters())
        return self._divided(own, keep_whole=False), "validation" in own

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
    """Tokenises the source's splits, or opens what an earlier call (of any process) has left in `cache_dir`."""
    key = recipe.key()
    return build_once(
        recipe.folder(cache_dir), lambda folder: _open(folder, key), lambda folder: _build(recipe, folder)
    )


def open_prepared(recipe: TextRecipe, cache_dir: str | Path) -> PreparedText | None:
    """Opens what `prepare_text` left; None if there is nothing, or nothing whole."""
    return _open(recipe.folder(cache_dir), recipe.key())


def _open(folder: Path, key: str) -> PreparedText | None:
    """None if the folder is missing, or lacks a part of its contents."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        splits = {name: open_split(folder, name, counts) for name, counts in meta["splits"].items()}
        tokenizer = TextTokenizer.from_json((folder / "tokenizer.json").read_text())
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None
    return PreparedText(tokenizer, splits, key, meta["own_validation"], folder)


def open_split(folder: Path, name: str, counts: dict[str, Any]) -> TokenSplit:
    """What `write_split` wrote.

    Raises:
        OSError, ValueError, EOFError: If a file is missing or damaged.
    """
    ids = np.load(folder / f"{name}.npy", mmap_mode="r")
    return TokenSplit(ids, np.load(folder / f"{name}.offsets.npy"), **counts)


def _build(recipe: TextRecipe, folder: Path) -> None:
    documents, own_validation = recipe.load()
    tokenizer = recipe.tokenizer.build(iterate_texts(next(iter(documents.values()))))
    folder.mkdir()
    meta: dict = {"own_validation": own_validation, "splits": {}}
    limits = [recipe.max_tokens] + [None] * (len(documents) - 1)
    for (name, split), limit in zip(documents.items(), limits, strict=True):
        texts = filter(None, with_progress(iterate_texts(split), len(split), name))
        meta["splits"][name] = write_split(texts, tokenizer, folder, name, limit)
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


@dataclass
class _Counts:
    num_bytes: int = 0
    num_characters: int = 0
    num_unknown: int = 0


def write_split(
    texts: Iterable[str], tokenizer: TextTokenizer, folder: Path, name: str, limit: int | None = None
) -> dict[str, int]:
    """Writes the stream `eos t1 eos t2 ...` and where each text's `eos` stands in it.

    Args:
        texts: What to tokenise.
        tokenizer: With what.
        folder: Where to write.
        name: Of the split.
        limit: Stop after so many scored tokens.

    Returns:
        What `TokenSplit` counts.
    """
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    counts = _Counts()
    with (
        ArrayWriter(folder / f"{name}.npy", dtype) as ids,
        ArrayWriter(folder / f"{name}.offsets.npy", np.dtype(np.int64)) as offsets,
    ):
        for read, documents in _encode(texts, tokenizer, limit):
            # All documents of a batch at once: one by one, arrays take a fifth of the time of their tokens.
            stream = np.array([token for tokens in documents for token in (tokenizer.eos_id, *tokens)])
            lengths = np.array([1 + len(tokens) for tokens in documents])
            offsets.append(ids.length + lengths.cumsum() - lengths)
            ids.append(stream)
            counts.num_bytes += sum(len(text.encode()) for text in read)
            counts.num_characters += sum(map(len, read))
            counts.num_unknown += int((stream == tokenizer.unk_id).sum())  # 0 where unk_id is None
        offsets.append(np.array([ids.length]))
    return asdict(counts)


def _encode(
    documents: Iterable[str], tokenizer: TextTokenizer, limit: int | None
) -> Iterator[tuple[list[str], list[list[int]]]]:
    """Some documents and the tokens of each; the last one is cut where the stream reaches `limit` scored tokens."""
    room = sys.maxsize if limit is None else limit
    for texts, encoded in _ahead(_batches(documents), tokenizer.encode_batch):
        for index, tokens in enumerate(encoded):
            if len(tokens) >= room:
                yield [*texts[:index], tokenizer.prefix(texts[index], room)], [*encoded[:index], tokens[:room]]
                return
            room -= len(tokens) + 1  # the next document's eos is scored too
            if room <= 0:
                yield texts[: index + 1], encoded[: index + 1]
                return
        if texts:
            yield texts, encoded


def _ahead(
    batches: Iterable[list[str]], encode: Callable[[list[str]], list[list[int]]]
) -> Iterator[tuple[list[str], list[list[int]]]]:
    """Each batch and its tokens, the next being encoded by a thread (which needs no Python) while one is used."""
    with ThreadPoolExecutor(1) as executor:
        coming: tuple[list[str], Future[list[list[int]]]] | None = None
        for texts in batches:
            previous, coming = coming, (texts, executor.submit(encode, texts))
            if previous is not None:
                yield previous[0], previous[1].result()
        if coming is not None:
            yield coming[0], coming[1].result()


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts in lists of about `_BATCH` characters."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH:
            yield batch
            batch, characters = [], 0
    yield batch


def with_progress(texts: Iterable[str], number: int, name: str) -> Iterator[str]:
    """The texts, with a progress bar on a terminal's standard error."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        yield from progress.track(texts, number, description=f"Tokenising {name}")
