"""Mistakes of the user as a few lines in the words of the config; every other error keeps its traceback."""

import contextlib
import difflib
import functools
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from tinyformer.app.keys import format_value, key_of_argument
from tinyformer.errors import ArgumentError

USER_MISTAKE, BUG = 2, 1

EXAMPLES = {
    "data.files": "book.txt",
    "data.path": "owner/name",
    "tokenizer.path": "tokenizer.json",
}
"""Values of the keys that have no default."""

_QUOTES_HINT = """quote what the shell or Hydra would split, such as 'generate.prompt="a, b"'"""


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
        wrong = cause_of(error)
        if not isinstance(wrong, ArgumentError):
            raise
        if node := re.search(r"^full_key: (\S+)$", str(error), re.MULTILINE):  # what `instantiate` was calling
            wrong.path = (*node[1].split("."), *wrong.path)
        raise ConfigError(wrong.describe(functools.partial(key_of_argument, written), format_value)) from error


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
    """The sentence that tells the user of a mistake; None for any other error, which is a bug.

    Mistakes are what this package raises about arguments and configs, what Hydra and OmegaConf raise about the command
    line, and Lightning's `MisconfigurationException`.
    """
    error = cause_of(error)
    if isinstance(error, ArgumentError):
        return error.describe(show=format_value)
    if isinstance(error, ConfigError):
        return str(error)
    if isinstance(error, MissingConfigException):
        return _unknown_choice(error)
    if isinstance(error, OverrideParseException):
        first = str(error).splitlines()[0].partition(" expecting ")[0]  # what the grammar could have gone on with
        return f"{error.override}: {first[0].lower()}{first[1:]}; {_QUOTES_HINT}."
    if isinstance(error, MissingMandatoryValue | InterpolationToMissingValueError):
        # An interpolation knows its own key, and says in words which one is missing.
        named = re.search(r"resolving interpolation: Missing mandatory value: ([\w.]+)", str(error))
        key = named[1] if named else str(error.full_key or error.key)
        return f"{key} is needed, such as {key}={EXAMPLES.get(key, 'VALUE')}."
    if isinstance(error, InterpolationKeyError):
        return " ".join(str(error).splitlines()[:2])
    if isinstance(error, HydraException | OmegaConfBaseException):
        return _unknown_key(str(error), config_dir, config_name)
    if isinstance(error, ValueError) and _raised_in(error, "hydra."):
        return f"{error}: an axis without a choice is left out; --help lists the choices."
    is_misconfiguration = type(error).__name__ == "MisconfigurationException"
    if is_misconfiguration or (isinstance(error, ValueError) and _raised_in(error, "tinyformer.")):
        return str(error)
    return None


def exit_code_of(job: Callable[[], None], config_dir: Path, config_name: str) -> int:
    """Run the job of a program that Hydra does not start, and tell errors as those that it starts do.

    Args:
        job: what to do.
        config_dir: where the config files are.
        config_name: the primary one, whose keys an error may name.

    Returns:
        The exit code: 0, 1 for a bug, 2 for a mistake of the user.
    """
    try:
        job()
    except Exception as error:
        return report(error, config_dir, config_name, with_traceback=os.environ.get("HYDRA_FULL_ERROR") == "1")
    return 0


def report(error: BaseException, config_dir: Path, config_name: str, with_traceback: bool = False) -> int:
    """Print an error to stderr.

    Args:
        error: what was raised.
        config_dir: where the config is.
        config_name: of the program's config.
        with_traceback: show it for mistakes of the user, too.

    Returns:
        The exit code: 2 for a mistake of the user, 1 for a bug.
    """
    text = describe(error, config_dir, config_name)
    if text is None or with_traceback:
        traceback.print_exception(error)
    else:
        print("\n".join(f"Error: {text}".splitlines()[:4]), file=sys.stderr)
    return BUG if text is None else USER_MISTAKE


def nearest(word: str, choices: Iterable[str]) -> str:
    """The choices that look like a word, as " Did you mean a or b?", or nothing."""
    found = difflib.get_close_matches(word, list(dict.fromkeys(choices)), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(found)}?" if found else ""


