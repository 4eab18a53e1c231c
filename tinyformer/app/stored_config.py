"""What a checkpoint stores of a config: choices, plain values and names of classes, from which it is composed again.

A checkpoint may come from a stranger, so its config is never used as it is. It is put, value by value, into the config
that our own YAML files compose for its choices; a key that they do not have is rejected by name, before anything is
resolved or instantiated. `describe_config` writes this form, `admit_config` reads it, and `ADMITTED` says what it may
contain.
"""

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from omegaconf import OmegaConf

from tinyformer.app.config import config_dir
from tinyformer.app.keys import format_value
from tinyformer.app.plain_values import SCORE_KEYS, problem_of_value
from tinyformer.checkpoint import EMBEDDING, Checkpoint, UntrustedTargetError, is_our_class
from tinyformer.errors import ArgumentError
from tinyformer.nn import SCORES

Plain: TypeAlias = dict[str, Any]
Leaves: TypeAlias = dict[tuple[str, ...], Any]
Trust: TypeAlias = Callable[[str, str], bool]
"""Whether the user has named a class at a key: a function of the key and the dotted name of the class."""

AXES = (
    *("model", "attention", "cross_attention", "position", "block", "feed_forward", "norm", "network"),
    *("task", "data", "tokenizer"),
)
"""The axes that a checkpoint stores; an evaluation chooses trainer, logger, callbacks and the others itself."""

OPTIONAL = ("cross_attention",)
"""Axes that a config may lack."""

SECTIONS = ("datamodule", "seed", "deterministic")
"""The keys of the primary config that a checkpoint stores."""

SOURCES = ("data.files", "data.path", "data.name", "data.revision", "data.source.hub.path", "data.document_start")
"""Keys that say what to read and how to split it: they are recorded for `recorded_sources`, but never followed."""

OWN = ("data.cache_dir", "tokenizer.path")
"""Paths of the machine that a run was made on, which are neither recorded nor followed."""

OF_MODELS = ("tinyformer.nn.", "tinyformer.tasks.")
"""The packages whose classes a checkpoint may name."""

POSITIONS = ("position.absolute", "position.relative")
"""Nodes that a checkpoint may set to null."""

DERIVED = ("data", "tokenizer", "network")
"""Nodes in which a checkpoint cannot set a key that our YAML computes, only the keys that it is computed from."""

KINDS = {"seed": int, "deterministic": bool}
"""The types of values that are not arguments of a class, so that no signature checks them."""

OF_DATA = ("data", "tokenizer", "datamodule")
"""Nodes whose classes read files or download: a checkpoint can name only the classes of our YAML there."""


def describe_config(config: Plain, choices: Mapping[str, Any] | None = None) -> Plain:
    """What a checkpoint stores of a config.

    A value that our YAML computes from others, such as `${model.d_model}`, is stored only where it was overridden, so
    that a later override of `model.d_model` takes effect on it.

    Args:
        config: the unresolved config of a run, as plain containers.
        choices: the choice of each axis; where it is unknown, the most similar file is taken.
    """
    resolved = OmegaConf.create(config)

    def value_of(key: str) -> Any:
        value = OmegaConf.select(resolved, key, throw_on_resolution_failure=False)
        return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value

    known = {axis: choice for axis, choice in (choices or {}).items() if choice in choices_of(axis)}
    known |= {axis: None for axis in OPTIONAL if config.get(axis) is None}
    chosen = {axis: known[axis] if axis in known else _most_similar(axis, config.get(axis)) for axis in AXES}
    base = _leaves(_base(chosen))
    values: Plain = {}
    classes: Plain = {}
    leaves = _leaves({name: config[name] for name in (*AXES, *SECTIONS) if name in config})
    for path, value in leaves.items():
        key, is_own = ".".join(path), base.get(path, ...) != value
        if key in OWN or value == "???":
            continue
        if path[-1] == "_target_":
            if is_own:
                classes[".".join(path[:-1])] = value
        elif _is_interpolation(value):
            if is_own:
                values[key] = value_of(key)
        elif is_own or not path[-1].startswith("_"):
            values[key] = value
    nodes = {path[:-1] for path in leaves}
    lacking = (path for path in base if path[:-1] in nodes and path not in leaves.keys() | nodes)
    deleted = [".".join(path) for path in lacking if not path[-1].startswith("_")]
    return {"choices": chosen, "values": values, "classes": classes, "deleted": deleted}


