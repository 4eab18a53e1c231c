"""Which package of the standard library does a docstring come from?"""

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection
from pathlib import Path

import datasets

from tinyformer.data.documents import from_columns
from tinyformer.data.pydoc import Library

MASKED = "package"
"""What stands for the name of a package."""


class Docstrings:
    """Docstrings of the standard library, labelled with the package or module at its top that they stand in.

    Different between Python versions; no download. The packages with the most docstrings are kept. Their names are
    masked in all texts, whichever package a text is of, as words and parts of `snake_case`, in upper and lower case:
    without that, 11.2 % of the texts of Python 3.11 name their own package. A text that stands in two packages tells
    nothing and is left out; only the first of identical ones is kept.

    Args:
        num_packages: How many packages are kept.

    Raises:
        ValueError: If it is less than 2.
    """

    name = "docstrings"

    def __init__(self, num_packages: int = 20) -> None:
        if num_packages < 2:
            raise ValueError(
                f"data.num_packages={num_packages}: there must be two to tell apart; data.num_packages=20 works."
            )
        self._num_packages, self._library = num_packages, Library()

    def fingerprint(self) -> str:
        """SHA-256 over the library and the number of packages."""
        return hashlib.sha256(json.dumps([self._library.fingerprint(), self._num_packages]).encode()).hexdigest()

    def load(self, max_characters: int | None = None) -> dict[str, datasets.Dataset]:
        """The texts of `load_examples`."""
        return {split: rows.select_columns("text") for split, rows in self.load_examples().items()}

    def load_examples(self) -> dict[str, datasets.Dataset]:
        """All docstrings and their packages, as the split "train"."""
        modules = {file.relative_to(self._library.root).parts[0].removesuffix(".py") for file in self._library.files}
        found = dict.fromkeys((_package(file, modules), text) for file, text in self._library.docstrings())
        kept = [package for package, _ in Counter(package for package, _ in found).most_common(self._num_packages)]
        packages_of: dict[str, set[str]] = defaultdict(set)
        for package, text in found:
            if package in kept:
                packages_of[mask_names(text, kept)].add(package)
        package_of = {text: package for text, (package, *others) in packages_of.items() if not others}
        return {"train": from_columns(text=package_of, label=package_of.values())}


def _package(file: Path, modules: Collection[str]) -> str:
    """The top of a file's path; `_pydecimal` is `decimal` in Python, for machines without the one in C."""
    module = file.parts[0].removesuffix(".py")
    public = module.removeprefix("_py")
    return public if public in modules else module


def mask_names(text: str, names: Collection[str]) -> str:
    """A text with another word in the place of each of these names."""
    return _pattern(names).sub(MASKED, text)


def names_package(text: str, package: str) -> bool:
    """Whether a text names a package."""
    return _pattern([package]).search(text) is not None


def _pattern(names: Collection[str]) -> re.Pattern[str]:
    # The underscore is no part of a word here: `test_email` and `_pyio` name their packages.
    return re.compile(rf"(?<![^\W_])(?:_py)?(?:{'|'.join(map(re.escape, names))})s?(?![^\W_])", re.IGNORECASE)
