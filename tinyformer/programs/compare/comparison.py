"""Runs grouped by their settings and averaged over seeds, with notes on runs that averages leave out."""

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyformer.config.admission import leaves
from tinyformer.errors import ArgumentError
from tinyformer.programs.compare.folders import ABSENT, Run, RunFolders, select

SPEED = "throughput/tokens_per_second"

NOT_SETTINGS = ("resume", "hydra")  # keys that say how a run was resumed and where it is stored, not what it computes
SCORED = (
    *("task.objective._target_", "task.objective.num_decoded", "task.objective.pseudo_perplexity_tokens"),
    *("task.objective.max_answer_length", "task.objective.no_answer_threshold", "task.masking", "tokenizer"),
    *("model.max_seq_len", "data.split_seed", "data.validation_fraction", "data.test_fraction", "data.pack"),
    *("data.group_near_copies", "data.document_mask", "data.too_long", "data.stride", "data.max_question_length"),
    *("trainer.limit_val_batches", "trainer.overfit_batches"),
    *("generate.beams", "generate.length_penalty", "generate.length_offset"),
)
"""The keys that, in addition to the data, determine what is scored: runs that differ in one are not comparable."""
MOST_NAMED = 6  # largest number of folders that a note names


@dataclass(frozen=True)
class Row:
    """The runs of one setting."""

    settings: dict[str, str]  # the values that define the setting, by key, as they are typed
    runs: list[Run]
    scored: list[Run]  # the runs whose metric is a number, in the order of `values`
    values: list[float]
    num_seeds: int  # the number of values of the averaged key among the scored runs

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        """The sample standard deviation, with the divisor n - 1 for n seeds; None for a single seed."""
        return statistics.stdev(self.values) if self.num_seeds > 1 else None

    @property
    def num_parameters(self) -> float | None:
        """The largest parameter count of the runs; the counts differ only if the vocabularies differ."""
        return max(numbers(self.runs, "num_parameters"), default=None)

    @property
    def tokens_per_second(self) -> float | None:
        speeds = numbers(self.runs, SPEED)
        return statistics.fmean(speeds) if speeds else None


@dataclass(frozen=True)
class Comparison:
    """The averaged results of each setting, and the keys that define a setting."""

    metric: str  # a key of `results.json`
    by: str  # the key that is averaged over
    columns: list[str]  # the keys that define a setting
    constant: list[str]  # the typed overrides that all runs share, as `key=value`
    rows: list[Row]  # sorted by `numbers` or else by mean
    numbers: list[float] | None  # the setting of each row, if settings are single numbers


def compare(runs: Sequence[Run], metric: str, by: str) -> Comparison:
    """Group runs by the settings in which they differ, and average each group over the key `by`.

    `metric` is a key of `results.json` whose value is a number.
    """
    _check_metric(runs, metric)
    _check_key(runs, by)
    typed = [key for key in dict.fromkeys(key for run in runs for key in run.typed) if _is_setting(key, runs, by)]
    columns = _columns(runs, typed, by)
    groups: dict[tuple[str, ...], list[Run]] = defaultdict(list)
    for run in runs:
        groups[_values(run, columns)].append(run)
    rows = []
    for values, group in groups.items():
        scored = [run for run in group if number(run, metric) is not None]
        num_seeds = len({as_typed(run.value(by)) for run in scored})
        settings = dict(zip(columns, values, strict=True))
        rows.append(Row(settings, group, scored, list(map(float, numbers(scored, metric))), num_seeds))
    rows.sort(key=lambda row: (row.mean is None, row.mean or 0))
    set_numbers = [_as_number(row.runs[0].value(columns[0])) if len(columns) == 1 else None for row in rows]
    by_number = {number: row for number, row in zip(set_numbers, rows, strict=True) if number is not None}
    is_numeric = len(by_number) == len(rows)
    return Comparison(
        metric=metric,
        by=by,
        columns=columns,
        constant=[f"{key}={as_typed(runs[0].value(key))}" for key in typed if key not in columns],
        rows=[by_number[number] for number in sorted(by_number)] if is_numeric else rows,
        numbers=sorted(by_number) if is_numeric else None,
    )


def number(run: Run, key: str) -> float | None:
    """A number of `results.json`; None if it is missing, not a number, or null, which replaces nan and infinity."""
    return _as_number(run.results.get(key))


def numbers(runs: Iterable[Run], key: str) -> list[float]:
    """The number of `results.json` at a key, for each run that has it."""
    return [value for run in runs if (value := number(run, key)) is not None]