def admit_config(checkpoint: Checkpoint, trust: Trust = lambda key, name: False) -> Plain:
    """The unresolved config of a checkpoint's run, composed from our own YAML and the checkpoint's plain values.

    Args:
        checkpoint: the checkpoint.
        trust: whether the user has named a class at a key; by default, only classes of this package are admitted.

    Raises:
        UntrustedTargetError: the checkpoint names a class of another package that the user has not named.
        ArgumentError: it contains a key that our YAML does not have, or a value that is not plain or is too large.
    """
    choices, values, classes = (checkpoint.stored[part] for part in ("choices", "values", "classes"))
    for axis in AXES:
        choice = choices.get(axis)
        if choice is None and axis in OPTIONAL:
            continue
        if not isinstance(choice, str) or choice not in choices_of(axis):
            shown = repr(choice[:100]) if isinstance(choice, str) else f"a {type(choice).__name__}"
            _refuse(checkpoint.path, axis, f"is {shown}, which is not a choice of this axis")
    if (choices["network"] == "encoder_decoder") != (choices.get("cross_attention") is not None):
        _refuse(checkpoint.path, "cross_attention", "does not belong to its network")
    config = _base(choices)
    for key, name in classes.items():
        _set_class(config, key, name, checkpoint.path, trust)
    for key, value in values.items():
        _set_value(config, key, value, classes, checkpoint.path, trust)
    for key in checkpoint.stored["deleted"]:
        *parents, last = _split(key, checkpoint.path)
        value = _node(config, parents, key, checkpoint.path).pop(last, {})
        if isinstance(value, dict) or parents[:1] in ([], ["model"]) or last.startswith("_"):
            _refuse(checkpoint.path, key, "cannot be deleted by a checkpoint")
    if config["tokenizer"].get("path") == "???":  # the checkpoint itself contains the tokenizer
        config["tokenizer"] = dict(_group("tokenizer", "byte"))
    _require_sizes_of_weights(config["model"], choices["network"], checkpoint)
    return config


def differing_values(stored: Plain) -> Plain:
    """The values and names of classes of `describe_config` that differ from what our YAML says, by key."""
    ours = _leaves(_base(stored["choices"]))
    values = {key: value for key, value in stored["values"].items() if ours.get(tuple(key.split(".")), ...) != value}
    return values | {f"{key}._target_": name for key, name in stored["classes"].items()}


@contextlib.contextmanager
def repeatable_classes() -> Iterator[None]:
    """Make the error about a class that is not trusted say what to add to the command line to trust it.

    Raises:
        ArgumentError: in place of an `UntrustedTargetError`.
    """
    try:
        yield
    except UntrustedTargetError as error:
        problem = f"would call {error.target!r}, which is not a class of tinyformer and could run any code"
        reason = f"{problem}; if you trust it, add {error.location}={format_value(error.target)}"
        raise ArgumentError("path", error.value, reason) from error


def choices_of(axis: str) -> list[str]:
    """The choices of an axis: the names of its YAML files."""
    return sorted(file.stem for file in (config_dir() / axis).glob("[!_]*.yaml")) if axis in AXES else []


def describe_again(config: Plain, checkpoint: Checkpoint) -> Plain:
    """What a checkpoint stores of a config that comes from another checkpoint, whose recorded sources it keeps."""
    description = describe_config(config)
    description["values"] |= recorded_sources(checkpoint)
    return description


def recorded_sources(checkpoint: Checkpoint) -> Plain:
    """What the run of a checkpoint read, by the keys of `SOURCES`, where that differs from our YAML."""
    ours, values = _leaves({"data": _group("data", checkpoint.stored["choices"]["data"])}), checkpoint.stored["values"]
    return {key: values[key] for key in SOURCES if values.get(key) not in (None, ours.get(tuple(key.split("."))))}


def _set_class(config: Plain, key: Any, name: Any, path: Path, trust: Trust) -> None:
    """Change the class of a node, if the new one is ours or the user has named it."""
    *parents, last = _split(key, path)
    node = _node(config, parents, key, path)
    if last not in node or not isinstance(node[last], dict | None):
        _refuse(path, key, "is not a node of a class")
    is_ours = isinstance(name, str) and key.partition(".")[0] not in OF_DATA and is_our_class(name, OF_MODELS)
    if not is_ours and not (isinstance(name, str) and trust(f"{key}._target_", name)):
        raise UntrustedTargetError(path, f"{key}._target_", name if isinstance(name, str) else type(name).__name__)
    node[last] = (node[last] or {}) | {"_target_": name}


