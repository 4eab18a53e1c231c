"""Overrides that a file brings: data, which name no class but ours and compute nothing."""

import functools
import itertools
import re
from collections.abc import Iterator
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ValueType
from hydra.errors import HydraException

from tinyformer.app.config import config_dir

SEVERAL_VALUES = "has several values"
"""What is said of an override that makes several jobs."""

MAX_JOBS = 10_000
"""Of a sweep in a file."""

SCORE = "attention.score"
"""A key whose value may name a class."""

OF_A_NODE = {"_target_", "_partial_", "_recursive_", "_convert_"}
"""Hydra's own keys in a node that makes an object; `_args_` is none of them, since no config file of ours has it."""


def problem_of_override(entry: str, in_sweep: bool = False) -> str | None:
    """Why an override that a file brings is not data, as in "calls 'os.system'"; None if it is.

    It may set plain values, refer to another key as a whole (`${model.d_model}`), choose among our own config files and
    name the classes of models in this package and those of its config files.

    Args:
        entry: an override as on a command line.
        in_sweep: whether it may have several values, each of which is checked.
    """
    try:
        override = OverridesParser.create().parse_override(entry)
    except (HydraException, RecursionError):
        return "is no override"
    key = override.key_or_group
    first = key.partition("/")[0].partition(".")[0]
    # Some file systems know no upper case: there, Norm=../x would choose a file in the folder norm.
    is_disguised = first != first.casefold() and first.casefold() in _choices()
    if override.package is not None or first.casefold() == "hydra" or is_disguised:
        return "changes the program itself"
    if not key:
        return "is no override"
    # A run makes folders, such as that of its cache: a new one in `conf` would be a group, which can load any file.
    is_new = "." not in key and (override.is_add() or override.is_force_add()) and key not in _choices()
    if "/" in key or first not in _keys() or is_new:
        return f"sets {key[:100]}, which no config file of tinyformer has"
    if override.is_sweep_override():
        if not in_sweep:
            return SEVERAL_VALUES
        if override.value_type == ValueType.GLOB_CHOICE_SWEEP and key in _choices():
            return None  # a glob chooses among our own files
        if getattr(override.value(), "shuffle", False):
            return "draws its values anew"
        try:
            values = list(itertools.islice(override.sweep_string_iterator(), MAX_JOBS + 1))
        except HydraException:
            return "is no list of values"
        if len(values) > MAX_JOBS:
            return f"makes more than {MAX_JOBS:,} jobs"
        alternatives = (f"{override.get_key_element()}={value}" for value in values)
        return next(filter(None, map(problem_of_override, alternatives)), None)
    value = override.value()
    if key in _choices():
        is_ours = value is None or value in _choices()[key]
        return None if is_ours else "chooses a file that is not tinyformer's"
    return next((problem for path, leaf in _leaves(key, value) if (problem := _problem_of_leaf(path, leaf))), None)


def num_values(entry: str) -> int:
    """The number of jobs that an override makes, up to one more than `MAX_JOBS`; 1 if it is malformed."""
    try:
        override = OverridesParser.create().parse_override(entry)
        if not override.is_sweep_override() or override.value_type == ValueType.GLOB_CHOICE_SWEEP:
            return 1
        return sum(1 for _ in itertools.islice(override.sweep_string_iterator(), MAX_JOBS + 1))
    except (HydraException, RecursionError):
        return 1


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The plain values of an override, each with its dotted key."""
    if isinstance(value, dict):
        for name, entry in value.items():
            yield from _leaves(f"{key}.{name}", entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _leaves(key, entry)
    else:
        yield key, value


def _problem_of_leaf(key: str, value: Any) -> str | None:
    name, text = key.rpartition(".")[2], str(value)
    if key.startswith("trainer.") and key.split(".")[1] not in _arguments_of_trainer():
        return f"sets {key}, which no config file of tinyformer has"
    if re.fullmatch(r"_\w+_", name) and name not in OF_A_NODE:
        return f"contains {name}"
    is_reference = re.fullmatch(r"\$\{[\w.]+\}", text)
    if name == "cache_dir" and value is not None:
        return f"makes a folder at {text[:100]!r}"
    if key == "logger.entity" and value is not None:
        return f"sends the run to the team {text[:100]!r}"
    if "${" in text and (not is_reference or key == SCORE):  # which would be imported by the name that it refers to
        return f"computes {text[:100]!r}"
    is_class = name == "_target_" or (key == SCORE and "." in text)
    if is_class and text not in _classes_of_config_files() and not _is_our_class(text):
        return f"calls {text[:100]!r}, which is not a class of tinyformer and could run any code"
    return None


@functools.cache
def _choices() -> dict[str, list[str]]:
    """The names of our config files by folder."""
    folders = (folder for folder in config_dir().iterdir() if folder.is_dir())
    return {folder.name: [file.stem for file in folder.glob("[!_]*.yaml")] for folder in folders}


@functools.cache
def _keys() -> frozenset[str]:
    """The keys at the top of a training run's config, groups included."""
    own = yaml.safe_load((config_dir() / "train.yaml").read_text())
    return frozenset({*own, *_choices()} - {"defaults", "hydra"})


@functools.cache
def _classes_of_config_files() -> frozenset[str]:
    found = (re.findall(r"_target_: *([\w.]+)", file.read_text()) for file in config_dir().rglob("*.yaml"))
    return frozenset(name for names in found for name in names)


@functools.cache
def _arguments_of_trainer() -> frozenset[str]:
    return frozenset(yaml.safe_load((config_dir() / "trainer" / "_shared.yaml").read_text()))


def _is_our_class(name: str) -> bool:
    # Torch takes seconds to import: only for a class that no config file names.
    from tinyformer.app.stored_config import OF_MODELS
    from tinyformer.checkpoint import is_our_class

    return is_our_class(name, OF_MODELS)
