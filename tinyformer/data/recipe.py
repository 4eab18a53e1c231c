"""Tokenised text in the cache folder, built once for each combination of source, tokenizer and settings."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import filelock
import numpy as np
from jaxtyping import UInt64

from tinyformer.data.row_format import RowFormat
from tinyformer.data.sources.documents import (
    SPLITS,
    Source,
    batches_of,
    from_columns,
    iterate_texts,
    text_columns,
    text_lengths,
)
from tinyformer.data.splits import MAX_FINGERPRINTS, cut_out, fingerprints, fingerprints_of_all, hold_out, num_blocks
from tinyformer.data.stream import (
    Prepared,
    default_cache_dir,
    encode,
    open_split,
    with_progress,
    write_split,
)
from tinyformer.data.tokenizer.recipes import TokenizerRecipe
from tinyformer.data.tokenizer.tokenizer import MASK, TextTokenizer
from tinyformer.errors import ArgumentError, argument_path
from tinyformer.files import atomic_write, write_whole

_NO_TEXT, _TRAINED_ON, _TOKENIZER = "without text (empty, null or cut short)", "trained_on.npy", "tokenizer.json"

_KNOWN = "that the weights were trained on"

_ROWS, _READ, _DRAWN = 2**15, 2**24, 2**20
"""Limits of `_sample`: rows to draw, characters to read from these rows, and characters to draw from those read."""

_FORMAT = 5  # increase it when the same input would give other files

LeftOut = dict[str, dict[str, int]]
"""The number of rows left out of each split, by reason; if the reason begins with "characters", of characters."""


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the tokenised splits of a source.

    The `max_examples` and `max_tokens` of the row format bound the first split (the training split, or "all"); examples
    are drawn at random, by `seed`, since data sets may be sorted by label.
    """

    source: Source
    tokenizer: TokenizerRecipe  # built on the training documents, with a mask token if the row format needs one
    row_format: RowFormat
    validation_fraction: float = 0.0  # see `hold_out` for this field and the next three
    test_fraction: float = 0.0
    seed: int = 0
    group_near_copies: bool = False
    whole: bool = False  # hold nothing out; the documents of all the source's splits are one split "all"
    without: UInt64[np.ndarray, " fingerprints"] | None = None  # of text to leave out of all splits except "train"

    @cached_property
    def key(self) -> str:
        """SHA-256 of everything that determines the tokenised splits."""
        with argument_path("tokenizer"):
            tokenizer = self.tokenizer.key() + f" with {MASK}" * self.row_format.needs_mask
        without = None if self.without is None else hashlib.sha256(self.without.tobytes()).hexdigest()
        return hashlib.sha256(json.dumps([self.content, tokenizer, without]).encode()).hexdigest()

    @cached_property
    def content(self) -> str:
        """SHA-256 of everything that determines the texts of the splits, independent of the tokenizer."""
        with argument_path("source"):
            source = self.source.fingerprint()
        division = [self.validation_fraction, self.test_fraction, self.seed, self.group_near_copies, self.whole]
        parts = [_FORMAT, source, *division, *self.row_format.key(self.source)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def prepare(self, cache_dir: str | Path | None = None) -> Prepared:
        """Tokenise the splits, or load what an earlier call (in any process) wrote to the cache folder."""
        folder = self._folder(cache_dir)
        return self._open(folder) or self._make(folder)

    def open(self, cache_dir: str | Path | None = None) -> Prepared | None:
        """Load the data that `prepare` has written to the cache folder; None if there are no such data."""
        return self._open(self._folder(cache_dir))

    def _folder(self, cache_dir: str | Path | None) -> Path:
        parent = default_cache_dir() if cache_dir is None else Path(cache_dir)
        source = self.source.name.replace("/", "-")  # a name may come from a file; it must not lead out of `parent`
        return parent / f"{source}-{self.tokenizer.name}-{self.key[:12]}"

    def _open(self, folder: Path) -> Prepared | None:
        if not folder.exists():
            return None
        facts = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        tokenizer = TextTokenizer.from_json((folder / _TOKENIZER).read_text(encoding="utf-8"))
        splits = {name: open_split(folder, name, tokenizer, of) for name, of in facts.pop("splits").items()}
        trained_on = np.load(folder / _TRAINED_ON) if (folder / _TRAINED_ON).exists() else None
        return Prepared(tokenizer, splits, folder, self.key, trained_on, facts)

    def _make(self, folder: Path) -> Prepared:
        """Build a temporary folder and rename it to `folder`, unless another process has already made `folder`."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{folder}.lock"):
            if (prepared := self._open(folder)) is None:
                with atomic_write(folder) as temporary:
                    self._build(temporary)
                prepared = self._open(folder)
        assert prepared is not None
        return prepared

    def _build(self, folder: Path) -> None:
        """Write all files of the folder."""
        with argument_path("source"):
            kind, load = self.row_format.source_rows, self.source.load
            # `rows` is omitted for texts, its default: sources that have only texts need not accept the argument.
            loaded = load(max_characters=self._max_characters()) if kind == "texts" else load(kind)
        if replace(self).content != self.content:  # the cache would keep the new text under the hash of the old one
            raise ArgumentError("source", self.source.name, "changed while it was loaded; start again")
        splits, facts = self._divide(loaded)
        texts_of = self.row_format.texts
        tokenizer = self._tokenizer_of(next(iter(splits.values())))
        folder.mkdir()
        counts, limit = dict[str, Any](), self.row_format.max_tokens
        for name, rows in splits.items():
            texts = with_progress(texts_of(rows), len(rows) * len(text_columns(rows)), f"Tokenising {name}")
            counts[name] = write_split(encode(texts, tokenizer, limit), tokenizer, folder, name)
            counts[name]["lost_bytes"] = lost_bytes(_sample(rows, texts_of), tokenizer)
            limit = None  # it applies to the first split only
            self.row_format.write(folder, name, rows, tokenizer)
        write_whole(folder / _TOKENIZER, tokenizer.to_json())
        write_whole(folder / "meta.json", json.dumps({**facts, "splits": counts}, indent=1))
        if "train" in splits:
            trained_on = self._compared(splits["train"])
            if num_blocks(text_lengths(trained_on)) <= MAX_FINGERPRINTS:
                np.save(folder / _TRAINED_ON, fingerprints_of_all(iterate_texts(trained_on)))

    def _tokenizer_of(self, rows: datasets.Dataset) -> TextTokenizer:
        """Build the tokenizer from the texts of the rows."""
        number = len(rows) * len(text_columns(rows))
        texts = with_progress(self.row_format.texts(rows), number, "Learning the tokenizer")
        with argument_path("tokenizer"):
            tokenizer = self.tokenizer.build(texts)
        return tokenizer.with_mask() if self.row_format.needs_mask else tokenizer

    def _max_characters(self) -> int | None:
        """The most characters to load, for `max_tokens` training tokens and the held-out text; None: no bound."""
        if self.row_format.max_tokens is None:
            return None
        training_share = 1 - self.validation_fraction - self.test_fraction
        return int(self.row_format.max_tokens * self.tokenizer.characters_per_token / training_share) + 1

    def _divide(self, loaded: dict[str, datasets.Dataset]) -> tuple[dict[str, datasets.Dataset], dict[str, Any]]:
        """Return the splits to tokenise (the first split is "train" or "all") and the facts of `Prepared`."""
        row_format, left_out = self.row_format, LeftOut({split: {} for split in ("all", *SPLITS)})
        loaded, facts = row_format.select(loaded, self.source, self.whole)
        if self.whole:
            loaded = {"all": datasets.concatenate_datasets([loaded[split] for split in SPLITS if split in loaded])}
        if not row_format.keep_whole:
            for split, rows in loaded.items():
                loaded[split] = _select(rows, text_lengths(rows), left_out[split], _NO_TEXT)
        splits, division = hold_out(
            loaded,
            0 if self.whole else self.validation_fraction,
            0 if self.whole else self.test_fraction,
            self.seed,
            self.group_near_copies,
            keep_whole=row_format.keep_whole,
            compared=row_format.compared,
            classes=row_format.classes,
        )
        splits = {split: splits[split] for split in left_out if split in splits}
        if self.without is not None:
            for split in splits.keys() - {"train"}:
                splits[split] = self._unknown(splits[split], self.without, left_out[split])
        if row_format.max_examples is not None:
            first, rows = next(iter(splits.items()))
            drawn = np.random.default_rng(self.seed).permutation(len(rows))[: row_format.max_examples]
            is_drawn = np.isin(np.arange(len(rows)), drawn)
            splits[first] = _select(rows, is_drawn, left_out[first], "beyond max_examples")
        return splits, {"left_out": left_out, "division": division, **facts}

    def _unknown(
        self, rows: datasets.Dataset, known: UInt64[np.ndarray, " fingerprints"], left_out: dict[str, int]
    ) -> datasets.Dataset:
        """Return the rows with any unknown fingerprint or, if documents may be cut, the parts without known text."""
        if self.row_format.keep_whole:
            known_set = set(known.tolist())
            is_unknown = (not fingerprints(text) <= known_set for text in iterate_texts(self._compared(rows)))
            return _select(rows, is_unknown, left_out, _KNOWN)
        unknown = from_columns(text=(part for text in iterate_texts(rows) for part in cut_out(text, known)))
        cut = sum(map(len, iterate_texts(rows))) - sum(map(len, iterate_texts(unknown)))
        if cut:
            left_out[f"characters {_KNOWN}"] = cut
        return unknown

    def _compared(self, rows: datasets.Dataset) -> datasets.Dataset:
        """The columns whose texts are compared to decide whether two rows are copies."""
        return rows.select_columns(list(self.row_format.compared) or text_columns(rows))


def _select(
    rows: datasets.Dataset, is_kept: Iterable[object], left_out: dict[str, int], reason: str
) -> datasets.Dataset:
    """Return the rows that are kept; the number of the other rows is stored in `left_out` under the reason."""
    kept = np.flatnonzero(np.fromiter(map(bool, is_kept), bool, len(rows)))
    if len(kept) == len(rows):
        return rows  # remains a memory map without a table of indices
    left_out[reason] = len(rows) - len(kept)
    return rows.select(kept)


def _sample(rows: datasets.Dataset, texts_of: Callable[[datasets.Dataset], Iterable[str]]) -> list[str]:
    """Draw pieces of the rows' texts with a fixed seed; each has up to 4,096 characters and ends at white space."""
    generator = np.random.default_rng(0)
    texts = next(batches_of(texts_of(rows.select(generator.permutation(len(rows))[:_ROWS])), _READ))
    pieces = [piece for text in texts for piece in re.findall(r"(?s).{1,4096}(?=\s|\Z)|.{4096}", text)]
    return next(batches_of((pieces[i] for i in generator.permutation(len(pieces))), _DRAWN))


def lost_bytes(texts: Sequence[str], tokenizer: TextTokenizer) -> float:
    """The share of the bytes of texts that decode(encode(text)) does not reproduce, from 0 to 1.

    The loss of a text is the bag distance of its bytes (Bartolini et al. 2002), a linear-time lower bound of the edit
    distance: the number of missing or of added bytes, whichever is larger, and at least 1 if the texts differ. The sum
    is divided by the bytes of the longer text of each pair. A leading space is ignored: many tokenizers add one.
    """
    lost = total = 0
    for pair in zip(texts, map(tokenizer.decode, tokenizer.encode_batch(texts)), strict=True):
        before, after = (text.encode() for text in pair)
        if before not in (after, b" " + after) and after != b" " + before:
            missing, added = Counter(before) - Counter(after), Counter(after) - Counter(before)
            lost += max(missing.total(), added.total(), 1)
        total += max(len(before), len(after))
    return lost / max(total, 1)