def _set_value(config: Plain, key: Any, value: Any, classes: Mapping[str, Any], path: Path, trust: Trust) -> None:
    """Set a plain value at a key of our YAML, or at an argument of a class that the checkpoint names there."""
    *parents, last = _split(key, path)
    owner = ".".join(parents)
    node = _node(config, parents, key, path)
    is_factory = last == "_partial_" and owner in classes and value is True
    if last.startswith("_") and not is_factory:
        _refuse(path, key, "cannot be set by a checkpoint")
    if key == "datamodule" or (last not in node and owner not in classes):
        _refuse(path, key, "is not a key of the config files")
    if (isinstance(node.get(last), dict) or key in POSITIONS) and (value is not None or key not in POSITIONS):
        _refuse(path, key, "is a node, not a value")
    if parents[:1] and parents[0] in DERIVED and _is_interpolation(node.get(last)):
        _refuse(path, key, "follows from other keys, and cannot be set by a checkpoint")
    if problem := problem_of_value(key, value):
        _refuse(path, key, problem)
    if not isinstance(value, kind := KINDS.get(key, object)) or (kind is int and isinstance(value, bool)):
        _refuse(path, key, f"must be of the type {kind.__name__}")
    if key in (*SOURCES, *OWN):
        return
    if key in SCORE_KEYS and not isinstance(value, str):
        _refuse(path, key, "must be a text")
    if key in SCORE_KEYS and value not in SCORES and not (is_our_class(value, OF_MODELS) or trust(key, value)):
        raise UntrustedTargetError(path, key, value)
    node[last] = value


def _split(key: Any, path: Path) -> list[str]:
    if not isinstance(key, str) or not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", key, re.ASCII):
        _refuse(path, repr(key[:100]) if isinstance(key, str) else "config", "is not a key of the config files")
    return key.split(".")


def _node(config: Plain, keys: list[str], key: str, path: Path) -> Plain:
    """The node at some keys."""
    node: Any = config
    for name in keys:
        node = node.get(name) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        _refuse(path, key, "is not a key of the config files")
    return node


def _require_sizes_of_weights(model: Plain, network: Any, checkpoint: Checkpoint) -> None:
    """Refuse sizes that differ from those of the weights, before a network of these sizes is made."""
    stacks = {"num_layers": "encoder"}
    if network == "encoder_decoder":
        stacks = {"num_layers": "decoder", "num_encoder_layers": "encoder"}
    found: dict[str, Any] = {
        key: len({name.split(".")[2] for name in checkpoint.weights if name.startswith(f"{stack}.layers.")})
        for key, stack in stacks.items()
    }
    embedding = checkpoint.weights.get(EMBEDDING)
    found["d_model"] = embedding.shape[-1] if embedding is not None and embedding.ndim == 2 else None
    for key, size in found.items():
        stored = model["num_layers"] if _is_interpolation(model[key]) else model[key]
        if stored != size:
            _refuse(checkpoint.path, f"model.{key}", f"is {format_value(stored)}, but its weights have {size}")


def _refuse(path: Path, key: str, problem: str) -> Any:
    raise ArgumentError("path", str(path), f"its {key[:200]} {problem}")


def _is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _leaves(node: Any, path: tuple[str, ...] = ()) -> Leaves:
    """The values of a nested mapping by path."""
    if not isinstance(node, Mapping):
        return {path: node}
    leaves: Leaves = {}
    for key, value in node.items():
        leaves |= _leaves(value, (*path, str(key)))
    return leaves


def _base(choices: Mapping[str, str | None]) -> Plain:
    """The unresolved config that our YAML files compose for some choices."""
    primary = _file("train")
    nodes = {axis: _group(axis, choice) for axis in AXES if (choice := choices.get(axis)) is not None}
    return copy.deepcopy(nodes | {name: primary[name] for name in SECTIONS})


@functools.cache
def _group(axis: str, choice: str) -> Plain:
    """A file of an axis, composed with the files that it inherits from, as Hydra does it."""
    own = _file(f"{axis}/{choice}")
    values = {name: value for name, value in own.items() if name != "defaults"}
    merged: Any = OmegaConf.create()
    for entry in own.get("defaults", ["_self_"]):
        if isinstance(entry, str):  # mappings override other axes
            merged = OmegaConf.merge(merged, values if entry == "_self_" else _group(axis, entry))
    plain: Any = OmegaConf.to_container(merged, resolve=False)
    return plain


@functools.cache
def _file(name: str) -> Plain:
    plain: Any = OmegaConf.to_container(OmegaConf.load(config_dir() / f"{name}.yaml"), resolve=False)
    return plain


def _most_similar(axis: str, node: Any) -> str:
    """The choice whose file differs from a node in the fewest keys."""
    own = _leaves(node)

    def difference(choice: str) -> int:
        ours = _leaves(_group(axis, choice))
        return sum(own.get(path, ...) != ours.get(path, ...) for path in own.keys() | ours.keys())

    return min(choices_of(axis), key=difference)
