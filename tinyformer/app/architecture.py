"""`init_from=FILE`: the architecture of the checkpoint, as overrides that precede those of the command line."""

from collections.abc import Mapping, Sequence
from typing import Any

from tinyformer.app.errors import ConfigError
from tinyformer.app.keys import hydra_value, text_of
from tinyformer.app.stored_config import admit_config, differing_values, repeatable_classes
from tinyformer.app.stored_overrides import is_swept
from tinyformer.checkpoint import Checkpoint, load_checkpoint
from tinyformer.errors import argument_path

AXES = ("model", "attention", "cross_attention", "position", "block", "feed_forward", "norm")
"""The axes that determine a network's function."""

SIZES = ("model.num_layers", "model.num_heads", "model.d_model")
"""Sizes that an override cannot change in a trained network."""

OF_TRAINING = (
    "backend",
    "dropout",
    "embedding_dropout",
    "init",
    "init_std",
    "checkpoint_activations",
    "autocast_residual",
    "vocab_size",
)
"""Arguments that are not inherited: a new run chooses them, and its vocabulary size follows from its tokenizer."""


def inherit_architecture(arguments: Sequence[str]) -> list[str]:
    """The arguments of a training run, preceded by the architecture of the checkpoint that `init_from=` names.

    Args:
        arguments: overrides. They take precedence over the checkpoint's values, unless a trained network cannot be
            changed in this way.

    Raises:
        ConfigError: an override contradicts the checkpoint's sizes or its choice of an axis.
        ArgumentError: the checkpoint cannot be read, or its config is not admitted; see `admit_config`.
    """
    given = {word.partition("=")[0].lstrip("+"): text_of(word) for word in arguments}
    file = given.get("init_from", "null")
    swept = any(word.startswith("init_from=") and is_swept(word) for word in arguments)
    if file == "null" or given.get("resume", "null") != "null" or swept:
        return list(arguments)
    with argument_path(passed={"path": "init_from"}), repeatable_classes():
        inherited, fixed = _architecture(load_checkpoint(file), given)
    for key in given.keys() & fixed.keys():
        if given[key] != fixed[key]:
            own = f"{key}={fixed[key]}"
            raise ConfigError(f"{key}={given[key]}: the checkpoint of init_from={file} has {own}; leave {key}= out.")
    return [*inherited, *arguments]


def _architecture(checkpoint: Checkpoint, given: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The overrides of a checkpoint's architecture that are not given, and the values that cannot be overridden."""
    config = admit_config(checkpoint, lambda key, name: given.get(key) == name)
    stored = checkpoint.stored
    choices = {axis: choice for axis in AXES if (choice := stored["choices"].get(axis)) is not None}
    values: dict[str, Any] = {
        key: value
        for key, value in differing_values(stored).items()
        if key.partition(".")[0] in AXES and key.rpartition(".")[2] not in OF_TRAINING
    }
    sizes = {key: config["model"][key.partition(".")[2]] for key in SIZES}
    inherited = [f"{key}={hydra_value(value)}" for key, value in (choices | values).items() if key not in given]
    inherited += [f"~{key}" for key in stored["deleted"] if key.partition(".")[0] in AXES and f"~{key}" not in given]
    return inherited, {key: hydra_value(value) for key, value in (choices | sizes).items()}
