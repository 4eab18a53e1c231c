"""Folders on disk that are complete or absent, and arrays that grow there."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import filelock
import numpy as np

from tinyformer.files import atomic_write

Contents = TypeVar("Contents")


def build_once(folder: Path, open_folder: Callable[[Path], Contents | None], build: Callable[[Path], None]) -> Contents:
    """Builds a folder, or opens what an earlier call (of any process) has left.

    The folder appears under its final name only when it is complete; one that is damaged is built again.

    Args:
        folder: Where it is to be.
        open_folder: Gives its contents; None if it is missing, or lacks a part of them.
        build: Makes it, under another name.
    """
    if contents := open_folder(folder):
        return contents
    folder.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{folder}.lock"):
        if contents := open_folder(folder):  # by the process that held the lock
            return contents
        with atomic_write(folder) as temporary:
            build(temporary)
            shutil.rmtree(folder, ignore_errors=True)  # damaged, or it would have been opened
        contents = open_folder(folder)
    assert contents is not None
    return contents


class ArrayWriter:
    """A one-dimensional `.npy` file that grows: its header is written again when the length is known."""

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
        # NumPy leaves room for the length to grow, so that the header's own size stays what it is.
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)
