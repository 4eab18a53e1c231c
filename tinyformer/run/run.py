"""`Run`: all objects of a training run or an evaluation; its training loop, and the signals and errors that end it."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import DictConfig

from tinyformer.analysis import Analysis
from tinyformer.checkpoint.file import Checkpoint
from tinyformer.config.admission import Plain
from tinyformer.config.errors import ConfigError
from tinyformer.config.folder import is_first_process
from tinyformer.config.launch import CommandLine
from tinyformer.data import DataModule
from tinyformer.errors import ArgumentError, argument_path, relative_path
from tinyformer.nn import AttentionMask, Network
from tinyformer.run.match import Matched
from tinyformer.run.settings import Settings
from tinyformer.tasks import Task
from tinyformer.training import AttentionTelemetry, TrainingModule
from tinyformer.training.callbacks.checkpoints import Checkpoints, Interrupted
from tinyformer.training.callbacks.finite import NonFiniteStep
from tinyformer.training.callbacks.metrics import Report
from tinyformer.training.step import has_processes

C = TypeVar("C", bound=L.Callback)


@dataclass
class Run:
    """All objects of a training run or an evaluation, which `set_up` makes before anything is computed."""

    config: DictConfig  # the config, with values that were set after it was composed
    folder: Path  # the folder that the run writes into
    invocation: CommandLine  # facts about the command line that the config lacks
    stored: Plain  # the config as a checkpoint stores it, unresolved, with the data of the training run
    settings: Settings
    data: DataModule
    split: str  # the split that is scored
    task: Task
    network: Network
    mask: AttentionMask  # the mask of the split's first batch
    matched: Matched | None  # the solved size; None without `match`
    kernels: list[str] = field(init=False)  # the attention kernels of its layers
    module: TrainingModule = field(init=False)
    loggers: list[Logger] = field(init=False)
    trainer: L.Trainer = field(init=False)  # Lightning's trainer, with all callbacks
    backends: str | None = None  # the backends of its layers; None if they were not measured
    analysis: Analysis | None = None  # the analysis of an evaluation; None for no analysis

    @property
    def checkpoint(self) -> Checkpoint:
        assert self.settings.start is not None
        return self.settings.start.checkpoint

    def callbacks(self, kind: type[C]) -> list[C]:
        return [callback for callback in self.trainer.callbacks if isinstance(callback, kind)]  # type: ignore[attr-defined]

    @property
    def telemetry(self) -> list[AttentionTelemetry]:
        return self.callbacks(AttentionTelemetry)

    @property
    def pictures(self) -> list[Path]:
        return [picture for callback in self.telemetry for picture in callback.paths]

    @property
    def report(self) -> Report:
        return self.callbacks(Report)[0]

    @property
    def checkpoints(self) -> Checkpoints:
        return self.callbacks(Checkpoints)[0]


@contextlib.contextmanager
def requeue_on_exit(run: Run) -> Iterator[None]:
    """At the end of a `with` statement, ask Slurm to start the job again if a signal has stopped the run."""
    try:
        yield
    except SystemExit as end:
        if is_first_process() and isinstance(end.code, int) and is_requeued(end.code - 128, run.invocation):
            requeue()
        raise


@contextlib.contextmanager
def destroy_process_group_on_exit() -> Iterator[None]:
    """Destroy the process group of a failed run with a single process, since other runs may follow in this process."""
    try:
        yield
    finally:
        if has_processes() and torch.distributed.get_world_size() == 1:
            torch.distributed.destroy_process_group()


def fit(run: Run) -> None:
    """Run the training loop."""
    resume = partial(run.invocation.call, f"resume={relative_path(run.folder)}")
    resumed = str(run.checkpoint.path) if run.settings.is_resumed else None
    try:
        passed = {"every_n_steps": "callbacks.snapshots.every_n_steps", "directory": "hydra.run.dir"}
        with argument_path(passed=passed):
            run.trainer.fit(run.module, datamodule=run.data, ckpt_path=resumed)
    except (NonFiniteStep, Interrupted) as stop:
        if not is_first_process():  # the first one reports how the run ended
            raise SystemExit(0) from stop
        if isinstance(stop, NonFiniteStep):
            cures = "a lower optimizer.lr, a longer schedule.warmup_steps or callbacks.finite.action=skip may help"
            saved = f"Nothing was saved after that step; from the last checkpoint, {cures}:\n  {resume('…')}"
            if not run.checkpoints.last.exists():
                saved = f"Nothing was saved; {cures}."
            raise ConfigError(f"{stop}\n{saved}") from stop
        how = f"To continue: {resume()}"
        if is_requeued(stop.signal_number, run.invocation):
            how = "Slurm is asked to start the job again."
        print(f"\nStopped at step {run.trainer.global_step}. {how}", flush=True)
        raise SystemExit(128 + stop.signal_number) from stop
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        if not (isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error)):
            if resumed is None or run.checkpoints.num_begun > 1 or isinstance(error, ArgumentError | ConfigError):
                raise
            needed = "the optimizer, trainer and callbacks must be the same as in the run"
            raise ConfigError(f"resume={run.config.resume}: {needed}, and its checkpoint whole ({error!r}).") from error
        how = "Nothing was saved."
        if run.checkpoints.last.exists():
            how = f"Steps since the last checkpoint are lost. To continue: {resume()}"
        where = f"during step {run.trainer.global_step + 1}"
        rank_zero_only(print)(f"\nAnother process of the run has ended {where}. {how}", file=sys.stderr)
        for process in (others := getattr(run.trainer.strategy.launcher, "procs", [])):
            process.kill()
        others.clear()  # if Lightning finds one that has ended, it kills this process, too
        raise SystemExit(1) from error


def is_requeued(signal_number: int, invocation: CommandLine) -> bool:
    """Return True if Slurm is to requeue the job: SIGUSR1 has stopped it, and its command has `resume=auto`."""
    return "SLURM_JOB_ID" in os.environ and signal_number == signal.SIGUSR1 and "resume=auto" in invocation.overrides


def requeue() -> None:
    """Ask Slurm to start this job, or this task of a job array, again; Slurm ends the processes that still run."""
    names = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")
    task = "_".join(os.environ[name] for name in names) if all(name in os.environ for name in names) else None
    subprocess.run(["scontrol", "requeue", task or os.environ["SLURM_JOB_ID"]], check=False)