def cause_of(error: BaseException) -> BaseException:
    """The error that a class raised when `instantiate` called it, without what `instantiate` wraps around it."""
    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _raised_in(error: BaseException, package: str) -> bool:
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and frame.tb_frame.f_globals.get("__name__", "").startswith(package)


def _unknown_choice(error: MissingConfigException) -> str:
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    choices = [option for option in error.options or () if not option.startswith("_")]
    if not choices:
        return str(error).splitlines()[0]
    return f"{group}={choice}: there is no such choice.{nearest(choice, choices)} Choices: {', '.join(choices)}."


def _unknown_key(message: str, config_dir: Path, config_name: str) -> str:
    found = re.search(r"Could not (?:override|append to config[^']*) '([^'@]+)", message)
    if not found:
        first = message.splitlines()[0]
        return f"{first}; {_QUOTES_HINT}." if first.startswith("Ambiguous") else first
    key = found[1]
    keys = known_keys(config_dir, config_name)
    if program := _other_program(key, keys, config_dir, config_name):
        return f"{key}: there is no such key. It belongs to {program}."
    hint = _other_choice(key, config_dir) or nearest(key, [*keys, *_keys_of_choices(key, config_dir)])
    if not hint:
        by_last_part = {name.rpartition(".")[2]: name for name in reversed(keys)}
        close = difflib.get_close_matches(key.rpartition(".")[2], by_last_part, n=3)
        hint = f" Did you mean {' or '.join(by_last_part[last] for last in close)}?" if close else ""
    return f"{key}: there is no such key.{hint or ' --help lists the axes.'}"


def _other_choice(key: str, config_dir: Path) -> str:
    """The choices of a key's group that have it, where others do not, as in " It belongs to data=text."."""
    group, _, rest = key.partition(".")
    files = sorted((config_dir / group).glob("[!_]*.yaml")) if rest else []
    having = [f"{group}={file.stem}" for file in files if rest.split(".")[0] in _keys(file)]
    return f" It belongs to {' or '.join(having)}." if 0 < len(having) < len(files) else ""


def _keys(file: Path) -> set[str]:
    """The keys of a config file, and of those that it starts from."""
    contents: dict[str, Any] = OmegaConf.to_container(OmegaConf.load(file))  # type: ignore[assignment]
    bases = [base for base in contents.get("defaults", []) if isinstance(base, str) and base != "_self_"]
    return {*contents}.union(*(_keys(file.with_name(f"{base}.yaml")) for base in bases))


def _keys_of_choices(key: str, config_dir: Path) -> set[str]:
    """All keys that a choice of a key's group has, such as `task.masking.rate`."""
    group = key.partition(".")[0]
    return {name for file in (config_dir / group).glob("[!_]*.yaml") for name in _flatten(_load(file), f"{group}.")}


def _other_program(key: str, keys: Iterable[str], config_dir: Path, config_name: str) -> str | None:
    """The program that has a key's axis, such as `evaluate.py`, where this one has not."""
    first = key.partition(".")[0]
    having = [file.stem for file in sorted(config_dir.glob("*.yaml")) if first in _axes(file)]
    return None if first in keys or config_name in having or not having else f"{having[0]}.py"


def _axes(file: Path) -> set[str]:
    """The groups that a program's config chooses from, and its own keys."""
    config = _load(file)
    groups = (node for node in config.get("defaults", []) if isinstance(node, dict))
    return {*config, *(name for node in groups for name in node)}


def _load(file: Path) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.load(file), resolve=False)  # type: ignore[return-value]


def known_keys(config_dir: Path, config_name: str) -> list[str]:
    """All keys of the default config, groups and values, such as `attention` and `attention.num_kv_heads`."""
    return list(_flatten(OmegaConf.to_container(default_config(config_dir, config_name), resolve=False)))


def default_config(config_dir: Path, config_name: str) -> DictConfig:
    """The config without any override."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_dir), version_base=None):
        return compose(config_name)


def _flatten(node: Any, prefix: str = "") -> Iterable[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield f"{prefix}{key}"
            yield from _flatten(value, f"{prefix}{key}.")
