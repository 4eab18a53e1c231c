"""Any analysis over the snapshots of a run: its tables and numbers by step, and the curve of each head."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tinyformer.analysis.pictures.charts import curves_by_step
from tinyformer.analysis.subject import CHANGE_COLUMNS, Analysis, Findings, Snapshot, Subject, Table, Trained
from tinyformer.nn.heads import layer_title


@dataclass(eq=False)
class OverSteps:
    """An analysis of each snapshot of a run, in turn and on the same data; only one of their networks is in memory.

    Each table has a first column `step`; the numbers of the analysis are the table `scalars`. `scalars_by_step`, and
    `NAME_by_step` for each table NAME with a row for each head, show them as curves. Other figures, lines and files are
    those of the last snapshot.
    """

    analysis: Analysis

    def __post_init__(self) -> None:
        self.num_windows, self.needs_gradient = self.analysis.num_windows, self.analysis.needs_gradient

    def __call__(self, model: Trained, folder: Path = Path()) -> Findings:
        subject = model.sample(self.num_windows)
        *earlier, last = subject.snapshots
        tables = dict[str, dict[int, Table]]()
        with TemporaryDirectory() as unkept:
            for snapshot in earlier:
                _collect(tables, snapshot.step, self._analyse(subject, snapshot, Path(unkept)))
        findings = self._analyse(subject, last, folder)
        _collect(tables, last.step, findings)
        steps = [snapshot.step for snapshot in subject.snapshots]
        findings.tables = {name: joined(of_steps) for name, of_steps in tables.items()}
        first = f"{len(steps)}, from step {steps[0]:,} to {steps[-1]:,}; what follows is of the last one"
        findings.lines = {"snapshots": first} | findings.lines
        span = {"step": f"{steps[0]:,} to {steps[-1]:,}"}
        for name, (columns, rows) in findings.tables.items():
            if panels := curves(columns, rows, steps):
                findings.figures[f"{name}_by_step"] = curves_by_step(panels, steps, f"{name}.csv, by step of training")
                findings.own_facts[f"{name}_by_step"] = {**(findings.facts or subject.facts), **span}
        return findings

    def _analyse(self, subject: Subject, snapshot: Snapshot, folder: Path) -> Findings:
        return self.analysis(replace(subject, network=snapshot.network(), snapshots=()), folder)


SCALARS = "scalars"
"""The table of the numbers of an analysis."""


def _collect(tables: dict[str, dict[int, Table]], step: int, findings: Findings) -> None:
    scalars = {name.removeprefix("analysis/"): value for name, value in findings.scalars.items()}
    own = findings.tables | ({SCALARS: ([*scalars], [[*scalars.values()]])} if scalars else {})
    for name, table in own.items():
        tables.setdefault(name, {})[step] = table


def joined(tables: Mapping[int, Table]) -> Table:
    """The rows of a table at several steps, after a column `step`; None in a column that a step lacks."""
    columns = list(dict.fromkeys(name for names, _ in tables.values() for name in names))
    rows = [
        [step, *(dict(zip(names, row, strict=True)).get(name) for name in columns)]
        for step, (names, own) in tables.items()
        for row in own
    ]
    return ["step", *columns], rows


def curves(columns: Sequence[str], rows: Sequence[Sequence[Any]], steps: Sequence[int]) -> dict[str, Any]:
    """The numbers of a joined table by column, then by head, at each step; empty unless it has a row for each head.

    The table of scalars has a single row, whose name is "". Bounds and controls, such as `low` and `OV_untrained`
    beside `OV`, are left out, and so are whole numbers of heads.
    """
    places = [name for name in ("kind", "layer", "head") if name in columns and "head" in columns]
    values: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        of_row = dict(zip(columns, row, strict=True))
        head = f"{layer_title(tuple(of_row[name] for name in places[:-1]))} head {of_row['head']}" if places else ""
        if of_row["step"] in values.setdefault(head, {}):
            return {}  # several rows for each head
        values[head][of_row["step"]] = of_row
    bounds = {name for name in columns if any(name.startswith(f"{other}_") for other in columns)}
    others = {"step", *places, *bounds, *CHANGE_COLUMNS} - {"change"}
    panels = {}
    for name in columns:
        numbers = [row[columns.index(name)] for row in rows]
        is_number = any(isinstance(n, float) or (not places and isinstance(n, int)) for n in numbers)
        if name not in others and is_number:
            panels[name] = {
                head: [of_steps.get(step, {}).get(name) for step in steps] for head, of_steps in values.items()
            }
    return panels
