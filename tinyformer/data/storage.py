"""The cache folder, and folders that are built once."""

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import filelock

from tinyformer.errors import ArgumentError
from tinyformer.files import atomic_write

Contents = TypeVar("Contents")
_ROOT = Path(__file__).parents[2]

CHECKSUMS = "checksums.json"
"""The size and the checksum of every other file of a folder that is built once."""

WHOLE_BYTES, BLOCK_BYTES, NUM_BLOCKS = 2**28, 2**20, 64
"""For their checksums, files of at most the first size are read whole, and of larger ones so many blocks of the second
size."""


def default_cache_dir() -> Path:
    """The folder of tokenised text: TINYFORMER_CACHE, else `data/cache` in a clone, else the user's cache folder."""
    if chosen := os.environ.get("TINYFORMER_CACHE"):
        return Path(chosen).expanduser()
    if (_ROOT / "conf").is_dir() and (_ROOT / "pyproject.toml").is_file():
        return _ROOT / "data" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tinyformer"


@contextlib.contextmanager
def writing_into(cache_dir: Path) -> Iterator[None]:
    """Make errors about files of a cache folder, such as a full disk, errors about the argument `cache_dir`."""
    try:
        yield
    except OSError as error:
        path = Path(error.filename or cache_dir)
        if cache_dir not in (path, *path.parents) and path not in cache_dir.parents:
            raise
        reason = f"cannot be written ({error.strerror}); TINYFORMER_CACHE in the environment moves the default folder"
        other = f"{tempfile.gettempdir()}/tinyformer"
        raise ArgumentError("cache_dir", str(cache_dir), reason, {"cache_dir": other}) from error


def build_once(folder: Path, open_folder: Callable[[Path], Contents | None], build: Callable[[Path], None]) -> Contents:
    """Build a folder, or open what an earlier call (of any process) left.

    The folder appears under its final name only when it is complete; a damaged one is built again. `open_folder`
    returns its contents, or None if they are incomplete; `build` makes it under a temporary name.
    """
    if contents := open_intact(folder, open_folder):
        return contents
    folder.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{folder}.lock"):
        if contents := open_intact(folder, open_folder):  # built by the process that held the lock
            return contents
        if folder.exists():
            print(f"{folder} is damaged, or of an earlier version; it is built again.", file=sys.stderr)
        with atomic_write(folder) as temporary:
            build(temporary)
            checksums = {path.name: _checksum(path) for path in sorted(temporary.iterdir())}
            (temporary / CHECKSUMS).write_text(json.dumps(checksums, indent=1), encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)
        contents = open_intact(folder, open_folder)
    assert contents is not None
    return contents


def open_intact(folder: Path, open_folder: Callable[[Path], Contents | None]) -> Contents | None:
    """The contents that `build_once` left in a folder; None if they are missing, incomplete or damaged."""
    try:
        stored = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        is_intact = all(_checksum(folder / name) == checksum for name, checksum in stored.items())
        return open_folder(folder) if is_intact else None
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def _checksum(path: Path) -> list[Any]:
    """The size of a file, and a checksum of its contents; see `WHOLE_BYTES`."""
    digest, size = hashlib.blake2b(digest_size=16), path.stat().st_size
    positions: Sequence[int] = range(0, size, BLOCK_BYTES)
    if size > WHOLE_BYTES:
        positions = [i * (size - BLOCK_BYTES) // (NUM_BLOCKS - 1) for i in range(NUM_BLOCKS)]
    with path.open("rb") as file:
        for position in positions:
            file.seek(position)
            digest.update(file.read(BLOCK_BYTES))
    return [size, digest.hexdigest()]
