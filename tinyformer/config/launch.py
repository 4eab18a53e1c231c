"""From a command line to a job: compose the config, claim its folder, and run the job there, or the jobs of a sweep."""

import argparse
import contextlib
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import run_job
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from tinyformer.config.compose import Invocation, hydra_parser
from tinyformer.config.conf import register_resolvers
from tinyformer.config.errors import USER_MISTAKE, config_keys, describe, exit_code_of
from tinyformer.config.folder import claim_folder, is_first_process, locked
from tinyformer.config.keys import is_multirun, quoted
from tinyformer.config.process import keep_hydra, named_lines

Job: TypeAlias = Callable[[DictConfig, Path, Invocation], Any]
"""What a program does with a config, in a folder."""


def launch(words: Sequence[str], program: str, job: Job, command: str, in_python: bool = False) -> Any:
    """Run a job with the config that a command line describes, in the folder that the config names.

    Nothing heavy is imported before the job, so that `--help` and misspelt keys are answered at once. The folder of a
    refused job is left as it was.

    Args:
        words: options, and overrides in Hydra's grammar.
        program: the primary config.
        job: called with the config, its folder and its `Invocation`.
        command: the program as the user called it, such as "tinyformer train", for hints.
        in_python: whether `command` is a function that was called in Python.

    Returns:
        What the job returns; the exit code of a sweep, whose jobs report their errors; None with `--help` and `--cfg`.

    Raises:
        ConfigError: another program uses the folder, or it cannot be made. Errors of Hydra and of the job pass through.
    """
    register_resolvers(command)
    parser = _parser()
    options = parser.parse_args(list(words))
    overrides, is_sweep = options.overrides, is_multirun(words)
    if options.config_dir:
        overrides.append(f"hydra.searchpath=[{quoted(f'file://{Path(options.config_dir).absolute()}')}]")
    if options.multirun:
        overrides.append("hydra.mode=MULTIRUN")
    with keep_hydra(), hydra_parser():
        hydra: Any = GlobalHydra.instance().hydra
        if options.help:
            return hydra.app_help(program, parser, options)
        if options.cfg:
            return hydra.show_cfg(program, overrides, options.cfg, options.package, options.resolve)
        if options.shell_completion:
            return hydra.shell_completion(program, overrides)
        config = hydra.compose_config(program, overrides, RunMode.MULTIRUN if is_sweep else RunMode.RUN)
        context, task = HydraContext(hydra.config_loader, Callbacks(config)), _Task(job, program, command, in_python)
        claim = claim_folder(config, "hydra.sweep.dir" if is_sweep else "hydra.run.dir")
        with claim.lock:
            try:
                value = (_sweep if is_sweep else _run)(config, context, task)
            except Exception as error:
                if describe(error, program) is not None:
                    claim.withdraw()
                raise
            if is_sweep and value == USER_MISTAKE:
                claim.withdraw()
            return value


def _parser() -> argparse.ArgumentParser:
    """The options of Hydra that a program has; the names of Hydra's own functions for them."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE")
    parser.add_argument("--help", "-h", action="store_true", help="print the axes and their choices")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"], help="print the config, and run nothing")
    parser.add_argument("--package", "-p", help="the part of the config that --cfg prints")
    parser.add_argument("--resolve", action="store_true", help="resolve the interpolations that --cfg prints")
    parser.add_argument("--multirun", "-m", action="store_true", help="make a run of each combination of values")
    parser.add_argument("--config-dir", "-cd", help="a further folder of config files")
    parser.add_argument("--shell-completion", "-sc", action="store_true", help="install=bash, or uninstall=bash")
    return parser


@dataclass(frozen=True)
class _Task:
    """The function that Hydra calls with a config: the job of a run, or of a sweep, perhaps in another process."""

    job: Job
    program: str
    command: str
    in_python: bool
    process: int = field(default_factory=os.getpid)

    def __call__(self, config: DictConfig) -> Any:
        node = HydraConfig.get()
        invocation, folder = Invocation.of_job(node, self.command, self.in_python), Path(node.runtime.output_dir)
        if not invocation.is_sweep:
            with config_keys(config):
                return self.job(config, folder, invocation)
        # Reported here: Hydra would hold back the error of a job until all jobs of the sweep have ended.
        with named_lines(f"[{node.job.num}]") if os.getpid() != self.process else contextlib.nullcontext():
            if is_first_process():
                print(" ".join(invocation.overrides), end="  ", flush=True)  # the line ends with the result
            return exit_code_of(lambda: self._in_sweep(config, folder, invocation), self.program)

    def _in_sweep(self, config: DictConfig, folder: Path, invocation: Invocation) -> None:
        try:
            with config_keys(config), locked(folder):
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
    context.callbacks.on_multirun_end(config=config, config_name=task.program)
    return max(codes)
