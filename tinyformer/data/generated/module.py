"""Base classes of the data modules that generate sequences of symbols."""

import hashlib
import json
import string
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, UInt16

from tinyformer.data.batches.loader import EpochLoader
from tinyformer.data.batches.masking import Masking
from tinyformer.data.module import DataModule
from tinyformer.data.row_format import WindowFormat
from tinyformer.data.stream import TokenSplit
from tinyformer.data.tokenizer.recipes import CharTokenizer
from tinyformer.data.tokenizer.tokenizer import TextTokenizer
from tinyformer.errors import ArgumentError, require_at_least

ALPHABET = string.ascii_letters + string.digits + "".join(map(chr, range(0x100, 0x250)))
"""398 symbols without punctuation: ASCII's letters and digits, and the letters of Latin Extended-A and -B."""

ABSENT = -1
"""The value in place of a symbol's index after the end of a sequence."""

_FORMAT = 1  # increase it when the same arguments would give other sequences


class Drawn(NamedTuple):
    """Sequences of symbols as indices (`ABSENT` after the end), and flags for the symbols that are scored targets."""

    symbols: Int[np.ndarray, "sequences symbols"]
    scored: Bool[np.ndarray, "sequences symbols"]

    def rows(self, chosen: Bool[np.ndarray, " sequences"]) -> "Drawn":
        return Drawn(self.symbols[chosen], self.scored[chosen])

    def hashable(self) -> list[bytes]:
        return [row.tobytes() for row in self.symbols]


class GeneratedDataModule(DataModule):
    """Sequences of symbols that a program makes, `<eos> s_1 … s_n`, each of which fills one window.

    Loss and accuracy are computed from the scored targets alone. A subclass makes the sequences in `_make`, and scores
    the targets that the sequence determines, or all.

    Args:
        seq_len: tokens in a window, `<eos>` included.
        max_seq_len: the maximum length of the model.
        symbols: the alphabet: one character each, or words if `tokenizer` has a token for each word.
        identity: JSON values for the fingerprint: all that determines the sequences, except `symbols` and `split_seed`.
        tokenizer: a tokenizer with a token for each symbol, such as a checkpoint's; None: a new tokenizer is made.
        masking: not supported, since the task is to predict the next token.
        split_seed: determines the sequences.
        settings: further arguments of `DataModule`; `seed` determines the order of the sequences.
    """

    alphabet_argument = "num_symbols"  # the argument that determines the number of symbols

    def __init__(
        self,
        seq_len: int,
        max_seq_len: int,
        batch_size: int,
        *,
        symbols: Sequence[str],
        identity: list[Any],
        tokenizer: TextTokenizer | None = None,
        masking: Masking | None = None,
        split_seed: int = 0,
        **settings: Any,
    ) -> None:
        if masking is not None:
            reason = f"the sequences are predicted from left to right; {self.name} needs a causal language model"
            raise ArgumentError("masking", masking, reason)
        if seq_len > max_seq_len:
            reason = f"must be at least {seq_len}, the length of a sequence"
            raise ArgumentError("max_seq_len", max_seq_len, reason, {"max_seq_len": seq_len})
        super().__init__(WindowFormat(seq_len, "document"), batch_size, split_seed=split_seed, **settings)
        self.document = "sequence"
        self._symbols, self._identity = symbols, [self.name, _FORMAT, symbols, *identity, split_seed]
        self.tokenizer = tokenizer or CharTokenizer().build(symbols)

    @abstractmethod
    def _make(self) -> dict[str, Drawn]:
        """The sequences of each split; the same arguments give the same sequences."""

    def prepare(self, whole: bool = False) -> None:
        """Make the sequences; `whole` has no effect, since nothing is held out."""
        self._ids = self._symbol_ids()
        self.splits = {split: self._tokens(drawn) for split, drawn in self._make().items()}
        self.fingerprint = hashlib.sha256(f"{self.content} {self.tokenizer.fingerprint}".encode()).hexdigest()

    @property
    def content(self) -> str:
        return hashlib.sha256(json.dumps(self._identity).encode()).hexdigest()

    def is_prepared(self, tokenizer: TextTokenizer, whole: bool = False) -> bool:
        return tokenizer.fingerprint == self.tokenizer.fingerprint

    def _tokens(self, drawn: Drawn) -> TokenSplit:
        symbols = np.pad(drawn.symbols.astype(np.int16), ((0, 0), (1, 0)))
        present, scored = symbols != ABSENT, np.pad(drawn.scored, ((0, 0), (1, 0)))
        ids = self._ids[symbols]
        ids[:, 0] = self.tokenizer.eos_id
        lengths = present.sum(axis=1)
        sizes = np.array([len(symbol.encode()) for symbol in self._symbols])
        return TokenSplit(
            ids[present],
            np.concatenate([[0], lengths.cumsum()]),
            num_bytes=int(sizes[drawn.symbols[drawn.symbols != ABSENT]].sum()),
            num_characters=int((lengths - 1).sum()),
            num_unknown=0,
            lost_bytes=0.0,
            scored=scored[present],
        )

    def _symbol_ids(self) -> UInt16[np.ndarray, " symbols"]:
        """The token id of each symbol; a symbol without a token, as in the tokenizer of another text, is an error."""
        tokens = dict(zip(self._symbols, self.tokenizer.encode_batch(list(self._symbols)), strict=True))
        lacking = [symbol for symbol, ids in tokens.items() if len(ids) != 1 or ids == [self.tokenizer.unk_id]]
        if lacking:
            reason = f"the tokenizer has no token for the symbols {' '.join(lacking)}"
            raise ArgumentError(self.alphabet_argument, len(self._symbols), reason)
        return np.array([*tokens.values()], np.uint16).ravel()


