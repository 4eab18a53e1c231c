"""Generated sequences: induction, associative recall, copying, Bigram-Backcopy, and addition modulo p."""

import itertools
import string
from typing import Any

import numpy as np

from tinyformer.data.batches.windows import Rows, Windows
from tinyformer.data.generated.module import (
    ABSENT,
    ALPHABET,
    Drawn,
    GeneratedDataModule,
    RandomDataModule,
    require_symbols,
)
from tinyformer.errors import ArgumentError

SYMBOLS = string.ascii_lowercase + string.ascii_uppercase + string.digits + string.punctuation
"""The symbols of induction; the first `num_symbols` of them are used."""

FILLER = "."
"""The filler symbol between the queries of `RecallDataModule`."""

COPY = "="
"""The symbol between a sequence and its copy."""

NUMBERS = string.digits + ALPHABET.replace(string.digits, "")
"""The symbols of the numbers 0, 1, 2 and so on."""


class InductionDataModule(RandomDataModule):
    """Sequences that repeat a random block: `<eos> b_1 … b_p b_1 … b_p b_1 …` (Olsson et al. 2022, arXiv 2209.11895).

    The symbols of a block are distinct and drawn uniformly, and its length p is drawn uniformly from a range. So all
    symbols are equally frequent, no symbol predicts the next, and no fixed distance is right for all sequences. The
    next symbol can be predicted only from the symbol that followed the previous occurrence of the current symbol. A
    head that attends to that symbol is an induction head, which composes with a head of an earlier layer (Elhage et al.
    2021, "A Mathematical Framework for Transformer Circuits").

    Only the predictable targets are scored, which are the targets whose input symbol has occurred before. The first
    symbol of the second block is not scored, since the end of the first block cannot be predicted.

    Args:
        seq_len: tokens in a window, `<eos>` included.
        min_period: the smallest p.
        max_period: the largest p.
        settings: further arguments of `RandomDataModule`.
    """

    name = "induction"

    def __init__(self, seq_len: int, *, num_symbols: int, min_period: int, max_period: int, **settings: Any) -> None:
        symbols, self._periods = require_symbols("num_symbols", num_symbols, SYMBOLS), (min_period, max_period)
        if not 1 <= min_period <= max_period <= num_symbols:
            reason = f"must be from `min_period`={min_period}, at least 1, to `num_symbols`={num_symbols}"
            raise ArgumentError("max_period", max_period, reason)
        needed = max_period + 3  # <eos>, the block, and one repeated symbol as input and one as target
        if seq_len < needed:
            reason = f"must be at least {needed}, for a block of `max_period`={max_period} and one scored repetition"
            raise ArgumentError("seq_len", seq_len, reason, {"seq_len": needed})
        super().__init__(seq_len, symbols=symbols, identity=[self._periods, seq_len], **settings)

    def _draw(self, generator: np.random.Generator, number: int) -> Drawn:
        smallest, largest = self._periods
        period = generator.integers(smallest, largest, (number, 1), endpoint=True)
        position = np.arange(self.seq_len - 1)  # <eos> comes before them
        alphabet = np.arange(len(self._symbols), dtype=np.uint8)
        blocks = generator.permuted(np.tile(alphabet, (number, 1)), axis=1)
        return Drawn(np.take_along_axis(blocks, position % period, axis=1), position > period)


