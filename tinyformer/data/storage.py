"""The cache folder, folders that are built once, and arrays that grow on disk."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import filelock
import numpy as np

from tinyformer.files import atomic_write

Contents = TypeVar("Contents")
_ROOT = Path(__file__).parents[2]


def default_cache_dir() -> Path:
    """The folder of tokenised text: TINYFORMER_CACHE, else `data/cache` in a clone, else the user's cache folder."""
    if chosen := os.environ.get("TINYFORMER_CACHE"):
        return Path(chosen).expanduser()
    if (_ROOT / "conf").is_dir() and (_ROOT / "pyproject.toml").is_file():
        return _ROOT / "data" / "cache"
    return _user_cache_dir() / "tinyformer"


def _user_cache_dir() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    variable, default = ("LOCALAPPDATA", "AppData/Local") if os.name == "nt" else ("XDG_CACHE_HOME", ".cache")
    return Path(os.environ.get(variable) or Path.home() / default)


def build_once(folder: Path, open_folder: Callable[[Path], Contents | None], build: Callable[[Path], None]) -> Contents:
    """Build a folder, or open what an earlier call (of any process) left.

    The folder appears under its final name only when it is complete; a damaged one is built again.

    Args:
        folder: its final path.
        open_folder: returns its contents, or None if it is missing or incomplete.
        build: makes it, under a temporary name.
    """
    if contents := open_folder(folder):
        return contents
    folder.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{folder}.lock"):
        if contents := open_folder(folder):  # built by the process that held the lock
            return contents
        with atomic_write(folder) as temporary:
            build(temporary)
            shutil.rmtree(folder, ignore_errors=True)  # damaged, or it would have been opened
        contents = open_folder(folder)
    assert contents is not None
    return contents


class ArrayWriter:
    """A one-dimensional `.npy` file that grows: its header is rewritten when the length is known."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._file = path.open("wb")
        self._dtype = dtype
        self.length = 0
        self._write_header()

    def append(self, values: np.ndarray) -> None:
        """Add values at the end."""
        self._file.write(values.astype(self._dtype).tobytes())
        self.length += len(values)

    def __enter__(self) -> "ArrayWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def _write_header(self) -> None:
        # NumPy pads the header so that the length can grow without changing the header's size.
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)
