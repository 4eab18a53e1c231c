"""The end of a training run: its scores, its results and its summary."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tinyformer.analysis import Findings
from tinyformer.app.analysis_run import describe_subject, examine, keep_findings
from tinyformer.app.loggers import wandb_location
from tinyformer.app.run import Run
from tinyformer.app.sample import describe_prompts, print_generated
from tinyformer.app.summary import (
    data_results,
    describe_data,
    describe_events,
    describe_profile,
    describe_skipped,
    describe_speed,
    describe_split,
    describe_telemetry,
    print_summary,
    speed_results,
    split_results,
    telemetry_results,
    write_results,
)
from tinyformer.app.trainer import forward_context, scoring_trainer
from tinyformer.checkpoint import load_checkpoint, load_weights
from tinyformer.data import DataModule
from tinyformer.files import relative_path
from tinyformer.hardware import describe_device
from tinyformer.tasks import Task
from tinyformer.training import TrainingModule


@dataclass(frozen=True)
class Scores:
    """What is computed once, at the end of a run.

    Args:
        validation: metrics of the last weights.
        test: metrics of the best weights on the test split; empty if the task does not test.
        findings: the task's tables and figures.
    """

    validation: Mapping[str, float | None]
    test: Mapping[str, float | None]
    findings: Findings


def has_test(task: Task, data: DataModule) -> bool:
    """Whether a run ends by scoring its best weights on the test split."""
    return task.tests_best and "test" in data.splits


def score(run: Run) -> Scores:
    """Score the last weights on the validation split and, if the task tests, the best weights on the test split."""
    data, task = run.data, run.task
    trainer, split, test = scoring_trainer(run.settings, run.folder), "validation", {}
    with forward_context(trainer, run.network):
        final = task.final_metrics(run.network, run.settings.decoded_part(data, "validation"), data.tokenizer)
    validation = run.module.metrics | final
    path, step = run.checkpoints.last, run.module.step
    if has_test(task, data):
        best = load_checkpoint(run.checkpoints.best)
        load_weights(run.network, best)
        path, step = best.path, best.step
        module, split = TrainingModule(run.network, task, data, evaluated="test"), "test"
        trainer.validate(module, data.test_dataloader(), verbose=False)
        with forward_context(trainer, run.network):
            part = run.settings.decoded_part(data, "test")
            test = module.metrics | task.final_metrics(run.network, part, data.tokenizer)
    findings = examine(task, run.network, data, split, trainer)
    keep_findings(findings, run.folder, run.loggers, describe_subject(path, step, data, split))
    return Scores(validation, test, findings)


def make_results(run: Run, scores: Scores) -> dict[str, Any]:
    """The contents of `results.json` except the sample."""
    splits, limit = run.data.splits, run.settings.limit
    test = split_results(scores.test, splits["test"], "test", limit) if scores.test else {}
    return {
        **split_results(scores.validation, splits["validation"], "val", limit),
        f"best/val/{run.task.monitor}": run.checkpoints.best_value,
        **test,
        "train/num_tokens": splits["train"].num_tokens,
        "train/num_unknown": splits["train"].num_unknown,
        "train/loss": run.report.latest.get("train/loss"),
        **run.training_scores,
        **speed_results(run.report),
        "num_parameters": run.network.num_parameters(),
        **({"matched": asdict(run.matched)} if run.matched else {}),
        "device": describe_device(run.settings.device),
        "precision": run.settings.precision,
        "attention_backend": run.config.attention.backend,
        "attention_kernel": run.kernel,
        "steps": run.trainer.global_step,
        "skipped_steps": run.skipped,
        **telemetry_results(run.telemetry, run.report.total.seconds),
        "data_fingerprint": run.data.fingerprint,
        "data": data_results(run.data, list(splits)),
        "held_out": run.data.caveats,
    }


def summarise(run: Run, scores: Scores) -> dict[str, Any]:
    """Write `results.json`, print the summary and a text sample."""
    results, splits, limit = make_results(run, scores), run.data.splits, run.settings.limit
    path, folder = run.folder / "results.json", relative_path(run.folder)
    write_results(path, results)  # without the sample, whose absence tells a resumed run that it was killed before
    pictures = [picture for callback in run.telemetry for picture in callback.paths]
    events = [event for callback in run.telemetry for event in callback.detector.events]
    max_seq_len = run.network.max_seq_len
    print_summary(
        {
            "parameters": f"{results['num_parameters']:,}",
            "matched": str(run.matched) if run.matched else None,
            "device": f"{results['device']}, {results['precision']}",
            "attention": f"{run.kernel} kernel (attention.backend={results['attention_backend']})",
            "warning": run.warning,
            "speed": describe_speed(run.report, run.trainer.global_step),
            "telemetry": describe_telemetry(results, run.telemetry),
            **describe_data(run.data, list(splits), f", fingerprint {run.data.fingerprint[:12]}"),
            "held out": "\n".join(run.data.caveats) or None,
            **describe_split(run.task, scores.validation, splits["validation"], "val", limit),
            **(describe_split(run.task, scores.test, splits["test"], "test", limit) if scores.test else {}),
            "examples": ", ".join(map(relative_path, scores.findings.files)) or None,
            "checkpoints": f"{folder}/checkpoints/last.ckpt, best.ckpt",
            "attention maps": relative_path(pictures[-1]) if pictures else None,
            "events": describe_events(events, run.folder),
            "not finite": describe_skipped(run.skipped),
            "logs": f"{folder}/metrics.csv, {'attention/heads.csv, ' if pictures else ''}results.json",
            "prompt": describe_prompts(run.config.generate, run.data.tokenizer, max_seq_len, run.task),
            "profile": describe_profile(run.folder) if run.settings.arguments.get("profiler") else None,
            "wandb": wandb_location(run.loggers),
        }
    )
    results["sample"] = None
    if run.task.generates:
        with forward_context(run.trainer, run.network):
            results["sample"] = print_generated(run.config.generate, run.task, run.network, run.data)
    write_results(path, results)
    return results
