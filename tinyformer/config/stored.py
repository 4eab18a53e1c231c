"""The part of a run's config that a checkpoint stores, and the config that is composed from it.

A checkpoint stores overrides by key: a choice for each axis, every value that our YAML states, and a value that it
computes, such as `${model.d_model}`, only where it was overridden. So a later change of a default leaves an old
checkpoint as it is, and an override of `model.d_model` acts on what follows from it.

Hydra composes the config from what is admitted (`admission`), and never reads the checkpoint's own text.
"""

import copy
import functools
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tinyformer.config.admission import DERIVED, SCORE_KEYS, NotAdmittedError, Plain, Trust, admit, leaves
from tinyformer.config.conf import AXES, STORED, choices_of, config_dir, register_resolvers, values_of_keys
from tinyformer.config.errors import ConfigError
from tinyformer.config.keys import format_value, key_of
from tinyformer.config.process import isolated_hydra
from tinyformer.errors import ArgumentError

if TYPE_CHECKING:
    from tinyformer.checkpoint.file import Checkpoint

SOURCES = ("data.files", "data.path", "data.name", "data.revision", "data.source.hub.path", "data.document_start")
"""Keys that say what to read and how to split it: a checkpoint records them, but they are never followed."""

OWN = ("data.cache_dir", "tokenizer.path")
"""Paths of the machine that a run was made on, which a checkpoint neither records nor follows."""


def describe_config(config: Plain, choices: Mapping[str, Any]) -> Plain:
    """The overrides from which Hydra composes an unresolved config again, by key, as a checkpoint stores them.

    An axis without a choice has its default.
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

    `remedy` is what a user who trusts a class does, given its key and name.

    Raises:
        ArgumentError: an override is not admitted, or sets what a checkpoint may not set or a size its weights lack.
    """
    try:
        return _admitted(checkpoint.overrides, len(checkpoint.weights), trust)
    except NotAdmittedError as error:
        hint = f"; if you trust it, {remedy.format(error.key, format_value(error.target))}" if error.target else ""
        reason = f"its {repr(error.key[:200])[1:-1]} {error}{hint}"
        raise ArgumentError("path", str(checkpoint.path), reason) from error


def require_readable(overrides: Plain) -> None:
    """Refuse what a run would store of its config, see `describe_config`, if no program admitted it."""
    try:
        _admitted(overrides, sys.maxsize, lambda key, name: True)
    except NotAdmittedError as error:
        raise ConfigError(f"{error.key}: {error}, so that nothing could read the run's; leave it out.") from error


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
            raise NotAdmittedError(f"model.{key}", f"is {size:,}, but it holds {num_weights:,} weights")
    return plain


def _put(config: DictConfig, base: Plain, key: str, value: Any, is_argument: bool) -> None:
    """Set an admitted value of a checkpoint in a config that Hydra has composed, as Hydra does it."""
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
    """The sources that a checkpoint's run read, by the keys of `SOURCES`, where they differ from our YAML."""
    ours = dict(leaves(composed(overrides)[0]))
    return {key: overrides[key] for key in SOURCES if overrides.get(key) not in (None, ours.get(key))}


def own_classes(overrides: Plain) -> Plain:
    """The user's own classes that a checkpoint's overrides name, which are used if a command line repeats them."""
    named = {key: value for key, value in overrides.items() if key.endswith("_target_") or key in SCORE_KEYS}
    return {key: name for key, name in named.items() if "." in str(name) and not str(name).startswith("tinyformer.")}


def _is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def composed(overrides: Mapping[str, Any]) -> tuple[Plain, dict[str, str | None]]:
    """The unresolved config of a run as far as a checkpoint stores it, and the choices of its axes.

    Only choices and deletions are applied, not values; a choice that is not ours becomes the default.
    """
    if not OmegaConf.has_resolver("default_num_kv_heads"):
        register_resolvers()
    chosen = (f"{axis}={overrides[axis]}" for axis in AXES if overrides.get(axis) in choices_of(axis))
    base, choices = copy.deepcopy(_compose(*chosen))
    for key in (key[1:] for key in overrides if key.startswith("~")):
        # Hydra, which would resolve the value before it deletes it, cannot delete one that refers to a missing value.
        *owners, name = key.split(".")
        node = functools.reduce(lambda node, owner: node.get(owner) or {}, owners, base)
        if name not in node:
            raise NotAdmittedError(key, "cannot be deleted by a checkpoint")
        del node[name]
    return base, choices


@functools.cache
def _compose(*overrides: str) -> tuple[Plain, dict[str, str | None]]:
    with isolated_hydra(), initialize_config_dir(str(config_dir()), version_base=None):
        config = compose("train", list(overrides), return_hydra_config=True)
        plain: Any = OmegaConf.to_container(config, resolve=False)
        choices = {axis: config.hydra.runtime.choices[axis] for axis in AXES}
        return {name: plain[name] for name in STORED if name in plain}, choices
