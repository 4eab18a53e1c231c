"""The quantities that findings measure: named functions of the files that the runs of one seed wrote.

Each takes the records of a seed by the name of the run, and plain values from the finding's file. A `source` names a
number, or a series by step, of a record; see `records.SOURCES`.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from tinyformer.programs.findings.records import Plain, Record, Series

Records: TypeAlias = Mapping[str, Record]
Source: TypeAlias = Mapping[str, Plain]


def value(records: Records, run: str, source: Source) -> float:
    """A number of a run."""
    return records[run].value(source)


def difference(records: Records, run: str, than: str, source: Source) -> float:
    """A number of a run, minus that of another."""
    return records[run].value(source) - records[than].value(source)


def difference_ratio(records: Records, run: str, than: str, to: Sequence[str], source: Source) -> float:
    """A number of a run minus that of another, divided by the difference of two further runs; infinite where that is 0.

    Args:
        records: of the runs.
        run: the run.
        than: the run whose number is subtracted.
        to: the same for the difference to compare with.
        source: the number.
    """
    first, second = to
    other = difference(records, first, second, source)
    return difference(records, run, than, source) / other if other else math.inf


def ratio(records: Records, run: str, than: str, source: Source) -> float:
    """A number of a run, divided by that of another; infinite where that is 0."""
    other = records[than].value(source)
    return records[run].value(source) / other if other else math.inf


def ratio_within_run(records: Records, run: str, source: Source, other: Source) -> float:
    """A number of a run, divided by another of the same run; infinite where that is 0."""
    divisor = records[run].value(other)
    return records[run].value(source) / divisor if divisor else math.inf


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
    """The exponent of the power law of a number of runs: least squares in logarithms.

    Args:
        records: of the runs.
        points: what is varied, by the name of the run, such as {"depth_2": 2}.
        source: the number.
    """
    return _exponent([(x, records[run].value(source)) for run, x in points.items()])


def exponent_in_table(
    records: Records,
    run: str,
    table: str,
    x: str,
    y: str,
    where: Source = {},  # noqa: B006
) -> float:
    """The exponent of the power law between two columns of a table: least squares in logarithms."""
    rows = records[run].rows(table, where)
    return _exponent([(float(row[x]), float(row[y])) for row in rows if row[y]])


def delay(records: Records, run: str, source: Source, level: float, other: Source, other_level: float) -> float:
    """The first step at which a series is at least a level, divided by that of another series and level.

    Infinite if only the first never gets there, nan if the second does not.
    """
    step, other_step = (
        _crossing(records[run].series(series), at) for series, at in ((source, level), (other, other_level))
    )
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


def _crossing(series: Series, level: float) -> float:
    """The first step at which a series is at least a level; infinite if it never is."""
    return next((float(step) for step, number in series.items() if number >= level), math.inf)


def _exponent(points: list[tuple[float, float]]) -> float:
    """The slope of log y against log x; nan where it does not exist."""
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
"""The quantities, by the names that the files use."""
