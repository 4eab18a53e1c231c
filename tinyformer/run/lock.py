"""One run in a folder at a time."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import filelock

from tinyformer.config.errors import ConfigError
from tinyformer.config.keys import format_value
from tinyformer.config.resume import is_first_process
from tinyformer.files import relative_path


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder, which the system releases when the process ends, however it ends.

    Only the first process of a run on several devices takes it.

    Raises:
        ConfigError: another process trains in the folder.
    """
    if not is_first_process():
        yield
        return
    name, other = (format_value(relative_path(folder) + end) for end in ("", "-2"))
    problem = "another process is training in this folder"
    # Not in the folder, which a refused run leaves as it was.
    path = folder.absolute().with_name(f".{folder.name}.lock")
    with held(path, f"hydra.run.dir={name}: {problem}; hydra.run.dir={other} starts another run."):
        yield


@contextlib.contextmanager
def held(path: Path, sentence: str) -> Iterator[None]:
    """Hold a lock, which the system releases when the process ends, however it ends.

    Args:
        path: the file of the lock, which is removed at the end.
        sentence: the error message if another process holds it.

    Raises:
        ConfigError: another process holds it.
    """
    if path.is_symlink():
        raise ConfigError(f"{path} is a symbolic link, which a run does not make; remove it.")
    lock = filelock.FileLock(path, blocking=False)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise ConfigError(sentence) from error
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()
