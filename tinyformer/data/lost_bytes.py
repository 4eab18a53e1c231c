"""The share of a text that its tokens do not give back."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import datasets
import numpy as np

from tinyformer.data.sources.documents import batches_of
from tinyformer.data.tokenizer.tokenizer import TextTokenizer

ROWS, READ, DRAWN = 2**15, 2**24, 2**20
"""Rows that are drawn, characters that are read of them, and characters of the pieces that are drawn of these."""


def draw(rows: datasets.Dataset, texts_of: Callable[[datasets.Dataset], Iterable[str]]) -> list[str]:
    """Pieces of texts of rows, of up to 4,096 characters that end before white space, drawn at random from seed 0."""
    generator = np.random.default_rng(0)
    texts = next(batches_of(texts_of(rows.select(generator.permutation(len(rows))[:ROWS])), READ))
    pieces = [piece for text in texts for piece in re.findall(r"(?s).{1,4096}(?=\s|\Z)|.{4096}", text)]
    return next(batches_of((pieces[i] for i in generator.permutation(len(pieces))), DRAWN))


def lost_bytes(texts: Sequence[str], tokenizer: TextTokenizer) -> float:
    """The share of the bytes of texts that decode(encode(text)) does not give back, from 0 to 1.

    For each text, the bag distance of its bytes (Bartolini et al. 2002), a lower bound of the edit distance that takes
    linear time: the bytes that are missing, or those that are added if they are more; at least 1 if the texts differ.
    The share is that of the longer texts. A space before a text does not count: many tokenizers add or remove one.
    """
    lost = total = 0
    for pair in zip(texts, map(tokenizer.decode, tokenizer.encode_batch(texts)), strict=True):
        before, after = (text.encode() for text in pair)
        if before not in (after, b" " + after) and after != b" " + before:
            missing, added = Counter(before) - Counter(after), Counter(after) - Counter(before)
            lost += max(missing.total(), added.total(), 1)
        total += max(len(before), len(after))
    return lost / max(total, 1)
