"""Atomic writing of files, and numbers for JSON."""

import contextlib
import csv
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def atomic_write(path: Path, previous: Path | None = None) -> Iterator[Path]:
    """A context that yields a temporary path for a file or a folder, which replaces `path` at the end of the context.

    If the context raises an error, the temporary file is removed and `path` does not change. A temporary file of a
    killed process is removed first. Files are flushed to disk before the replacement, so that `path` is never
    incomplete. A folder can replace only an empty folder. Processes that may write the same path at the same time must
    hold a lock.

    Args:
        path: the file or folder to write.
        previous: the path that the replaced file is moved to; None to delete it.
    """
    temporary = path.with_name(f"{path.name}.partial")
    _remove(temporary)
    try:
        yield temporary
        for written in (temporary, *temporary.rglob("*")):
            if written.is_file():
                with written.open("rb+") as file:
                    os.fsync(file.fileno())
        if previous is not None and path.exists():
            os.replace(path, previous)
        os.replace(temporary, path)
    finally:
        _remove(temporary)


def write_whole(path: Path, text: str) -> None:
    """Write a text file by `atomic_write`."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a CSV file with the names of its columns; see `atomic_write`."""
    with atomic_write(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *rows])


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def finite(value: Any) -> Any:
    """A value for JSON and tables, with None in place of nan and infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
