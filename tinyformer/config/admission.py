"""The choices and values that an untrusted checkpoint, run folder or finding may set in a config.

The rule is `admit`: a file may choose among our own config files and set plain values at the keys of these files. A
class that it names must be a class of tinyformer, unless the command line names the same class.

A checkpoint stores overrides by key: the choice of each axis and every literal value of our YAML. A computed value,
such as `${model.d_model}`, is stored only if it was overridden. So a later change of a default does not change an old
checkpoint, and an override of `model.d_model` also changes the values that are computed from it. The config is composed
from the admitted overrides, and Hydra never parses the checkpoint's own text.
"""

import copy
import functools
import importlib
import math
import pydoc
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from hydra.core.override_parser.types import Glob
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tinyformer.config.by_layer import NODES
from tinyformer.config.conf import (
    AXES,
    STORED,
    choices_of,
    default_choices,
    files,
    format_value,
    hydra_value,
    key_of,
    parsed,
    read,
    register_resolvers,
    values_of_keys,
)
from tinyformer.config.errors import ConfigError
from tinyformer.errors import ArgumentError

if TYPE_CHECKING:
    from tinyformer.checkpoint.file import Checkpoint

Plain: TypeAlias = dict[str, Any]
Trust: TypeAlias = Callable[[str, Any], bool]
"""A function of a key and the dotted name of a class; it returns True if the user has named this class at this key."""

DERIVED = ("data", "tokenizer", "network", "datamodule")
"""Nodes in which a file may not name a class, since data classes read files and download. In these nodes, a checkpoint
may not set a key that our YAML computes from other keys."""

OF_MODELS = ("tinyformer.nn.", "tinyformer.tasks.")  # the packages whose classes a file may name
SCORE_KEYS = ("attention.score", "cross_attention.score")  # keys whose plain value may be the name of a class

TYPED_AGAIN = {
    "cache_dir": "makes a folder",  # the folder could be a new group of config files
    "entity": "sends the run to a team",
}
"""Last components of keys that only the command line may set, each with the effect that an error names."""

MAX_DEPTH = 2  # maximum depth of nested lists

SOURCES = ("data.files", "data.path", "data.name", "data.revision", "data.source.hub.path", "data.document_start")
"""Keys of data sources. A checkpoint records their values, which a later run uses only if they are typed again."""

OWN = ("data.cache_dir", "tokenizer.path")
"""Keys of paths on the machine of a run: a checkpoint does not record them, and values for them are ignored."""


class NotAdmittedError(ValueError):
    """A file sets a key to a value that it may not set; `problem` says what the value does: "calls 'os.system'".

    `target` is the dotted name of a class in the file that the user may allow by typing the name; else None.
    """

    def __init__(self, key: str, problem: str, target: str | None = None) -> None:
        super().__init__(problem)
        self.key, self.target = key, target


def never_instantiated(key: str, name: Any) -> bool:
    """Trust every class, for callers that instantiate nothing from the config."""
    return True


def admit(key: str, value: Any, trust: Trust = lambda key, name: False, is_argument: bool = False) -> None:
    """Raise `NotAdmittedError` if a file may not set `key`, an axis or a key such as "norm._target_", to a value.

    With `is_argument`, the file also names a class for the key's node, so that the key may be missing in our YAML.
    """
    if key in files():
        if value not in (None, *choices_of(key)):
            raise NotAdmittedError(key, f"chooses {_shown(value)}, which is not a choice of this axis")
        return
    known, last = values_of_keys().get(key, []), key.rpartition(".")[2]
    if not known and not (is_argument and re.fullmatch(r"[A-Za-z]\w*", last, re.ASCII)):
        raise NotAdmittedError(key, "is not a key of the config files")
    if last in TYPED_AGAIN and value is not None:
        raise NotAdmittedError(key, f"{TYPED_AGAIN[last]}, {_shown(value)}")
    if problem := problem_of_value(value):
        raise NotAdmittedError(key, problem)
    if last == "_target_" or (key in SCORE_KEYS and not (isinstance(value, str) and "." not in value)):
        name = value if isinstance(value, str) else None
        is_ours = key.partition(".")[0] not in DERIVED and (name in known or _is_class_of_models(name or ""))
        if name is None or not (is_ours or trust(key, name)):
            what = f"calls {_shown(value)}, which is not a class of tinyformer and could run any code"
            raise NotAdmittedError(key, what, name)
    elif last.startswith("_") and value not in known:
        raise NotAdmittedError(key, "cannot be set by a file")


