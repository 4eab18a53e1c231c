"""Mistakes of the user as a few lines in the words of the config; every other error keeps its traceback."""

import contextlib
import errno
import functools
import os
import re
import sys
import traceback
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from tinyformer.config.hydra_errors import describe_hydra_error, raising_module
from tinyformer.config.invocation import config_dir
from tinyformer.config.keys import format_value, key_of_argument
from tinyformer.errors import ArgumentError

USER_MISTAKE, BUG = 2, 1
MAX_LINES = 4

OF_THE_MACHINE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY),
)
"""File errors that the user can remedy: a full disk, a read-only folder, missing rights, a file instead of a folder."""


OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|not enough memory|[Ss]torage size calculation overflowed"
)
"""Messages of torch, on each device."""


class ConfigError(ValueError):
    """A mistake in a config or on a command line, as a sentence that names its keys or options."""


@contextlib.contextmanager
def config_keys(config: DictConfig) -> Iterator[None]:
    """Make errors about arguments name the keys of a config that set them.

    Raises:
        ConfigError: in place of an `ArgumentError`, raised directly or by a class that `instantiate` called.
    """
    written = OmegaConf.to_container(config, resolve=False)
    try:
        yield
    except (ArgumentError, InstantiationException) as error:
        cause = cause_of(error)
        node = re.search(r"^full_key: (\S+)$", str(error), re.MULTILINE)  # of the class
        # Raised in Hydra, the call itself failed; in the others, one of their classes refused an argument.
        is_refused = isinstance(cause, TypeError | ValueError) and not isinstance(cause, ArgumentError)
        if node and is_refused and raising_module(cause).startswith(("hydra.", "lightning.", "torch.")):
            raise ConfigError(f"{node[1]}: {str(cause).splitlines()[0].rstrip('.')}.") from error
        if not isinstance(cause, ArgumentError):
            raise
        if node:
            cause.path = (*node[1].split("."), *cause.path)
        raise ConfigError(cause.describe(functools.partial(key_of_argument, written), format_value)) from error


@contextlib.contextmanager
def in_sentences(config_name: str) -> Iterator[None]:
    """Raise the mistakes of a caller in Python as sentences, as a program prints them.

    Args:
        config_name: the primary config, such as "train".

    Raises:
        ConfigError: in place of a mistake; with HYDRA_FULL_ERROR=1 in the environment, caused by it.
    """
    try:
        yield
    except Exception as error:
        sentence = describe(error, config_dir(), config_name)
        if sentence is None:
            raise
        raise ConfigError(sentence) from (error if os.environ.get("HYDRA_FULL_ERROR") == "1" else None)


@contextlib.contextmanager
def option_names(**names: str) -> Iterator[None]:
    """Make errors about arguments name the options of a command line, as in `option_names(out="--out")`.

    Raises:
        ConfigError: in place of an `ArgumentError`.
    """
    try:
        yield
    except ArgumentError as error:

        def name_of(path: tuple[str, ...]) -> str:
            return names.get(path[0], ".".join(path))

        raise ConfigError(error.describe(name_of, format_value)) from error


def describe(error: BaseException, config_dir: Path, config_name: str) -> str | None:
    """The sentence that explains a mistake to the user; None for any other error, which is a bug.

    Mistakes are what this package raises about arguments and configs, what Hydra and OmegaConf raise about the command
    line, Lightning's `MisconfigurationException`, and files that cannot be written.
    """
    error = cause_of(error)
    if isinstance(error, ArgumentError):
        return error.describe(show=format_value)
    # Recognised by name, since Lightning takes seconds to import.
    if isinstance(error, ConfigError) or type(error).__name__ == "MisconfigurationException":
        return str(error)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error))):
        return "there is not enough memory; a smaller data.batch_size, model.max_seq_len or model.d_model needs less."
    if type(error).__name__ == "TerminatedWorkerError":  # of joblib, which may not be installed
        return "the process of a job was killed, as happens where memory runs out; fewer jobs side by side need less."
    if isinstance(error, ValueError) and raising_module(error).startswith("lightning."):
        return f"trainer: {str(error).strip().splitlines()[0]}"
    if isinstance(error, OSError) and error.errno in OF_THE_MACHINE:
        return f"{error.filename or 'a file'}: {error.strerror}. It was left as it was, or was not written."
    return describe_hydra_error(error, config_dir, config_name)


def exit_code_of(job: Callable[[], int | None], config_dir: Path, config_name: str) -> int:
    """Run the job of a program that Hydra does not start, and report its errors as `train` does.

    Args:
        job: the job; it may return an exit code for errors that it has reported itself.
        config_dir: the folder of the config files.
        config_name: the primary config, whose keys an error may suggest.

    Returns:
        The exit code: 0, 1 for a bug, 2 for a mistake of the user.
    """
    try:
        return job() or 0
    except Exception as error:
        return report(error, config_dir, config_name, with_traceback=os.environ.get("HYDRA_FULL_ERROR") == "1")


def report(error: BaseException, config_dir: Path, config_name: str, with_traceback: bool = False) -> int:
    """Print an error to stderr: a mistake in at most `MAX_LINES` lines, a bug (or both, if asked) with its traceback.

    Returns:
        The exit code: 2 for a mistake of the user, 1 for a bug.
    """
    text = describe(error, config_dir, config_name)
    if text is None or with_traceback:
        traceback.print_exception(error)
    else:
        lines = f"Error: {text}".splitlines()
        if len(lines) > MAX_LINES:
            lines[MAX_LINES - 1 :] = [f"{lines[MAX_LINES - 1]} …"]
        print("\n".join(map(printable, lines)), file=sys.stderr)
    return BUG if text is None else USER_MISTAKE


def printable(line: str) -> str:
    """A line without the control characters of a stranger's file, which a terminal would obey."""

    def is_shown(character: str) -> bool:
        return character.isprintable() or character == "\t" or unicodedata.category(character) == "Zs"  # a space

    return "".join(character if is_shown(character) else repr(character)[1:-1] for character in line)


def cause_of(error: BaseException) -> BaseException:
    """The error that a class raised when `instantiate` called it, without what `instantiate` wraps around it."""
    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    return error
