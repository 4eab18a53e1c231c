"""Sequences to copy, longer ones in the test split than in training."""

from typing import Any

import numpy as np

from tinyformer.data.batches.windows import Windows
from tinyformer.data.generated.module import ABSENT, Drawn, RandomDataModule, require_symbols
from tinyformer.errors import ArgumentError, require_at_least

COPY = "="
"""The symbol between a sequence and its copy."""

_FORMAT = 1  # increase it when the same arguments would give other sequences


class CopyDataModule(RandomDataModule):
    """Copying: `<eos> s_1 … s_n = s_1 … s_n`, with longer sequences in the test split than in training.

    The symbols are drawn independently and uniformly, so that they repeat, and the length n uniformly: from
    `min_length` to `max_length` for training and validation, from `max_length` + 1 to `max_test_length` for testing.
    Kazemnejad et al. 2023 (arXiv 2305.19466) compare positional encodings by how well a model copies sequences longer
    than those that it was trained on. Their sequences are words, and they score whole copies; here every symbol of the
    copy is a scored target. A guess is right in 1 / `num_symbols` of the cases.

    Each sequence fills one window, padded on the right. Windows of the test split are longer than those of training;
    `max_seq_len` has to hold them.

    Args:
        max_seq_len: the maximum length of the model.
        num_symbols: number of different symbols.
        min_length: the smallest n.
        max_length: the largest n in training and validation.
        max_test_length: the largest n in the test split.
        fresh: whether each epoch has training sequences of its own.
        settings: further arguments of `RandomDataModule`; the test split is as large as the validation split.

    Raises:
        ArgumentError: a number is out of range, or `masking` is given.
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
        require_at_least(1, min_length=min_length)
        if max_length < min_length:
            works = {"max_length": min_length}
            raise ArgumentError("max_length", max_length, f"must be at least `min_length`={min_length}", works)
        if max_test_length <= max_length:
            works = {"max_test_length": 2 * max_length}
            reason = f"must be above `max_length`={max_length}, for sequences longer than those of training"
            raise ArgumentError("max_test_length", max_test_length, reason, works)
        self._test_seq_len = _num_tokens(max_test_length)
        if self._test_seq_len > max_seq_len:
            reason = f"makes {self._test_seq_len} tokens, more than `max_seq_len`={max_seq_len}"
            works = {"max_seq_len": self._test_seq_len}
            raise ArgumentError("max_test_length", max_test_length, reason, works)
        self._lengths = {"train": (min_length, max_length), "test": (max_length + 1, max_test_length)}
        super().__init__(
            _num_tokens(max_length),
            max_seq_len=max_seq_len,
            symbols=symbols,
            identity=[self.name, _FORMAT, symbols, self._lengths],
            fresh=fresh,
            **settings,
        )

    def _make(self) -> dict[str, Drawn]:
        number, stream = self._num_sequences["validation"], len(self._num_sequences)
        generator = np.random.default_rng((self.split_seed, stream))
        return super()._make() | {"test": self._of_lengths(generator, number, *self._lengths["test"])}

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

    def _rows(self, split: str) -> Windows:
        return Windows(self.splits[split], self._test_seq_len if split == "test" else self.seq_len, self.pack)


def _num_tokens(length: int) -> int:
    """The tokens of a window with a sequence of this length: `<eos>`, the sequence, the separator and the copy."""
    return 2 * length + 2
