"""The runs that a finding needs, and their records: the contents of their files, from which quantities are computed."""

import csv
import functools
import hashlib
import json
import math
import os
import re
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from glob import glob
from pathlib import Path
from typing import Any, TypeAlias

from tinyformer.config.conf import AXES, parsed
from tinyformer.config.errors import ConfigError

Source: TypeAlias = Mapping[str, Any]

Series: TypeAlias = dict[int, float]  # a number by the step at which it was measured

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

ENDED = "ended.json"  # written last: a run with this file in its folder is complete


@dataclass(frozen=True)
class PlannedRun:
    """A run that a finding needs, with its program, overrides (`words`) and folder.

    `program` is a name in `running.PROGRAMS`. `evaluate` has the overrides of the run's analysis; [] for no analysis.
    """

    finding: str
    name: str
    seed: int
    program: str
    words: list[str]
    folder: Path
    evaluate: list[str]

    @functools.cached_property
    def analysed(self) -> Path | None:
        described = [self.evaluate, contents] if (contents := contents_of(self.evaluate)) else self.evaluate
        return self.folder / f"evaluate-{digest_of(described)}" if self.evaluate else None

    @property
    def has_ended(self) -> bool:
        return all((folder / ENDED).exists() for folder in (self.folder, self.analysed) if folder)


@dataclass(frozen=True)
class Record:
    """The record of a run: its numbers, those of its evaluation, and the rows of `metrics.csv` and of other tables."""

    results: Mapping[str, Any] = field(default_factory=dict)
    evaluated: Mapping[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, str]] = field(default_factory=list)
    tables: Mapping[str, list[dict[str, str]]] = field(default_factory=dict)

    def series(self, source: Source) -> Series:
        """A metric or a measure of heads by step: `{metric: NAME}` or `{heads: MEASURE, over: STATISTIC}`."""
        series = {}
        for row in self.metrics:
            numbers = [float(cell) for name, cell in row.items() if cell and _is_named(name, source)]
            if numbers:
                series[int(row["step"])] = reduced(numbers, source.get("over", "mean"))
        if not series:
            raise ConfigError(f"source={dict(source)}: metrics.csv has no such values.")
        return dict(sorted(series.items()))

    def rows(self, table: str, where: Source) -> list[dict[str, str]]:
        """The rows of a table that have the value `where[column]` in each column of `where`; an error if none has."""
        if table not in self.tables:
            raise ConfigError(f"table={table}: the run wrote {', '.join(self.tables) or 'no tables'}.")
        rows = [row for row in self.tables[table] if all(row.get(name) == str(value) for name, value in where.items())]
        if not rows:
            raise ConfigError(f"table={table}: no row has {dict(where)}.")
        return rows

    def only(self, named: Sequence[Source]) -> "Record":
        """The part of the record that some sources, quantities or lines use, given their arguments."""
        named_sources = [source for of in named for source in sources(of)]
        columns: dict[str, set[str]] = {}
        for source in named_sources:
            if "table" in source:
                own = {source[key] for key in ("column", "x", "y", "groups") if source.get(key)}
                columns.setdefault(source["table"], set()).update(own, source.get("where", {}))

        def chosen(numbers: Mapping[str, Any], kind: str) -> dict[str, Any]:
            return {name: number for name, number in numbers.items() if name in {of.get(kind) for of in named_sources}}

        measured = {name for row in self.metrics for name in row if any(_is_named(name, of) for of in named_sources)}
        return Record(
            chosen(self.results, "metric"),
            chosen(self.evaluated, "evaluated"),
            [_part(row, {"step", *measured}) for row in self.metrics if any(row.get(name) for name in measured)],
            {table: [_part(row, names) for row in self.tables.get(table, [])] for table, names in columns.items()},
        )


Records: TypeAlias = Mapping[str, Record]  # the records of one seed, by the name of the run


def packed(record: Record) -> dict[str, Any]:
    """A record as plain values, with tables by column instead of by row."""
    plain = asdict(record)
    plain["metrics"] = _columns(record.metrics)
    plain["tables"] = {name: _columns(rows) for name, rows in record.tables.items()}
    return {key: values for key, values in plain.items() if values}


