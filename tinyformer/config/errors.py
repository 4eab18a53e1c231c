"""Mistakes of the user, printed as a sentence that names config keys; every other error keeps its traceback."""

import contextlib
import difflib
import functools
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
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
"""A pattern of torch's messages about a lack of memory, on all devices."""

EXAMPLES = {"data.files": "book.txt", "data.path": "owner/name", "tokenizer.path": "tokenizer.json"}
"""Example values of the keys that have no default."""

OTHER_NAMES = {
    "epochs": "trainer.max_epochs or trainer.max_steps",
    "learning_rate": "optimizer.lr",
    "device": "trainer.accelerator",
}
"""Names that other programs use, each with our config key for the same setting."""


class ConfigError(ValueError):
    """A mistake in a config or on a command line, as a sentence that names its keys or options."""


@contextlib.contextmanager
def config_keys(config: DictConfig) -> Iterator[None]:
    """Turn an `ArgumentError` inside a `with` statement into a `ConfigError` that names the argument's config key.

    The `ArgumentError` may also come from a class that Hydra's `instantiate` called.
    """
    written = OmegaConf.to_container(config, resolve=False)
    try:
        yield
    except (ArgumentError, InstantiationException) as error:
        cause = cause_of(error)
        node = re.search(r"^full_key: (\S+)$", str(error), re.MULTILINE)  # the key of the class
        if node and isinstance(cause, ImportError):
            raise ConfigError(f"{node[1]}: {str(cause).splitlines()[0]}") from error
        if not isinstance(cause, ArgumentError):
            raise
        if node:
            cause.path = (*node[1].split("."), *cause.path)
        raise ConfigError(cause.describe(functools.partial(key_of_argument, written), format_value)) from error


@contextlib.contextmanager
def in_sentences(program: str) -> Iterator[None]:
    """Turn mistakes of the user inside a `with` statement into a `ConfigError` with the sentence that `describe` gives.

    With HYDRA_FULL_ERROR=1 in the environment, the original error is shown as the cause.
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
    """Turn an `ArgumentError` into a `ConfigError` that names an option, as in `option_names(out="--out")`."""
    try:
        yield
    except ArgumentError as error:
        sentence = error.describe(lambda path: names.get(path[0], ".".join(path)), format_value)
        raise ConfigError(sentence) from error


def exit_code_of(job: Callable[[], int | None], program: str) -> int:
    """Run a program's job, print its error, and return 0 for success, 1 for a bug, or 2 for a user's mistake.

    The printed error may suggest keys of the primary config `program`. A job that has already printed its errors
    returns an exit code itself.
    """
    try:
        code = job() or 0
        sys.stdout.flush()
    except BrokenPipeError:  # the output was closed, as by `| head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at the end
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:  # the user knows why the program ends
        return 128 + signal.SIGINT
    except Exception as error:
        return report(error, program, with_traceback=os.environ.get("HYDRA_FULL_ERROR") == "1")
    return code


def report(error: BaseException, program: str, with_traceback: bool = False) -> int:
    """Print an error to stderr and return the exit code.

    A mistake of the user is printed as a sentence, a bug as a traceback; `with_traceback` prints one for both.
    """
    text = describe(error, program)
    if text is None or with_traceback:
        traceback.print_exception(error)
    else:
        say(f"Error: {text}", file=sys.stderr)
    return BUG if text is None else USER_MISTAKE


def say(text: str, **options: Any) -> None:
    """Print a text, each line through `printable`, since file names and labels may have control characters."""
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

    Mistakes are the errors of this package about arguments and configs, errors of Hydra and OmegaConf about the command
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
    """A sentence that explains an error of Hydra or OmegaConf about a command line, and says what would work."""
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
        # `full_key` is the key of the interpolation; only the message names the missing key.
        missing = re.search(r"resolving interpolation: Missing mandatory value: ([\w.]+)", message)
        key = missing[1] if missing else str(error.full_key or error.key)
        return f"{key} is needed, such as {key}={EXAMPLES.get(key, 'VALUE')}."
    first = message.splitlines()[0]
    if named := re.search(r"Could not (?:override|append to config[^']*|delete(?: from config\.)?) '([^'@]+)", message):
        return first if "already" in message else _unknown_key(named[1], program)
    if ambiguous := re.fullmatch(r"Ambiguous value for argument '([^=]+=.*)'", first):
        return f"{ambiguous[1]}: several values need -m, which makes a run of each value."
    return first


def nearest(word: str, choices: Iterable[str]) -> str:
    """A suggestion of choices that are spelled like a word, as in " Did you mean a or b?"; empty if there are none."""
    close = difflib.get_close_matches(word, list(dict.fromkeys(choices)), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def _unknown_key(key: str, program: str) -> str:
    """The sentence about a key that a config does not have."""
    axis, _, name = key.partition(".")
    others = [other for other in programs() if axis in (axes_of(other) | read(other))]
    if others and program not in others and not (program == "evaluate" and axis in STORED):
        program = {"card": "tinyformer card"}.get(others[-1], f"{others[-1]}.py")  # train, if it has the key
        return f"{key}: there is no such key here; {program} has it."
    choices = choices_of(axis) if axis in files() and name else []
    having = [f"{axis}={choice}" for choice in choices if name.partition(".")[0] in read(choice, axis)]
    if 0 < len(having) < len(choices):
        return f"{key}: there is no such key. It belongs to {' or '.join(having)}."
    return f"{key}: there is no such key.{_similar_key(key, program)}"


def _similar_key(key: str, program: str) -> str:
    """A suggestion of keys of the same node, else of keys spelled like `key`, else of keys that end like it."""
    if key in OTHER_NAMES:
        return f" Did you mean {OTHER_NAMES[key]}?"
    keys = [known for known in values_of_keys() if known.partition(".")[0] in axes_of(program) | read(program)]
    node, dot, last = key.rpartition(".")

    def by_last(known: Sequence[str], limit: int) -> str:
        parts = {each.rpartition(".")[2]: each for each in reversed(known)}
        close = difflib.get_close_matches(last, parts, n=limit)
        return f" Did you mean {' or '.join(parts[part] for part in close)}?" if close else ""

    siblings = [known for known in keys if dot and known.rpartition(".")[0] == node]
    return by_last(siblings, 1) or nearest(key, keys) or by_last(keys, 3) or " --help lists the axes."
