"""Recipes that build a tokenizer: from the training text, from a file, or from the Hub."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol, runtime_checkable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tinyformer.data.sources import hub
from tinyformer.data.tokenizer.tokenizer import BYTE_OF, EOS, UNK, TextTokenizer
from tinyformer.errors import ArgumentError


@runtime_checkable
class TokenizerRecipe(Protocol):
    """A way to build a tokenizer.

    Attributes:
        name: a short name, for folder names.
        characters_per_token: an upper bound on the mean number of characters per token.
    """

    @property
    def name(self) -> str: ...

    @property
    def characters_per_token(self) -> int: ...

    def key(self) -> str:
        """A string that, with the texts that `build` receives, identifies the tokenizer."""
        ...

    def build(self, texts: Iterable[str]) -> TextTokenizer:
        """Build the tokenizer; `texts` are the training documents, unused by recipes that load a finished tokenizer."""
        ...


class _Learned:
    def key(self) -> str:
        return repr(self)


@dataclass(frozen=True)
class CharTokenizer(_Learned):
    """A token for each character of the training documents; any other character becomes `<unk>`."""

    name = "char"
    characters_per_token = 1

    def build(self, texts: Iterable[str]) -> TextTokenizer:
        """Build a tokenizer with a token for each character of `texts`, sorted by code point."""
        characters: set[str] = set()
        for text in texts:
            characters.update(text)
        vocabulary = {token: i for i, token in enumerate([UNK, EOS, *sorted(characters)])}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNK, fuse_unk=False))
        tokenizer.decoder = decoders.Fuse()
        tokenizer.add_special_tokens([EOS])
        return TextTokenizer(tokenizer, EOS)


@dataclass(frozen=True)
class ByteTokenizer(_Learned):
    """A token for each of the 256 bytes of UTF-8, whose id is the byte's value, and `<eos>`."""

    name = "byte"
    characters_per_token = 1

    def build(self, texts: Iterable[str]) -> TextTokenizer:
        tokenizer = Tokenizer(models.BPE(vocab=dict(BYTE_OF), merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([EOS])
        return TextTokenizer(tokenizer, EOS)


@dataclass(frozen=True)
class BPETokenizer(_Learned):
    """Byte-level byte-pair encoding, learned on the training documents.

    Sennrich et al. 2016, arXiv 1508.07909; on bytes: Radford et al. 2019 (GPT-2).

    Args:
        vocab_size: maximum number of tokens, including `<eos>` and the 256 bytes; little text gives fewer tokens.
    """

    vocab_size: int = 2048
    name = "bpe"
    characters_per_token = 8

    def __post_init__(self) -> None:
        if self.vocab_size < 257:
            reason = "must be at least 257, for the 256 bytes and <eos>"
            raise ArgumentError("vocab_size", self.vocab_size, reason, {"vocab_size": 2048})

    def build(self, texts: Iterable[str]) -> TextTokenizer:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size, special_tokens=[EOS], initial_alphabet=sorted(BYTE_OF), show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        return TextTokenizer(tokenizer, EOS)


@dataclass(frozen=True)
class TokenizerFile:
    """The tokenizer in a `tokenizer.json`."""

    path: str
    eos_token: str | None = None  # see `TextTokenizer`
    characters_per_token = 8

    @property
    def name(self) -> str:
        return "file"

    def _file(self) -> Path:
        return Path(self.path)

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        file = self._file()
        if not file.is_file():
            raise ArgumentError("path", self.path, "the file does not exist; name a tokenizer.json")
        try:
            tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises plain Exception
            reason = f"not a tokenizer.json of the library tokenizers ({error})"
            raise ArgumentError("path", self.path, reason) from error
        return TextTokenizer(tokenizer, self.eos_token)

    def key(self) -> str:
        """The tokenizer's fingerprint, which does not depend on the path of its file."""
        return self._tokenizer.fingerprint

    def build(self, texts: Iterable[str]) -> TextTokenizer:
        return self._tokenizer


@dataclass(frozen=True)
class HubTokenizer(TokenizerFile):
    """The `tokenizer.json` of a model on the Hugging Face Hub, downloaded once."""

    path: str = "openai-community/gpt2"  # the repository, "owner/name"

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1]

    def _file(self) -> Path:
        return hub.model_file(self.path, "tokenizer.json")
