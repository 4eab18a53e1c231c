"""Runs grouped by what differs between them, and averaged over seeds."""

import difflib
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinyformer.errors import ArgumentError
from tinyformer.programs.compare.folders import ABSENT, Run, leaves, select

SPEED = "throughput/tokens_per_second"
NOT_SETTINGS = ("resume", "hydra")
"""Keys that say how a run was resumed and where it is stored, not what it computes."""


@dataclass(frozen=True)
class Row:
    """The runs of one setting.

    Attributes:
        settings: the values that define the setting, by key, as they are typed.
        runs: all runs.
        scored: the runs whose metric is a number, in the order of `values`.
        values: the values of the metric.
        num_seeds: the number of values of the averaged key among the scored runs.
    """

    settings: dict[str, str]
    runs: list[Run]
    scored: list[Run]
    values: list[float]
    num_seeds: int

    @property
    def mean(self) -> float | None:
        """The mean over the scored runs."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        """The standard deviation of the sample (n - 1); None for a single run."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def num_parameters(self) -> list[float]:
        """The distinct parameter counts; several only where the vocabularies differ."""
        return sorted({size for run in self.runs if (size := number(run, "num_parameters")) is not None})

    @property
    def tokens_per_second(self) -> float | None:
        """The mean over the runs."""
        speeds = [speed for run in self.runs if (speed := number(run, SPEED)) is not None]
        return statistics.fmean(speeds) if speeds else None


@dataclass(frozen=True)
class Comparison:
    """The results of each setting.

    Attributes:
        metric: a key of `results.json`.
        by: the key that is averaged over.
        columns: the keys that define a setting.
        constant: the typed overrides that all runs share, as `key=value`.
        rows: one row per setting, sorted by `numbers` or else by mean.
        numbers: the setting of each row, if settings are single numbers.
    """

    metric: str
    by: str
    columns: list[str]
    constant: list[str]
    rows: list[Row]
    numbers: list[float] | None


def compare(runs: Sequence[Run], metric: str, by: str) -> Comparison:
    """Group runs by the settings in which they differ, and average each group.

    Args:
        runs: at least one run.
        metric: a key of `results.json` whose value is a number.
        by: the config key or axis to average over.

    Raises:
        ArgumentError: no run has such a metric or key.
    """
    _check_metric(runs, metric)
    _check_key(runs, by)
    typed = [key for key in dict.fromkeys(key for run in runs for key in run.typed) if _is_setting(key, runs, by)]
    columns = _columns(runs, typed, by)
    groups: dict[tuple[str, ...], list[Run]] = defaultdict(list)
    for run in runs:
        groups[_values(run, columns)].append(run)
    rows = [_row(dict(zip(columns, values, strict=True)), group, metric, by) for values, group in groups.items()]
    by_number = {value: row for row in rows if (value := _number_set(row, columns)) is not None}
    is_numeric = len(by_number) == len(rows)
    numbers = sorted(by_number)
    return Comparison(
        metric=metric,
        by=by,
        columns=columns,
        constant=[f"{key}={as_typed(runs[0].value(key))}" for key in typed if key not in columns],
        rows=[by_number[value] for value in numbers] if is_numeric else sorted(rows, key=_by_mean),
        numbers=numbers if is_numeric else None,
    )


def number(run: Run, key: str) -> float | None:
    """A number of `results.json`; None where it is missing, not a number, or null (it was nan or infinite)."""
    return _as_number(run.results.get(key))


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


def _columns(runs: Sequence[Run], typed: Sequence[str], by: str) -> list[str]:
    """The keys that define a setting: typed keys that differ, and others that distinguish runs of one setting.

    A key that is derived from another, such as `attention.num_heads` from `model.num_heads`, is the same text in all
    runs. Where only the resolved config is stored, it distinguishes no runs that the other key does not.
    """
    columns = [key for key in typed if len({_values(run, [key]) for run in runs}) > 1]
    averaged = [as_typed(run.value(by)) for run in runs]
    for key in dict.fromkeys(key for run in runs for key in leaves(run.written)):
        written = [as_typed(select(run.written, key)) for run in runs]
        if len(set(written)) > 1 and _is_setting(key, runs, by):
            values = [as_typed(run.value(key)) for run in runs]
            settings = [_values(run, columns) for run in runs]
            if values != averaged and _splits(settings, written) and _splits(settings, values):
                columns.append(key)
    return columns


def _splits(settings: Sequence[tuple[str, ...]], values: Sequence[str]) -> bool:
    """Whether two runs of one setting have different values."""
    return len(set(zip(settings, values, strict=True))) > len(set(settings))


def _is_setting(key: str, runs: Sequence[Run], by: str) -> bool:
    root = re.split(r"[./@]", key)[0]
    # Choices are comparable only if all runs store theirs; otherwise the values that they set are compared.
    is_known = len({key in run.choices for run in runs}) == 1
    return is_known and root not in NOT_SETTINGS and key != by and not key.startswith(f"{by}.")


def _values(run: Run, keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(as_typed(run.value(key)) for key in keys)


def _row(settings: dict[str, str], runs: list[Run], metric: str, by: str) -> Row:
    scores = [(run, value) for run in runs if (value := number(run, metric)) is not None]
    return Row(
        settings=settings,
        runs=runs,
        scored=[run for run, _ in scores],
        values=[float(value) for _, value in scores],
        num_seeds=len({as_typed(run.value(by)) for run, _ in scores}),
    )


def _number_set(row: Row, columns: Sequence[str]) -> float | None:
    return _as_number(row.runs[0].value(columns[0])) if len(columns) == 1 else None


def _by_mean(row: Row) -> tuple[bool, float]:
    """A sort key: ascending, settings without a mean last."""
    return row.mean is None, row.mean or 0.0


def _as_number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def _check_metric(runs: Sequence[Run], metric: str) -> None:
    known = list(dict.fromkeys(key for run in runs for key in run.results if number(run, key) is not None))
    if metric not in known:
        has_key = any(metric in run.results for run in runs)
        reason = "is not a number in any run" if has_key else "is not a key of results.json"
        nearest = difflib.get_close_matches(metric, known, n=1)
        works = {"metric": nearest[0]} if nearest else None
        raise ArgumentError("metric", metric, f"{reason} (numbers: {', '.join(known)})", works)


def _check_key(runs: Sequence[Run], by: str) -> None:
    if all(run.value(by) is ABSENT for run in runs):
        known = dict.fromkeys(key for run in runs for key in [*leaves(run.config), *run.choices])
        nearest = difflib.get_close_matches(by, known, n=1)
        raise ArgumentError("by", by, "is not a key of config.yaml", {"by": nearest[0] if nearest else "seed"})
