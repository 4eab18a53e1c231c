"""Generated sequences that repeat themselves: what induction heads are found with."""

import hashlib
import json
import string

import numpy as np
from jaxtyping import Bool, UInt8, UInt16

from tinyformer.data.base import TokenDataModule, require_at_least_one
from tinyformer.data.cache import TokenSplit
from tinyformer.data.masking import Masking
from tinyformer.data.tokenizer import TextTokenizer
from tinyformer.data.tokenizer_recipes import CharTokenizer

SYMBOLS = string.ascii_lowercase + string.ascii_uppercase + string.digits + string.punctuation
"""What sequences are written with; the first `num_symbols` of them."""

_FORMAT = 1  # raise it when the same arguments would give other sequences


class InductionDataModule(TokenDataModule):
    """Sequences that repeat a random block: `<eos> b_1 … b_p b_1 … b_p b_1 …` (Olsson et al. 2022, arXiv 2209.11895).

    The symbols of a block are distinct and drawn uniformly, its length p uniformly from a range. So no symbol is
    likelier than another, none always follows another, and no distance back is right for all sequences: what comes
    next is known only from what followed when the last symbol was there before. A head that looks it up is an
    induction head, and it needs a head of an earlier layer (Elhage et al. 2021, "A Mathematical Framework for
    Transformer Circuits").

    Only what can be known so is scored: targets whose input stands for the second time or later. The first symbol of
    the second period is not among them, since nothing says yet that the block has ended. Each sequence fills one
    window, and no sequence of the validation split is in the training split.

    Args:
        seq_len: Tokens in a window, `<eos>` included.
        max_seq_len: What the model can take.
        batch_size: Sequences in a batch, on each device.
        num_symbols: How many there are.
        min_period: The smallest p.
        max_period: The largest p.
        num_sequences: To train on; more steps go through them again, in another order.
        num_validation_sequences: To validate on.
        tokenizer: One that has a token for each symbol, such as that of a checkpoint; by default there is a token for
            each symbol and no other.
        masking: Refused: the task is to tell what follows.
        num_workers: See `TokenDataModule`.
        seed: Decides the sequences and their order.

    Raises:
        ValueError: If a number is not one that works.
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
            raise ValueError(
                "task=masked_lm: what repeats in data=induction is seen from both sides; task=causal_lm works."
            )
        _check_periods(num_symbols, min_period, max_period)
        _check_length(seq_len, max_seq_len, max_period)
        require_at_least_one("data.num_sequences", num_sequences, 65_536)
        require_at_least_one("data.num_validation_sequences", num_validation_sequences, 512)
        super().__init__(seq_len, batch_size, "document", False, num_workers, seed)
        self._periods = min_period, max_period
        self._num_sequences = {"train": num_sequences, "validation": num_validation_sequences}
        self._symbols = SYMBOLS[:num_symbols]
        self.tokenizer = tokenizer or CharTokenizer().build([self._symbols])

    def prepare(self, whole: bool = False) -> None:
        """Draws the sequences; they are the same for the same arguments.

        Args:
            whole: Changes nothing: nothing is held out of what is drawn.

        Raises:
            ValueError: If the tokenizer lacks a symbol, or there are too few different sequences.
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
            raise ValueError(
                f"data.num_sequences={len(seen)} different sequences leave none to validate on; "
                "fewer, or a larger data.max_period, works."
            )
        drawn["validation"] = symbols[unseen], scored[unseen]
        self.splits = {split: self._split(symbol_ids[rows], scored) for split, (rows, scored) in drawn.items()}
        parts = [_FORMAT, self._symbols, self._periods, self._num_sequences, self.seq_len, self.seed]
        key = json.dumps([*parts, self.tokenizer.fingerprint])
        self.fingerprint = hashlib.sha256(key.encode()).hexdigest()

    def is_prepared(self, tokenizer: TextTokenizer, whole: bool = False) -> bool:
        """Whether the tokens are those of a given tokenizer: the sequences are drawn in no time."""
        return tokenizer.fingerprint == self.tokenizer.fingerprint

    def _draw(
        self, generator: np.random.Generator, number: int
    ) -> tuple[UInt8[np.ndarray, "sequences symbols"], Bool[np.ndarray, "sequences symbols"]]:
        """Sequences, as numbers of symbols, and which of them are scored as targets."""
        smallest, largest = self._periods
        period = generator.integers(smallest, largest, (number, 1), endpoint=True)
        position = np.arange(self.seq_len - 1)  # <eos> stands before them
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
            ValueError: If one has none, as in the vocabulary of a text that lacks it.
        """
        tokens = self.tokenizer.encode_batch(list(self._symbols))
        lacking = [
            symbol
            for symbol, ids in zip(self._symbols, tokens, strict=True)
            if len(ids) != 1 or ids == [self.tokenizer.unk_id]
        ]
        if lacking:
            raise ValueError(
                f"data.num_symbols={len(self._symbols)}: the checkpoint's vocabulary has no token for "
                f"{' '.join(lacking)}; data=induction needs one for each of its symbols."
            )
        return np.array(tokens, np.uint16).ravel()


def _check_periods(num_symbols: int, smallest: int, largest: int) -> None:
    if not 1 <= num_symbols <= len(SYMBOLS):
        raise ValueError(
            f"data.num_symbols={num_symbols}: must be from 1 to {len(SYMBOLS)}; data.num_symbols=26 works."
        )
    require_at_least_one("data.min_period", smallest, 1)
    if largest < smallest:
        raise ValueError(
            f"data.max_period={largest} is less than data.min_period={smallest}; data.max_period={smallest} works."
        )
    if largest > num_symbols:
        raise ValueError(
            f"data.max_period={largest}: the symbols of a block are distinct, and there are only {num_symbols}; "
            f"data.max_period={num_symbols} works, or a larger data.num_symbols."
        )


def _check_length(seq_len: int, max_seq_len: int, largest: int) -> None:
    needed = largest + 3  # <eos>, the block, and the one symbol after it that is scored as an input and a target
    if seq_len < needed:
        raise ValueError(
            f"data.seq_len={seq_len}: a block of data.max_period={largest} and a repeat to score need {needed} tokens; "
            f"data.seq_len={needed} works."
        )
    if seq_len > max_seq_len:
        raise ValueError(
            f"data.seq_len={seq_len} is longer than model.max_seq_len={max_seq_len}; data.seq_len={max_seq_len} works."
        )
