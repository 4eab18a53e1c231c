"""Errors of Hydra and OmegaConf about a command line, each as one sentence that says what would work."""

import difflib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationResolutionError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from tinyformer.config.keys import TEXTS, format_value, text_of

EXAMPLES = {
    "data.files": "book.txt",
    "data.path": "owner/name",
    "tokenizer.path": "tokenizer.json",
}
"""Values for the keys that have no default."""


def describe_hydra_error(error: BaseException, config_dir: Path, config_name: str) -> str | None:
    """An error of Hydra or OmegaConf as a sentence, which may suggest keys of the config; None for any other error."""
    if isinstance(error, MissingConfigException):
        return _unknown_choice(error)
    if isinstance(error, OverrideParseException):
        own = re.match(r"is no KEY=VALUE; .*", str(error))  # Hydra's message is about its grammar
        return f"{error.override}: {own[0] if own else 'is no KEY=VALUE, such as attention=gqa'}."
    if isinstance(error, MissingMandatoryValue | InterpolationToMissingValueError):
        # The full key is that of the interpolation; the missing key stands in the message.
        missing = re.search(r"resolving interpolation: Missing mandatory value: ([\w.]+)", str(error))
        key = missing[1] if missing else str(error.full_key or error.key)
        return f"{key} is needed, such as {key}={EXAMPLES.get(key, 'VALUE')}."
    if isinstance(error, InterpolationResolutionError) and TEXTS.fullmatch(error.full_key or ""):
        node: Any = OmegaConf.to_container(error.parent_node, resolve=False)
        return _unresolved(str(error.full_key), node[error.key])
    if isinstance(error, InterpolationKeyError):
        missing = re.search(r"^Interpolation key '([\w.]+)' not found", str(error))
        if missing is None:
            return " ".join(str(error).splitlines()[:2])
        return f"{missing[1]} is needed by {error.full_key}, and the config has no such key."
    if isinstance(error, HydraException | OmegaConfBaseException):
        return _unknown_key(str(error), config_dir, config_name)
    if isinstance(error, ValueError | TypeError | AttributeError) and raising_module(error).startswith("hydra."):
        return f"{str(error).splitlines()[0]}: an axis without a choice is left out; --help lists the choices."
    return None


def nearest(word: str, choices: Iterable[str]) -> str:
    """The choices that look like a word, as " Did you mean a or b?"; empty if none does."""
    close = difflib.get_close_matches(word, list(dict.fromkeys(choices)), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def raising_module(error: BaseException) -> str:
    """The name of the module that raised an error."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return "" if frame is None else frame.tb_frame.f_globals.get("__name__", "")


def _unknown_choice(error: MissingConfigException) -> str:
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    choices = [option for option in error.options or () if not option.startswith("_")]
    if not choices:
        return str(error).splitlines()[0]
    return f"{group}={choice}: there is no such choice.{nearest(choice, choices)} Choices: {', '.join(choices)}."


def _unknown_key(message: str, config_dir: Path, config_name: str) -> str:
    named = re.search(r"Could not (?:override|append to config[^']*|delete(?: from config\.)?) '([^'@]+)", message)
    if not named:
        first = message.splitlines()[0]
        if ambiguous := re.fullmatch(r"Ambiguous value for argument '(([^=]+)=(.*))'", first):
            word, key, value = ambiguous.groups()
            return f"{word}: -m makes a run of each value; {key}={format_value(value)} is one text."
        if unread := re.fullmatch(r"Error merging override (([^=]+)=.*\$\{.*)", first):
            return _unresolved(unread[2], text_of(unread[1]))
        return first
    key, keys = named[1], known_keys(config_dir, config_name)
    if program := _other_program(key, keys, config_dir, config_name):
        return f"{key}: there is no such key here; {program} has it."
    hint = _other_choice(key, config_dir)
    if not hint and key in keys:
        if "already" in message:
            return f"+{key}: adds a key that is there already; without the + it is set."
        or_replaces = f" or replaces {parent}" if (parent := key.rpartition(".")[0]) else ""
        return f"{key}: there is no such key any more; an earlier override removes it{or_replaces}."
    hint = hint or nearest(key, [*keys, *_keys_of_choices(key, config_dir)])
    if not hint:
        by_last_part = {name.rpartition(".")[2]: name for name in reversed(keys)}
        close = difflib.get_close_matches(key.rpartition(".")[2], by_last_part, n=3)
        hint = f" Did you mean {' or '.join(by_last_part[last] for last in close)}?" if close else ""
    return f"{key}: there is no such key.{hint or ' --help lists the axes.'}"


def _unresolved(key: str, text: str) -> str:
    r"""The sentence about `${…}` in a text that refers to no other key; `\${…}` stands for itself."""
    literal = format_value(text.replace("${", "\\${"))
    return f"{key}={format_value(text)}: ${{…}} refers to another key, which is not there; {key}={literal} is a text."


def known_keys(config_dir: Path, config_name: str) -> list[str]:
    """All keys of the default config, groups and values, such as `attention` and `attention.num_kv_heads`."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_dir), version_base=None):
        return list(_flatten(OmegaConf.to_container(compose(config_name), resolve=False)))


def _other_choice(key: str, config_dir: Path) -> str:
    """The choices of a key's group that have the key, if others do not, as in " It belongs to data=text."."""
    group, _, rest = key.partition(".")
    files = sorted((config_dir / group).glob("[!_]*.yaml")) if rest else []
    choices = [f"{group}={file.stem}" for file in files if rest.split(".")[0] in _with_bases(file)]
    return f" It belongs to {' or '.join(choices)}." if 0 < len(choices) < len(files) else ""


def _with_bases(file: Path) -> dict[str, Any]:
    """The contents of a config file and of the files that it starts from, such as _shared or /attention/gqa@_here_."""
    whole: dict[str, Any] = {}
    contents = _load(file)
    for base in contents.pop("defaults", []):
        if isinstance(base, str) and base != "_self_":
            path = base.partition("@")[0]
            whole |= _with_bases(file.parent / f"{'..' if path.startswith('/') else ''}{path}.yaml")
    return whole | contents


def _keys_of_choices(key: str, config_dir: Path) -> set[str]:
    """All keys that some choice of a key's group has, such as `task.masking.rate`."""
    group = key.partition(".")[0]
    return {
        name for file in (config_dir / group).glob("[!_]*.yaml") for name in _flatten(_with_bases(file), f"{group}.")
    }


def _other_program(key: str, keys: Iterable[str], config_dir: Path, config_name: str) -> str | None:
    """The program that has a key's axis, such as `evaluate`, if this one does not."""
    first = key.partition(".")[0]
    programs = [file.stem for file in sorted(config_dir.glob("*.yaml")) if first in _axes(file)]
    return None if first in keys or config_name in programs or not programs else programs[0]


def _axes(file: Path) -> set[str]:
    """The groups of a program's defaults list, and its own keys."""
    config = _load(file)
    groups = (node for node in config.get("defaults", []) if isinstance(node, dict))
    return {*config, *(name for node in groups for name in node)}


def _load(file: Path) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.load(file), resolve=False)  # type: ignore[return-value]


def _flatten(node: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield f"{prefix}{key}"
            yield from _flatten(value, f"{prefix}{key}.")
