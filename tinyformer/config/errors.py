"""Mistakes of the user as a few lines in the words of the config; every other error keeps its traceback."""

import contextlib
import difflib
import functools
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from tinyformer.config.conf import (
    STORED,
    NoOverrideError,
    axes_of,
    choices_of,
    files,
    format_value,
    key_of_argument,
    programs,
    read,
    values_of_keys,
)
from tinyformer.errors import ArgumentError, printable

USER_MISTAKE, BUG = 2, 1

OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|not enough memory|[Ss]torage size calculation overflowed"
)
"""Messages of torch, on each device."""

EXAMPLES = {"data.files": "book.txt", "data.path": "owner/name", "tokenizer.path": "tokenizer.json"}
"""Values for the keys that have no default."""


OTHER_NAMES = {
    "epochs": "trainer.max_epochs or trainer.max_steps",
    "learning_rate": "optimizer.lr",
    "device": "trainer.accelerator",
}
"""What other programs call some of our keys, where the names are not alike."""


class ConfigError(ValueError):
    """A mistake in a config or on a command line, as a sentence that names its keys or options."""


@contextlib.contextmanager
def config_keys(config: DictConfig) -> Iterator[None]:
    """Make errors about arguments name the keys of a config that set them, as a `ConfigError`.

    Such an `ArgumentError` may also be raised by a class that `instantiate` called.
    """
    written = OmegaConf.to_container(config, resolve=False)
    try:
        yield
    except (ArgumentError, InstantiationException) as error:
        cause = cause_of(error)
        node = re.search(r"^full_key: (\S+)$", str(error), re.MULTILINE)  # of the class
        if node and isinstance(cause, ImportError):
            raise ConfigError(f"{node[1]}: {str(cause).splitlines()[0]}") from error
        if not isinstance(cause, ArgumentError):
            raise
        if node:
            cause.path = (*node[1].split("."), *cause.path)
        raise ConfigError(cause.describe(functools.partial(key_of_argument, written), format_value)) from error


@contextlib.contextmanager
def in_sentences(program: str) -> Iterator[None]:
    """Raise a caller's mistakes as a `ConfigError` in the sentence that a program prints.

    With HYDRA_FULL_ERROR=1 in the environment, the mistake itself is shown as its cause.
    """
    try:
        yield
    except Exception as error:
        sentence = describe(error, program)
        if sentence is None:
            raise
        raise ConfigError(sentence) from (error if os.environ.get("HYDRA_FULL_ERROR") == "1" else None)


@contextlib.contextmanager
def option_names(**names: str) -> Iterator[None]:
    """Make errors about arguments name the options of a command line, as in `option_names(out="--out")`."""
    try:
        yield
    except ArgumentError as error:
        sentence = error.describe(lambda path: names.get(path[0], ".".join(path)), format_value)
        raise ConfigError(sentence) from error


