"""Lines of a finding's figure: one number against another, for each run or group of runs, and each seed."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import pydantic

from tinyformer.programs.findings.quantities import Records, Source
from tinyformer.programs.findings.records import require_source

Line: TypeAlias = Mapping[float, float]
"""y by x."""


class Curve(pydantic.BaseModel):
    """A panel with lines.

    Args:
        name: what the y-axis shows, with its unit.
        of: the lines, by the arguments of the function in `LINES` that one of them names.
        along: what the x-axis shows, with its unit.
        runs: the runs that have lines; all by default.
        log: the axes that are logarithmic.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    name: str
    of: dict[str, Any]
    along: str = "step"
    runs: list[str] | None = None
    log: list[Literal["x", "y"]] = []

    @pydantic.model_validator(mode="after")
    def _fits(self) -> "Curve":
        if sum(kind in self.of for kind in LINES) != 1:
            raise ValueError(f"{self.name}: a curve needs one of {', '.join(LINES)}")
        try:
            inspect.signature(self._function).bind({}, **self.of)
            if "table" not in self.of:
                require_source(self.of["source"] if "points" in self.of else self.of)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.name}: {error}") from error
        points = self.of.get("points", {})
        if not isinstance(points, dict) or not all(isinstance(of_label, dict) for of_label in points.values()):
            raise ValueError(f"{self.name}: points: each label needs runs with a number, as in {{all: {{run: 1}}}}")
        return self

    @property
    def _function(self) -> Callable[..., dict[str, Line]]:
        return next(function for kind, function in LINES.items() if kind in self.of)

    def drawn_runs(self, runs: Iterable[str]) -> list[str]:
        """The runs that it needs, of all runs of a finding."""
        of_points = [run for of_label in self.of.get("points", {}).values() for run in of_label]
        return of_points or self.runs or list(runs)

    def lines(self, records: Sequence[Records]) -> dict[str, list[Line]]:
        """The line of each seed, by its label in the legend, given the records of each seed."""
        lines: dict[str, list[Line]] = {}
        for of_seed in records:
            drawn = {run: of_seed[run] for run in self.drawn_runs(of_seed)}
            for label, line in self._function(drawn, **self.of).items():
                lines.setdefault(label, []).append(line)
        return lines


def by_step(records: Records, **source: Any) -> dict[str, Line]:
    """A metric or a measure of heads by step, a line for each run; see `Record.series`."""
    return {run: record.series(source) for run, record in records.items()}


def by_column(
    records: Records,
    table: str,
    x: str,
    y: str,
    where: Source = {},  # noqa: B006
    groups: str | None = None,
) -> dict[str, Line]:
    """A column of a table against another, a line for each run; empty cells are left out.

    Args:
        records: of the runs.
        table: the table.
        x: the column of the x-axis.
        y: that of the y-axis.
        where: the values that other columns have.
        groups: a column for each of whose values there is a line of its own; only for a single run.
    """
    rows = {run: record.rows(table, where) for run, record in records.items()}
    if groups is not None:
        (of_run,) = rows.values()
        rows = {}
        for row in of_run:
            rows.setdefault(row[groups], []).append(row)
    return {
        label: {float(row[x]): float(row[y]) for row in of_label if row[x] and row[y]}
        for label, of_label in rows.items()
    }


def by_run(records: Records, points: Mapping[str, Mapping[str, float]], source: Source) -> dict[str, Line]:
    """A number against what is varied between runs.

    Args:
        records: of the runs.
        points: what is varied, by run, for each line: {"pre-norm": {"depth_2": 2, "depth_4": 4}}.
        source: the number.
    """
    return {label: {x: records[run].value(source) for run, x in of_line.items()} for label, of_line in points.items()}


LINES: dict[str, Callable[..., dict[str, Line]]] = {
    "metric": by_step,
    "heads": by_step,
    "table": by_column,
    "points": by_run,
}
"""The functions that give lines, by the argument that names them."""
