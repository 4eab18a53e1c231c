"""The end of a run: it is scored, its results are written, and a summary is printed."""

import signal
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import OmegaConf

from tinyformer.analysis import analyse_predictions
from tinyformer.checkpoint.file import SNAPSHOTS, load_checkpoint, load_weights
from tinyformer.checkpoint.snapshots import snapshots_of
from tinyformer.config.errors import say
from tinyformer.config.keys import hydra_value
from tinyformer.config.stored import own_classes, recorded_sources
from tinyformer.data import DataModule
from tinyformer.data.module import count
from tinyformer.files import relative_path
from tinyformer.hardware import describe_device
from tinyformer.report import AnalysisResult
from tinyformer.run import summary
from tinyformer.run.analysis_run import describe_context, keep_findings
from tinyformer.run.data import reads_own_data
from tinyformer.run.loggers import wandb_location
from tinyformer.run.run import Run
from tinyformer.run.sample import describe_prompts, print_generated
from tinyformer.run.trainer import forward_context, scoring_trainer
from tinyformer.tasks import Task
from tinyformer.training import FiniteCheck, TrainingModule, TrainingScores

Lines = dict[str, str | None]  # lines of the summary by their names; None for one that is left out


class Scores(NamedTuple):
    """The metrics of each split that was scored, and the seconds that the last one took."""

    splits: dict[str, summary.Metrics]
    seconds: float = 0.0


def has_test(task: Task, data: DataModule) -> bool:
    """Return True if a training run ends by scoring its best weights on the test split."""
    return task.tests_best and "test" in data.splits


def score_training(run: Run) -> tuple[Scores, AnalysisResult]:
    """Score the last weights on the validation split and, if the task tests, the best weights on the test split."""
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
    """Score the split, drawing its attention maps; the files of the task's findings are added to `findings`."""
    scores = score_split(run, run.trainer, run.module, run.split)
    findings.files += task_findings(run, run.trainer, run.split, run.checkpoint.path, run.checkpoint.step).files
    return scores


def score_split(run: Run, trainer: L.Trainer, module: TrainingModule, split: str) -> Scores:
    """Score a split."""
    batches, start = run.data.evaluation_dataloader(split), time.perf_counter()
    try:
        trainer.validate(module, batches, verbose=False)
    except SIGTERMException as end:  # which has no exit code, as after success
        raise SystemExit(128 + signal.SIGTERM) from end
    seconds = time.perf_counter() - start
    return Scores({split: module.metrics | final_metrics(run, trainer, split)}, seconds)


def final_metrics(run: Run, trainer: L.Trainer, split: str) -> dict[str, float | None]:
    """The metrics of a split that are computed once, at the end of a run."""
    part = run.settings.decoded_part(run.data, split)
    with forward_context(trainer, run.network):
        return run.task.final_metrics(run.network, part, run.data.tokenizer)


def task_findings(run: Run, trainer: L.Trainer, split: str, path: Path, step: int) -> AnalysisResult:
    """The task's own tables and figures of a split, see `analyse_predictions`, which are saved.

    The network has the weights of the checkpoint `path` of `step` steps; the trainer gives device and precision.
    """
    data, place, device = run.data, trainer.strategy.batch_to_device, trainer.strategy.root_device
    batches = (place(batch, device) for batch in data.evaluation_dataloader(split))
    with forward_context(trainer, run.network):
        findings = analyse_predictions(run.task, run.network, batches, data.splits[split])
    keep_findings(findings, run.folder, run.loggers, describe_context(path, step, data, split), step)
    return findings


def summarise_training(run: Run, scores: Scores, findings: AnalysisResult) -> dict[str, Any]:
    """Write `results.json`, print the summary and a text sample; see `summarise`."""
    splits, steps, folder = run.data.splits, run.trainer.global_step, relative_path(run.folder)
    skipped = [step for check in run.callbacks(FiniteCheck) for step in check.skipped]
    profiles = [*sorted(run.folder.glob("*-profile.txt")), *run.folder.glob("trace.json")]
    telemetry = summary.telemetry_results(run.telemetry, run.report.total.seconds)
    results = {
        f"best/val/{run.task.monitor}": run.checkpoints.best_value,
        "train/num_tokens": splits["train"].num_tokens,
        "train/num_unknown": splits["train"].num_unknown,
        "train/loss": run.report.latest.get("train/loss"),
        **{name: value for scores in run.callbacks(TrainingScores) for name, value in scores.metrics.items()},
        **summary.speed_results(run.report),
        **({"matched": asdict(run.matched)} if run.matched else {}),
        "skipped_steps": skipped,
        **telemetry,
        "held_out": run.data.caveats,
    }
    events = [event for callback in run.telemetry for event in callback.detector.events]
    first: Lines = {
        "matched": str(run.matched) if run.matched else None,
        "warning": run.warning,
        "speed": summary.describe_speed(run.report, steps),
        "telemetry": summary.describe_telemetry(telemetry, run.telemetry),
        **summary.describe_data(run.data, list(splits)),
        "held out": "\n".join(run.data.caveats) or None,
    }
    last: Lines = {
        "examples": ", ".join(map(relative_path, findings.files)) or None,
        "checkpoints": f"{folder}/checkpoints/last.ckpt, best.ckpt",
        "snapshots": f"{len(saved)} in {folder}/{SNAPSHOTS}" if (saved := snapshots_of(run.folder)) else None,
        "attention maps": relative_path(run.pictures[-1]) if run.pictures else None,
        "heads": summary.describe_roles(run.telemetry, run.folder),
        "events": summary.describe_events(events, run.folder),
        "not finite": f"{count(len(skipped), 'step')} skipped, the first at step {skipped[0]}" if skipped else None,
        "logs": f"{folder}/metrics.csv, {'attention/heads.csv, ' if run.pictures else ''}results.json",
        "prompt": None,
        "profile": ", ".join(map(relative_path, profiles)) if run.settings.arguments.get("profiler") else None,
    }
    results = summarise(run, steps, list(splits), scores, results, first, last)
    if (command := next_command(run)) is not None:
        say(f"\nTo see its heads:\n  {command}")
    return results


