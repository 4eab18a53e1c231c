"""Conversion of a user's texts to token ids for a model."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from tinyformer.data import TextTokenizer
from tinyformer.errors import ArgumentError
from tinyformer.nn import Network

Texts: TypeAlias = str | Sequence[str | tuple[str, str]] | Tensor
"""A text, a list of texts, of pairs of texts for a classifier of pairs, or token ids of shape (batch, seq)."""

SOME_TEXTS = ["A text", "and another"]
"""Texts that errors show as an example that works."""


class TextReader(NamedTuple):
    """Converts texts to token ids for a network; a model without a tokenizer accepts only token ids."""

    network: Network
    own_tokenizer: TextTokenizer | None

    @property
    def tokenizer(self) -> TextTokenizer:
        """The model's tokenizer; an `ArgumentError` is raised if the model has no tokenizer."""
        if self.own_tokenizer is None:
            reason = "the model has no tokenizer and takes only token ids of shape (batch, seq), as generate_ids does"
            raise ArgumentError("tokenizer", None, reason)
        return self.own_tokenizer

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def rows_of(self, texts: Any, num_texts: int | None = 1, around: bool = True) -> list[list[int]]:
        """The token ids of each text, or of each pair of texts if `num_texts` is 2; a tensor of ids is not changed.

        With `around`, the token ids include the special tokens that begin and end a text.
        """
        if isinstance(texts, Tensor):
            require_token_ids("texts", texts, self.network.vocab_size)
            return texts.tolist()
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, Sequence) or not texts or not all(is_row(text, num_texts) for text in texts):
            kinds = {1: "a text, a list of texts", 2: "a list of pairs of texts, (first, second)"}
            kind = kinds.get(num_texts or 0, "a text, a list of texts or of (first, second)")
            works = {"texts": [tuple(SOME_TEXTS)] if num_texts == 2 else SOME_TEXTS}
            raise ArgumentError("texts", texts, f"must be {kind}, or token ids of shape (batch, seq)", works)
        return self.tokenizer.read(texts, around)

    def padded(
        self, rows: Sequence[Sequence[int]], padding: int, argument: str = "texts"
    ) -> tuple[Int[Tensor, "batch seq"], Int[Tensor, " batch"]]:
        """Rows of token ids on the network's device, with padding on the right, and the length of each row."""
        for index, row in enumerate(rows):
            if not 0 < len(row) <= self.network.max_seq_len:
                limit = f"must be 1 to {self.network.max_seq_len:,} tokens, including the special tokens around a text"
                raise ArgumentError(f"len({argument}[{index}])", len(row), limit)
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, padding)
        return ids.to(self.device), torch.tensor([len(row) for row in rows], device=self.device)


def require_token_ids(argument: str, ids: Tensor, vocab_size: int) -> None:
    """Refuse a tensor that has another shape than (batch, seq), or values that are not ids of the vocabulary."""
    if ids.ndim != 2 or len(ids) == 0:
        raise ArgumentError(f"{argument}.shape", list(ids.shape), "must be (batch, seq), with at least one sequence")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ArgumentError(f"{argument}.dtype", ids.dtype, "token ids must be integers")
    ids = ids.long()  # a smaller dtype may not hold the size of the vocabulary
    for unknown in ids[(ids < 0) | (ids >= vocab_size)].tolist():
        raise ArgumentError(argument, unknown, f"token ids must be from 0 to {vocab_size - 1}")


def texts_of(argument: str, value: Any) -> list[str]:
    """One text, or several, as a list; an `ArgumentError` about the argument if the value is something else."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise ArgumentError(argument, value, "must be a text, or a list of texts", {argument: SOME_TEXTS})
    return list(texts)


def is_row(text: object, num_texts: int | None) -> bool:
    """Return True if `text` is a text or a tuple of two texts, and `num_texts` (None: any) is the number of texts."""
    texts = (text,) if isinstance(text, str) else text if isinstance(text, tuple) and len(text) == 2 else ()
    return bool(texts) and num_texts in (None, len(texts)) and all(isinstance(part, str) for part in texts)
