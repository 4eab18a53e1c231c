"""The launch of a program: compose its config, insert a checkpoint's config, claim the folder, and run the job."""

import argparse
import contextlib
import copy
import difflib
import io
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hydra import compose, initialize_config_dir, version
from hydra._internal.callbacks import Callbacks
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import run_job
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from tinyformer.checkpoint.paths import find_checkpoint
from tinyformer.config.admission import admit_config, alternatives, composed, is_swept, leaves, recorded_sources
from tinyformer.config.by_layer import ARCHITECTURE, ConfigLoader, with_patterns
from tinyformer.config.conf import (
    config_dir,
    format_value,
    hydra_value,
    is_multirun,
    parsed,
    readable,
    register_resolvers,
    shell_word,
    text_of,
)
from tinyformer.config.errors import BUG, USER_MISTAKE, ConfigError, config_keys, describe, exit_code_of
from tinyformer.config.folder import claim_folder, is_first_process, locked, name_of_run
from tinyformer.config.process import named_lines
from tinyformer.errors import ArgumentError, argument_path

if TYPE_CHECKING:
    from tinyformer.checkpoint.file import Checkpoint

OF_TRAINING = (
    *("backend", "dropout", "embedding_dropout", "init", "init_std", "checkpoint_activations", "autocast_residual"),
    "vocab_size",
)
"""Arguments that `init_from=` does not inherit: a new run chooses them; its tokenizer determines `vocab_size`."""


@dataclass(frozen=True)
class CommandLine:
    """Facts about a run's command line that the run's config does not contain."""

    overrides: Sequence[str] = ()  # its arguments, such as "attention=gqa"
    choices: Mapping[str, Any] = field(default_factory=dict)  # the choice of each axis, such as {"attention": "gqa"}
    is_sweep: bool = False  # whether the run is one of the jobs of a `--multirun`
    command: str = "tinyformer train"  # the program as the user called it, for hints
    in_python: bool = False  # whether `command` is a function that was called in Python

    @classmethod
    def of_job(cls, node: Any, command: str, in_python: bool = False) -> "CommandLine":
        """The command line of a job, from its `hydra` node; overrides such as `seed=${oc.env:SEED}` stay as typed."""
        typed: Any = OmegaConf.to_container(node.overrides.task, resolve=False)
        return cls(typed, node.runtime.choices, node.mode == RunMode.MULTIRUN, command, in_python)

    def call(self, *words: str) -> str:
        """A command that calls the same program with other words, as in `tinyformer train resume=outputs/run`."""
        if self.in_python:
            return f"{self.command}({json.dumps(words, ensure_ascii=False)})"
        return " ".join((self.command, *map(shell_word, words)))

    def overridden(self, *prefixes: str) -> list[str]:
        return [override for override in self.overrides if override.startswith(prefixes)]


def compose_run(program: str, overrides: Sequence[str] = ()) -> tuple[DictConfig, CommandLine]:
    """Compose the config of one run of a program, and return it with its command line."""
    overrides = with_patterns(readable(overrides))
    if program == "train":
        overrides = inherit_architecture(overrides)
    config = compose_whole(program, overrides)
    choices = dict(config.hydra.runtime.choices)
    with open_dict(config):
        del config["hydra"]
    return config, CommandLine(list(overrides), choices)


def compose_whole(program: str, overrides: Sequence[str]) -> DictConfig:
    """Compose the config of one run of a program, with its `hydra` node, from overrides in Hydra's grammar."""
    register_resolvers()
    with isolated_hydra(), initialised_hydra():
        return compose(program, list(overrides), return_hydra_config=True)


