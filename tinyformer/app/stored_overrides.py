"""Overrides from a run folder or a sweep: they are data, and are written anew before Hydra reads them.

A folder may come from a stranger, and Hydra's overrides can do anything. So each override is parsed; its key has to be
one of our config files, its value plain or the name of one of our classes; and what Hydra reads is formatted from these
two, never the text of the file. `stored_config` does the same with the config in a checkpoint.
"""

import functools
import itertools
import math
import re
import sys
from collections.abc import Iterator
from typing import Any

import yaml
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, OverrideType, RangeSweep
from hydra.errors import HydraException

from tinyformer.app.config import config_dir
from tinyformer.app.keys import hydra_value, parsed
from tinyformer.app.plain_values import SCORE_KEYS, problem_of_value

MAX_JOBS = 10_000
"""Maximum number of jobs of a sweep."""

PREFIXES = {OverrideType.CHANGE: "", OverrideType.ADD: "+", OverrideType.FORCE_ADD: "++", OverrideType.DEL: "~"}
"""The prefix of an override, by its type."""

TYPED_AGAIN = {
    "cache_dir": "makes a folder",  # which could be a new group of config files
    "entity": "sends the run to a team",
}
"""Last parts of keys that only the command line may set, and what each of them does."""

NEVER_SET = ("defaults", "hydra", "resume", "checkpoint")
"""Entries of our config files that are not values of a run."""

PRIMARY = ("train", "evaluate", "card")
"""The config files of programs, which name the axes."""


class NotDataError(ValueError):
    """An override in a file is more than data.

    Args:
        problem: what it is, as in "calls 'os.system'".
    """


def admit_override(entry: str, in_sweep: bool = False) -> str:
    """An override from a file, written anew.

    It may choose among our own config files, set plain values at keys that they have, and name classes of models in
    this package and those of the config files.

    Args:
        entry: an override as on a command line.
        in_sweep: whether it may have several values; each of them is checked.

    Raises:
        NotDataError: it does anything else.
    """
    override = _parsed(entry)
    key = override.key_or_group
    if override.package is not None:
        raise NotDataError("moves a config file to another key")
    if key.partition("/")[0].partition(".")[0].casefold() == "hydra":
        raise NotDataError("changes Hydra itself")
    if not is_known(key):
        raise NotDataError(f"sets {key[:100]}, which no config file of tinyformer has")
    start = PREFIXES[override.type] + key
    if override.type == OverrideType.DEL and "=" not in entry:
        return start
    if not override.is_sweep_override():
        return f"{start}={_admit_value(key, override.value())}"
    if not in_sweep:
        raise NotDataError("has several values")
    return f"{start}={_admit_alternatives(key, override)}"


def num_values(entry: str) -> int:
    """The number of values of an admitted override; each makes a job."""
    return count_values(_parsed(entry))


def count_values(override: Override) -> int:
    """The number of values of an override, counted without making them; 1 where it is malformed."""
    value = override.value()
    if isinstance(value, Glob):
        return len(value.filter(_files().get(override.key_or_group, []))) if is_plain_glob(value) else 0
    if isinstance(value, ChoiceSweep):
        return len(value.list)
    if not isinstance(value, RangeSweep):
        return 1
    try:
        return max(0, math.ceil((float(value.stop or 0) - float(value.start or 0)) / float(value.step)))
    except (ZeroDivisionError, ValueError):  # a step of 0, and NaN
        return 1
    except OverflowError:
        return sys.maxsize


def is_plain_glob(glob: Glob) -> bool:
    """Whether the patterns of a glob are those of names in a folder."""
    return all(isinstance(name, str) and re.fullmatch(r"[\w*?]+", name) for name in glob.include + glob.exclude)


def is_known(key: str) -> bool:
    """Whether a config file has a key."""
    return key in _values_of_keys()


def is_swept(entry: str) -> bool:
    """Whether an override has several values, each of which makes a job."""
    try:
        return _parsed(entry).is_sweep_override()
    except NotDataError:
        return False


def _parsed(entry: str) -> Override:
    try:
        return parsed(entry)
    except ValueError as error:
        raise NotDataError("is not an override") from error


