"""Files and folders that are written whole or not at all, and the folder that libraries read settings from."""

import contextlib
import importlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_write(path: Path, previous: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path beside `path` for a file or a folder, which replaces `path` after the block.

    If the block fails, what it wrote is removed and `path` is left as it was; what a killed process left is removed
    first. A file is flushed to disk before it takes its name, so that the name never stands for a part of it. A folder
    can take the place of an empty folder only. Processes that may write the same path at the same time must hold a
    lock.

    Args:
        path: the file or folder.
        previous: where to keep the file that is replaced.
    """
    temporary = path.with_name(f"{path.name}.partial")
    _remove(temporary)
    try:
        with _named(path):
            yield temporary
        if temporary.is_file():
            _flush(temporary)
        if previous is not None and path.exists():
            os.replace(path, previous)
        os.replace(temporary, path)
    finally:
        _remove(temporary)


def relative_path(path: Path) -> str:
    """A path relative to the working directory if it lies below, else the absolute path."""
    path, here = path.resolve(), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the file's name to an error in writing, such as that of a full disk, where Python leaves it out."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def outside_of_the_current_folder() -> Iterator[None]:
    """Run the block in the root folder: libraries read settings from the current one, which may be a stranger's."""
    with contextlib.chdir(os.path.abspath(os.sep)):
        yield


def import_matplotlib() -> None:
    """Import matplotlib without the current folder's `matplotlibrc`, which it executed until 3.10.8 and still reads."""
    with outside_of_the_current_folder():
        importlib.import_module("matplotlib")
