"""Mistakes of the user as a few lines in the words of the config; every other error keeps its traceback."""

import contextlib
import difflib
import errno
import functools
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationResolutionError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from tinyformer.config.conf import (
    STORED,
    TEXTS,
    NoOverrideError,
    axes_of,
    choices_of,
    files,
    format_value,
    key_of_argument,
    programs,
    read,
    text_of,
    values_of_keys,
)
from tinyformer.config.process import close_output, escape_output
from tinyformer.errors import ArgumentError, printable

USER_MISTAKE, BUG = 2, 1
MAX_LINES = 4

OF_THE_MACHINE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.ELOOP),
)
"""File errors that the user can remedy: full disks, missing rights, files instead of folders, too long names."""

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
        # Raised in Hydra, the call itself failed; in the others, one of their classes refused an argument.
        is_refused = isinstance(cause, TypeError | ValueError | ImportError) and not isinstance(cause, ArgumentError)
        if node and is_refused and raising_module(cause).startswith(("hydra.", "lightning.", "torch.")):
            reason = str(cause).splitlines()[0].rstrip(".")
            for package in re.findall(r"Requirement '([\w-]+)", str(cause)):  # the last is the one to install
                reason = f"needs {package}, which is not installed; `pip install {package}` installs it"
            raise ConfigError(f"{node[1]}: {reason}.") from error
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
    for those that it has reported itself. The output escapes what the terminal cannot encode.
    """
    escape_output()
    try:
        code = job() or 0
        sys.stdout.flush()  # while it can still be noticed that nobody reads it
    except BrokenPipeError:
        return close_output()
    except Exception as error:
        return report(error, program, with_traceback=os.environ.get("HYDRA_FULL_ERROR") == "1")
    return code


def report(error: BaseException, program: str, with_traceback: bool = False) -> int:
    """Print an error to stderr: a mistake in at most `MAX_LINES` lines, a bug (or both, if asked) with its traceback.

    Returns the exit code.
    """
    text = describe(error, program)
    if text is None or with_traceback:
        traceback.print_exception(error)
    else:
        lines = f"Error: {text}".splitlines()
        if len(lines) > MAX_LINES:
            lines[MAX_LINES - 1 :] = [f"{lines[MAX_LINES - 1]} …"]
        say("\n".join(lines), file=sys.stderr)
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


def raising_module(error: BaseException) -> str:
    """The name of the module that raised an error."""
    last = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1:]
    return last[0].f_globals.get("__name__", "") if last else ""


def describe(error: BaseException, program: str) -> str | None:
    """The sentence that explains a mistake to the user; None for any other error, which is a bug.

    Mistakes are what this package raises about arguments and configs, what Hydra and OmegaConf raise about the command
    line of `program`, Lightning's `MisconfigurationException`, and files that cannot be written.
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
    # Where a file cannot be made in /proc, the system says that there is none.
    if isinstance(error, OSError) and (error.errno in OF_THE_MACHINE or str(error.filename).startswith("/proc/")):
        return f"{error.filename or 'a file'}: {error.strerror}. The file was not modified."
    if isinstance(error, HydraException | OmegaConfBaseException):
        return _describe_composition(error, program)
    module, first = raising_module(error), (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, ValueError) and module.startswith("lightning."):
        return f"trainer: {first}"
    if isinstance(error, ValueError | TypeError | AttributeError) and module.startswith("hydra."):
        return f"{first}: an axis without a choice is left out; --help lists the choices."
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
    if isinstance(error, InterpolationResolutionError) and TEXTS.fullmatch(error.full_key or ""):
        node: Any = OmegaConf.to_container(error.parent_node, resolve=False)
        return _unresolved(str(error.full_key), node[error.key])
    if isinstance(error, InterpolationKeyError):
        missing = re.search(r"^Interpolation key '([\w.]+)' not found", message)
        if missing is None:
            return " ".join(message.splitlines()[:2])
        return f"{missing[1]} is needed by {error.full_key}, and the config has no such key."
    first = message.splitlines()[0]
    if named := re.search(r"Could not (?:override|append to config[^']*|delete(?: from config\.)?) '([^'@]+)", message):
        return _unknown_key(named[1], program, is_added="already" in message)
    if ambiguous := re.fullmatch(r"Ambiguous value for argument '([^=]+=.*)'", first):
        return f"{ambiguous[1]}: -m makes a run of each value."
    if unread := re.fullmatch(r"Error merging override (([^=]+)=.*\$\{.*)", first):
        return _unresolved(unread[2], text_of(unread[1]))
    return first


def nearest(word: str, choices: Iterable[str]) -> str:
    """The choices that look like a word, as " Did you mean a or b?"; empty if none does."""
    close = difflib.get_close_matches(word, list(dict.fromkeys(choices)), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def _unknown_key(key: str, program: str, is_added: bool) -> str:
    """The sentence about a key that a config does not have, or that is added though the config has it."""
    axis, _, name = key.partition(".")
    others = [other for other in programs() if axis in (axes_of(other) | read(other))]
    if others and program not in others and not (program == "evaluate" and axis in STORED):
        program = {"card": "tinyformer card"}.get(others[-1], f"{others[-1]}.py")  # rather train than the card
        return f"{key}: there is no such key here; {program} has it."
    choices = choices_of(axis) if axis in files() and name else []
    having = [f"{axis}={choice}" for choice in choices if name.partition(".")[0] in read(choice, axis)]
    if 0 < len(having) < len(choices):
        return f"{key}: there is no such key. It belongs to {' or '.join(having)}."
    if key in values_of_keys() and is_added:
        return f"+{key}: adds a key that is there already; without the + it is set."
    if key in values_of_keys():
        or_replaces = f" or replaces {parent}" if (parent := key.rpartition(".")[0]) else ""
        return f"{key}: there is no such key any more; an earlier override removes it{or_replaces}."
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


def _unresolved(key: str, text: str) -> str:
    r"""The sentence about `${…}` in a text that refers to no other key; `\${…}` stands for itself."""
    literal = format_value(text.replace("${", "\\${"))
    return f"{key}={format_value(text)}: ${{…}} refers to another key, which is not there; {key}={literal} is a text."
