"""The results of a run: a list of facts, from which `results.json` and the printed summary are made."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from tinyformer.checkpoint.file import SNAPSHOTS, snapshots_of
from tinyformer.config.admission import own_classes, recorded_sources
from tinyformer.config.conf import hydra_value
from tinyformer.config.errors import say
from tinyformer.data import DataModule, LabelledSplit, PairSplit, QuestionSplit
from tinyformer.data.module import count, shortened
from tinyformer.errors import relative_path
from tinyformer.files import atomic_write, finite
from tinyformer.hardware import describe_device
from tinyformer.measures import head_label, head_roles
from tinyformer.nn.heads import layer_title
from tinyformer.report import AnalysisResult
from tinyformer.run.data import reads_own_data
from tinyformer.run.evaluation import Metrics, Scores
from tinyformer.run.run import Run
from tinyformer.run.sample import describe_prompts, print_generated
from tinyformer.run.trainer import forward_context, wandb_location
from tinyformer.tasks import Task
from tinyformer.training import AttentionTelemetry, FiniteCheck, TrainingScores
from tinyformer.training.callbacks.metrics import Report
from tinyformer.training.module import PREFIXES

COUNTS = ("num_tokens", "num_bytes", "num_unknown")  # the sizes of a split in `results.json`
MOST_EVENTS, MOST_ROLES, MOST_CLASSES = 3, 5, 10  # largest numbers in the summary


class Fact(NamedTuple):
    """A fact about a run, with its line in the summary and its values in `results.json`."""

    label: str
    line: str | None = None  # None if the summary does not show the fact
    results: Mapping[str, Any] = {}


def summarise_training(run: Run, scores: Scores, findings: AnalysisResult) -> dict[str, Any]:
    """Write `results.json`, print the summary and a text sample; return the contents of `results.json`."""
    train, folder = run.data.splits["train"], relative_path(run.folder)
    skipped = [step for check in run.callbacks(FiniteCheck) for step in check.skipped]
    saved = snapshots_of(run.folder)
    profiles = [*sorted(run.folder.glob("*-profile.txt")), *run.folder.glob("trace.json")]
    first = f"{count(len(skipped), 'step')} skipped, the first at step {skipped[0]}" if skipped else None
    of_training = {
        f"best/val/{run.task.monitor}": run.checkpoints.best_value,
        "train/num_tokens": train.num_tokens,
        "train/num_unknown": train.num_unknown,
        "train/loss": run.report.latest.get("train/loss"),
        **{name: value for scores in run.callbacks(TrainingScores) for name, value in scores.metrics.items()},
    }
    facts = [
        *describe_network(run),
        describe_speed(run.report, run.trainer.global_step),
        describe_telemetry(run.telemetry, run.report.total.seconds),
        *describe_data(run.data, list(run.data.splits)),
        Fact("held out", "\n".join(run.data.caveats) or None, {"held_out": run.data.caveats}),
        *describe_scores(run, scores),
        Fact("examples", _paths(findings.files)),
        Fact("checkpoints", f"{folder}/checkpoints/last.ckpt, best.ckpt", of_training),
        Fact("snapshots", f"{len(saved)} in {folder}/{SNAPSHOTS}" if saved else None),
        Fact("attention maps", _paths(run.pictures[-1:])),
        Fact("heads", describe_roles(run.telemetry, run.folder)),
        Fact("events", describe_events(run.telemetry, run.folder)),
        Fact("not finite", first, {"skipped_steps": skipped}),
        Fact("logs", f"{folder}/metrics.csv, {'attention/heads.csv, ' * bool(run.pictures)}results.json"),
        Fact("profile", _paths(profiles) if run.settings.arguments.get("profiler") else None),
    ]
    results = publish(run, facts, is_scored=True)
    if (command := next_command(run)) is not None:
        say(f"\nTo see its heads:\n  {command}")
    return results


def summarise_evaluation(run: Run, findings: AnalysisResult, scores: Scores | None) -> dict[str, Any]:
    """Write `config.yaml` and `results.json`, print the summary and, if a split was scored, a text sample."""
    data, checkpoint, measured = run.data, run.checkpoint, dict[str, Any]()
    if scores is not None:
        num_targets = None if is_partial(run.settings.limit) else data.splits[run.split].num_targets
        speed = num_targets and num_targets / scores.seconds
        measured = {"throughput/tokens_per_second": speed, "seconds": scores.seconds}
    is_own = checkpoint.facts.get("data_fingerprint") is None or reads_own_data(data, checkpoint)
    remark = "" if is_own else "; not the data and splits of the run"
    trained_on, inherited = checkpoint.trained_on, checkpoint.facts.get("inherited", 0)
    if not is_own and (trained_on is None or len(trained_on) == inherited):
        remark += ", which may have been trained on some of them"
    (run.folder / "config.yaml").write_text(OmegaConf.to_yaml(run.config, resolve=True), encoding="utf-8")
    of_checkpoint = {"steps": checkpoint.step, "checkpoint/train/num_tokens": checkpoint.facts.get("train/num_tokens")}
    facts = [
        Fact("checkpoint", f"{relative_path(checkpoint.path)}, after {count(checkpoint.step, 'step')}", of_checkpoint),
        *describe_network(run),
        *describe_data(data, [run.split], remark),
        *(describe_scores(run, scores) if scores else ()),
        Fact("attention maps", _paths(run.pictures[-1:]), {"split": run.split, **measured}),
        *(Fact(label, line) for label, line in findings.lines.items()),
        Fact("analysis", _paths(findings.files), findings.scalars),
        Fact("results", relative_path(run.folder / "results.json")),
    ]
    return publish(run, facts, is_scored=scores is not None)


def publish(run: Run, facts: Sequence[Fact], is_scored: bool) -> dict[str, Any]:
    """Write `results.json`, print the summary and, if a split was scored, generated text."""
    path, network = run.folder / "results.json", run.network
    results: dict[str, Any] = {key: value for fact in facts for key, value in fact.results.items()}
    # Without "sample", so that a resumed run knows if the process was killed while sampling.
    write_results(path, results)
    prompt = describe_prompts(run.settings.generation, run.data.tokenizer, network.max_seq_len, run.task)
    print_summary([*facts, Fact("prompt", prompt), Fact("wandb", wandb_location(run.loggers))])
    results["sample"] = None
    if run.task.generates and is_scored:
        with forward_context(run.trainer, network):
            results["sample"] = print_generated(run.settings.generation, run.task, network, run.data)
    write_results(path, results)
    return results


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Write `results.json`, with null for numbers that JSON lacks, such as nan."""
    results = {key: finite(value) for key, value in results.items()}
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def print_summary(facts: Sequence[Fact]) -> None:
    """Print the label and line of each fact that has a line."""
    width = max(len(fact.label) for fact in facts) + 2
    print()
    for label, line, _ in facts:
        if line is not None:
            say(f"{label:<{width}}{line}".replace("\n", "\n" + " " * width))