class RandomDataModule(GeneratedDataModule):
    """Random sequences for training and validation; the training sequences may be new in each epoch.

    No sequence of the validation split is trained on. A subclass draws the sequences in `_draw`.

    Args:
        num_sequences: number of training sequences in an epoch.
        fresh: whether each epoch has new training sequences; otherwise, epochs repeat them in another order.
        settings: further arguments of `GeneratedDataModule`.
    """

    def __init__(
        self,
        seq_len: int,
        *,
        num_sequences: int,
        num_validation_sequences: int,
        fresh: bool = False,
        identity: list[Any],
        **settings: Any,
    ) -> None:
        numbers = {"num_sequences": num_sequences, "num_validation_sequences": num_validation_sequences}
        require_at_least(1, {"num_sequences": 65_536, "num_validation_sequences": 512}, **numbers)
        self._num_sequences = {"train": num_sequences, "validation": num_validation_sequences}
        super().__init__(seq_len, identity=[*identity, self._num_sequences, fresh], **settings)
        self._fresh = fresh

    @abstractmethod
    def _draw(self, generator: np.random.Generator, number: int) -> Drawn:
        """Draw `number` independent sequences."""

    def _make(self) -> dict[str, Drawn]:
        drawn = {
            split: self._draw(np.random.default_rng((self.split_seed, stream)), number)
            for stream, (split, number) in enumerate(self._num_sequences.items())
        }
        seen = set(drawn["train"].hashable())
        is_unseen = [key not in seen for key in drawn["validation"].hashable()]
        if not any(is_unseen):
            reason = f"the {len(seen)} different training sequences include every validation sequence; "
            reason += "draw fewer sequences, or use more symbols"
            raise ArgumentError("num_sequences", self._num_sequences["train"], reason)
        drawn["validation"] = drawn["validation"].rows(np.array(is_unseen))
        self._held_out = set(drawn["validation"].hashable())
        return drawn

    def _training_loader(self, **settings: Any) -> EpochLoader:
        return super()._training_loader(split_of=self._split_of if self._fresh else None, **settings)

    def _split_of(self, epoch: int) -> TokenSplit:
        """The training sequences of an epoch."""
        if epoch == 0:
            return self.splits["train"]
        generator = np.random.default_rng((self.split_seed, 0, epoch))
        drawn = self._draw(generator, self._num_sequences["train"])
        while True:  # this ends, since the sequences of the first epoch are not held out
            held_out = np.array([key in self._held_out for key in drawn.hashable()])
            if not held_out.any():
                return self._tokens(drawn)
            for old, new in zip(drawn, self._draw(generator, int(held_out.sum())), strict=True):
                old[held_out] = new


def require_symbols(name: str, number: int, alphabet: str = ALPHABET, smallest: int = 1) -> str:
    """The first `number` symbols of an alphabet; an error about an invalid number names the argument `name`."""
    if not smallest <= number <= len(alphabet):
        raise ArgumentError(name, number, f"must be from {smallest} to {len(alphabet)}", {name: min(26, len(alphabet))})
    return alphabet[:number]
