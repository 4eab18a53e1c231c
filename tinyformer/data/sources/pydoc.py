"""English text that comes with CPython: the language reference and the docstrings of the standard library.

No source here needs a download. The files are parsed, not imported. The texts differ between versions of Python.
"""

import ast
import hashlib
import inspect
import json
import os
import re
import sys
import sysconfig
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import datasets

from tinyformer.data.sources.documents import from_columns

# Folders and files that are not the library's own text, or that differ between machines.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_SKIPPED_PREFIX = "_sysconfigdata"

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Docstring(NamedTuple):
    """A docstring of the library, and the module, class or function that it documents."""

    file: Path  # relative to the root of the library
    name: str  # of the module, class or function
    is_function: bool  # True for methods, too
    text: str

    @property
    def summary(self) -> str:
        """The first line, if it is the only line or a blank line follows (PEP 257); otherwise the empty text."""
        line, _, others = self.text.partition("\n")
        return "" if others.partition("\n")[0].strip() else line.strip()

    @property
    def body(self) -> str:
        """The text after the first two lines."""
        return "\n".join(self.text.split("\n")[2:]).strip()


class Library:
    """The source files of the standard library of the running Python."""

    def __init__(self) -> None:
        self.root = Path(sysconfig.get_path("stdlib"))

    @cached_property
    def files(self) -> list[Path]:
        """All source files, except tests and packages that were installed later."""
        files = []
        for folder, subfolders, names in os.walk(self.root):
            subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
            files += [Path(folder, n) for n in names if n.endswith(".py") and not n.startswith(_SKIPPED_PREFIX)]
        return sorted(files, key=lambda file: file.relative_to(self.root).as_posix())

    def fingerprint(self) -> str:
        """SHA-256 of the version of Python and the contents of every file."""
        digest = hashlib.sha256(sys.version.split()[0].encode())
        for file in self.files:
            digest.update(hashlib.sha256(file.read_bytes()).digest())
        return digest.hexdigest()

    def docstrings(self) -> Iterator[Docstring]:
        """The docstrings of all modules, classes and functions."""
        for file in self.files:
            try:
                for node, text in _documented(_parse(file)):
                    name = file.stem if isinstance(node, ast.Module) else node.name
                    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                    yield Docstring(file.relative_to(self.root), name, is_function, text)
            except (SyntaxError, ValueError):  # a template, or another version's syntax
                continue


def _parse(file: Path) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as a library file's invalid escape
        return ast.parse(file.read_bytes())


def _documented(node: ast.AST) -> Iterator[tuple[_Documented, str]]:
    if isinstance(node, _Documented):
        docstring = ast.get_docstring(node, clean=False)
        if docstring and (text := inspect.cleandoc(docstring)):
            yield node, text
    # Only statements contain definitions: walking expressions too would take twice as long.
    for field in ("body", "orelse", "handlers", "finalbody"):
        for child in getattr(node, field, ()):
            yield from _documented(child)


class Pydoc:
    """About 2 MB of English in 8,000 documents.

    A document is a topic of the language reference (`pydoc_data.topics`) or the docstring of a module, class or
    function of the standard library. Only the first of several identical documents is kept.
    """

    name = "pydoc"

    def __init__(self) -> None:
        self._library = Library()

    def fingerprint(self) -> str:
        return self._library.fingerprint()

    def load(self, rows: str = "texts", max_characters: int | None = None) -> dict[str, datasets.Dataset]:
        docstrings = (docstring.text for docstring in self._library.docstrings())
        return {"train": from_columns(text=list(dict.fromkeys([*self._topics(), *docstrings])))}

    def _topics(self) -> Iterator[str]:
        # Read from the file, not imported, so that the fingerprint covers it.
        for file in self._library.files:
            if file.parts[-2:] == ("pydoc_data", "topics.py"):
                topics = next(node.value for node in _parse(file).body if isinstance(node, ast.Assign))
                yield from (text.strip("\n") for _, text in sorted(ast.literal_eval(topics).items()))


class Summaries:
    """Docstrings to summarise: the source is the body, and the target is the first line.

    Of pairs with the same body, only the first is kept.

    Args:
        min_words: minimum number of words of a body; shorter bodies say little more than their summary.
    """

    name = "summaries"
    rows = ("texts", "pairs")
    pair_columns = ("source", "target")

    def __init__(self, min_words: int = 20) -> None:
        self.min_words, self._library = min_words, Library()

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self._library.fingerprint()} {self.min_words}".encode()).hexdigest()

    def load(self, rows: str = "texts", max_characters: int | None = None) -> dict[str, datasets.Dataset]:
        summary_of: dict[str, str] = {}
        for docstring in self._library.docstrings():
            if docstring.summary and len(docstring.body.split()) >= self.min_words:
                summary_of.setdefault(docstring.body, docstring.summary)
        return {"train": from_columns(text=summary_of, pair=summary_of.values())}


class Docstrings:
    """Docstrings of the standard library, labelled with their top-level package or module.

    The `num_packages` packages with the most docstrings are used. Their names are replaced by "package" in all texts,
    as words and as parts of `snake_case`, in upper and lower case: otherwise, 11.2 % of the texts of Python 3.11 would
    name their own package. A text that occurs in two packages is left out; of identical texts, the first is used.
    """

    name = "docstrings"
    rows = ("texts", "examples")

    def __init__(self, num_packages: int = 20) -> None:
        self._num_packages, self._library = num_packages, Library()

    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps([self._library.fingerprint(), self._num_packages]).encode()).hexdigest()

    def load(self, rows: str = "texts", max_characters: int | None = None) -> dict[str, datasets.Dataset]:
        modules = {file.relative_to(self._library.root).parts[0].removesuffix(".py") for file in self._library.files}
        docstrings = dict.fromkeys((_package(x.file, modules), x.text) for x in self._library.docstrings())
        counts = Counter(package for package, _ in docstrings)
        classes = [package for package, _ in counts.most_common(self._num_packages)]
        packages_of: dict[str, set[str]] = defaultdict(set)
        for package, text in docstrings:
            if package in classes:
                packages_of[mask_names(text, classes)].add(package)
        package_of = {text: package for text, (package, *others) in packages_of.items() if not others}
        labels = {"label": package_of.values()} if rows == "examples" else {}
        return {"train": from_columns(text=package_of, **labels)}


def _package(file: Path, modules: Collection[str]) -> str:
    """The top-level package of a file; for `_pydecimal.py`, this is `decimal`, if `modules` has that name."""
    module = file.parts[0].removesuffix(".py")
    public = module.removeprefix("_py")
    return public if public in modules else module


def mask_names(text: str, names: Collection[str]) -> str:
    """Replace each of the names in a text by the word "package"."""
    # The underscore separates words here: `test_email` and `_pyio` name their packages.
    pattern = rf"(?<![^\W_])(?:_py)?(?:{'|'.join(map(re.escape, names))})s?(?![^\W_])"
    return re.sub(pattern, "package", text, flags=re.IGNORECASE)
