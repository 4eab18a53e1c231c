"""The summary of a run: lines to print, and `results.json`."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tinyformer.config.errors import say
from tinyformer.data import DataModule, LabelledSplit, PairSplit, QuestionSplit
from tinyformer.data.module import count, shortened
from tinyformer.files import atomic_write, finite, relative_path
from tinyformer.measures import Event, head_label, head_roles
from tinyformer.nn.heads import layer_title
from tinyformer.tasks import Task
from tinyformer.training import AttentionTelemetry
from tinyformer.training.callbacks.finite import NonFiniteStep
from tinyformer.training.callbacks.report import Report
from tinyformer.training.module import PREFIXES

Metrics = Mapping[str, float | None]  # the metrics of a split, by name; None for one that is undefined

COUNTS = ("num_tokens", "num_bytes", "num_unknown")  # the sizes of a split that `results.json` has
MOST_EVENTS, MOST_ROLES, MOST_CLASSES = 3, 5, 10  # that are printed


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Write `results.json`, with null for numbers that JSON lacks, such as nan."""
    results = {key: finite(value) for key, value in results.items()}
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def split_results(metrics: Metrics, split: Any, name: str, limit: float | None) -> dict[str, Any]:
    """The part of `results.json` about one split: its metrics and its size, which is unknown where a part is scored."""
    counts = {key: None if is_partial(limit) else getattr(split, key) for key in COUNTS}
    return {f"{PREFIXES[name]}/{key}": value for key, value in {**metrics, **counts}.items()}


def describe_split(task: Task, metrics: Metrics, split: Any, name: str, limit: float | None) -> dict[str, str | None]:
    """The lines of the summary about one split; see `split_results`."""
    lines = task.describe(metrics, split)
    if number := split.num_unknown:
        lines["unknown"] = f"{count(number, 'token')} for what the vocabulary lacks ({split.tokenizer.unknown})"
    scored = f"over {split.num_tokens:,} tokens" + ("" if split.num_bytes is None else f" of {split.num_bytes:,} bytes")
    if "num_scored" in metrics:
        scored = f"over {metrics['num_scored']:,} masked tokens of {split.num_tokens:,}"
    if is_partial(limit):
        scored = f"over a part of the text (trainer.limit_val_batches={limit})"
    return {
        f"{PREFIXES[name]} loss": f"{metrics['loss']:.4f} nats per {task.unit}, {scored}",
        # Lines about a validation split carry no prefix, even next to those of a test split.
        **{f"test {key}" if name == "test" else key: line for key, line in lines.items()},
    }


def data_results(data: DataModule, splits: Sequence[str]) -> dict[str, Any]:
    """The part of `results.json` about what each split consists of, and what was left out of it, by the reason."""
    return {
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


def describe_data(data: DataModule, splits: Sequence[str], remark: str = "") -> dict[str, str]:
    """The line of the summary about data, with a remark, and one about each split; see `data_results`."""
    unread = ", ".join(count(number, kind) for kind, number in data.unread.items())
    lines = {"data": f"{data.title}{remark}{'; not read: ' * bool(unread)}{unread}"}
    if share := data.lost_bytes:
        lines["tokenizer"] = f"decode(encode(text)) differs from the text in {share:.2%} of the bytes"
    for name in splits:
        split, files = data.splits[name], data.files.get(name)
        origin = f"{count(len(files), 'file')} ({shortened(files)}), " if files else "held out, " if data.files else ""
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in data.left_out.get(name, {}).items())
        lines[name] = (
            f"{origin}{count(split.num_documents, data.document)}, {count(split.num_tokens, 'token')}"
            f"{''.join(f', {count(number, noun)} {fate}' for number, noun, fate in too_long(split))}"
            f"{'; left out: ' * bool(reasons)}{reasons}"
        )
        if classes := [f"{each} ({number:,})" for each, number in getattr(split, "label_counts", {}).items() if number]:
            lines[name] += f"\nclasses: {shortened(classes, MOST_CLASSES)}"
    return lines