def next_command(run: Run) -> str | None:
    """The command that shows the heads of a training run, with what an evaluation does not take from its checkpoint."""
    if run.invocation.in_python or any(callback.refusal for callback in run.telemetry):
        return None
    stored = run.checkpoints.contents["overrides"]
    words = [f"{key}={hydra_value(value)}" for key, value in (recorded_sources(stored) | own_classes(stored)).items()]
    evaluate = replace(run.invocation, command=run.invocation.command.replace("train", "evaluate"))
    return evaluate.call(f"checkpoint={relative_path(run.checkpoints.last)}", *words, "analysis=maps")


def summarise_evaluation(run: Run, findings: AnalysisResult, scores: Scores | None) -> dict[str, Any]:
    """Write `config.yaml` and `results.json`, print the summary and a text sample; see `summarise`."""
    data, checkpoint = run.data, run.checkpoint
    results = {"split": run.split, "checkpoint/train/num_tokens": checkpoint.facts.get("train/num_tokens")}
    if scores is not None:
        num_targets = None if summary.is_partial(run.settings.limit) else data.splits[run.split].num_targets
        results["throughput/tokens_per_second"] = num_targets and num_targets / scores.seconds
        results["seconds"] = scores.seconds
    is_own = checkpoint.facts.get("data_fingerprint") is None or reads_own_data(data, checkpoint)
    remark = "" if is_own else "; not the data and splits of the run"
    trained_on, inherited = checkpoint.trained_on, checkpoint.facts.get("inherited", 0)
    if not is_own and (trained_on is None or len(trained_on) == inherited):
        remark += ", which may have been trained on some of them"
    (run.folder / "config.yaml").write_text(OmegaConf.to_yaml(run.config, resolve=True), encoding="utf-8")
    first: Lines = {
        "checkpoint": f"{relative_path(checkpoint.path)}, after {count(checkpoint.step, 'step')}",
        **summary.describe_data(data, [run.split], remark),
    }
    last: Lines = {
        "attention maps": relative_path(run.pictures[-1]) if run.pictures else None,
        **findings.lines,
        "analysis": ", ".join(map(relative_path, findings.files)) or None,
        "results": relative_path(run.folder / "results.json"),
    }
    return summarise(run, checkpoint.step, [run.split], scores, results | findings.scalars, first, last)


def summarise(
    run: Run, steps: int, splits: list[str], scores: Scores | None, results: dict[str, Any], first: Lines, last: Lines
) -> dict[str, Any]:
    """Write `results.json`, print the summary and, where a split was scored, what the model generates.

    `results` are what only this kind of run writes. Lines about scored splits are printed between `first` and `last`.
    """
    path, network, data, limit = run.folder / "results.json", run.network, run.data, run.settings.limit
    kernel = ", ".join(sorted(set(run.kernels))) or "its own"
    shared: dict[str, Any] = {
        "num_parameters": network.num_parameters(),
        "device": describe_device(run.settings.device),
        "precision": run.settings.precision,
        "is_compiled": run.settings.compile_mode is not None,
        "attention_backend": run.config.attention.get("backend"),
        "attention_kernel": kernel,
        "steps": steps,
        "data_fingerprint": data.fingerprint,
        "data": summary.data_results(data, splits),
        "lost_bytes": data.lost_bytes,
    }
    rows: Lines = dict.fromkeys(("checkpoint", "parameters", "matched", "device", "attention")) | first
    rows["parameters"] = f"{shared['num_parameters']:,}"
    rows["device"] = f"{shared['device']}, {shared['precision']}{', compiled' * shared['is_compiled']}"
    backend = shared["attention_backend"]
    measured = ", measured" if run.backends else ""
    rows["attention"] = f"{kernel} kernel" + (f" (attention.backend={backend}{measured})" if backend else "")
    scored: dict[str, Any] = {}
    for name, metrics in scores.splits.items() if scores else ():
        scored |= summary.split_results(metrics, data.splits[name], name, limit)
        rows |= summary.describe_split(run.task, metrics, data.splits[name], name, limit)
    results = scored | shared | results
    # Without the sample, whose absence tells a resumed run that it was killed before.
    summary.write_results(path, results)
    prompt = describe_prompts(run.settings.generation, data.tokenizer, network.max_seq_len, run.task)
    summary.print_summary(rows | last | {"prompt": prompt, "wandb": wandb_location(run.loggers)})
    results["sample"] = None
    if run.task.generates and scores is not None:
        with forward_context(run.trainer, network):
            results["sample"] = print_generated(run.settings.generation, run.task, network, data)
    summary.write_results(path, results)
    return results
