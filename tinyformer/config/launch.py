"""From a command line to a job: compose the config, claim its folder, and run the job there, or the jobs of a sweep."""

import argparse
import contextlib
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from hydra import version
from hydra._internal.callbacks import Callbacks
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import run_job
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from tinyformer.config.compose import CommandLine
from tinyformer.config.conf import config_dir, register_resolvers
from tinyformer.config.errors import BUG, USER_MISTAKE, ConfigError, config_keys, describe, exit_code_of
from tinyformer.config.folder import claim_folder, is_first_process, locked
from tinyformer.config.process import isolated_hydra, named_lines

Job: TypeAlias = Callable[[DictConfig, Path, CommandLine], Any]
"""The work of a program, given a config, its folder and its `CommandLine`."""


def launch(words: Sequence[str], program: str, job: Job, command: str, in_python: bool = False) -> Any:
    """Run a job with the config that a command line describes, in the folder that the config names.

    Nothing heavy is imported before the job, so that `--help` and misspelt keys are answered at once. The folder of a
    refused job is left as it was.

    Args:
        words: options, and overrides in Hydra's grammar.
        program: the primary config.
        job: called with the config, its folder and its `CommandLine`.
        command: the program as the user called it, such as "tinyformer train", for hints.
        in_python: whether `command` is a function that was called in Python.

    Returns:
        What the job returns; the exit code of a sweep, whose jobs report their errors; None with `--help` and `--cfg`.

    Raises:
        ConfigError: another program uses the folder, or it cannot be made. Errors of Hydra and of the job pass through.
    """
    register_resolvers(command)
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
            raise ConfigError("hydra.mode=MULTIRUN: starts no sweep; -m does.")
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
    """The options of a program; their names are those that Hydra's functions read."""
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
    """Hydra with our config files, and those of a further folder, which take precedence."""
    version.setbase(None)
    search_path = create_config_search_path(str(config_dir()))
    if folder is not None:
        if not Path(folder).is_dir():
            parser.error(f"--config-dir {folder}: there is no such folder")
        url = f"file://{Path(folder).absolute()}"
        search_path.prepend("command-line", url, SearchPathQuery(provider="schema"))
    return Hydra.create_main_hydra2(parser.prog, search_path)


@dataclass(frozen=True)
class _Task:
    """The task of a run, or of a job of a sweep, which Hydra may call in another process."""

    job: Job
    program: str
    command: str
    in_python: bool
    codes: list[int] = field(default_factory=list)  # the exit codes of the jobs in this process
    process: int = field(default_factory=os.getpid)

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
    """The largest exit code of the jobs. Folders of refused jobs are kept: their numbers count."""
    context.callbacks.on_multirun_start(config=config, config_name=task.program)
    sweeper = Plugins.instance().instantiate_sweeper(config=config, hydra_context=context, task_function=task)
    words: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    codes = [ended.return_value for batch in sweeper.sweep(words) for ended in batch]
    task.codes.extend(codes)  # of other processes, too
    context.callbacks.on_multirun_end(config=config, config_name=task.program)
    return max(codes, default=0)