def _admit_alternatives(key: str, override: Override) -> str:
    """The values of a sweep, as they are typed."""
    value = override.value()
    number = count_values(override)
    if not number:
        raise NotDataError("is no list of values")
    if isinstance(value, Glob):
        return f"glob({hydra_value(value.include)},exclude={hydra_value(value.exclude)})"  # of our own files
    if getattr(value, "shuffle", False):
        raise NotDataError("shuffles its values")
    if number > MAX_JOBS:
        raise NotDataError(f"makes more than {MAX_JOBS:,} jobs")
    try:
        texts = list(override.sweep_string_iterator())
    except (HydraException, ArithmeticError, ValueError) as error:
        raise NotDataError("is no list of values") from error
    alternatives = (_parsed(f"{key}={text}") for text in texts)
    return ",".join(_admit_value(key, alternative.value()) for alternative in alternatives)


def _admit_value(key: str, value: Any) -> str:
    """A single value, as it is typed."""
    if key in _choices():
        if value is not None and value not in _choices()[key]:
            raise NotDataError("chooses a file that is not tinyformer's")
    else:
        for path, leaf in _leaves(key, value):
            _admit_leaf(path, leaf)
    return hydra_value(value)


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The values of an override that are not mappings, each with its dotted key."""
    if isinstance(value, dict):
        for name, entry in value.items():
            yield from _leaves(f"{key}.{name}", entry)
    else:
        yield key, value


def _admit_leaf(key: str, value: Any) -> None:
    known, last = _values_of_keys(), key.rpartition(".")[2]
    if key not in known:
        raise NotDataError(f"sets {key[:100]}, which no config file of tinyformer has")
    if problem := problem_of_value(key, value):
        raise NotDataError(f"is not admitted: the value {problem}")
    if last in TYPED_AGAIN and value is not None:
        raise NotDataError(f"{TYPED_AGAIN[last]}, {str(value)[:100]!r}")
    is_name = last == "_target_" or (key in SCORE_KEYS and "." in str(value))
    if is_name and value not in known[key] and not _is_class_of_models(key, value):
        raise NotDataError(f"calls {str(value)[:100]!r}, which is not a class of tinyformer and could run any code")


def _is_class_of_models(key: str, name: Any) -> bool:
    # Torch takes seconds to import: only for a class that no config file names at this key.
    from tinyformer.app.stored_config import OF_DATA, OF_MODELS
    from tinyformer.checkpoint import is_our_class

    return isinstance(name, str) and key.partition(".")[0] not in OF_DATA and is_our_class(name, OF_MODELS)


def _choices() -> dict[str, list[str]]:
    """The choices of each axis of a program."""
    return {axis: [name for name in names if not name.startswith("_")] for axis, names in _files().items()}


@functools.cache
def _files() -> dict[str, list[str]]:
    """The names of our config files, by the axis of a program."""
    entries = (entry for name in PRIMARY for entry in _file(name)["defaults"])
    axes = (name for entry in entries if isinstance(entry, dict) for name in entry)
    return {axis: [file.stem for file in (config_dir() / axis).glob("*.yaml")] for axis in axes if "/" not in axis}


@functools.cache
def _values_of_keys() -> dict[str, list[Any]]:
    """The dotted keys of the programs' configs, nodes included, each with its values in the config files."""
    values: dict[str, list[Any]] = {axis: [] for axis in _choices()}

    def add(node: Any, key: str) -> None:
        values.setdefault(key, []).append(node)
        for name, entry in node.items() if isinstance(node, dict) else ():
            add(entry, f"{key}.{name}")

    for name, node in itertools.chain(*(_file(primary).items() for primary in PRIMARY)):
        if name not in NEVER_SET:
            add(node, name)
    for axis, files in _files().items():
        for file in files:
            text = (config_dir() / axis / f"{file}.yaml").read_text(encoding="utf-8")
            is_global = re.search(r"^# @package _global_$", text, re.MULTILINE)
            for name, node in _file(f"{axis}/{file}").items():
                if name not in NEVER_SET:
                    add(node, name if is_global else f"{axis}.{name}")
    return values


@functools.cache
def _file(name: str) -> dict[str, Any]:
    return yaml.safe_load((config_dir() / f"{name}.yaml").read_text(encoding="utf-8")) or {}
