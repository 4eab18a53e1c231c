"""Tokenised text in the cache folder, built once for each combination of source, tokenizer and settings."""

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import datasets

from tinyformer.data.documents import iterate_texts
from tinyformer.data.sources import SPLITS, Source
from tinyformer.data.splits import hold_out
from tinyformer.data.storage import build_once, default_cache_dir, open_intact
from tinyformer.data.stream import TokenSplit, open_split, with_progress, write_split
from tinyformer.data.tokenizer import TextTokenizer
from tinyformer.data.tokenizer_recipes import TokenizerRecipe
from tinyformer.errors import argument_path

_FORMAT = 2  # increase it when the same input would give other files

Prepared = TypeVar("Prepared")


@dataclass(frozen=True)
class Recipe(ABC, Generic[Prepared]):
    """Everything that determines the tokenised splits of a source.

    Args:
        source: where the text comes from.
        tokenizer: built on the training documents, or a finished tokenizer.
        validation_fraction: see `hold_out`.
        test_fraction: see `hold_out`.
        seed: see `hold_out`.
        group_near_copies: see `hold_out`.
        whole: hold nothing out; the documents of all the source's splits are one split "all".
    """

    source: Source
    tokenizer: TokenizerRecipe
    validation_fraction: float = 0.0
    test_fraction: float = 0.0
    seed: int = 0
    group_near_copies: bool = False
    whole: bool = False

    @cached_property
    def key(self) -> str:
        """SHA-256 of everything that determines the splits."""
        return hashlib.sha256(json.dumps(self._parts()).encode()).hexdigest()

    def prepare(self, cache_dir: str | Path | None = None) -> Prepared:
        """Tokenise the splits, or open what an earlier call (of any process) left in the cache folder.

        Raises:
            ArgumentError: the source or the tokenizer cannot be read.
        """
        return build_once(self._folder(cache_dir), self._open, self._build)

    def open(self, cache_dir: str | Path | None = None) -> Prepared | None:
        """What `prepare` left in the cache folder; None if it is missing, incomplete or damaged."""
        return open_intact(self._folder(cache_dir), self._open)

    def division(self, cache_dir: str | Path | None = None) -> str | None:
        """The phrase of `hold_out` about what `prepare` left in the cache folder."""
        return json.loads((self._folder(cache_dir) / "meta.json").read_text())["division"]

    def _folder(self, cache_dir: str | Path | None) -> Path:
        parent = default_cache_dir() if cache_dir is None else Path(cache_dir)
        source = self.source.name.replace("/", "-")  # it may come from a file, and must not lead out of the folder
        return parent / f"{source}-{self.tokenizer.name}-{self.key[:12]}"

    def _parts(self) -> list[Any]:
        with argument_path("source"):
            source = self.source.fingerprint()
        with argument_path("tokenizer"):
            tokenizer = self.tokenizer.key()
        return [
            *(_FORMAT, source, tokenizer),
            *(self.validation_fraction, self.test_fraction, self.seed, self.group_near_copies),
        ]

    def _divide(self, own: dict[str, datasets.Dataset], **how: Any) -> tuple[dict[str, datasets.Dataset], str | None]:
        """The splits to tokenise, the first of them the training split, or "all"; and a phrase, see `hold_out`.

        Args:
            own: the source's splits.
            how: further arguments of `hold_out`.
        """
        if self.whole:
            return {"all": datasets.concatenate_datasets([own[split] for split in SPLITS if split in own])}, None
        fractions = self.validation_fraction, self.test_fraction
        splits, division = hold_out(own, *fractions, self.seed, self.group_near_copies, **how)
        return {split: splits[split] for split in SPLITS if split in splits}, division

    def _open(self, folder: Path) -> Prepared | None:
        """None if the folder's contents are incomplete."""
        try:
            meta = json.loads((folder / "meta.json").read_text())
            if not meta["splits"].keys() & {"train", "all"}:
                return None
            meta.pop("division")
            splits = {name: open_split(folder, name, counts) for name, counts in meta.pop("splits").items()}
            tokenizer = TextTokenizer.from_json((folder / "tokenizer.json").read_text())
            return self._prepared(folder, tokenizer, splits, meta)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, RecursionError):
            return None

    @abstractmethod
    def _prepared(
        self, folder: Path, tokenizer: TextTokenizer, splits: dict[str, TokenSplit], meta: dict[str, Any]
    ) -> Prepared:
        """The folder's contents; `meta` is what `write_meta` stored beside the counts."""

    @abstractmethod
    def _build(self, folder: Path) -> None:
        """Tokenise the source into a folder that does not exist."""


def write_meta(folder: Path, tokenizer: TextTokenizer, counts: dict[str, dict[str, int]], **meta: Any) -> None:
    """Write the tokenizer, the counts of the splits and further facts."""
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    (folder / "meta.json").write_text(json.dumps({**meta, "splits": counts}, indent=1))


@dataclass(frozen=True)
class PreparedText:
    """Tokenised text, opened.

    Attributes:
        tokenizer: the tokenizer of all splits.
        splits: by name.
        fingerprint: `TextRecipe.key`.
        own_validation: whether the source has a validation split of its own.
        folder: where the files are.
    """

    tokenizer: TextTokenizer
    splits: dict[str, TokenSplit]
    fingerprint: str
    own_validation: bool
    folder: Path


@dataclass(frozen=True)
class TextRecipe(Recipe[PreparedText]):
    """Everything that determines the token streams of a source.

    Args:
        max_tokens: upper bound on the scored tokens of the first split (the training split, or "all").
    """

    max_tokens: int | None = None

    def _parts(self) -> list[Any]:
        return [*super()._parts(), self.max_tokens, self.whole]

    def _prepared(
        self, folder: Path, tokenizer: TextTokenizer, splits: dict[str, TokenSplit], meta: dict[str, Any]
    ) -> PreparedText:
        return PreparedText(tokenizer, splits, self.key, meta["own_validation"], folder)

    def _build(self, folder: Path) -> None:
        with argument_path("source"):
            own = self.source.load(self._max_characters())
        splits, division = self._divide(own)
        with argument_path("tokenizer"):
            tokenizer = self.tokenizer.build(iterate_texts(next(iter(splits.values()))))
        folder.mkdir()
        counts, limit = {}, self.max_tokens
        for name, rows in splits.items():
            texts = filter(None, with_progress(iterate_texts(rows), len(rows), name))
            counts[name] = write_split(texts, tokenizer, folder, name, limit)
            limit = None  # which bounds the first split only
        write_meta(folder, tokenizer, counts, division=division, own_validation="validation" in own)

    def _max_characters(self) -> int | None:
        """Upper bound on the characters that `max_tokens` need, what is held out included."""
        if self.max_tokens is None:
            return None
        training_share = 1 - self.validation_fraction - self.test_fraction
        return int(self.max_tokens * self.tokenizer.characters_per_token / training_share) + 1
