"""The names in a finding's file: numbers and series of a run, quantities of several runs, and lines of the figure.

All are functions of the files that the runs wrote, and of plain values in the finding's file. A `source`, a key of
`SOURCES` with its arguments, names a number of a run, or a series by step.
"""

import inspect
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from tinyformer.config.errors import ConfigError
from tinyformer.programs.findings.records import STATISTICS, Record, Records, Series, Source, reduced

Line: TypeAlias = Mapping[float, float]  # y by x

QUANTITIES: dict[str, Callable[..., float]] = {}
"""The measured quantities, by the names that the files use."""

VERSIONS: dict[str, int] = {}
"""The version of each quantity, by its name."""

Quantity: TypeAlias = Callable[..., float]


def quantity(version: int) -> Callable[[Quantity], Quantity]:
    """Register a quantity, with a version that increases when its meaning changes."""

    def register(function: Quantity) -> Quantity:
        QUANTITIES[function.__name__], VERSIONS[function.__name__] = function, version
        return function

    return register


def function_of(what: str, words: Any, functions: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The function that a key of `words` names; callers pass it one or several records, and `**words`.

    Raises a ValueError if no key or several keys name a function, or if the function does not take these arguments.
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


def _number(results: Mapping[str, Any], kind: str, name: str) -> float:
    if not isinstance(results.get(name), int | float):
        raise ConfigError(f"{kind}={name}: results.json has no such number.")
    return float(results[name])


def _heads(record: Record, heads: str, over: str) -> float:
    """A measure of heads at the last step, reduced over the heads to one number."""
    return list(record.series({"heads": heads, "over": over}).values())[-1]


def _cells(record: Record, table: str, column: str, over: str = "mean", where: Mapping[str, Any] = {}) -> float:
    """Reduce the cells of a column, in the rows that `where` selects, to one number; nan if a cell is empty."""
    return reduced([float(row[column] or "nan") for row in record.rows(table, where)], over)


SOURCES: dict[str, Callable[..., float]] = {
    "metric": lambda record, metric: _number(record.results, "metric", metric),
    "evaluated": lambda record, evaluated: _number(record.evaluated, "evaluated", evaluated),
    "heads": _heads,
    "table": _cells,
}
"""The numbers of a run, by the argument that names them."""


def number_of(record: Record, source: Source) -> float:
    """Look up the number that a source names in the record of a run."""
    return function_of("a source", source, SOURCES)(record, **source)


@quantity(version=1)
def value(records: Records, run: str, source: Source) -> float:
    """The number that `source` names in the record of a run."""
    return number_of(records[run], source)


@quantity(version=1)
def difference(records: Records, run: str, than: str, source: Source) -> float:
    """A number of a run, minus the same number of another run."""
    return number_of(records[run], source) - number_of(records[than], source)


@quantity(version=1)
def ratio(records: Records, run: str, than: str, source: Source) -> float:
    """A number of a run, divided by the same number of another run."""
    return _divided(number_of(records[run], source), number_of(records[than], source))


@quantity(version=1)
def ratio_within_run(records: Records, run: str, source: Source, other: Source) -> float:
    """A number of a run, divided by another number of the same run."""
    return _divided(number_of(records[run], source), number_of(records[run], other))


@quantity(version=1)
def log_ratio_within_run(records: Records, run: str, source: Source, other: Source) -> float:
    """The logarithm of a number of a run, divided by the logarithm of another number of the run; nan if undefined.

    For the numbers c^(a^(n+1)) and c^(a^n), the result is a, for any c and n.
    """
    numbers = number_of(records[run], source), number_of(records[run], other)
    if min(numbers) <= 0 or numbers[1] == 1:
        return math.nan
    return math.log(numbers[0]) / math.log(numbers[1])


@quantity(version=1)
def difference_within_run(records: Records, run: str, source: Source, other: Source) -> float:
    """A number of a run, minus another number of the same run."""
    return number_of(records[run], source) - number_of(records[run], other)


@quantity(version=1)
def contrast(records: Records, points: Mapping[str, float], source: Source) -> float:
    """The sum over runs of a number times the run's weight in `points`, such as a difference of two differences."""
    return sum(weight * number_of(records[run], source) for run, weight in points.items())


@quantity(version=1)
def exponent(records: Records, points: Mapping[str, float], source: Source) -> float:
    """The exponent p of the power law x^p of the values of the runs; `points` has each run's x: {"depth_2": 2}."""
    return _slope([(x, number_of(records[run], source)) for run, x in points.items()])


@quantity(version=1)
def exponent_in_table(records: Records, run: str, table: str, x: str, y: str, where: Mapping[str, Any] = {}) -> float:
    """The exponent p of the power law y ∝ x^p between the columns `x` and `y` of a table."""
    return _slope([(float(row[x]), float(row[y])) for row in records[run].rows(table, where) if row[y]])


@quantity(version=1)
def delay(records: Records, run: str, source: Source, level: float, other: Source, other_level: float) -> float:
    """The step at which `source` first reaches `level`, divided by the step at which `other` reaches `other_level`.

    Infinite if only `other` reaches its level; nan if `other` does not.
    """
    step = _crossing(records[run].series(source), level)
    other_step = _crossing(records[run].series(other), other_level)
    return step / other_step if other_step < math.inf else math.nan


@quantity(version=1)
def rise(records: Records, run: str, source: Source, low: float, high: float) -> float:
    """The steps from a series' first value of at least `low` to the first of at least `high`, as a share of all steps.

    Infinite if the series never reaches `high`.
    """
    series = records[run].series(source)
    end = _crossing(series, high)
    return math.inf if end == math.inf else (end - _crossing(series, low)) / max(series)


def _divided(number: float, divisor: float) -> float:
    """A ratio; infinite if the divisor is 0."""
    return number / divisor if divisor else math.inf


def _crossing(series: Series, level: float) -> float:
    """The first step at which a series is at least a level; infinite if there is none."""
    return next((float(step) for step, number in series.items() if number >= level), math.inf)


def _slope(points: list[tuple[float, float]]) -> float:
    """The slope of log y against log x by least squares; nan if it is undefined."""
    if len({x for x, _ in points}) < 2 or any(x <= 0 or y <= 0 for x, y in points):
        return math.nan
    return statistics.linear_regression([math.log(x) for x, _ in points], [math.log(y) for _, y in points]).slope


def by_step(records: Records, **source: Any) -> dict[str, Line]:
    """A metric or a measure of heads by step, a line for each run; see `Record.series`."""
    return {run: record.series(source) for run, record in records.items()}


def by_series(records: Records, series: Source, against: Source) -> dict[str, Line]:
    """A series against another series, such as the loss against time, a line for each run; see `Record.series`."""
    pairs = {run: (record.series(series), record.series(against)) for run, record in records.items()}
    return {run: {x[step]: value for step, value in y.items() if step in x} for run, (y, x) in pairs.items()}


def by_column(
    records: Records, table: str, x: str, y: str, where: Mapping[str, Any] = {}, groups: str | None = None
) -> dict[str, Line]:
    """A column of a table against another, a line for each run; empty cells are left out.

    With `groups`, the name of a column, there is only one run, and a line for each value in this column.
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
    """A number of each run against its x, `points[line][run]`, as in {"pre-norm": {"depth_2": 2}}."""
    return {
        label: {x: number_of(records[run], source) for run, x in of_line.items()} for label, of_line in points.items()
    }


LINES: dict[str, Callable[..., dict[str, Line]]] = {
    "metric": by_step,
    "heads": by_step,
    "series": by_series,
    "table": by_column,
    "points": by_run,
}
"""The functions that give lines of a figure, by the argument that names them."""