def exit_code_of(job: Callable[[], int | None], program: str) -> int:
    """The exit code of the job of a program: 0, 1 for a bug, 2 for a mistake of the user.

    Errors are reported as `train` does, and may suggest keys of the primary config `program`; the job may return a code
    for those that it has reported itself.
    """
    try:
        code = job() or 0
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads the output, as in `| head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at the end
        return 128 + signal.SIGPIPE
    except Exception as error:
        return report(error, program, with_traceback=os.environ.get("HYDRA_FULL_ERROR") == "1")
    return code


def report(error: BaseException, program: str, with_traceback: bool = False) -> int:
    """Print an error to stderr: a mistake as a sentence, a bug (or both, if asked) with its traceback.

    Returns the exit code.
    """
    text = describe(error, program)
    if text is None or with_traceback:
        traceback.print_exception(error)
    else:
        say(f"Error: {text}", file=sys.stderr)
    return BUG if text is None else USER_MISTAKE


def say(text: str, **options: Any) -> None:
    """Print a text, which may name files and labels, by `printable` lines."""
    print("\n".join(map(printable, text.split("\n"))), **options)


def indent(text: str) -> str:
    """A text with each line indented, without control characters."""
    return "\n".join(f"  {printable(line)}" for line in text.splitlines())


def cause_of(error: BaseException) -> BaseException:
    """The error that a class raised when `instantiate` called it, without what `instantiate` wraps around it."""
    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    return error


def describe(error: BaseException, program: str) -> str | None:
    """The sentence that explains a mistake to the user; None for any other error, which is a bug.

    Mistakes are what this package raises about arguments and configs, what Hydra and OmegaConf raise about the command
    line of `program`, Lightning's `MisconfigurationException`, and a lack of memory.
    """
    error = cause_of(error)
    if isinstance(error, ArgumentError):
        return error.describe(show=format_value)
    # Recognised by name, since Lightning takes seconds to import.
    if isinstance(error, ConfigError) or type(error).__name__ == "MisconfigurationException":
        return str(error)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error))):
        return "there is not enough memory; a smaller data.batch_size, model.max_seq_len or model.d_model needs less."
    if isinstance(error, HydraException | OmegaConfBaseException):
        return _describe_composition(error, program)
    return None


def _describe_composition(error: BaseException, program: str) -> str:
    """An error of Hydra or OmegaConf about a command line as a sentence that says what would work."""
    message = str(error)
    if isinstance(error, MissingConfigException) and error.options:
        axis, _, choice = (error.missing_cfg_file or "").rpartition("/")
        choices = [option for option in error.options if not option.startswith("_")]
        return f"{axis}={choice}: there is no such choice.{nearest(choice, choices)} Choices: {', '.join(choices)}."
    if isinstance(error, NoOverrideError) and error.override.startswith("--"):
        key = error.override.lstrip("-").partition("=")[0].replace("-", "_")
        return f"{error.override}: {message}.{_similar_key(key, program)}"
    if isinstance(error, OverrideParseException):  # Hydra's message is about its grammar
        what = message if isinstance(error, NoOverrideError) else "is no KEY=VALUE, such as attention=gqa"
        return f"{error.override}: {what}."
    if isinstance(error, MissingMandatoryValue | InterpolationToMissingValueError):
        # The full key is that of the interpolation; the missing key stands in the message.
        missing = re.search(r"resolving interpolation: Missing mandatory value: ([\w.]+)", message)
        key = missing[1] if missing else str(error.full_key or error.key)
        return f"{key} is needed, such as {key}={EXAMPLES.get(key, 'VALUE')}."
    first = message.splitlines()[0]
    if named := re.search(r"Could not (?:override|append to config[^']*|delete(?: from config\.)?) '([^'@]+)", message):
        return first if "already" in message else _unknown_key(named[1], program)
    if ambiguous := re.fullmatch(r"Ambiguous value for argument '([^=]+=.*)'", first):
        return f"{ambiguous[1]}: -m makes a run of each value."
    return first


def nearest(word: str, choices: Iterable[str]) -> str:
    """The choices that look like a word, as " Did you mean a or b?"; empty if none does."""
    close = difflib.get_close_matches(word, list(dict.fromkeys(choices)), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def _unknown_key(key: str, program: str) -> str:
    """The sentence about a key that a config does not have."""
    axis, _, name = key.partition(".")
    others = [other for other in programs() if axis in (axes_of(other) | read(other))]
    if others and program not in others and not (program == "evaluate" and axis in STORED):
        program = {"card": "tinyformer card"}.get(others[-1], f"{others[-1]}.py")  # rather train than the card
        return f"{key}: there is no such key here; {program} has it."
    choices = choices_of(axis) if axis in files() and name else []
    having = [f"{axis}={choice}" for choice in choices if name.partition(".")[0] in read(choice, axis)]
    if 0 < len(having) < len(choices):
        return f"{key}: there is no such key. It belongs to {' or '.join(having)}."
    return f"{key}: there is no such key.{_similar_key(key, program)}"


def _similar_key(key: str, program: str) -> str:
    """The keys that look like a key, as in `nearest`, or of which the last part does; else where the axes are."""
    if key in OTHER_NAMES:
        return f" Did you mean {OTHER_NAMES[key]}?"
    keys = [known for known in values_of_keys() if known.partition(".")[0] in axes_of(program) | read(program)]
    by_last_part = {known.rpartition(".")[2]: known for known in reversed(keys)}
    close = difflib.get_close_matches(key.rpartition(".")[2], by_last_part, n=3)
    by_last = f" Did you mean {' or '.join(by_last_part[last] for last in close)}?" if close else ""
    return nearest(key, keys) or by_last or " --help lists the axes."