def next_command(run: Run) -> str | None:
    """The command that draws the heads of a training run, with the paths and classes that have to be typed again."""
    if run.invocation.in_python or any(callback.refusal for callback in run.telemetry):
        return None
    stored = run.checkpoints.contents["overrides"]
    words = [f"{key}={hydra_value(value)}" for key, value in (recorded_sources(stored) | own_classes(stored)).items()]
    evaluate = replace(run.invocation, command=run.invocation.command.replace("train", "evaluate"))
    return evaluate.call(f"checkpoint={relative_path(run.checkpoints.last)}", *words, "analysis=maps")


def describe_network(run: Run) -> list[Fact]:
    """The size of the network, and the device and kernels that it runs on."""
    kernel, backend = ", ".join(sorted({*run.kernels})) or "its own", run.config.attention.get("backend")
    device, precision = describe_device(run.settings.device), run.settings.precision
    number, is_compiled = run.network.num_parameters(), run.settings.compile_mode is not None
    hardware = {"device": device, "precision": precision, "is_compiled": is_compiled}
    chosen = f" (attention.backend={backend}{', measured' * bool(run.backends)})" if backend else ""
    kernels = {"attention_backend": backend, "attention_kernel": kernel}
    return [
        Fact("parameters", f"{number:,}", {"num_parameters": number}),
        *([Fact("matched", str(run.matched), {"matched": asdict(run.matched)})] if run.matched else []),
        Fact("device", f"{device}, {precision}{', compiled' * is_compiled}", hardware),
        Fact("attention", f"{kernel} kernel{chosen}", kernels),
    ]


