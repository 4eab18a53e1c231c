"""The table of addition modulo p, a part of which is for training."""

import itertools
import string
from typing import Any

import numpy as np

from tinyformer.data.generated.module import ALPHABET, Drawn, GeneratedDataModule, require_symbols
from tinyformer.errors import ArgumentError

NUMBERS = string.digits + ALPHABET.replace(string.digits, "")
"""The symbols of 0, 1, 2 and so on."""

_FORMAT = 1  # increase it when the same arguments would give other sequences


class ModularAdditionDataModule(GeneratedDataModule):
    """Addition modulo p: `<eos> a + b = c` with c = (a + b) mod p, for all p² pairs of a and b.

    A random fraction of the table is the training split and the rest the validation split, so that only a model that
    adds, and does not recall sums that it has seen, is right on the latter: Power et al. 2022 (arXiv 2201.02177) found
    that with weight decay it learns to add long after it knows the training split by heart ("grokking"), and Nanda et
    al. 2023 (arXiv 2301.05217) how it adds. Each number is one symbol, and c is the only scored target; a guess is
    right in 1 / p of the cases.

    Args:
        modulus: p, which need not be a prime number.
        train_fraction: fraction of the table that is for training; `split_seed` determines which.
        settings: further arguments of `GeneratedDataModule`.

    Raises:
        ArgumentError: a number is out of range, or `masking` is given.
    """

    name, alphabet_argument = "modular_addition", "modulus"

    def __init__(
        self,
        *,
        modulus: int = 59,
        train_fraction: float = 0.5,
        **settings: Any,
    ) -> None:
        symbols = require_symbols("modulus", modulus, NUMBERS, smallest=2) + "+="
        self._modulus, self._num_training = modulus, round(train_fraction * modulus**2)
        if not 0 < self._num_training < modulus**2:
            reason = "must be between 0 and 1, and leave sums both for training and for validation"
            raise ArgumentError("train_fraction", train_fraction, reason, {"train_fraction": 0.5})
        super().__init__(
            6,  # <eos> a + b = c
            symbols=symbols,
            identity=[self.name, _FORMAT, symbols, self._num_training],
            **settings,
        )

    def _make(self) -> dict[str, Drawn]:
        p = self._modulus
        table = np.array([(a, p, b, p + 1, (a + b) % p) for a, b in itertools.product(range(p), repeat=2)], np.int16)
        table = np.random.default_rng(self.split_seed).permutation(table)
        drawn = Drawn(table, np.broadcast_to(np.arange(5) == 4, table.shape))
        first = np.arange(len(table)) < self._num_training
        return {"train": drawn.rows(first), "validation": drawn.rows(~first)}