def unpacked(plain: Mapping[str, Any]) -> Record:
    """The record whose plain values `packed` has returned."""
    tables = {name: _rows(columns) for name, columns in plain.get("tables", {}).items()}
    return Record(plain.get("results", {}), plain.get("evaluated", {}), _rows(plain.get("metrics", {})), tables)


def read_record(folder: Path, analysed: Path | None = None) -> Record:
    """Load the files that a run wrote, and the files of its analysis in the folder `analysed`."""
    tables: dict[str, list[dict[str, str]]] = {}
    for place in (analysed, folder) if analysed else (folder,):  # a table of the run replaces one of its analysis
        for path in sorted(place.glob("*.csv")):
            with path.open(newline="", encoding="utf-8") as file:
                tables[path.stem] = list(csv.DictReader(file))
    evaluated = read_results(analysed) if analysed else {}
    return Record(read_results(folder), evaluated, tables.pop("metrics", []), tables)


def read_results(folder: Path) -> dict[str, Any]:
    """The contents of `results.json`; {} if the file does not exist."""
    path = folder / "results.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def records_of(planned: Sequence[PlannedRun]) -> list[Records]:
    """For each seed, the records of runs that have ended, by the name of the run."""
    by_seed: dict[int, dict[str, Record]] = {}
    for run in planned:
        by_seed.setdefault(run.seed, {})[run.name] = read_record(run.folder, run.analysed)
    return list(by_seed.values())


def facts_of(planned: Sequence[PlannedRun]) -> list[dict[str, Any]]:
    """The time, machine, code and duration of each run, and the hash of the statement in force when the run started."""
    facts = []
    for run in planned:
        made = json.loads((run.folder / ENDED).read_text(encoding="utf-8"))
        if run.analysed:
            made["analysis"] = json.loads((run.analysed / ENDED).read_text(encoding="utf-8"))
            del made["analysis"]["overrides"], made["analysis"]["machine"]
        made["statement"] = made.pop("statements", {}).get(run.finding)  # runs of an earlier version recorded none
        del made["overrides"]
        place = (run.analysed or run.folder).relative_to(run.folder.parent)
        facts.append({"run": run.name, "seed": run.seed, "folder": str(place), **made})
    return facts


def contents_of(words: Sequence[str]) -> dict[str, str]:
    """For each override that names files, such as "data.files=book.txt", a hash of the contents of these files."""
    found = {}
    for word in words:
        value = parsed(word).value() if "=" in word else None
        names = value if isinstance(value, list) else [value]
        paths = [path for name in names if isinstance(name, str) for path in glob(os.path.expanduser(name))]
        files = {file for path in paths for file in (Path(path), *Path(path).rglob("*")) if file.is_file()}
        if files and word.partition("=")[0] not in AXES:  # a choice such as data=text names no file
            found[word] = digest_of([hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)])
    return found


def digest_of(stated: Any) -> str:
    """The first 12 digits of a hash of plain values."""
    return hashlib.sha256(json.dumps(stated, sort_keys=True, default=str).encode()).hexdigest()[:12]


def reduced(numbers: list[float], over: str) -> float:
    """Reduce numbers to one by the statistic `over`; nan if any is nan, since `max` and `median` may ignore a nan."""
    return math.nan if any(map(math.isnan, numbers)) else STATISTICS[over](numbers)


def _part(row: Mapping[str, str], columns: Collection[str]) -> dict[str, str]:
    return {name: cell for name, cell in row.items() if name in columns}


def _is_named(column: str, source: Source) -> bool:
    """Return True if a column of `metrics.csv` belongs to a source."""
    if "metric" in source:
        return column == source["metric"]
    found = HEAD.fullmatch(column)
    return found is not None and found[1] == source.get("heads")


def sources(of: Source) -> Iterator[Source]:
    """The arguments of a source, quantity or line, and all mappings nested in them."""
    yield of
    for value in of.values():
        if isinstance(value, Mapping):
            yield from sources(value)


def _columns(rows: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name, "") for row in rows] for name in names}


def _rows(columns: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
