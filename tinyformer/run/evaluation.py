"""The scores, analyses and predictions of a trained network, and the files that they are saved in."""

import copy
import json
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias, cast

import lightning as L
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tinyformer.analysis import Analysis, AnalysisContext, Snapshot, analyse_predictions
from tinyformer.analysis.over_training.over_steps import OverSteps
from tinyformer.checkpoint.file import copy_with, load_checkpoint, load_weights, save_network, snapshots_of
from tinyformer.config.admission import describe_config, recorded_sources
from tinyformer.data import DataModule, SourceDataModule
from tinyformer.data.batches.windows import Batch
from tinyformer.data.sources.documents import in_use
from tinyformer.data.sources.text_files import LocalFiles
from tinyformer.errors import ArgumentError, argument_path, relative_path, require_at_least
from tinyformer.files import write_table
from tinyformer.nn import Network
from tinyformer.report import AnalysisResult, caption, save_png
from tinyformer.run.data import has_test
from tinyformer.run.network import make_seeded_network
from tinyformer.run.run import Run
from tinyformer.run.trainer import forward_context, scoring_trainer
from tinyformer.training import TrainingModule
from tinyformer.training.loggers import log_findings

Metrics: TypeAlias = Mapping[str, float | None]  # the metrics of a split, by name; None for one that is undefined


class Scores(NamedTuple):
    """The metrics of each scored split, and the seconds that scoring the last split took."""

    splits: dict[str, Metrics]
    seconds: float = 0.0


def score_training(run: Run) -> tuple[Scores, AnalysisResult]:
    """Score the last weights on the validation split and, if `has_test` is true, the best weights on the test split."""
    trainer, path, step = scoring_trainer(run.settings, run.folder), run.checkpoints.last, run.module.step
    scores = Scores({"validation": run.module.metrics | final_metrics(run, trainer, "validation")})
    if has_test(run.task, run.data):
        best = load_checkpoint(run.checkpoints.best)
        load_weights(run.network, best)
        path, step = best.path, best.step
        module = TrainingModule(run.network, run.task, run.data, evaluated="test")
        scores.splits["test"] = score_split(run, trainer, module, "test").splits["test"]
    return scores, task_findings(run, trainer, list(scores.splits)[-1], path, step)


def score_evaluation(run: Run, findings: AnalysisResult) -> Scores:
    """Score the split of an evaluation, and add the files of the task's tables and figures to `findings`."""
    scores = score_split(run, run.trainer, run.module, run.split)
    findings.files += task_findings(run, run.trainer, run.split, run.checkpoint.path, run.checkpoint.step).files
    return scores


def score_split(run: Run, trainer: L.Trainer, module: TrainingModule, split: str) -> Scores:
    """Score a split with the network of a Lightning module."""
    batches, start = run.data.evaluation_dataloader(split), time.perf_counter()
    try:
        trainer.validate(module, batches, verbose=False)
    except SIGTERMException as end:  # which alone would exit with code 0
        raise SystemExit(128 + signal.SIGTERM) from end
    seconds = time.perf_counter() - start
    return Scores({split: module.metrics | final_metrics(run, trainer, split)}, seconds)


def final_metrics(run: Run, trainer: L.Trainer, split: str) -> dict[str, float | None]:
    """The metrics of a split that are computed once, at the end of a run."""
    part = run.settings.decoded_part(run.data, split)
    with forward_context(trainer, run.network):
        return run.task.final_metrics(run.network, part, run.data.tokenizer)


def task_findings(run: Run, trainer: L.Trainer, split: str, path: Path, step: int) -> AnalysisResult:
    """Make and save the task's own tables and figures of a split; see `analyse_predictions`.

    `path` is the checkpoint of the weights, `step` their number of steps; `trainer` has the device and the precision.
    """
    data, place, device = run.data, trainer.strategy.batch_to_device, trainer.strategy.root_device
    batches = (place(batch, device) for batch in data.evaluation_dataloader(split))
    with forward_context(trainer, run.network):
        findings = analyse_predictions(run.task, run.network, batches, data.splits[split])
    keep_findings(findings, run.folder, run.loggers, describe_context(path, step, data, split), step)
    return findings


