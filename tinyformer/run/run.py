"""The parts of a run, which `pipeline` makes from its config, and `results` scores and summarises."""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import lightning as L
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig

from tinyformer.analysis import Analysis
from tinyformer.checkpoint.file import Checkpoint
from tinyformer.config.admission import Plain
from tinyformer.config.compose import Invocation
from tinyformer.data import DataModule
from tinyformer.nn import Network
from tinyformer.run.match import Matched
from tinyformer.run.sample import Generation
from tinyformer.run.starting_checkpoint import Start
from tinyformer.run.trainer import Settings
from tinyformer.tasks import Task
from tinyformer.training import AttentionTelemetry, TrainingModule
from tinyformer.training.callbacks.checkpoints import Checkpoints
from tinyformer.training.callbacks.report import Report

C = TypeVar("C", bound=L.Callback)


@dataclass
class Run:
    """A training run before its first step, or an evaluation before it computes anything.

    Args:
        config: the resolved config, with what has been set in it since it was composed.
        folder: the folder of its files.
        invocation: what the command line says in addition to the config.
        start: the checkpoint that it begins with, if any.
        stored: the config as a checkpoint stores it, unresolved; of an evaluation, with the data of the training run.
        settings: device, precision and the trainer's arguments.
        data: the tokens.
        split: the split that is scored.
        task: the task.
        generation: what is generated at the end.
        network: the model.
        kernels: the attention kernels of its layers.
        module: Lightning's module.
        loggers: the loggers.
        trainer: Lightning's trainer, with all callbacks.
        matched: the size that was solved for, if any.
        warning: a sentence if the attention weights of a training step will not fit into memory.
        analysis: the analysis of an evaluation, if one is chosen.
        is_scored: whether the split is scored, its attention maps are drawn and text is generated.
    """

    config: DictConfig
    folder: Path
    invocation: Invocation
    start: Start | None
    stored: Plain
    settings: Settings
    data: DataModule
    split: str
    task: Task
    generation: Generation
    network: Network
    kernels: list[str]
    module: TrainingModule
    loggers: list[Logger]
    trainer: L.Trainer
    matched: Matched | None = None
    warning: str | None = None
    analysis: Analysis | None = None
    is_scored: bool = True

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that the run begins with."""
        assert self.start is not None
        return self.start.checkpoint

    def callbacks(self, kind: type[C]) -> list[C]:
        """The callbacks of a class."""
        return [callback for callback in self.trainer.callbacks if isinstance(callback, kind)]  # type: ignore[attr-defined]

    @property
    def telemetry(self) -> list[AttentionTelemetry]:
        """The callbacks that measure heads."""
        return self.callbacks(AttentionTelemetry)

    @property
    def pictures(self) -> list[Path]:
        """The attention maps that were drawn."""
        return [picture for callback in self.telemetry for picture in callback.paths]

    @property
    def report(self) -> Report:
        """The callback that measures the speed of training."""
        return self.callbacks(Report)[0]

    @property
    def checkpoints(self) -> Checkpoints:
        """The callback that saves the run."""
        return self.callbacks(Checkpoints)[0]
