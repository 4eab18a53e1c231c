"""Random sequences that repeat themselves, to find induction heads with."""

import string
from typing import Any

import numpy as np

from tinyformer.data.generated.module import Drawn, RandomDataModule, require_symbols
from tinyformer.errors import ArgumentError, require_at_least

SYMBOLS = string.ascii_lowercase + string.ascii_uppercase + string.digits + string.punctuation
"""The symbols of sequences; the first `num_symbols` of them are used."""

_FORMAT = 1  # increase it when the same arguments would give other sequences


class InductionDataModule(RandomDataModule):
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
        num_symbols: number of different symbols.
        min_period: the smallest p.
        max_period: the largest p.
        settings: further arguments of `RandomDataModule`.

    Raises:
        ArgumentError: a number is out of range, or `masking` is given.
    """

    name = "induction"

    def __init__(
        self,
        seq_len: int,
        *,
        num_symbols: int,
        min_period: int,
        max_period: int,
        **settings: Any,
    ) -> None:
        symbols, self._periods = require_symbols("num_symbols", num_symbols, SYMBOLS), (min_period, max_period)
        _check_periods(num_symbols, min_period, max_period)
        needed = max_period + 3  # <eos>, the block, and one repeated symbol as input and one as target
        if seq_len < needed:
            reason = f"must be at least {needed}, for a block of `max_period`={max_period} and one scored repetition"
            raise ArgumentError("seq_len", seq_len, reason, {"seq_len": needed})
        super().__init__(
            seq_len,
            symbols=symbols,
            identity=[self.name, _FORMAT, symbols, self._periods, seq_len],
            **settings,
        )

    def _draw(self, generator: np.random.Generator, number: int) -> Drawn:
        smallest, largest = self._periods
        period = generator.integers(smallest, largest, (number, 1), endpoint=True)
        position = np.arange(self.seq_len - 1)  # <eos> comes before them
        alphabet = np.arange(len(self._symbols), dtype=np.uint8)
        blocks = generator.permuted(np.tile(alphabet, (number, 1)), axis=1)
        return Drawn(np.take_along_axis(blocks, position % period, axis=1), position > period)


def _check_periods(num_symbols: int, smallest: int, largest: int) -> None:
    require_at_least(1, min_period=smallest)
    if largest < smallest:
        raise ArgumentError(
            "max_period", largest, f"must be at least `min_period`={smallest}", {"max_period": smallest}
        )
    if largest > num_symbols:
        reason = f"must be at most `num_symbols`={num_symbols}, since the symbols of a block are distinct"
        raise ArgumentError("max_period", largest, reason, {"max_period": num_symbols})
