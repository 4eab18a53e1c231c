"""The files that a run wrote, and the numbers in them that a source names."""

import csv
import inspect
import json
import math
import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from tinyformer.config.errors import ConfigError

Plain: TypeAlias = Any
"""A plain value of YAML."""

Series: TypeAlias = dict[int, float]
"""A number by the step at which it was measured."""

STATISTICS: dict[str, Callable[[list[float]], float]] = {
    "largest": max,
    "smallest": min,
    "mean": statistics.fmean,
    "median": statistics.median,
    "last": lambda values: values[-1],
}
"""Reductions of several values to one, by name: over heads, or over the rows of a table."""

HEAD = re.compile(r"attention/(?:\w+/)?layer_\d+/head_\w+/(\w+)")


@dataclass(frozen=True)
class Record:
    """The contents of the files that a run wrote.

    Args:
        results: the numbers at its end, by name.
        evaluated: the numbers of its evaluation, by name.
        metrics: the rows of `metrics.csv`.
        tables: the rows of each table of its analysis, by the name of the file.
    """

    results: Mapping[str, Any] = field(default_factory=dict)
    evaluated: Mapping[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, str]] = field(default_factory=list)
    tables: Mapping[str, list[dict[str, str]]] = field(default_factory=dict)

    def value(self, source: Mapping[str, Plain]) -> float:
        """The number that a source names; see `SOURCES`."""
        kind = next(kind for kind in SOURCES if kind in source)
        return SOURCES[kind](self, **source)

    def series(self, source: Mapping[str, Plain]) -> Series:
        """A metric, or a measure of heads, by step.

        Args:
            source: {"metric": name}, or {"heads": measure, "over": statistic}.

        Raises:
            ConfigError: the run did not measure it, or it is a table.
        """
        over = source.get("over", "mean")
        found = {}
        for row in self.metrics:
            if "metric" in source:
                values = [row.get(source["metric"])]
            else:
                values = [
                    value
                    for name, value in row.items()
                    if (at := HEAD.fullmatch(name)) and at[1] == source.get("heads")
                ]
            numbers = [float(value) for value in values if value]
            if numbers:
                found[int(row["step"])] = _reduced(numbers, over)
        if not found:
            raise ConfigError(f"source={dict(source)}: metrics.csv has no such values.")
        return dict(sorted(found.items()))

    def rows(self, table: str, where: Mapping[str, Plain]) -> list[dict[str, str]]:
        """The rows of a table whose columns have some values.

        Raises:
            ConfigError: there is no such table, or no such row.
        """
        if table not in self.tables:
            raise ConfigError(f"table={table}: the run left {', '.join(self.tables) or 'no tables'}.")
        found = [row for row in self.tables[table] if all(row.get(name) == str(value) for name, value in where.items())]
        if not found:
            raise ConfigError(f"table={table}: no row has {dict(where)}.")
        return found


def _result(record: Record, metric: str) -> float:
    """A number of the run's `results.json`."""
    return _number(record.results, "metric", metric)


def _evaluated(record: Record, evaluated: str) -> float:
    """A number of the `results.json` of the run's evaluation."""
    return _number(record.evaluated, "evaluated", evaluated)


def _number(results: Mapping[str, Any], kind: str, name: str) -> float:
    if not isinstance(results.get(name), int | float):
        raise ConfigError(f"{kind}={name}: results.json has no such number.")
    return float(results[name])


def _heads(record: Record, heads: str, over: str) -> float:
    """The last measure of the heads, reduced to one number."""
    return list(record.series({"heads": heads, "over": over}).values())[-1]


def _cells(record: Record, table: str, column: str, over: str = "mean", where: Mapping[str, Plain] = {}) -> float:
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
"""The kinds: {metric: NAME}, {evaluated: NAME}, {heads: MEASURE, over: …}, and
{table: …, column: …, where: …, over: …}."""


def require_source(source: Plain) -> None:
    """Refuse what names no number, before anything is computed.

    Raises:
        ValueError: it is of no kind or of several, or its function in `SOURCES` does not take it.
    """
    kinds = [kind for kind in SOURCES if kind in source] if isinstance(source, Mapping) else []
    if len(kinds) != 1:
        raise ValueError(f"a source needs one of {', '.join(SOURCES)}")
    try:
        inspect.signature(SOURCES[kinds[0]]).bind(None, **source)
    except TypeError as error:
        raise ValueError(f"source of {kinds[0]}: {error}") from error
    if source.get("over", "mean") not in STATISTICS:
        raise ValueError(f"over={source['over']}: must be one of {', '.join(STATISTICS)}")


def read_record(folder: Path, analysed: Path | None = None) -> Record:
    """Read the files that a run, and its analysis if there is one, wrote."""
    tables: dict[str, list[dict[str, str]]] = {}
    for at in (analysed, folder) if analysed else (folder,):  # of a name in both, the run's own counts
        tables |= {path.stem: _rows(path) for path in sorted(at.glob("*.csv"))}
    evaluated = read_results(analysed) if analysed else {}
    return Record(read_results(folder), evaluated, tables.pop("metrics", []), tables)


def read_results(folder: Path) -> dict[str, Any]:
    """The contents of `results.json`; empty without one."""
    path = folder / "results.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
