"""What a finding's file can name: numbers and series of a run, quantities of several runs, and lines of the figure.

All are functions of the files that the runs wrote, and of plain values in the finding's file. A `source`, a key of
`SOURCES` with its arguments, names a number of a run, or a series by step.
"""

import csv
import inspect
import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from tinyformer.config.errors import ConfigError

Source: TypeAlias = Mapping[str, Any]

Series: TypeAlias = dict[int, float]  # a number by the step at which it was measured
Line: TypeAlias = Mapping[float, float]  # y by x

STATISTICS: dict[str, Callable[[list[float]], float]] = {
    "largest": max,
    "smallest": min,
    "mean": statistics.fmean,
    "median": statistics.median,
    "last": lambda values: values[-1],
}
"""Reductions of several values to one, by name: over heads, or over the rows of a table."""

HEAD = re.compile(r"attention/(?:\w+/)?layer_\d+/head_\w+/(\w+)")
"""The columns of `metrics.csv` for the measures of heads."""


@dataclass(frozen=True)
class Record:
    """What a run wrote: the numbers at its end and of its evaluation, the rows of `metrics.csv` and of other tables."""

    results: Mapping[str, Any] = field(default_factory=dict)
    evaluated: Mapping[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, str]] = field(default_factory=list)
    tables: Mapping[str, list[dict[str, str]]] = field(default_factory=dict)

    def value(self, source: Source) -> float:
        return function_of("a source", source, SOURCES)(self, **source)

    def series(self, source: Source) -> Series:
        """A metric or a measure of heads by step: `{metric: NAME}` or `{heads: MEASURE, over: STATISTIC}`."""
        series = {}
        for row in self.metrics:
            if "metric" in source:
                cells = [row.get(source["metric"])]
            else:
                measures = {name: found[1] for name in row if (found := HEAD.fullmatch(name))}
                cells = [row[name] for name, measure in measures.items() if measure == source.get("heads")]
            numbers = [float(cell) for cell in cells if cell]
            if numbers:
                series[int(row["step"])] = _reduced(numbers, source.get("over", "mean"))
        if not series:
            raise ConfigError(f"source={dict(source)}: metrics.csv has no such values.")
        return dict(sorted(series.items()))

    def rows(self, table: str, where: Source) -> list[dict[str, str]]:
        """The rows of a table whose columns have some values, at least one."""
        if table not in self.tables:
            raise ConfigError(f"table={table}: the run left {', '.join(self.tables) or 'no tables'}.")
        rows = [row for row in self.tables[table] if all(row.get(name) == str(value) for name, value in where.items())]
        if not rows:
            raise ConfigError(f"table={table}: no row has {dict(where)}.")
        return rows


Records: TypeAlias = Mapping[str, Record]  # the records of one seed, by the name of the run


def read_record(folder: Path, analysed: Path | None = None) -> Record:
    """Read the files that a run, and its analysis if there is one, wrote."""
    tables: dict[str, list[dict[str, str]]] = {}
    for place in (analysed, folder) if analysed else (folder,):  # of a name in both, the run's own counts
        for path in sorted(place.glob("*.csv")):
            with path.open(newline="", encoding="utf-8") as file:
                tables[path.stem] = list(csv.DictReader(file))
    evaluated = read_results(analysed) if analysed else {}
    return Record(read_results(folder), evaluated, tables.pop("metrics", []), tables)


def read_results(folder: Path) -> dict[str, Any]:
    """The contents of `results.json`; empty without one."""
    path = folder / "results.json"
    return json.loads(path.read_text()) if path.exists() else {}


