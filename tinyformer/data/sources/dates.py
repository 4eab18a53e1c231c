"""Dates in many languages, to be translated to ISO 8601: the classic demonstration of alignment by attention."""

import datetime
import hashlib
import importlib.metadata
import json
from collections import defaultdict

import datasets
import numpy as np

from tinyformer.data.sources.documents import from_columns
from tinyformer.errors import ArgumentError

LOCALES = ("en", "de", "fr", "es", "it", "pt", "nl", "sv", "da", "nb", "fi", "pl", "cs", "tr", "ro", "hu", "id", "ca")
"""Languages with Latin letters, as `babel` names them."""

PATTERNS = (
    *("d MMMM y", "MMMM d, y", "EEEE, d MMMM y", "d MMM y", "y MMMM d", "EEE d MMM y", "MMM d, y", "d. MMMM y"),
    *("EEEE d MMMM y", "y, d MMMM", "MMMM d y", "d-MMM-y"),
)
"""Patterns of dates in CLDR's notation; each spells out the month. Texts that mean two different dates are left out."""

FIRST, LAST = datetime.date(1000, 1, 1), datetime.date(2999, 12, 31)

_FORMAT = 1  # increase it when the same arguments would give other dates


class Dates:
    """Dates as people write them, each with the same date in ISO 8601: "12. März 2031" and "2031-03-12".

    A date is written in a language and a pattern of the CLDR. A tenth of the formats (pairs of language and pattern,
    such as Polish "y MMMM d") occur in the validation and test splits only, with dates that do not occur in training.
    Half of the held-out texts still look like texts in a training format, since languages share names of months, and
    some patterns give similar texts. No download; needs `babel`.

    Args:
        num_pairs: number of training pairs.
        num_held_out: number of pairs of the validation split, and of the test split.
        seed: determines the dates and which formats are held out.
    """

    name = "dates"
    rows = ("texts", "pairs")
    has_own_splits = True
    pair_columns = ("source", "target")

    def __init__(self, num_pairs: int = 20_000, num_held_out: int = 500, seed: int = 0) -> None:
        try:
            self._version = importlib.metadata.version("babel")
        except importlib.metadata.PackageNotFoundError as error:
            reason = "needs the package babel: pip install 'tinyformer[dates]'"
            raise ArgumentError("source", self.name, reason) from error
        self.num_pairs, self.num_held_out, self.seed = num_pairs, num_held_out, seed

    def fingerprint(self) -> str:
        """SHA-256 of the arguments and of the version of `babel`, which contains the names of months."""
        parts = [self._version, self.num_pairs, self.num_held_out, self.seed, LOCALES, PATTERNS, _FORMAT]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def load(self, rows: str = "texts", max_characters: int | None = None) -> dict[str, datasets.Dataset]:
        rng = np.random.default_rng(self.seed)
        formats = [(locale, pattern) for locale in LOCALES for pattern in PATTERNS]
        order = rng.permutation(len(formats))
        held_out, trained = order[: len(formats) // 10], order[len(formats) // 10 :]
        days = rng.permutation((LAST - FIRST).days + 1)
        num_new = len(days) // 5
        chosen = {
            "train": (trained, days[num_new:], self.num_pairs),
            "validation": (held_out, days[: num_new // 2], self.num_held_out),
            "test": (held_out, days[num_new // 2 : num_new], self.num_held_out),
        }
        splits = {}
        for split, (split_formats, split_days, number) in chosen.items():
            meanings: dict[str, set[str]] = defaultdict(set)
            pairs = rng.choice(split_formats, number), rng.choice(split_days, number)
            for format_index, day in zip(*pairs, strict=True):
                date = FIRST + datetime.timedelta(days=int(day))
                text = written(date, *formats[format_index])
                meanings[text].add(date.isoformat())
            clear = {text: date for text, (date, *others) in meanings.items() if not others}
            splits[split] = from_columns(text=clear, pair=clear.values())
        return splits


def written(date: datetime.date, locale: str, pattern: str) -> str:
    """A date in a language and a pattern."""
    from babel.dates import format_date  # noqa: PLC0415 -- an extra

    return format_date(date, pattern, locale=locale)
