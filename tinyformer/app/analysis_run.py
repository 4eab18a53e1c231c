"""Analyses of a trained model, and the files that they write."""

import copy
import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig

from tinyformer.analysis import Analysis, Findings, Subject, analyse_predictions, caption, save_png
from tinyformer.app.admission import describe_config, recorded_sources
from tinyformer.app.parts import make_seeded_network
from tinyformer.app.trainer import forward_context
from tinyformer.checkpoint import Checkpoint, save_network
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


def make_subject(
    config: DictConfig,
    stored: dict[str, Any],
    checkpoint: Checkpoint,
    network: Network,
    task: Task,
    data: DataModule,
    split: str,
    num_windows: int,
    trainer: Trainer,
) -> Subject:
    """The subject of an analysis: a checkpoint's network, and windows or pairs of a split.

    Args:
        config: the config of the evaluation.
        stored: the unresolved config of the network as it is evaluated, for checkpoints of pruned copies.
        checkpoint: the checkpoint of the network.
        network: the model.
        task: the task that it was trained for.
        data: the data.
        split: the split.
        num_windows: maximum number of windows or pairs.
        trainer: a trainer on the device and in the precision to use.
    """
    device = trainer.strategy.root_device

    def placed(network: Network) -> Network:
        return cast(Network, trainer.precision_plugin.convert_module(network.to(device).eval()))

    def save_pruned(pruned: Network, path: Path) -> None:
        own = copy.deepcopy(stored)
        own["model"]["pruned_heads"] = pruned.pruned_heads()
        overrides = describe_config(own, checkpoint.overrides) | recorded_sources(checkpoint)
        save_network(path, pruned, checkpoint, overrides)

    return Subject(
        network=placed(network),
        batches=[trainer.strategy.batch_to_device(batch, device) for batch in data.sample(split, num_windows)],
        task=task,
        tokenizer=data.tokenizer,
        precision=trainer.precision_plugin.forward_context,
        untrained=lambda: placed(make_seeded_network(config, data.tokenizer)),
        save_pruned=save_pruned,
        row=data.row,
        facts=describe_subject(checkpoint.path, checkpoint.step, data, split),
    )


def describe_subject(path: Path, step: int, data: DataModule, split: str) -> dict[str, str]:
    """What an analysis shows, by name, for the line above its figures; see `caption`.

    Args:
        path: the checkpoint.
        step: its optimizer steps.
        data: the data.
        split: the split that is analysed.
    """
    return {"checkpoint": relative_path(path), "step": f"{step:,}", "data": f"{data.title}, {split} split"}