class RecallDataModule(RandomDataModule):
    """Multi-query associative recall, MQAR: `<eos> k_1 v_1 … k_D v_D . . k_i v_i . . k_j v_j …`.

    From Arora et al. 2023 (arXiv 2312.04927). First come D pairs of a key and a value: the keys of a sequence are
    distinct, and its values are drawn independently of each other, each uniformly. Then every key is queried once, in
    random order and at random positions among fillers, and only the value that follows a query is a scored target. Keys
    and values are different symbols. Without the pairs, a guess is right in 1 / `num_values` of the cases.

    In the paper, the distance of a query from its pair follows a power law that favours short distances, and the value
    of a query is a target only. Here, all positions after the pairs are equally likely for a query, and its value is
    also the next input, which does not help with later queries, since each key is queried once.

    Args:
        seq_len: tokens in a window, `<eos>` included; at least 4 D + 1.
        num_pairs: D, the number of pairs, and of queries.
        settings: further arguments of `RandomDataModule`.
    """

    name, alphabet_argument = "recall", "num_keys"

    def __init__(
        self, seq_len: int, *, num_pairs: int, num_keys: int, num_values: int, fresh: bool = True, **settings: Any
    ) -> None:
        keys = require_symbols("num_keys", num_keys)
        symbols = keys + require_symbols("num_values", num_values, ALPHABET[num_keys:]) + FILLER
        if not 1 <= num_pairs <= num_keys:
            reason = f"must be from 1 to `num_keys`={num_keys}, since the keys of a sequence are distinct"
            raise ArgumentError("num_pairs", num_pairs, reason, {"num_pairs": num_keys})
        needed = 4 * num_pairs + 1  # <eos>, the pairs, and the same pairs again
        if seq_len < needed:
            reason = f"must be at least {needed}, for `num_pairs`={num_pairs} and as many queries"
            raise ArgumentError("seq_len", seq_len, reason, {"seq_len": needed})
        self._numbers = num_pairs, num_keys, num_values
        super().__init__(seq_len, symbols=symbols, identity=[self._numbers, seq_len], fresh=fresh, **settings)

    def _draw(self, generator: np.random.Generator, number: int) -> Drawn:
        num_pairs, num_keys, num_values = self._numbers
        num_slots = (self.seq_len - 1) // 2 - num_pairs  # of two tokens each, after the pairs
        keys = _distinct(generator, number, num_keys, num_pairs)
        values = num_keys + generator.integers(num_values, size=(number, num_pairs))
        slots = num_pairs + _distinct(generator, number, num_slots, num_pairs)
        symbols = np.full((number, self.seq_len - 1), num_keys + num_values, np.int16)  # fillers
        scored = np.zeros(symbols.shape, bool)
        for first in (np.arange(num_pairs)[None], slots):
            np.put_along_axis(symbols, 2 * first, keys, axis=1)
            np.put_along_axis(symbols, 2 * first + 1, values, axis=1)
        np.put_along_axis(scored, 2 * slots + 1, True, axis=1)
        return Drawn(symbols, scored)


def _distinct(generator: np.random.Generator, number: int, population: int, chosen: int) -> np.ndarray:
    """In each of `number` rows, `chosen` distinct numbers below `population` in random order."""
    return generator.random((number, population)).argsort(axis=1)[:, :chosen]


class CopyDataModule(RandomDataModule):
    """Copying: `<eos> s_1 … s_n = s_1 … s_n`, with longer sequences in the test split than in training.

    The symbols are drawn independently and uniformly, so that they may repeat. The length n is drawn uniformly: from
    `min_length` to `max_length` for training and validation, from `max_length` + 1 to `max_test_length` for testing.
    Kazemnejad et al. 2023 (arXiv 2305.19466) compare positional encodings by how well a model copies sequences longer
    than those that it was trained on. Their sequences are words, and they score whole copies; here every symbol of the
    copy is a scored target. A guess is right in 1 / `num_symbols` of the cases.

    Each sequence fills one window, padded on the right. Windows of the test split are longer than training windows, and
    must not be longer than `max_seq_len`.

    Args:
        max_seq_len: the maximum length of the model.
        min_length: the smallest n.
        max_length: the largest n in training and validation.
        max_test_length: the largest n in the test split, which is as large as the validation split.
        settings: further arguments of `RandomDataModule`.
    """

    name = "copy"

    def __init__(
        self,
        max_seq_len: int,
        *,
        num_symbols: int,
        min_length: int,
        max_length: int,
        max_test_length: int,
        fresh: bool = True,
        **settings: Any,
    ) -> None:
        symbols = require_symbols("num_symbols", num_symbols) + COPY
        if not 1 <= min_length <= max_length < max_test_length:
            reason = f"must be below `max_test_length`={max_test_length}, and at least `min_length`={min_length}"
            raise ArgumentError("max_length", max_length, reason)
        seq_len, self._test_seq_len = 2 * max_length + 2, 2 * max_test_length + 2  # <eos>, s, the separator and s
        if self._test_seq_len > max_seq_len:
            reason = f"makes {self._test_seq_len} tokens, more than `max_seq_len`={max_seq_len}"
            works = {"max_seq_len": self._test_seq_len}
            raise ArgumentError("max_test_length", max_test_length, reason, works)
        self._lengths = {"train": (min_length, max_length), "test": (max_length + 1, max_test_length)}
        settings |= {"max_seq_len": max_seq_len, "fresh": fresh}
        super().__init__(seq_len, symbols=symbols, identity=[self._lengths], **settings)

    def _make(self) -> dict[str, Drawn]:
        generator = np.random.default_rng((self.split_seed, len(self._num_sequences)))
        test = self._of_lengths(generator, self._num_sequences["validation"], *self._lengths["test"])
        return super()._make() | {"test": test}

    def _draw(self, generator: np.random.Generator, number: int) -> Drawn:
        return self._of_lengths(generator, number, *self._lengths["train"])

    def _of_lengths(self, generator: np.random.Generator, number: int, smallest: int, largest: int) -> Drawn:
        separator = len(self._symbols) - 1
        length = generator.integers(smallest, largest, (number, 1), endpoint=True)
        drawn = generator.integers(separator, size=(number, largest))
        position = np.arange(2 * largest + 1)[None]
        original = np.where(position < length, position, position - length - 1).clip(0, largest - 1)
        symbols = np.take_along_axis(drawn, original, axis=1)
        symbols = np.where(position == length, separator, symbols)
        scored = (position > length) & (position <= 2 * length)
        return Drawn(np.where(position <= 2 * length, symbols, ABSENT), scored)

    def _rows(self, split: str) -> Rows:
        return Windows(self.splits[split], self._test_seq_len if split == "test" else self.seq_len, "document")


