"""Random sequences that repeat themselves, to find induction heads with."""

import hashlib
import json
import string

import numpy as np
from jaxtyping import Bool, UInt8, UInt16

from tinyformer.data.masking import Masking
from tinyformer.data.module import TokenDataModule
from tinyformer.data.stream import TokenSplit
from tinyformer.data.tokenizer import TextTokenizer
from tinyformer.data.tokenizer_recipes import CharTokenizer
from tinyformer.errors import ArgumentError, require_at_least, require_at_most

SYMBOLS = string.ascii_lowercase + string.ascii_uppercase + string.digits + string.punctuation
"""The symbols of sequences; the first `num_symbols` of them are used."""

MAX_TOKENS = 2**26
"""In the sequences of a split, which are held in memory: drawing them takes up to 1 GB."""

_FORMAT = 1  # increase it when the same arguments would give other sequences


class InductionDataModule(TokenDataModule):
    """Sequences that repeat a random block: `<eos> b_1 … b_p b_1 … b_p b_1 …` (Olsson et al. 2022, arXiv 2209.11895).

    The symbols of a block are distinct and drawn uniformly, and its length p is drawn uniformly from a range. So all
    symbols are equally frequent, none predicts the next, and no fixed distance is right for all sequences: the next
    symbol can be predicted only from the one that followed the previous occurrence of the current symbol. A head that
    attends there is an induction head, which composes with a head of an earlier layer (Elhage et al. 2021, "A
    Mathematical Framework for Transformer Circuits").

    Only these predictable targets are scored: those whose input symbol has occurred before. The first symbol of the
    second period is not one of them, since the end of the block cannot be foreseen. Each sequence fills one window, and
    no sequence of the validation split is in the training split.

    Args:
        seq_len: tokens in a window, `<eos>` included.
        max_seq_len: the maximum length of the model.
        batch_size: sequences in a batch, on each device.
        num_symbols: number of different symbols.
        min_period: the smallest p.
        max_period: the largest p.
        num_sequences: number of training sequences; longer runs repeat them in another order.
        num_validation_sequences: number of validation sequences.
        tokenizer: has a token for each symbol, such as a checkpoint's; None: one with exactly these tokens.
        masking: not supported, since the task is to predict the next token.
        num_workers: see `TokenDataModule`.
        seed: determines the sequences and their order.

    Raises:
        ArgumentError: a number is out of range, or `masking` is given.
    """

    name = "induction"

    def __init__(
        self,
        seq_len: int,
        max_seq_len: int,
        batch_size: int,
        *,
        num_symbols: int,
        min_period: int,
        max_period: int,
        num_sequences: int,
        num_validation_sequences: int,
        tokenizer: TextTokenizer | None = None,
        masking: Masking | None = None,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        if masking is not None:
            reason = "a repeated block is seen from both sides; induction needs a model that predicts the next token"
            raise ArgumentError("masking", masking, reason)
        _check_periods(num_symbols, min_period, max_period)
        _check_length(seq_len, max_seq_len, max_period)
        examples = {"num_sequences": 65_536, "num_validation_sequences": 512}
        numbers = {"num_sequences": num_sequences, "num_validation_sequences": num_validation_sequences}
        require_at_least(1, examples, **numbers)
        require_at_most(MAX_TOKENS // seq_len, dict.fromkeys(numbers, MAX_TOKENS // seq_len), **numbers)
        super().__init__(seq_len, batch_size, "document", False, num_workers, seed)
        self._periods = min_period, max_period
        self._num_sequences = {"train": num_sequences, "validation": num_validation_sequences}
        self._symbols = SYMBOLS[:num_symbols]
        self.tokenizer = tokenizer or CharTokenizer().build([self._symbols])

    def prepare(self, whole: bool = False) -> None:
        """Draw the sequences; the same arguments give the same sequences.

        Args:
            whole: has no effect, since nothing is held out.

        Raises:
            ArgumentError: the tokenizer lacks a symbol, or there are too few different sequences.
        """
        symbol_ids = self._symbol_ids()
        drawn = {
            split: self._draw(np.random.default_rng((self.seed, stream)), number)
            for stream, (split, number) in enumerate(self._num_sequences.items())
        }
        seen = {row.tobytes() for row in drawn["train"][0]}
        symbols, scored = drawn["validation"]
        unseen = np.array([row.tobytes() not in seen for row in symbols])
        if not unseen.any():
            reason = (
                f"they include all {len(seen)} different sequences, so that none is left for validation; draw fewer, "
                "or increase `max_period`"
            )
            raise ArgumentError("num_sequences", self._num_sequences["train"], reason)
        drawn["validation"] = symbols[unseen], scored[unseen]
        self.splits = {split: self._split(symbol_ids[rows], scored) for split, (rows, scored) in drawn.items()}
        parts = [_FORMAT, self._symbols, self._periods, self._num_sequences, self.seq_len, self.seed]
        key = json.dumps([*parts, self.tokenizer.fingerprint])
        self.fingerprint = hashlib.sha256(key.encode()).hexdigest()

    def is_prepared(self, tokenizer: TextTokenizer, whole: bool = False) -> bool:
        """Whether the tokens are those of a given tokenizer; drawing the sequences takes no time."""
        return tokenizer.fingerprint == self.tokenizer.fingerprint

    def _draw(
        self, generator: np.random.Generator, number: int
    ) -> tuple[UInt8[np.ndarray, "sequences symbols"], Bool[np.ndarray, "sequences symbols"]]:
        """Sequences of symbol indices, and which of these are scored as targets."""
        smallest, largest = self._periods
        period = generator.integers(smallest, largest, (number, 1), endpoint=True)
        position = np.arange(self.seq_len - 1)  # <eos> comes before them
        alphabet = np.arange(len(self._symbols), dtype=np.uint8)
        blocks = generator.permuted(np.tile(alphabet, (number, 1)), axis=1)
        return np.take_along_axis(blocks, position % period, axis=1), position > period

    def _split(
        self, ids: UInt16[np.ndarray, "sequences symbols"], scored: Bool[np.ndarray, "sequences symbols"]
    ) -> TokenSplit:
        eos = ((0, 0), (1, 0))
        return TokenSplit(
            np.pad(ids, eos, constant_values=self.tokenizer.eos_id).ravel(),
            np.arange(len(ids) + 1) * self.seq_len,
            num_bytes=ids.size,  # SYMBOLS are ASCII
            num_characters=ids.size,
            num_unknown=0,
            scored=np.pad(scored, eos).ravel(),
        )

    def _symbol_ids(self) -> UInt16[np.ndarray, " symbols"]:
        """The token of each symbol.

        Raises:
            ArgumentError: a symbol has no token, as in the vocabulary of a text without it.
        """
        tokens = self.tokenizer.encode_batch(list(self._symbols))
        lacking = [
            symbol
            for symbol, ids in zip(self._symbols, tokens, strict=True)
            if len(ids) != 1 or ids == [self.tokenizer.unk_id]
        ]
        if lacking:
            reason = f"the tokenizer has no token for the symbols {' '.join(lacking)}"
            raise ArgumentError("num_symbols", len(self._symbols), reason)
        return np.array(tokens, np.uint16).ravel()


def _check_periods(num_symbols: int, smallest: int, largest: int) -> None:
    if not 1 <= num_symbols <= len(SYMBOLS):
        raise ArgumentError("num_symbols", num_symbols, f"must be from 1 to {len(SYMBOLS)}", {"num_symbols": 26})
    require_at_least(1, min_period=smallest)
    if largest < smallest:
        raise ArgumentError(
            "max_period", largest, f"must be at least `min_period`={smallest}", {"max_period": smallest}
        )
    if largest > num_symbols:
        reason = f"must be at most `num_symbols`={num_symbols}, since the symbols of a block are distinct"
        raise ArgumentError("max_period", largest, reason, {"max_period": num_symbols})


def _check_length(seq_len: int, max_seq_len: int, largest: int) -> None:
    needed = largest + 3  # <eos>, the block, and one repeated symbol as input and one as target
    if seq_len < needed:
        reason = f"must be at least {needed}, for a block of `max_period`={largest} and one scored repetition"
        raise ArgumentError("seq_len", seq_len, reason, {"seq_len": needed})
    if seq_len > max_seq_len:
        raise ArgumentError(
            "seq_len", seq_len, f"must be at most `max_seq_len`={max_seq_len}", {"seq_len": max_seq_len}
        )
