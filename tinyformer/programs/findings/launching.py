"""Jobs run by a launcher of Hydra: one after the other, or in parallel in processes of their own."""

import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from hydra import compose
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException
from hydra.types import HydraContext
from omegaconf import DictConfig

from tinyformer.config.compose import hydra_parser
from tinyformer.config.errors import ConfigError
from tinyformer.config.keys import quoted
from tinyformer.config.process import guard_imports, isolated_hydra

Job: TypeAlias = Callable[[], int]
"""What a launcher does, in this process or in another, to which it is sent; it returns an exit code."""

ONE_AFTER_THE_OTHER = "basic"


def require_launcher(words: Sequence[str]) -> None:
    """Refuse a launcher that is not installed, and settings that it does not have: ["joblib", "n_jobs=2"]."""
    name, *settings = words
    with isolated_hydra(), hydra_parser():
        installed = sorted(GlobalHydra.instance().config_loader().get_group_options("hydra/launcher"))
        if name not in installed:
            problem = "there is no such launcher."
            if name == "joblib":
                problem = "is not installed. pip install 'tinyformer[sweep]' brings it."
            raise ConfigError(f"--launcher {name}: {problem} Installed: {', '.join(installed)}.")
        known = [key for key in _compose([name], Path()).hydra.launcher if key != "_target_"]
        for setting in settings:
            key, equals, _ = setting.partition("=")
            if not equals:
                raise ConfigError(f"--launcher {name} {setting}: is no KEY=VALUE; a finding stands before --launcher.")
            if key not in known:
                has = f"has the settings {', '.join(known)}" if known else "has no settings"
                raise ConfigError(f"--launcher {name} {setting}: {name} {has}.")
        try:
            _compose(words, Path())
        except ConfigCompositionException as error:
            raise ConfigError(f"--launcher {' '.join(words)}: {str(error.__cause__).splitlines()[0]}.") from error


def launch(jobs: Sequence[Job], words: Sequence[str], folder: Path) -> list[int]:
    """Do jobs by a launcher that `require_launcher` admits, which keeps what it needs in a folder; returns exit codes.

    A launcher of Hydra composes a config for each job, and calls a function with it: here, with a job's number.
    """
    guard_imports()
    with isolated_hydra(), hydra_parser():
        config = _compose(words, folder)
        context = HydraContext(GlobalHydra.instance().config_loader(), Callbacks(config))
        launcher = Plugins.instance().instantiate_launcher(context, functools.partial(_do, jobs), config)
        try:
            ended = launcher.launch([[f"+number={number}"] for number in range(len(jobs))], 0)
        except ValueError as error:  # jobs report their own errors
            raise ConfigError(f"--launcher {' '.join(words)}: {error}.") from error
    return [job.return_value for job in ended]


def _compose(words: Sequence[str], folder: Path) -> DictConfig:
    """Hydra's own config, of jobs that leave what they write themselves and nothing of Hydra's."""
    name, *settings = words
    overrides = [f"hydra/launcher={name}", *(f"hydra.launcher.{setting}" for setting in settings)]
    overrides += [f"hydra.sweep.dir={quoted(str(folder))}", "hydra.sweep.subdir='.'", "hydra.output_subdir=null"]
    overrides += ["hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.job.chdir=false"]
    return compose(None, overrides, return_hydra_config=True)


def _do(jobs: Sequence[Job], config: DictConfig) -> int:
    _end_with_parent()
    return jobs[config.number]()


@functools.cache
def _end_with_parent() -> None:
    """End this process soon after the one that started it, if it is a launcher's: nobody would wait for its job.

    Ctrl-C reaches the first process, which ends the others.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent.pid:
            time.sleep(0.2)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