def function_of(what: str, words: Any, functions: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The function that one of the words names, where `words` are its arguments after the first.

    A ValueError if none or several of the words name a function, or it does not take the others.
    """
    kinds = [kind for kind in functions if kind in words] if isinstance(words, Mapping) else []
    if len(kinds) != 1:
        raise ValueError(f"{what} needs one of {', '.join(functions)}")
    try:
        inspect.signature(functions[kinds[0]]).bind(None, **words)
    except TypeError as error:
        raise ValueError(f"{what} of {kinds[0]}: {error}") from error
    if words.get("over", "mean") not in STATISTICS:
        raise ValueError(f"over={words['over']}: must be one of {', '.join(STATISTICS)}")
    return functions[kinds[0]]


def _result(record: Record, metric: str) -> float:
    return _number(record.results, "metric", metric)


def _evaluated(record: Record, evaluated: str) -> float:
    return _number(record.evaluated, "evaluated", evaluated)


def _number(results: Mapping[str, Any], kind: str, name: str) -> float:
    if not isinstance(results.get(name), int | float):
        raise ConfigError(f"{kind}={name}: results.json has no such number.")
    return float(results[name])


def _heads(record: Record, heads: str, over: str) -> float:
    """The last measure of the heads, reduced to one number."""
    return list(record.series({"heads": heads, "over": over}).values())[-1]


def _cells(record: Record, table: str, column: str, over: str = "mean", where: Mapping[str, Any] = {}) -> float:
    """A column of the rows of a table, reduced to one number; nan where a cell is empty, as of what was refused."""
    return _reduced([float(row[column] or "nan") for row in record.rows(table, where)], over)


def _reduced(numbers: list[float], over: str) -> float:
    """Several numbers reduced to one; nan if one of them is, which `max` and `median` may skip."""
    return math.nan if any(map(math.isnan, numbers)) else STATISTICS[over](numbers)


SOURCES: dict[str, Callable[..., float]] = {
    "metric": _result,
    "evaluated": _evaluated,
    "heads": _heads,
    "table": _cells,
}
"""The numbers of a run, by the argument that names them."""


def value(records: Records, run: str, source: Source) -> float:
    """A number of a run."""
    return records[run].value(source)


def difference(records: Records, run: str, than: str, source: Source) -> float:
    """A number of a run, minus that of another."""
    return records[run].value(source) - records[than].value(source)


def difference_ratio(records: Records, run: str, than: str, to: Sequence[str], source: Source) -> float:
    """A number of a run minus that of another, divided by the difference of two further runs, `to`."""
    first, second = to
    return _divided(difference(records, run, than, source), difference(records, first, second, source))


def ratio(records: Records, run: str, than: str, source: Source) -> float:
    """A number of a run, divided by that of another."""
    return _divided(records[run].value(source), records[than].value(source))


def ratio_within_run(records: Records, run: str, source: Source, other: Source) -> float:
    """A number of a run, divided by another of the same run."""
    return _divided(records[run].value(source), records[run].value(other))


def log_ratio_within_run(records: Records, run: str, source: Source, other: Source) -> float:
    """The logarithm of a number of a run, divided by that of another of the same run; nan where either does not exist.

    Of two values of c^(a^n), with n one apart, it is a.
    """
    numbers = records[run].value(source), records[run].value(other)
    if min(numbers) <= 0 or numbers[1] == 1:
        return math.nan
    return math.log(numbers[0]) / math.log(numbers[1])


def difference_within_run(records: Records, run: str, source: Source, other: Source) -> float:
    """A number of a run, minus another of the same run."""
    return records[run].value(source) - records[run].value(other)


def exponent(records: Records, points: Mapping[str, float], source: Source) -> float:
    """The exponent of the power law of a number of runs against what is varied, such as {"depth_2": 2} by run."""
    return _slope([(x, records[run].value(source)) for run, x in points.items()])


def exponent_in_table(records: Records, run: str, table: str, x: str, y: str, where: Mapping[str, Any] = {}) -> float:
    """The exponent of the power law between two columns of a table."""
    return _slope([(float(row[x]), float(row[y])) for row in records[run].rows(table, where) if row[y]])


def delay(records: Records, run: str, source: Source, level: float, other: Source, other_level: float) -> float:
    """The first step at which a series is at least a level, divided by that of another series and level.

    Infinite if only the first never gets there, nan if the second does not.
    """
    step = _crossing(records[run].series(source), level)
    other_step = _crossing(records[run].series(other), other_level)
    return step / other_step if other_step < math.inf else math.nan


def rise(records: Records, run: str, source: Source, low: float, high: float) -> float:
    """The share of a run's steps from a series' first value of at least `low` to that of `high`.

    Infinite if it never gets there.
    """
    series = records[run].series(source)
    end = _crossing(series, high)
    return math.inf if end == math.inf else (end - _crossing(series, low)) / max(series)


def change(records: Records, run: str, source: Source) -> float:
    """The last value of a series, minus its first."""
    values = list(records[run].series(source).values())
    return values[-1] - values[0]


def correlation(records: Records, run: str, source: Source, other: Source) -> float:
    """Pearson's correlation of two series over the steps at which both were measured; nan if one is constant."""
    first, second = records[run].series(source), records[run].series(other)
    steps = [step for step in first if step in second]
    a, b = [first[step] for step in steps], [second[step] for step in steps]
    return statistics.correlation(a, b) if len(set(a)) > 1 and len(set(b)) > 1 else math.nan


def _divided(number: float, divisor: float) -> float:
    """A ratio; infinite where the divisor is 0."""
    return number / divisor if divisor else math.inf


def _crossing(series: Series, level: float) -> float:
    """The first step at which a series is at least a level; infinite if it never is."""
    return next((float(step) for step, number in series.items() if number >= level), math.inf)


def _slope(points: list[tuple[float, float]]) -> float:
    """The slope of log y against log x by least squares; nan where it does not exist."""
    if len({x for x, _ in points}) < 2 or any(x <= 0 or y <= 0 for x, y in points):
        return math.nan
    return statistics.linear_regression([math.log(x) for x, _ in points], [math.log(y) for _, y in points]).slope


QUANTITIES: dict[str, Callable[..., float]] = {
    function.__name__: function
    for function in (
        *(value, difference, difference_ratio, ratio),
        *(difference_within_run, ratio_within_run, log_ratio_within_run),
        *(exponent, exponent_in_table),
        *(delay, rise, change, correlation),
    )
}
"""The measured quantities, by the names that the files use."""


def by_step(records: Records, **source: Any) -> dict[str, Line]:
    """A metric or a measure of heads by step, a line for each run; see `Record.series`."""
    return {run: record.series(source) for run, record in records.items()}


def by_series(records: Records, series: Source, against: Source) -> dict[str, Line]:
    """A series against another one, such as the loss against the time, a line for each run; see `Record.series`."""
    pairs = {run: (record.series(series), record.series(against)) for run, record in records.items()}
    return {run: {x[step]: value for step, value in y.items() if step in x} for run, (y, x) in pairs.items()}


def by_column(
    records: Records, table: str, x: str, y: str, where: Mapping[str, Any] = {}, groups: str | None = None
) -> dict[str, Line]:
    """A column of a table against another, a line for each run; empty cells are left out.

    With `groups`, a column, there is a line for each of its values, of a single run.
    """
    rows = {run: record.rows(table, where) for run, record in records.items()}
    if groups is not None:
        (rows_of_run,) = rows.values()
        rows = {}
        for row in rows_of_run:
            rows.setdefault(row[groups], []).append(row)
    return {
        label: {float(row[x]): float(row[y]) for row in rows_of_line if row[x] and row[y]}
        for label, rows_of_line in rows.items()
    }


def by_run(records: Records, points: Mapping[str, Mapping[str, float]], source: Source) -> dict[str, Line]:
    """A number against what is varied between runs: {"pre-norm": {"depth_2": 2, "depth_4": 4}} by line and run."""
    return {label: {x: records[run].value(source) for run, x in of_line.items()} for label, of_line in points.items()}


LINES: dict[str, Callable[..., dict[str, Line]]] = {
    "metric": by_step,
    "heads": by_step,
    "series": by_series,
    "table": by_column,
    "points": by_run,
}
"""The functions that give lines of a figure, by the argument that names them."""
