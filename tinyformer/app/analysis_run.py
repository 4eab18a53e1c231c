"""Analyses of a trained model, and the files that they write."""

import csv
from collections.abc import Mapping
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger

from tinyformer.analysis import Analysis, Findings, Subject, analyse_predictions, caption, save_png
from tinyformer.app.trainer import forward_context
from tinyformer.data import DataModule
from tinyformer.errors import argument_path
from tinyformer.files import relative_path
from tinyformer.nn import Network
from tinyformer.tasks import Task
from tinyformer.training import RunWandbLogger


def run_analysis(analysis: Analysis, subject: Subject, folder: Path, loggers: list[Logger]) -> Findings:
    """Run an analysis, and save its findings."""
    with argument_path("analysis"):
        findings = analysis(subject, folder)
    keep_findings(findings, folder, loggers, subject.facts)
    return findings


def keep_findings(findings: Findings, folder: Path, loggers: list[Logger], facts: Mapping[str, str]) -> None:
    """Save tables (`NAME.csv`) and figures (`NAME.png`) in the folder and in Weights & Biases.

    Args:
        findings: the findings, to which the files are added.
        folder: the folder.
        loggers: the loggers of the run.
        facts: what was analysed, for the line above each figure, unless the findings have facts of their own; see
            `caption`.
    """
    for name, (columns, rows) in findings.tables.items():
        path = folder / f"{name}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([columns, *rows])
        findings.files.append(path)
    for name, figure in findings.figures.items():
        findings.files.append(save_png(figure, folder / f"{name}.png", caption(findings.facts or facts)))
    for logger in loggers:
        if isinstance(logger, RunWandbLogger):
            logger.log_findings(findings)


def examine(task: Task, network: Network, data: DataModule, split: str, trainer: Trainer) -> Findings:
    """Tables and figures of the network's predictions on a split, see `analyse_predictions`.

    Args:
        task: the task that the network was trained for.
        network: the model, on any device.
        data: the data.
        split: the split.
        trainer: a trainer on the device and in the precision to use.
    """
    device = trainer.strategy.root_device
    batches = (trainer.strategy.batch_to_device(batch, device) for batch in data.evaluation_dataloader(split))
    with forward_context(trainer, network):
        return analyse_predictions(task, network, batches, data.splits[split])


def describe_subject(path: Path, step: int, data: DataModule, split: str) -> dict[str, str]:
    """What an analysis shows, by name, for the line above its figures; see `caption`.

    Args:
        path: the checkpoint.
        step: its optimizer steps.
        data: the data.
        split: the split that is analysed.
    """
    return {"checkpoint": relative_path(path), "step": f"{step:,}", "data": f"{data.title}, {split} split"}
