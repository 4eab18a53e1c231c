"""The English text that comes with CPython: the language reference and the library's docstrings."""

import ast
import hashlib
import inspect
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import datasets

from tinyformer.data.sources.documents import from_texts
from tinyformer.errors import ArgumentError

# Not the library's own text, or different on every machine.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_SKIPPED_PREFIX = "_sysconfigdata"

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Library:
    """The source files of the standard library of the running Python; nothing is imported."""

    @cached_property
    def root(self) -> Path:
        """The folder of the standard library."""
        return Path(sysconfig.get_path("stdlib"))

    @cached_property
    def files(self) -> list[Path]:
        """All source files, except tests and packages that were installed later.

        Raises:
            ArgumentError: this Python comes without the library's sources.
        """
        files = []
        for folder, subfolders, names in os.walk(self.root):
            subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
            files += [Path(folder, n) for n in names if n.endswith(".py") and not n.startswith(_SKIPPED_PREFIX)]
        if not files:
            raise ArgumentError("library", str(self.root), "this Python has no library sources there; text files work")
        return sorted(files, key=lambda file: file.relative_to(self.root).as_posix())

    def fingerprint(self) -> str:
        """SHA-256 of the version of Python and the contents of every file."""
        digest = hashlib.sha256(sys.version.split()[0].encode())
        for file in self.files:
            digest.update(hashlib.sha256(file.read_bytes()).digest())
        return digest.hexdigest()

    def docstrings(self) -> Iterator[tuple[Path, str]]:
        """The docstrings of modules, classes and functions, each with its file's path from the root.

        Files that do not parse (templates, another version's syntax) are left out.
        """
        for file, _, text in self._documented():
            yield file, text

    def functions(self) -> Iterator[tuple[str, str]]:
        """The names of functions and methods, each with its docstring."""
        for _, node, text in self._documented():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name, text

    def names(self) -> Iterator[tuple[str, str]]:
        """The names of modules, classes and functions, each with its docstring."""
        for file, node, text in self._documented():
            yield file.stem if isinstance(node, ast.Module) else node.name, text

    def _documented(self) -> Iterator[tuple[Path, _Documented, str]]:
        for file in self.files:
            try:
                for node, text in _docstrings(_parse(file)):
                    yield file.relative_to(self.root), node, text
            except (SyntaxError, ValueError):
                continue


class Pydoc:
    """About 2 MB of English in 8,000 documents, different between Python versions; no download.

    A document is a topic of the language reference (`pydoc_data.topics`) or the docstring of a module, class or
    function of the standard library. Only the first of several identical documents is kept. Files are parsed, not
    imported.
    """

    name = "pydoc"

    def __init__(self) -> None:
        self._library = Library()

    def fingerprint(self) -> str:
        """The fingerprint of `Library`."""
        return self._library.fingerprint()

    def load(self, max_characters: int | None = None) -> dict[str, datasets.Dataset]:
        """All documents, as the split "train"."""
        docstrings = (text for _, text in self._library.docstrings())
        return {"train": from_texts(list(dict.fromkeys([*self._topics(), *docstrings])))}

    def _topics(self) -> Iterator[str]:
        # Read from the file, not imported, so that the fingerprint covers it.
        for file in self._library.files:
            if file.parts[-2:] == ("pydoc_data", "topics.py"):
                topics = next(node.value for node in _parse(file).body if isinstance(node, ast.Assign))
                yield from (text.strip("\n") for _, text in sorted(ast.literal_eval(topics).items()))


def _parse(file: Path) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as a library file's invalid escape
        return ast.parse(file.read_bytes())


def _docstrings(node: ast.AST) -> Iterator[tuple[_Documented, str]]:
    if isinstance(node, _Documented):
        docstring = ast.get_docstring(node, clean=False)
        if docstring and (text := inspect.cleandoc(docstring)):
            yield node, text
    # Only statements contain definitions: walking expressions too would take twice as long.
    for field in ("body", "orelse", "handlers", "finalbody"):
        for child in getattr(node, field, ()):
            yield from _docstrings(child)
