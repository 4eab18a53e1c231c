"""Docstrings of Python's standard library, to be classified by the package they come from."""

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection
from pathlib import Path

import datasets

from tinyformer.data.sources.documents import from_columns
from tinyformer.data.sources.pydoc import Library
from tinyformer.errors import require_at_least

MASKED = "package"
"""The word that replaces the names of packages."""


class Docstrings:
    """Docstrings of the standard library, labelled with their top-level package or module.

    Different between Python versions; no download. The packages with the most docstrings are used. Their names are
    replaced in all texts, as words and as parts of `snake_case`, in upper and lower case: otherwise 11.2 % of the texts
    of Python 3.11 would name their own package. A text that occurs in two packages is left out; only the first of
    identical texts is used.

    Args:
        num_packages: the number of packages.

    Raises:
        ArgumentError: `num_packages` is less than 2.
    """

    name = "docstrings"

    def __init__(self, num_packages: int = 20) -> None:
        require_at_least(2, {"num_packages": 20}, num_packages=num_packages)
        self._num_packages, self._library = num_packages, Library()

    def fingerprint(self) -> str:
        """SHA-256 of the library and the number of packages."""
        return hashlib.sha256(json.dumps([self._library.fingerprint(), self._num_packages]).encode()).hexdigest()

    def load(self, max_characters: int | None = None) -> dict[str, datasets.Dataset]:
        """The texts of `load_examples`."""
        return {split: rows.select_columns("text") for split, rows in self.load_examples().items()}

    def load_examples(self) -> dict[str, datasets.Dataset]:
        """All docstrings and their packages, as the split "train"."""
        modules = {file.relative_to(self._library.root).parts[0].removesuffix(".py") for file in self._library.files}
        docstrings = dict.fromkeys((_package(file, modules), text) for file, text in self._library.docstrings())
        counts = Counter(package for package, _ in docstrings)
        classes = [package for package, _ in counts.most_common(self._num_packages)]
        packages_of: dict[str, set[str]] = defaultdict(set)
        for package, text in docstrings:
            if package in classes:
                packages_of[mask_names(text, classes)].add(package)
        package_of = {text: package for text, (package, *others) in packages_of.items() if not others}
        return {"train": from_columns(text=package_of, label=package_of.values())}


def _package(file: Path, modules: Collection[str]) -> str:
    """The top-level package of a file; `_pydecimal` is the Python version of `decimal`."""
    module = file.parts[0].removesuffix(".py")
    public = module.removeprefix("_py")
    return public if public in modules else module


def mask_names(text: str, names: Collection[str]) -> str:
    """A text with the word `MASKED` in place of each of these names."""
    # The underscore separates words here: `test_email` and `_pyio` name their packages.
    pattern = rf"(?<![^\W_])(?:_py)?(?:{'|'.join(map(re.escape, names))})s?(?![^\W_])"
    return re.sub(pattern, MASKED, text, flags=re.IGNORECASE)