def describe_speed(report: Report, steps: int) -> Fact:
    """The speed of training; values that were not measured are null in `results.json`."""
    total, peak = report.total, report.peak
    rate = f"{total.tokens_per_second:,.0f} tokens/s" if total.tokens else "not measured"
    line = f"{rate}, {count(steps, 'step')} in {report.seconds:.0f} s"
    if peak is not None:
        share = f"{100 * total.mfu(peak):.0f} % of {peak}"
        if math.isnan(total.flops):
            share = "FLOPs of a user-defined attention are not counted"
        line += f"\n{share}, at most {report.latest['throughput/memory_gb']:.2f} GB of memory"
    results = {
        "throughput/tokens_per_second": total.tokens_per_second if total.tokens else None,
        "throughput/mfu": total.mfu(peak) if peak else None,
        "throughput/peak_tflops": peak.flops / 1e12 if peak else None,
        "throughput/memory_gb": report.latest.get("throughput/memory_gb"),
        "throughput/data_wait": total.data_wait if peak else None,
        "seconds": report.seconds,
        "steps": steps,
    }
    return Fact("speed", line, results)


def describe_telemetry(telemetry: Sequence[AttentionTelemetry], training_seconds: float) -> Fact:
    """The time that telemetry took, as a share of the training time."""
    if not telemetry:
        return Fact("telemetry")
    seconds, number = (sum(getattr(each, name) for each in telemetry) for name in ("seconds", "num_measurements"))
    share = seconds / training_seconds if training_seconds else None  # None: too short to measure
    line = f"{seconds:.2f} s for {count(number, 'measurement')}"
    line = line if share is None else f"{100 * share:.1f} % of training time ({line})"
    refusals = [f"left out: {each.refusal}" for each in telemetry if each.refusal]
    return Fact("telemetry", [*refusals, line][0], {"telemetry/seconds": seconds, "telemetry/share": share})


def describe_data(data: DataModule, splits: Sequence[str], remark: str = "") -> list[Fact]:
    """The facts about the data, with a remark, the bytes that the tokenizer changes, and the contents of each split."""
    unread = ", ".join(count(number, kind) for kind, number in data.unread.items())
    contents = {
        name: {
            "files": len(data.files.get(name, ())),
            f"{data.document}s": data.splits[name].num_documents,
            "tokens": data.splits[name].num_tokens,
            "left_out": data.left_out.get(name, {}),
            "too_long": {f"{noun}s {fate}": number for number, noun, fate in too_long(data.splits[name])},
            "classes": getattr(data.splits[name], "label_counts", {}),
        }
        for name in splits
    }
    lost = f"decode(encode(text)) differs from the text in {data.lost_bytes:.2%} of the bytes"
    line = f"{data.title}{remark}{'; not read: ' * bool(unread)}{unread}"
    return [
        Fact("data", line, {"data_fingerprint": data.fingerprint, "data": contents}),
        Fact("tokenizer", lost if data.lost_bytes else None, {"lost_bytes": data.lost_bytes}),
        *(Fact(name, _describe_split(data, name)) for name in splits),
    ]


def _describe_split(data: DataModule, name: str) -> str:
    split, files = data.splits[name], data.files.get(name)
    origin = f"{count(len(files), 'file')} ({shortened(files)}), " if files else "held out, " if data.files else ""
    parts = [count(split.num_documents, data.document), count(split.num_tokens, "token")]
    parts += [f"{count(number, noun)} {fate}" for number, noun, fate in too_long(split)]
    reasons = ", ".join(f"{number:,} {reason}" for reason, number in data.left_out.get(name, {}).items())
    line = f"{origin}{', '.join(parts)}{'; left out: ' * bool(reasons)}{reasons}"
    classes = [f"{each} ({number:,})" for each, number in getattr(split, "label_counts", {}).items() if number]
    return f"{line}\nclasses: {shortened(classes, MOST_CLASSES)}" if classes else line


