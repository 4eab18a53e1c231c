"""Associative recall with several queries: pairs of a key and a value, then the keys again."""

from typing import Any

import numpy as np

from tinyformer.data.generated.module import ALPHABET, Drawn, RandomDataModule, require_symbols
from tinyformer.errors import ArgumentError, require_at_least

FILLER = "."
"""The symbol between queries."""

_FORMAT = 1  # increase it when the same arguments would give other sequences


class RecallDataModule(RandomDataModule):
    """Multi-query associative recall, MQAR: `<eos> k_1 v_1 … k_D v_D . . k_i v_i . . k_j v_j …`.

    From Arora et al. 2023 (arXiv 2312.04927). First come D pairs of a key and a value: the keys of a sequence are
    distinct, and its values are drawn independently of each other, each uniformly. Then every key is queried once, in
    random order and at random places among fillers, and the value that follows is the only target that is scored. Keys
    and values are different symbols. Without the pairs, a guess is right in 1 / `num_values` of the cases.

    In the paper, the distance of a query from its pair follows a power law that favours short distances, and its value
    is not an input of later positions. Here, queries are anywhere after the pairs with the same probability, and as
    each key is queried once, values among the inputs do not help with later queries.

    Args:
        seq_len: tokens in a window, `<eos>` included; at least 4 D + 1.
        num_pairs: D, the number of pairs, and of queries.
        num_keys: number of different keys.
        num_values: number of different values.
        fresh: whether each epoch has training sequences of its own.
        settings: further arguments of `RandomDataModule`.

    Raises:
        ArgumentError: a number is out of range, or `masking` is given.
    """

    name, alphabet_argument = "recall", "num_keys"

    def __init__(
        self,
        seq_len: int,
        *,
        num_pairs: int,
        num_keys: int,
        num_values: int,
        fresh: bool = True,
        **settings: Any,
    ) -> None:
        keys = require_symbols("num_keys", num_keys)
        symbols = keys + require_symbols("num_values", num_values, ALPHABET[num_keys:]) + FILLER
        require_at_least(1, num_pairs=num_pairs)
        if num_pairs > num_keys:
            reason = f"must be at most `num_keys`={num_keys}, since the keys of a sequence are distinct"
            raise ArgumentError("num_pairs", num_pairs, reason, {"num_pairs": num_keys})
        needed = 4 * num_pairs + 1  # <eos>, the pairs, and the same pairs again
        if seq_len < needed:
            reason = f"must be at least {needed}, for `num_pairs`={num_pairs} and as many queries"
            raise ArgumentError("seq_len", seq_len, reason, {"seq_len": needed})
        self._numbers = num_pairs, num_keys, num_values
        super().__init__(
            seq_len,
            symbols=symbols,
            identity=[self.name, _FORMAT, symbols, self._numbers, seq_len],
            fresh=fresh,
            **settings,
        )

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