def problem_of_value(value: Any) -> str | None:
    """The reason that a file may not set a value, as in "is '${x}': an interpolation"; None for a plain value."""
    entries = [value]
    for _ in range(MAX_DEPTH):
        entries = [one for entry in entries for one in (entry if isinstance(entry, list) else [entry])]
    for entry in entries:
        if isinstance(entry, str) and "${" in entry:
            return f"is {entry[:100]!r}: an interpolation, which a file may not contain"
        if not isinstance(entry, str | int | float | None) or (isinstance(entry, float) and not math.isfinite(entry)):
            return "must be a finite number, a text, true, false, null or a list of these"
    return None


def _shown(value: Any) -> str:
    """A value of a file as text of bounded length."""
    return repr(value[:100]) if isinstance(value, str) else f"a value of the type {type(value).__name__}"


def _is_class_of_models(name: str) -> bool:
    """Return True if a dotted name is the name of a class that a package in `OF_MODELS` defines."""
    module_name, _, attribute = name.rpartition(".")
    if not name.startswith("tinyformer."):
        return False
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return False
    value = getattr(module, attribute, None)
    return isinstance(value, type) and value.__module__.startswith(OF_MODELS)


def admit_override(entry: str, in_sweep: bool = False) -> str:
    """Parse an override from a run folder or a finding, check it by `admit`, and return it in Hydra's grammar.

    With `in_sweep`, the override may list several values, and each value is checked.
    """
    try:
        override = parsed(entry)
    except ValueError as error:
        raise NotAdmittedError(entry, "is not an override") from error
    key, start = override.key_or_group, override.get_key_element()
    if override.package is not None:
        raise NotAdmittedError(key, "moves a config file to another key")
    if key.partition("/")[0].partition(".")[0].casefold() == "hydra":
        raise NotAdmittedError(key, "changes Hydra itself")
    if key not in values_of_keys():
        raise NotAdmittedError(key, "is not a key of the config files")
    if override.is_delete() and "=" not in entry:
        return start
    if not override.is_sweep_override():
        return f"{start}={_admit_value(key, override.value())}"
    if not in_sweep:
        raise NotAdmittedError(key, "has several values")
    if getattr(override.value(), "shuffle", False):
        raise NotAdmittedError(key, "shuffles its values")
    texts = alternatives(entry)
    if not texts:
        raise NotAdmittedError(key, "is no list of values")
    return f"{start}={','.join(_admit_value(key, parsed(f'{key}={text}').value()) for text in texts)}"


def alternatives(entry: str) -> list[str]:
    """The values that an override lists, as typed, or the choices that `glob(…)` matches; [] if they are unknown."""
    if not is_swept(entry):
        return [entry.partition("=")[2]]
    override = parsed(entry)
    values, axis = override.value(), override.key_or_group
    if isinstance(values, Glob):
        is_ours = axis in files() and all(isinstance(name, str) for name in values.include + values.exclude)
        return values.filter(choices_of(axis)) if is_ours else []
    try:
        return list(override.sweep_string_iterator())
    except (HydraException, ArithmeticError, ValueError):
        return []


def is_swept(entry: str) -> bool:
    """Return True if an override has several values, each of which makes a job."""
    try:
        return parsed(entry).is_sweep_override()
    except ValueError:
        return False


def _admit_value(key: str, value: Any) -> str:
    """Check a single value, which may be a mapping, and return it in Hydra's grammar."""
    try:
        choices = value if key in NODES and isinstance(value, list) else [value]  # a list for the layers
        for path, leaf in [(key, choice) for choice in choices] if key in files() else leaves(value, key):
            admit(path, leaf)
    except NotAdmittedError as error:
        inner = "" if error.key == key else f"sets {error.key[:100]}, which "
        raise NotAdmittedError(key, f"{inner}{error}") from error
    return hydra_value(value)


def leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a nested mapping, each with its dotted key."""
    if isinstance(node, Mapping):
        for name, entry in node.items():
            yield from leaves(entry, f"{key}.{name}" if key else str(name))
    else:
        yield key, node


def describe_config(config: Plain, choices: Mapping[str, Any]) -> Plain:
    """The overrides, by key, from which an unresolved config can be composed again; a checkpoint stores them.

    `choices` has the choice of each axis; an axis that is missing there has its default choice.
    """
    resolved = OmegaConf.create(config)
    base, chosen = composed(choices)
    ours, values = dict(leaves(base)), dict(leaves({name: config[name] for name in STORED if name in config}))
    overrides: Plain = {axis: choice for axis, choice in chosen.items() if choice is not None}
    for key, value in values.items():
        is_own, is_class = ours.get(key, ...) != value, key.rpartition(".")[2].startswith("_")
        if key in OWN or value == "???" or (not is_own and (is_class or _is_interpolation(value))):
            continue
        computed = OmegaConf.select(resolved, key, throw_on_resolution_failure=False)
        overrides[key] = OmegaConf.to_container(computed) if OmegaConf.is_config(computed) else computed
    nodes = {key.rpartition(".")[0] for key in values}
    deleted = [key for key in ours if key not in values.keys() | nodes and key.rpartition(".")[0] in nodes]
    return overrides | {f"~{key}": None for key in deleted if not key.rpartition(".")[2].startswith("_")}


def admit_config(checkpoint: "Checkpoint", trust: Trust = lambda key, name: False, remedy: str = "add {}={}") -> Plain:
    """The unresolved config of a checkpoint's run, composed from our own YAML and the checkpoint's overrides.

    `remedy` is the hint for a user who trusts a class; its two fields are the class's key and name.

    Raises:
        ArgumentError: an override is not admitted, or sets more layers than the checkpoint has weight tensors.
    """
    try:
        return _admitted(checkpoint.overrides, len(checkpoint.weights), trust)
    except NotAdmittedError as error:
        hint = f"; if you trust it, {remedy.format(error.key, format_value(error.target))}" if error.target else ""
        reason = f"its {repr(error.key[:200])[1:-1]} {error}{hint}"
        raise ArgumentError("path", str(checkpoint.path), reason) from error


def require_readable(overrides: Plain) -> None:
    """Refuse overrides, in the form of `describe_config`, with which no checkpoint of the run could be loaded."""
    try:
        _admitted(overrides, sys.maxsize, lambda key, name: True)
    except NotAdmittedError as error:
        raise ConfigError(f"{error.key}: {error}, so no program could load the checkpoint; leave it out.") from error


def _admitted(overrides: Plain, num_weights: int, trust: Trust) -> Plain:
    named = {key.rpartition(".")[0] for key in overrides if key.endswith("._target_")}
    for key, value in overrides.items():
        name, is_argument = key.removeprefix("~"), key.rpartition(".")[0] in named
        known, axis = values_of_keys().get(name, []), name.partition(".")[0]
        if known and axis not in STORED:
            raise NotAdmittedError(name, "cannot be set by a checkpoint")
        if key == name:
            admit(key, value, trust, is_argument)
        elif not known or any(isinstance(ours, dict) for ours in known) or name.endswith("_") or axis == "model":
            raise NotAdmittedError(name, "cannot be deleted by a checkpoint")
    base, choices = composed(overrides)
    if (choices["network"] == "encoder_decoder") != (choices["cross_attention"] is not None):
        raise NotAdmittedError("cross_attention", "does not belong to its network")
    config = OmegaConf.create(base)
    OmegaConf.set_struct(config, True)
    for key, value in overrides.items():
        if key not in (*AXES, *SOURCES, *OWN) and not key.startswith("~"):
            _put(config, base, key, value, key.rpartition(".")[0] in named)
    plain: Any = OmegaConf.to_container(config, resolve=False)
    if plain["tokenizer"].get("path") == "???":  # the checkpoint itself contains the tokenizer
        plain["tokenizer"] = dict(composed({"tokenizer": "byte"})[0]["tokenizer"])
    for key in ("num_layers", "num_encoder_layers"):  # before a network of these layers is made
        if isinstance(size := plain["model"][key], int) and size > num_weights:
            raise NotAdmittedError(f"model.{key}", f"is {size:,}, but the file has {num_weights:,} weight tensors")
    return plain


def _put(config: DictConfig, base: Plain, key: str, value: Any, is_argument: bool) -> None:
    """Set an admitted value of a checkpoint in a composed config, as Hydra sets an override."""
    ours: Any = base
    for name in key.split("."):
        ours = ours.get(name) if isinstance(ours, dict) else None
    if isinstance(ours, dict) and not (value is None and None in values_of_keys()[key]):
        raise NotAdmittedError(key, "is a node, not a value")
    if key.partition(".")[0] in DERIVED and _is_interpolation(ours):
        raise NotAdmittedError(key, f"follows from {key_of(base, key)}, and cannot be set by a checkpoint")
    try:
        OmegaConf.update(config, key, value, force_add=is_argument)
    except OmegaConfBaseException as error:
        raise NotAdmittedError(key, "is not a key of the config files") from error


def recorded_sources(overrides: Plain) -> Plain:
    """The data sources (`SOURCES`) that a checkpoint records, by key, except values that our YAML has as well."""
    ours = dict(leaves(composed(overrides)[0]))
    return {key: overrides[key] for key in SOURCES if overrides.get(key) not in (None, ours.get(key))}


def own_classes(overrides: Plain) -> Plain:
    """The user's own classes in a checkpoint's overrides, by key; they are used only if a command line repeats them."""
    named = {key: value for key, value in overrides.items() if key.endswith("_target_") or key in SCORE_KEYS}
    return {key: name for key, name in named.items() if "." in str(name) and not str(name).startswith("tinyformer.")}


def _is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def composed(overrides: Mapping[str, Any]) -> tuple[Plain, dict[str, str | None]]:
    """Return the part of our unresolved config that a checkpoint stores, and the choice of each axis.

    Of the overrides, only choices on axes and deletions of keys are applied. An unknown choice becomes the default.
    """
    if not OmegaConf.has_resolver("default_num_kv_heads"):
        register_resolvers()
    choices = default_choices({axis: name for axis in AXES if (name := overrides.get(axis)) in choices_of(axis)})
    base: Plain = {axis: read(choice, axis) for axis in AXES if (choice := choices[axis]) is not None}
    base = copy.deepcopy(base | {name: read("train")[name] for name in STORED if name not in AXES})
    for node in base.values():
        if isinstance(node, dict):
            node.pop("defaults", None)
    for key in (key[1:] for key in overrides if key.startswith("~")):
        *owners, name = key.split(".")
        node = functools.reduce(lambda node, owner: node.get(owner) or {}, owners, base)
        if name not in node:
            raise NotAdmittedError(key, "cannot be deleted by a checkpoint")
        del node[name]
    return base, {axis: choices[axis] for axis in AXES}


def register_score(config: Mapping[str, Any]) -> None:
    """Import the user's classes that `attention.score` or `cross_attention.score` names, and add them to `SCORES`.

    The config is unresolved. Interpolations are skipped, since the classes that they may lead to were not admitted.
    """
    values = dict(leaves(config))
    for key in SCORE_KEYS:
        name = values.get(key)
        if not isinstance(name, str) or "." not in name or "${" in name:
            continue
        from tinyformer.nn import SCORES, ScaledDotScore  # which imports torch

        score: Any = pydoc.locate(name)
        if not (isinstance(score, type) and issubclass(score, ScaledDotScore)):
            known = ", ".join(SCORES)
            reason = f"must be one of {known}, or PACKAGE.CLASS of a subclass of tinyformer.nn.ScaledDotScore"
            raise ArgumentError(key, name, reason)
        SCORES[name] = score
