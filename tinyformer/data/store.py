"""The cache folder, texts in memory maps of its disk, and progress bars of what fills it."""

import contextlib
import mmap
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import datasets
import pyarrow as pa
from rich.console import Console
from rich.progress import track

from tinyformer.data.sources.documents import STRING, batches_of, dataset_of, strings
from tinyformer.errors import ArgumentError

T = TypeVar("T")

_ROOT = Path(__file__).parents[2]
_BATCH = 2**24  # characters written at a time


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


def map_texts(texts: Iterable[str], folder: Path) -> datasets.Dataset:
    """A dataset of texts in a memory-mapped file without a name, whose space on the disk is freed with the dataset.

    Args:
        texts: the texts, of which about `_BATCH` characters are held in memory.
        folder: determines the disk.
    """
    schema = pa.schema({"text": STRING})
    with writing_into(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with writing_into(folder), tempfile.TemporaryFile(dir=folder) as file:
        with pa.ipc.new_stream(file, schema) as stream:
            for batch in batches_of(texts, _BATCH):
                stream.write_batch(pa.record_batch([strings(batch)], schema))
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return dataset_of(pa.ipc.open_stream(pa.py_buffer(mapped)).read_all())


def with_progress(parts: Iterable[T], number: int | None, action: str) -> Iterator[T]:
    """The texts or shards, whose number may be unknown, with a progress bar on standard error if that is a terminal."""
    console, hidden = Console(stderr=True), not sys.stderr.isatty()
    yield from track(parts, action, number, console=console, transient=True, disable=hidden)