def compose_sweep(program: str, arguments: Sequence[str]) -> list[tuple[tuple[str, ...], DictConfig]]:
    """Compose a config for every combination of values on a command line; `attention=mha,gqa seed=1` has two.

    Returns the overrides of each combination and its config, which includes the `hydra` node.
    """
    register_resolvers()
    axes = []
    for word in readable(arguments, is_sweep=True):
        key, values = word.partition("=")[0], alternatives(word)
        if not values:
            raise ConfigError(f"{word}: lists no values; {key}=A,B lists two.")
        axes.append([f"{key}={value}" for value in values] if is_swept(word) else [word])
    with initialised_hydra():
        return [
            (words, compose(program, with_patterns(words), return_hydra_config=True))
            for words in itertools.product(*axes)
        ]


@contextlib.contextmanager
def isolated_hydra() -> Iterator[None]:
    """Use a separate Hydra inside a `with` statement, since the caller may have initialised Hydra, as in a notebook."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.version import VersionBase

    hydra, version = GlobalHydra.instance(), VersionBase.instance()
    GlobalHydra.set_instance(GlobalHydra.__new__(GlobalHydra))
    GlobalHydra.instance().clear()
    VersionBase.set_instance(copy.copy(version))
    try:
        yield
    finally:
        GlobalHydra.set_instance(hydra)
        VersionBase.set_instance(version)


@contextlib.contextmanager
def initialised_hydra() -> Iterator[None]:
    """Initialise Hydra with our config files."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_dir()), version_base=None):
        yield


def with_last(arguments: Sequence[str]) -> list[str]:
    """Replace "last" in the arguments by the path of the newest checkpoint, so that the run records the path."""
    last = ("checkpoint=last", "init_from=last")
    return [f"{word[:-4]}{hydra_value(find_checkpoint('last'))}" if word in last else word for word in arguments]


def offer_stored_run(
    arguments: Sequence[str], trusted: Sequence[str] = (), known: "Checkpoint | None" = None
) -> "Checkpoint | None":
    """Load the checkpoint of `checkpoint=`, and register its config with Hydra as `stored_run`.

    Returns None for an option such as `--help` without a checkpoint. The checkpoint may use classes of this package,
    classes that the overrides name, and `trusted` classes. A `known` checkpoint is not loaded again. An `ArgumentError`
    is raised if the config is not admitted, or if the command line has neither the run's data paths nor `data=`, which
    an imported model always needs.
    """
    paths = [text_of(argument) for argument in arguments if argument.startswith("checkpoint=")]
    if not paths and not any(argument.startswith("-") for argument in arguments):
        keys = [argument.partition("=")[0] for argument in arguments]
        for misspelt in difflib.get_close_matches("checkpoint", keys, n=1):
            raise ConfigError(f"{misspelt}: there is no such key. Did you mean checkpoint?")
        raise ConfigError("checkpoint is needed, such as checkpoint=last, or a run's folder, checkpoint=outputs/….")
    checkpoint, config = None, {"seed": 0, "deterministic": False}  # for the defaults that --help shows
    if paths:
        from tinyformer.checkpoint.file import load_step  # imports torch, which takes seconds

        given = _given(arguments)
        word = f"step={given.get('step', 'null')}"
        step = "all" if is_swept(word) else parsed(word).value()  # in a sweep over steps, each job loads one
        with argument_path(passed={"path": "checkpoint"}):
            checkpoint = load_step(paths[-1], step, known)
            config = admit_config(checkpoint, lambda key, name: given.get(key) == name or name in trusted)
            missing = {key: value for key, value in recorded_sources(checkpoint.overrides).items() if key not in given}
            if missing and "data" not in given:
                words = " ".join(f"{key}={format_value(value)}" for key, value in missing.items())
                reason = f"its run was trained on {words}, and paths in a checkpoint are not followed; "
                reason += f"add {words}, or choose data="
                raise ArgumentError("path", str(checkpoint.path), reason)
            is_imported = checkpoint.facts.get("data_fingerprint", "") is None
            if is_imported and checkpoint.tokenizer is not None and "data" not in given:
                reason = "is an imported model, which has no data of its own; add data=text data.files=book.txt, "
                reason += "or choose data="
                raise ArgumentError("path", str(checkpoint.path), reason)
        # A group that the command line chooses replaces the run's; merging would leave keys of the run's choice behind.
        config = {key: value for key, value in config.items() if key not in given or not isinstance(value, dict)}
    ConfigStore.instance().store(name="stored_run", node=config, package="_global_")
    return checkpoint