class BigramBackcopyDataModule(RandomDataModule):
    """Bigram-Backcopy: `<eos> s_1 … s_n`, s_{i+1} = s_{i-1} after a trigger s_i (Guo et al. 2024, arXiv 2410.13835).

    After any other symbol, the next symbol is drawn from a distribution that depends on this symbol alone. So attention
    helps only after triggers: elsewhere, a head should add nothing, and comes to attend to the first token. A sequence
    does not begin with a trigger. Every symbol is a scored target, so that what a head adds elsewhere has a cost.

    In the paper, the distributions are frequencies of pairs of characters in a text, and the most frequent characters
    are triggers. Here, the distributions are drawn from a Dirichlet distribution, and the first symbols are triggers.

    Args:
        seq_len: tokens in a window, `<eos>` included.
        num_triggers: number of triggers, the first of the symbols.
        settings: further arguments of `RandomDataModule`.
    """

    name = "bigram_backcopy"

    def __init__(
        self, seq_len: int, *, num_symbols: int, num_triggers: int, fresh: bool = True, **settings: Any
    ) -> None:
        symbols, self._num_triggers = require_symbols("num_symbols", num_symbols), num_triggers
        if not 1 <= num_triggers < num_symbols:
            reason = f"must be at least 1, and below `num_symbols`={num_symbols}"
            raise ArgumentError("num_triggers", num_triggers, reason, {"num_triggers": 1})
        super().__init__(seq_len, symbols=symbols, identity=[num_triggers, seq_len], fresh=fresh, **settings)
        generator = np.random.default_rng((self.split_seed, len(self._num_sequences)))
        self._cumulative = generator.dirichlet(np.full(num_symbols, 0.1), num_symbols).cumsum(axis=1)[:, :-1]

    def _draw(self, generator: np.random.Generator, number: int) -> Drawn:
        symbols = np.zeros((number, self.seq_len - 1), np.int16)
        symbols[:, 0] = generator.integers(self._num_triggers, len(self._symbols), number)
        for at in range(1, self.seq_len - 1):
            last = symbols[:, at - 1]
            following = (generator.random((number, 1)) > self._cumulative[last]).sum(axis=1)
            symbols[:, at] = np.where(last < self._num_triggers, symbols[:, at - 2], following)
        return Drawn(symbols, np.ones(symbols.shape, bool))


class ModularAdditionDataModule(GeneratedDataModule):
    """Addition modulo p: `<eos> a + b = c` with c = (a + b) mod p, for all p² pairs of a and b.

    A random fraction of the table is the training split and the rest the validation split, which a model that only
    memorises sums cannot predict. Power et al. 2022 (arXiv 2201.02177) found that with weight decay a model learns to
    add long after it has memorised the training split ("grokking"); Nanda et al. 2023 (arXiv 2301.05217) show how it
    adds. Each number is one symbol, and c is the only scored target; a guess is right in 1 / p of the cases.

    Args:
        modulus: p, which need not be a prime number.
        train_fraction: fraction of the table that is for training; `split_seed` determines which sums.
        settings: further arguments of `GeneratedDataModule`.
    """

    name, alphabet_argument = "modular_addition", "modulus"

    def __init__(self, *, modulus: int = 59, train_fraction: float = 0.5, **settings: Any) -> None:
        symbols = require_symbols("modulus", modulus, NUMBERS, smallest=2) + "+="
        self._modulus, self._num_training = modulus, round(train_fraction * modulus**2)
        if not 0 < self._num_training < modulus**2:
            reason = "must be between 0 and 1, and leave sums both for training and for validation"
            raise ArgumentError("train_fraction", train_fraction, reason, {"train_fraction": 0.5})
        seq_len = 6  # <eos> a + b = c
        super().__init__(seq_len, symbols=symbols, identity=[self._num_training], **settings)

    def _make(self) -> dict[str, Drawn]:
        p = self._modulus
        table = np.array([(a, p, b, p + 1, (a + b) % p) for a, b in itertools.product(range(p), repeat=2)], np.int16)
        table = np.random.default_rng(self.split_seed).permutation(table)
        drawn = Drawn(table, np.broadcast_to(np.arange(5) == 4, table.shape))
        first = np.arange(len(table)) < self._num_training
        return {"train": drawn.rows(first), "validation": drawn.rows(~first)}