def as_typed(value: Any) -> str:
    """A value as it is typed after `key=`; a dash for an absent key."""
    if value is ABSENT:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{as_typed(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(as_typed, value))}]"
    # 1 and 1.0 are one setting.
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value, default=str)


def notes_on(comparison: Comparison, folders: RunFolders) -> list[str]:
    """Notes on missing runs, missing numbers and runs that are not comparable, a sentence each."""
    runs = [run for row in comparison.rows for run in row.runs]
    return [*_lacking(comparison, runs, folders), *_unlike(comparison, runs)]


def _lacking(comparison: Comparison, runs: Sequence[Run], folders: RunFolders) -> Iterator[str]:
    if folders.unfinished:
        yield (
            f"{len(folders.unfinished)} of {len(folders.finished + folders.unfinished)} runs have no results.json "
            f"(failed, stopped or still running): {_named(folders.unfinished)}."
        )
    without = [run.path for run in runs if number(run, comparison.metric) is None]
    if without:
        yield (
            f"{comparison.metric} is not a finite number in {len(without)} of {len(runs)} runs, which are left out of "
            f"the means: {_named(without)}."
        )


def _unlike(comparison: Comparison, runs: Sequence[Run]) -> Iterator[str]:
    if len({run.results.get("data_fingerprint") for run in runs}) > 1:
        yield (
            "The runs have different data (data_fingerprint): losses are comparable on the same text and tokenizer, "
            "val/bits_per_byte on the same text."
        )
    differing = {key: dict.fromkeys(as_typed(select(run.config, key)) for run in runs) for key in SCORED}
    if told := [f"{key}={' or '.join(values)}" for key, values in differing.items() if len(values) > 1]:
        yield f"The runs differ in what is scored, so that scores are not comparable: {'; '.join(told)}."
    steps = set(numbers(runs, "steps"))
    if len(steps) > 1 and "trainer.max_steps" not in comparison.columns:
        yield f"The runs made different numbers of steps: {min(steps):,} to {max(steps):,}."


def _named(paths: Sequence[Path]) -> str:
    rest = len(paths) - MOST_NAMED
    return ", ".join(map(str, paths[:MOST_NAMED])) + (f" and {rest} more" if rest > 0 else "")


def _columns(runs: Sequence[Run], typed: Sequence[str], by: str) -> list[str]:
    """The keys that define a setting: overrides that differ, and keys that differ between runs with equal overrides.

    A key that follows from another, as `attention.num_heads` from `model.num_heads`, is left out: its unresolved text
    is the same in all runs. If only resolved configs are stored, the key is left out as it separates no further runs.
    """
    columns = [key for key in typed if len({_values(run, [key]) for run in runs}) > 1]
    averaged = [as_typed(run.value(by)) for run in runs]
    for key in dict.fromkeys(key for run in runs for key, _ in leaves(run.written)):
        written = [as_typed(select(run.written, key)) for run in runs]
        if len(set(written)) > 1 and _is_setting(key, runs, by):
            values = [as_typed(run.value(key)) for run in runs]
            settings = [_values(run, columns) for run in runs]
            if values != averaged and _splits(settings, written) and _splits(settings, values):
                columns.append(key)
    return columns


def _splits(settings: Sequence[tuple[str, ...]], values: Sequence[str]) -> bool:
    """Return True if two runs with equal settings have different values."""
    return len(set(zip(settings, values, strict=True))) > len(set(settings))


def _is_setting(key: str, runs: Sequence[Run], by: str) -> bool:
    root = re.split(r"[./@]", key)[0]
    # Choices are comparable only if all runs store theirs; otherwise the values that they set are compared.
    is_known = len({key in run.choices for run in runs}) == 1
    return is_known and root not in NOT_SETTINGS and key != by and not key.startswith(f"{by}.")


def _values(run: Run, keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(as_typed(run.value(key)) for key in keys)


def _as_number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _check_metric(runs: Sequence[Run], metric: str) -> None:
    known = dict.fromkeys(key for run in runs for key in run.results if number(run, key) is not None)
    if metric not in known:
        raise ArgumentError("metric", metric, f"is not a number in any results.json; {', '.join(known)} are")


def _check_key(runs: Sequence[Run], by: str) -> None:
    if all(run.value(by) is ABSENT for run in runs):
        raise ArgumentError("by", by, "is not a key of config.yaml", {"by": "seed"})
