"""The parts of a run: `training_run` and `evaluation_run` make them, `run_results` scores and summarises them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig

from tinyformer.analysis import Analysis
from tinyformer.checkpoint.file import Checkpoint
from tinyformer.config.invocation import Invocation
from tinyformer.data import DataModule
from tinyformer.nn import Network
from tinyformer.run.match import Matched
from tinyformer.run.starting_checkpoint import Start
from tinyformer.run.trainer import Settings
from tinyformer.tasks import Task
from tinyformer.training import AttentionTelemetry, FiniteCheck, TrainingModule, TrainingScores
from tinyformer.training.callbacks.checkpoints import Checkpoints
from tinyformer.training.callbacks.report import Report

C = TypeVar("C", bound=L.Callback)


@dataclass
class Parts:
    """What a training run and an evaluation are made of.

    Args:
        config: the config, with what has been set in it since.
        folder: the folder of its files.
        settings: device, precision and the trainer's arguments.
        data: the tokens.
        task: the task.
        network: the model.
        kernels: the attention kernels of its layers.
        module: Lightning's module.
        loggers: the loggers.
        trainer: Lightning's trainer, with all callbacks.
    """

    config: DictConfig
    folder: Path
    settings: Settings
    data: DataModule
    task: Task
    network: Network
    kernels: list[str]
    module: TrainingModule
    loggers: list[Logger]
    trainer: L.Trainer

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


@dataclass
class Run(Parts):
    """A training run before its first step.

    Args:
        invocation: what the command line says in addition to the config.
        start: the checkpoint that the run starts from, if any.
        warning: a sentence if the attention weights will not fit into memory.
        matched: the size that was solved for, if any.
    """

    invocation: Invocation
    start: Start | None
    warning: str | None
    matched: Matched | None

    @property
    def report(self) -> Report:
        """The callback that measures speed."""
        return self.callbacks(Report)[0]

    @property
    def checkpoints(self) -> Checkpoints:
        """The callback that saves the run."""
        return self.callbacks(Checkpoints)[0]

    @property
    def training_scores(self) -> dict[str, float]:
        """The metrics of training rows at the last validation, by name; empty where none are scored."""
        return {name: value for scores in self.callbacks(TrainingScores) for name, value in scores.metrics.items()}

    @property
    def skipped(self) -> list[int]:
        """The steps that were skipped since they were not finite."""
        return [step for check in self.callbacks(FiniteCheck) for step in check.skipped]


@dataclass
class Evaluation(Parts):
    """An evaluation before it computes anything.

    Args:
        checkpoint: the checkpoint.
        stored: the unresolved config of the network as it is evaluated, for checkpoints of pruned copies.
        split: the split that is scored.
        analysis: the analysis, if one is chosen.
        is_scored: whether the split is scored, its attention maps are drawn and text is sampled.
    """

    checkpoint: Checkpoint
    stored: dict[str, Any]
    split: str
    analysis: Analysis | None
    is_scored: bool
