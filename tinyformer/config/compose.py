"""Configs composed by Hydra from a command line, with what a checkpoint that it names says of them."""

import contextlib
import difflib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from tinyformer.checkpoint.paths import find_checkpoint
from tinyformer.config.admission import alternatives, is_swept, leaves
from tinyformer.config.conf import AXES, config_dir, register_resolvers
from tinyformer.config.errors import ConfigError
from tinyformer.config.keys import format_value, hydra_value, parsed, readable, shell_word, text_of
from tinyformer.config.process import isolated_hydra
from tinyformer.config.stored import admit_config, composed, recorded_sources
from tinyformer.errors import ArgumentError, argument_path

if TYPE_CHECKING:
    from tinyformer.checkpoint.file import Checkpoint

ARCHITECTURE = AXES[: AXES.index("network")]
"""The axes that determine a network's function, which `init_from=` inherits."""

OF_TRAINING = (
    *("backend", "dropout", "embedding_dropout", "init", "init_std", "checkpoint_activations", "autocast_residual"),
    "vocab_size",
)
"""Arguments that are not inherited: a new run chooses them, and its vocabulary size follows from its tokenizer."""


@dataclass(frozen=True)
class CommandLine:
    """The command line of a run, as far as its config does not contain it."""

    overrides: Sequence[str] = ()  # its arguments, such as "attention=gqa"
    choices: Mapping[str, Any] = field(default_factory=dict)  # the choice of each axis, such as {"attention": "gqa"}
    is_sweep: bool = False  # whether the run is one of the jobs of a `--multirun`
    command: str = "tinyformer train"  # the program as the user called it, for hints
    in_python: bool = False  # whether `command` is a function that was called in Python

    @classmethod
    def of_job(cls, node: Any, command: str, in_python: bool = False) -> "CommandLine":
        """That of a job, from its `hydra` node; an override such as `seed=${oc.env:SEED}` stays as it was typed."""
        typed: Any = OmegaConf.to_container(node.overrides.task, resolve=False)
        return cls(typed, node.runtime.choices, node.mode == RunMode.MULTIRUN, command, in_python)

    def call(self, *words: str) -> str:
        """The command with some words, as in `tinyformer train resume=outputs/run`."""
        if self.in_python:
            return f"{self.command}({json.dumps(words, ensure_ascii=False)})"
        return " ".join((self.command, *map(shell_word, words)))

    def overridden(self, *prefixes: str) -> list[str]:
        return [override for override in self.overrides if override.startswith(prefixes)]


def compose_run(program: str, overrides: Sequence[str] = ()) -> tuple[DictConfig, CommandLine]:
    """The config of one run of a program, and its invocation: arguments of `train`."""
    overrides = readable(overrides)
    if program == "train":
        overrides = inherit_architecture(overrides)
    config = compose_whole(program, overrides)
    choices = dict(config.hydra.runtime.choices)
    with open_dict(config):
        del config["hydra"]
    return config, CommandLine(list(overrides), choices)


def compose_whole(program: str, overrides: Sequence[str]) -> DictConfig:
    """The config that overrides in Hydra's grammar give one run of a program, with its `hydra` node."""
    register_resolvers()
    with isolated_hydra(), initialised_hydra():
        return compose(program, list(overrides), return_hydra_config=True)


def compose_sweep(program: str, arguments: Sequence[str]) -> list[tuple[tuple[str, ...], DictConfig]]:
    """Every combination of the alternatives on a command line; `attention=mha,gqa seed=1` has two.

    Returns the overrides of each and the config composed from them, including its `hydra` node.
    """
    register_resolvers()
    axes = []
    for word in readable(arguments, is_sweep=True):
        key, values = word.partition("=")[0], alternatives(word)
        if not values:
            raise ConfigError(f"{word}: lists no values; {key}=A,B lists two.")
        axes.append([f"{key}={value}" for value in values] if is_swept(word) else [word])
    with initialised_hydra():
        return [(words, compose(program, list(words), return_hydra_config=True)) for words in itertools.product(*axes)]