def training_words(words: Sequence[str]) -> list[str]:
    """Convert a command line of `train` to Hydra's grammar, and add the overrides of the run or checkpoint it names."""
    words = with_patterns(readable(words, is_multirun(words)))
    if any(word.startswith("resume=") for word in words):
        from tinyformer.config.resume import expand_resume

        words = expand_resume(words)
    return inherit_architecture(words)


def inherit_architecture(arguments: Sequence[str]) -> list[str]:
    """Put the architecture of the checkpoint that `init_from=` names before the arguments of a training run.

    An argument that changes a size, or a choice on an axis, is refused. Any other replaces the checkpoint's value.
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
    """The value that a command line sets for each key, as a string."""
    return {argument.partition("=")[0].lstrip("+"): text_of(argument) for argument in arguments}


Job: TypeAlias = Callable[[DictConfig, Path, CommandLine], Any]
"""The work of a program, given a config, its folder and its `CommandLine`."""


def launch(words: Sequence[str], program: str, job: Job, command: str, in_python: bool = False) -> Any:
    """Run a job with the config that a command line describes, in the folder that the config names.

    Torch and Lightning are not imported before the job, so that `--help` and errors about keys are printed at once. If
    the job is refused, its folder is left unchanged.

    Args:
        words: options, and overrides in Hydra's grammar.
        program: the name of the primary config, such as "train".
        job: called with the config, its folder and its `CommandLine`.
        command: the program as the user called it, such as "tinyformer train", for hints.
        in_python: whether `command` is a function that was called in Python.

    Returns:
        The job's return value; for a sweep, the largest exit code of its jobs; None with `--help` and `--cfg`.

    Raises:
        ConfigError: the folder cannot be made, or another program uses it. Errors of Hydra and of the job pass through.
    """
    register_resolvers(command)
    OmegaConf.register_new_resolver("name_of_run", name_of_run, replace=True, use_cache=True)
    parser = _parser(command)
    options = parser.parse_intermixed_args(list(words))
    overrides, is_sweep = options.overrides, options.multirun
    if options.resolve and not options.cfg:
        parser.error("--resolve needs --cfg")
    with isolated_hydra():
        hydra = _hydra(options.config_dir, parser)
        if options.help:
            return hydra.app_help(program, parser, options)
        if options.cfg:
            return hydra.show_cfg(program, overrides, options.cfg, options.package, options.resolve)
        if options.shell_completion:
            return hydra.shell_completion(program, overrides)
        overrides += ["hydra.mode=MULTIRUN"] * is_sweep
        config = hydra.compose_config(program, overrides, RunMode.MULTIRUN if is_sweep else RunMode.RUN)
        if config.hydra.mode == RunMode.MULTIRUN and not is_sweep:
            raise ConfigError("hydra.mode=MULTIRUN: does not start a sweep; use -m.")
        context, task = HydraContext(hydra.config_loader, Callbacks(config)), _Task(job, program, command, in_python)
        claim = claim_folder(config, "hydra.sweep.dir" if is_sweep else "hydra.run.dir")
        with claim.lock:
            try:
                return (_sweep if is_sweep else _run)(config, context, task)
            except Exception as error:
                task.codes.append(BUG if describe(error, program) is None else USER_MISTAKE)
                raise
            finally:
                if USER_MISTAKE in task.codes:
                    claim.withdraw()


def _parser(command: str) -> argparse.ArgumentParser:
    """The parser of a program's options; Hydra's functions read the parsed options as attributes."""
    parser = argparse.ArgumentParser(prog=command, add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE")
    parser.add_argument("--help", "-h", action="store_true", help="print the axes and their choices")
    parser.add_argument("--package", "-p", help="the part of the config that --cfg prints")
    parser.add_argument("--resolve", action="store_true", help="resolve the interpolations that --cfg prints")
    parser.add_argument("--config-dir", "-cd", help="a further folder of config files")
    only_one = parser.add_mutually_exclusive_group()
    only_one.add_argument("--cfg", "-c", choices=["job", "hydra", "all"], help="print the config, and run nothing")
    only_one.add_argument("--multirun", "-m", action="store_true", help="make a run of each combination of values")
    only_one.add_argument("--shell-completion", "-sc", action="store_true", help="install=bash, or uninstall=bash")
    return parser


def _hydra(folder: str | None, parser: argparse.ArgumentParser) -> Any:
    """A Hydra object with our config files; files of a further `folder` take precedence."""
    version.setbase(None)
    search_path = create_config_search_path(str(config_dir()))
    if folder is not None:
        if not Path(folder).is_dir():
            parser.error(f"--config-dir {folder}: there is no such folder")
        url = f"file://{Path(folder).absolute()}"
        search_path.prepend("command-line", url, SearchPathQuery(provider="schema"))
    hydra = Hydra.create_main_hydra2(parser.prog, search_path)
    hydra.config_loader = ConfigLoader(search_path)
    return hydra


@dataclass(frozen=True)
class _Task:
    """The function that Hydra calls for a run, or for each job of a sweep, perhaps in another process."""

    job: Job
    program: str
    command: str
    in_python: bool
    codes: list[int] = field(default_factory=list)  # the exit codes of the jobs in this process
    process: int = field(default_factory=os.getpid)  # the process that started the run or sweep

    def __call__(self, config: DictConfig) -> Any:
        node = HydraConfig.get()
        invocation, folder = CommandLine.of_job(node, self.command, self.in_python), Path(node.runtime.output_dir)
        if not invocation.is_sweep:
            with config_keys(config):
                return self.job(config, folder, invocation)
        # Reported here: Hydra would hold back the error of a job until all jobs of the sweep have ended.
        with named_lines(f"[{node.job.num}]") if os.getpid() != self.process else contextlib.nullcontext():
            if is_first_process():
                print(" ".join(invocation.overrides), end="  ", flush=True)  # the line ends with the result
            self.codes.append(exit_code_of(lambda: self._in_sweep(config, folder, invocation), self.program))
        return self.codes[-1]

    def _in_sweep(self, config: DictConfig, folder: Path, invocation: CommandLine) -> None:
        try:
            with config_keys(config), locked(folder):  # the folder of the sweep alone is claimed
                self.job(config, folder, invocation)
        except Exception:
            print(flush=True)
            raise


def _run(config: DictConfig, context: HydraContext, task: _Task) -> Any:
    context.callbacks.on_run_start(config=config, config_name=task.program)
    ended = run_job(task, config, "hydra.run.dir", None, context, configure_logging=False)
    context.callbacks.on_run_end(config=config, config_name=task.program, job_return=ended)
    with contextlib.redirect_stderr(io.StringIO()):  # Hydra prints a line about an error before it raises it
        return ended.return_value


def _sweep(config: DictConfig, context: HydraContext, task: _Task) -> int:
    """Run the jobs of a sweep, and return the largest exit code; a refused job keeps its numbered folder."""
    context.callbacks.on_multirun_start(config=config, config_name=task.program)
    sweeper = Plugins.instance().instantiate_sweeper(config=config, hydra_context=context, task_function=task)
    words: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    codes = [ended.return_value for batch in sweeper.sweep(words) for ended in batch]
    task.codes.extend(codes)  # includes jobs in other processes
    context.callbacks.on_multirun_end(config=config, config_name=task.program)
    return max(codes, default=0)