def too_long(split: Any) -> list[tuple[int, str, str]]:
    """The texts of a split that exceed the context: their number, a noun such as "pair", and what happened to them."""
    facts: list[tuple[int, str, str]] = []
    if isinstance(split, LabelledSplit):
        facts = [(split.num_truncated, "document", "truncated")]
    elif isinstance(split, PairSplit):
        facts = [(split.num_truncated, "pair", "truncated"), (split.num_skipped, "pair", "skipped")]
    elif isinstance(split, QuestionSplit):
        facts = [(split.num_truncated, "question", "truncated"), (split.num_lost(), "answer", "whole in no window")]
    return [fact for fact in facts if fact[0]]


def describe_scores(run: Run, scores: Scores) -> list[Fact]:
    """The metrics of each split that was scored."""
    splits, limit = run.data.splits, run.settings.limit
    return [
        fact
        for name, metrics in scores.splits.items()
        for fact in describe_metrics(run.task, metrics, splits[name], name, limit)
    ]


def describe_metrics(task: Task, metrics: Metrics, split: Any, name: str, limit: float | None) -> list[Fact]:
    """The metrics and the size of a split; the size is null if only some of its batches were scored."""
    counts = {key: None if is_partial(limit) else getattr(split, key) for key in COUNTS}
    results = {f"{PREFIXES[name]}/{key}": value for key, value in {**metrics, **counts}.items()}
    lines = task.describe(metrics, split)
    if number := split.num_unknown:
        lines["unknown"] = f"{count(number, 'token')} for text that the vocabulary lacks ({split.tokenizer.unknown})"
    scored = f"over {split.num_tokens:,} tokens" + ("" if split.num_bytes is None else f" of {split.num_bytes:,} bytes")
    if "num_scored" in metrics:
        scored = f"over {metrics['num_scored']:,} masked tokens of {split.num_tokens:,}"
    if is_partial(limit):
        scored = f"over a part of the text (trainer.limit_val_batches={limit})"
    return [
        Fact(f"{PREFIXES[name]} loss", f"{metrics['loss']:.4f} nats per {task.unit}, {scored}", results),
        # Lines about a validation split carry no prefix, even next to those of a test split.
        *(Fact(f"test {key}" if name == "test" else key, line) for key, line in lines.items()),
    ]


def is_partial(limit: float | None) -> bool:
    """Return True if `limit`, a number or a fraction of batches, makes Lightning score only a part of them."""
    return limit is not None and not (isinstance(limit, float) and limit == 1.0)


def describe_events(telemetry: Sequence[AttentionTelemetry], folder: Path) -> str | None:
    """The first events of heads, and the number of further events."""
    events = [event for callback in telemetry for event in callback.detector.events]
    lines = [str(event) for event in events[:MOST_EVENTS]]
    if len(events) > MOST_EVENTS:
        lines.append(f"and {len(events) - MOST_EVENTS} more in {relative_path(folder)}/events.csv")
    return "\n".join(lines) or None


def describe_roles(telemetry: Sequence[AttentionTelemetry], folder: Path) -> str | None:
    """A line for each role at the last measurement, with the head furthest beyond the threshold; rare roles first."""
    lines = []
    for callback in telemetry:
        if callback.latest is not None:
            measures = callback.latest[-1]
            roles = head_roles(measures.values, callback.detector.traits)
            for role, heads in sorted(roles.items(), key=lambda role: len(role[1])):
                (layer, head), value = next(iter(heads.items()))
                name = f"{layer_title(measures.addresses[layer])} head {head_label(measures.names[layer][head])}"
                lines.append(f"{role}: {name} ({value:.2f})" + f" and {len(heads) - 1} more" * (len(heads) > 1))
    if len(lines) > MOST_ROLES:
        file = f"{relative_path(folder)}/attention/heads.csv"
        lines[MOST_ROLES - 1 :] = [f"and {len(lines) - MOST_ROLES + 1} more roles in {file}"]
    return "\n".join(lines) or None


def _paths(paths: Sequence[Path]) -> str | None:
    return ", ".join(map(relative_path, paths)) or None