@contextlib.contextmanager
def initialised_hydra() -> Iterator[None]:
    """Initialise Hydra with our config files."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_dir()), version_base=None):
        yield


def with_last(arguments: Sequence[str]) -> list[str]:
    """The arguments with the path of the newest checkpoint in the place of "last", so that the run records it."""
    last = ("checkpoint=last", "init_from=last")
    return [f"{word[:-4]}{hydra_value(find_checkpoint('last'))}" if word in last else word for word in arguments]


def offer_stored_run(
    arguments: Sequence[str], trusted: Sequence[str] = (), known: "Checkpoint | None" = None
) -> "Checkpoint | None":
    """Load the checkpoint of `checkpoint=`, and register its config with Hydra as `stored_run`, which overrides change.

    None with options such as `--help` and no checkpoint. `trusted` are classes that the checkpoint may use in addition
    to those of this package and of the overrides; the checkpoint that is `known` is not read again. An `ArgumentError`
    if its config is not admitted, or its run read a path that the command line does not repeat.
    """
    paths = [text_of(argument) for argument in arguments if argument.startswith("checkpoint=")]
    if not paths and not any(argument.startswith("-") for argument in arguments):
        keys = [argument.partition("=")[0] for argument in arguments]
        for misspelt in difflib.get_close_matches("checkpoint", keys, n=1):
            raise ConfigError(f"{misspelt}: there is no such key. Did you mean checkpoint?")
        raise ConfigError("checkpoint is needed, such as checkpoint=last, or a run's folder, checkpoint=outputs/….")
    checkpoint, config = None, {"seed": 0, "deterministic": False}  # for the defaults that --help shows
    if paths:
        from tinyformer.checkpoint.snapshots import load_step  # which imports torch, which takes seconds

        given = _given(arguments)
        word = f"step={given.get('step', 'null')}"
        step = "all" if is_swept(word) else parsed(word).value()  # of several, each job loads its own
        with argument_path(passed={"path": "checkpoint"}):
            checkpoint = load_step(paths[-1], step, known)
            config = admit_config(checkpoint, lambda key, name: given.get(key) == name or name in trusted)
            missing = {key: value for key, value in recorded_sources(checkpoint.overrides).items() if key not in given}
            if missing and "data" not in given:
                words = " ".join(f"{key}={format_value(value)}" for key, value in missing.items())
                reason = f"its run read {words}, and a checkpoint's paths are not followed; "
                reason += f"add {words}, or choose data="
                raise ArgumentError("path", str(checkpoint.path), reason)
        # A group that the command line chooses replaces the run's; merging would leave keys of the run's choice behind.
        config = {key: value for key, value in config.items() if key not in given or not isinstance(value, dict)}
    ConfigStore.instance().store(name="stored_run", node=config, package="_global_")
    return checkpoint


def inherit_architecture(arguments: Sequence[str]) -> list[str]:
    """The arguments of a training run, preceded by the architecture of the checkpoint that `init_from=` names, if any.

    They take precedence over the checkpoint's values, but must not contradict its sizes or its choice of an axis.
    """
    given = _given(arguments := with_last(arguments))
    file = given.get("init_from", "null")
    swept = any(word.startswith("init_from=") and is_swept(word) for word in arguments)
    if file == "null" or given.get("resume", "null") not in ("null", "auto") or swept:
        return arguments
    from tinyformer.checkpoint.file import load_checkpoint

    with argument_path(passed={"path": "init_from"}):
        checkpoint = load_checkpoint(file)
        config = admit_config(checkpoint, lambda key, name: given.get(key) == name)
    fixed = {axis: checkpoint.overrides[axis] for axis in ARCHITECTURE if axis in checkpoint.overrides}
    fixed |= {f"model.{size}": config["model"][size] for size in ("num_layers", "num_heads", "d_model")}
    for key in given.keys() & fixed.keys():
        if given[key] != (own := hydra_value(fixed[key])):
            raise ConfigError(
                f"{key}={given[key]}: the checkpoint of init_from={file} has {key}={own}; leave {key}= out."
            )
    ours = dict(leaves(composed(checkpoint.overrides)[0]))
    inherited = []
    for key, value in checkpoint.overrides.items():
        is_deleted, last = key.startswith("~"), key.rpartition(".")[2]
        is_inherited = key.lstrip("~").partition(".")[0] in ARCHITECTURE and (is_deleted or last not in OF_TRAINING)
        if is_inherited and key not in given and ours.get(key, ...) != value:
            prefix = "" if is_deleted or key in ARCHITECTURE or key in ours else "+"
            inherited.append(key if is_deleted else f"{prefix}{key}={hydra_value(value)}")
    return [*inherited, *arguments]


def _given(arguments: Sequence[str]) -> dict[str, str]:
    """The texts that a command line sets, by key."""
    return {argument.partition("=")[0].lstrip("+"): text_of(argument) for argument in arguments}
