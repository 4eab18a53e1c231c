"""`Run`: all objects of a training run or an evaluation, which `pipeline` makes and `results` scores and summarises."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import lightning as L
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig

from tinyformer.analysis import Analysis
from tinyformer.checkpoint.file import Checkpoint
from tinyformer.config.admission import Plain
from tinyformer.config.compose import CommandLine
from tinyformer.data import DataModule
from tinyformer.nn import AttentionMask, Network
from tinyformer.run.match import Matched
from tinyformer.run.settings import Settings
from tinyformer.tasks import Task
from tinyformer.training import AttentionTelemetry, TrainingModule
from tinyformer.training.callbacks.checkpoints import Checkpoints
from tinyformer.training.callbacks.report import Report

C = TypeVar("C", bound=L.Callback)


@dataclass
class Run:
    """A training run before its first step, or an evaluation before it computes anything."""

    config: DictConfig  # the resolved config, with what has been set in it since it was composed
    folder: Path  # the folder of its files
    invocation: CommandLine  # what the command line says in addition to the config
    stored: Plain  # the config as a checkpoint stores it, unresolved, with the data of the training run
    settings: Settings
    data: DataModule
    split: str  # the split that is scored
    task: Task
    network: Network
    mask: AttentionMask  # of the split's first batch
    matched: Matched | None  # the size that was solved for, if any
    kernels: list[str] = field(init=False)  # the attention kernels of its layers
    module: TrainingModule = field(init=False)
    loggers: list[Logger] = field(init=False)
    trainer: L.Trainer = field(init=False)  # Lightning's trainer, with all callbacks
    warning: str | None = None  # a sentence if the attention weights of a training step will not fit into memory
    backends: str | None = None  # the backends of its layers, where they were chosen by measurement
    analysis: Analysis | None = None  # the analysis of an evaluation, if one is chosen

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