def analyse(run: Run) -> AnalysisResult:
    """Run the chosen analysis and save its result; an empty result if none is chosen."""
    if run.analysis is None:
        return AnalysisResult()
    analysis: Analysis = run.analysis
    if not run.task.has_loss and getattr(analysis, "needs_loss", True):
        name = run.invocation.choices.get("analysis") or type(analysis).__name__
        reason = "needs predictions or their loss, and the encoder has no prediction head"
        raise ArgumentError("analysis", name, reason, {"analysis": "heads"})
    if run.config.step == "all" and not getattr(analysis, "reads_snapshots", False):
        analysis = OverSteps(analysis)
    with argument_path("analysis"):
        require_at_least(1, num_windows=analysis.num_windows)
    context = make_context(run, analysis.num_windows)
    with argument_path("analysis"):
        findings = analysis(context, run.folder)
    keep_findings(findings, run.folder, run.loggers, context.facts, run.checkpoint.step)
    return findings


def keep_findings(
    findings: AnalysisResult, folder: Path, loggers: list[Logger], facts: Mapping[str, str], step: int = 0
) -> None:
    """Save tables (`NAME.csv`) and figures (`NAME.png`), add their paths to `findings`, and log them at a step.

    The line above each figure, see `caption`, says what was analysed: `facts`, unless the findings or the figure have
    facts of their own.
    """
    for name, (columns, rows) in findings.tables.items():
        path = folder / f"{name}.csv"
        write_table(path, columns, rows)
        findings.files.append(path)
    for name, figure in findings.figures.items():
        own = findings.own_facts.get(name) or findings.facts or facts
        findings.files.append(save_png(figure, folder / f"{name}.png", caption(own)))
    for logger in loggers[1:]:  # all but `metrics.csv`
        log_findings(logger, findings, step)


def write_predictions(run: Run) -> AnalysisResult:
    """Write `predictions.csv`: each row of the files with all of its columns, and the columns of `Task.predict`."""
    context, data, path = make_context(run, 1), run.data, run.folder / "predictions.csv"
    with context.precision():
        columns, predicted = run.task.predict(context.network, context.split(), data.splits[run.split])
    source = cast(LocalFiles, in_use(cast(SourceDataModule, data).source))
    with argument_path("datamodule", "source"):
        whole = zip(source.whole_rows(data.row_format.source_rows), predicted, strict=True)
        rows = [row | dict(zip(columns, values, strict=True)) for row, values in whole]
    names = list(dict.fromkeys(name for row in rows for name in row))
    as_json = partial(json.dumps, ensure_ascii=False, default=str)
    cells = ((as_json(cell) if isinstance(cell, dict | list) else cell for cell in map(row.get, names)) for row in rows)
    write_table(path, names, map(list, cells))
    return AnalysisResult(lines={"predictions": relative_path(path)})


def make_context(run: Run, num_windows: int) -> AnalysisContext:
    """The context of an analysis: a checkpoint's network, and at most `num_windows` windows or pairs of a split."""
    checkpoint, data, trainer = run.checkpoint, run.data, run.trainer
    device = trainer.strategy.root_device

    def placed(network: Network) -> Network:
        return cast(Network, trainer.precision_plugin.convert_module(network.to(device).eval()))

    def at_snapshot(path: Path) -> Network:
        with argument_path(passed={"path": "checkpoint"}):
            return placed(copy_with(run.network, load_checkpoint(path)))

    def save_pruned(pruned: Network, path: Path) -> None:
        own = copy.deepcopy(run.stored)
        own["model"]["pruned_heads"] = pruned.pruned_heads()
        overrides = describe_config(own, checkpoint.overrides) | recorded_sources(checkpoint.overrides)
        save_network(path, pruned, checkpoint, overrides)

    def on_device(batches: Iterable[Batch]) -> Iterator[Batch]:
        return (trainer.strategy.batch_to_device(batch, device) for batch in batches)

    return AnalysisContext(
        network=placed(run.network),
        batches=[*on_device(data.sample(run.split, num_windows))],
        split=lambda: on_device(data.evaluation_dataloader(run.split)),
        task=run.task,
        tokenizer=data.tokenizer,
        precision=trainer.precision_plugin.forward_context,
        untrained=lambda further=0: placed(make_seeded_network(run.config, data.tokenizer, further)),
        save_pruned=save_pruned,
        snapshots=[Snapshot(step, partial(at_snapshot, path)) for step, path in snapshots_of(checkpoint.path).items()],
        row=data.row_format.row,
        facts=describe_context(checkpoint.path, checkpoint.step, data, run.split),
    )


def describe_context(path: Path, step: int, data: DataModule, split: str) -> dict[str, str]:
    """The facts about the model and data of an analysis, by name, for the line above its figures; see `caption`."""
    return {"checkpoint": relative_path(path), "step": f"{step:,}", "data": f"{data.title}, {split} split"}
