"""Docstrings of Python's standard library and their first lines: texts and the summaries that people wrote."""

import hashlib

import datasets

from tinyformer.data.sources.documents import from_columns
from tinyformer.data.sources.pydoc import Library
from tinyformer.errors import require_at_least


class Summaries:
    """The body of a docstring, to be summarised by the docstring's first line.

    By convention (PEP 257) a docstring begins with a line that summarises it, and a blank line. The texts differ
    between Python versions; no download. Only the first of several pairs with one body is kept.

    Args:
        min_words: minimum number of words of a body; shorter ones say little more than their summary.

    Raises:
        ArgumentError: `min_words` is less than 1.
    """

    name = "summaries"
    pair_columns = ("source", "target")

    def __init__(self, min_words: int = 20) -> None:
        require_at_least(1, {"min_words": 20}, min_words=min_words)
        self.min_words, self._library = min_words, Library()

    def fingerprint(self) -> str:
        """SHA-256 of the library and of `min_words`."""
        return hashlib.sha256(f"{self._library.fingerprint()} {self.min_words}".encode()).hexdigest()

    def load(self, max_characters: int | None = None) -> dict[str, datasets.Dataset]:
        """The pairs as documents of two lines."""
        return self.load_pairs()

    def load_pairs(self) -> dict[str, datasets.Dataset]:
        """All pairs, as the split "train"."""
        summary_of: dict[str, str] = {}
        for _, docstring in self._library.docstrings():
            summary, blank, body = (*docstring.split("\n", 2), "", "")[:3]
            if summary.strip() and not blank.strip() and len(body.split()) >= self.min_words:
                summary_of.setdefault(body.strip(), summary.strip())
        return {"train": from_columns(text=summary_of, pair=summary_of.values())}