def too_long(split: Any) -> list[tuple[int, str, str]]:
    """The number of texts of a split that exceed the context, by kind, and their treatment."""
    facts: list[tuple[int, str, str]] = []
    if isinstance(split, LabelledSplit):
        facts = [(split.num_truncated, "document", "truncated")]
    elif isinstance(split, PairSplit):
        facts = [(split.num_truncated, "pair", "truncated"), (split.num_skipped, "pair", "skipped")]
    elif isinstance(split, QuestionSplit):
        facts = [(split.num_truncated, "question", "truncated"), (split.num_lost(), "answer", "whole in no window")]
    return [fact for fact in facts if fact[0]]


def is_partial(limit: float | None) -> bool:
    """Return True if Lightning scores only a part of the batches: their number, or a fraction of all."""
    return limit is not None and not (isinstance(limit, float) and limit == 1.0)


def speed_results(report: Report) -> dict[str, Any]:
    """The part of `results.json` about speed; null for what was not measured, as in a run without a report."""
    total, peak = report.total, report.peak
    return {
        "throughput/tokens_per_second": total.tokens_per_second if total.tokens else None,
        "throughput/mfu": total.mfu(peak) if peak else None,
        "throughput/peak_tflops": peak.flops / 1e12 if peak else None,
        "throughput/memory_gb": report.latest.get("throughput/memory_gb"),
        "throughput/data_wait": total.data_wait if peak else None,
        "seconds": report.seconds,
    }


def describe_speed(report: Report, steps: int) -> str:
    """The lines of the summary about speed."""
    total, peak = report.total, report.peak
    rate = f"{total.tokens_per_second:,.0f} tokens/s" if total.tokens else "not measured"
    speed = f"{rate}, {count(steps, 'step')} in {report.seconds:.0f} s"
    if peak is None:
        return speed
    memory, share = report.latest["throughput/memory_gb"], f"{100 * total.mfu(peak):.0f} % of {peak}"
    if math.isnan(total.flops):
        share = "operations of an attention of your own are not counted"
    return f"{speed}\n{share}, at most {memory:.2f} GB of memory"


def telemetry_results(telemetry: Sequence[AttentionTelemetry], training_seconds: float) -> dict[str, Any]:
    """The part of `results.json` about the time that telemetry took; empty without telemetry."""
    if not telemetry:
        return {}
    seconds = sum(callback.seconds for callback in telemetry)
    share = seconds / training_seconds if training_seconds else None  # None: too short to measure
    return {"telemetry/seconds": seconds, "telemetry/share": share}


def describe_telemetry(results: dict[str, Any], telemetry: Sequence[AttentionTelemetry]) -> str | None:
    """The line of the summary about the time that telemetry took."""
    if not telemetry:
        return None
    if refusals := [callback.refusal for callback in telemetry if callback.refusal]:
        return f"left out: {refusals[0]}"
    number, seconds = sum(callback.num_measurements for callback in telemetry), results["telemetry/seconds"]
    share = results["telemetry/share"]
    spent = f"{seconds:.2f} s for {count(number, 'measurement')}"
    return spent if share is None else f"{100 * share:.1f} % of training time ({spent})"


def describe_events(events: Sequence[Event], folder: Path) -> str | None:
    """The lines of the summary about events of heads: the first ones, and the number of the others."""
    lines = [str(event) for event in events[:MOST_EVENTS]]
    if len(events) > MOST_EVENTS:
        lines.append(f"and {len(events) - MOST_EVENTS} more in {relative_path(folder)}/events.csv")
    return "\n".join(lines) or None


def describe_roles(telemetry: Sequence[AttentionTelemetry], folder: Path) -> str | None:
    """A line of the summary for each role that a head has at the last measurement, the rarest first: its clearest head.

    The number is that of the measure which defines the role.
    """
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


def describe_non_finite(stop: NonFiniteStep, last: Path, command: str) -> str:
    """The lines that say why a run stopped at a step that was not finite, and with which command it may continue."""
    cures = "a lower optimizer.lr, a longer schedule.warmup_steps or callbacks.finite.action=skip may help"
    if not last.exists():
        return f"{stop}\nNothing was saved; {cures}."
    return f"{stop}\nNothing was saved from there on; with the last checkpoint, {cures}:\n  {command}"


def print_summary(rows: dict[str, str | None]) -> None:
    """Print names and values, one on each line, without those that are None."""
    width = max(map(len, rows)) + 2
    print()
    for name, value in rows.items():
        if value is not None:
            say(f"{name:<{width}}{value}".replace("\n", "\n" + " " * width))
