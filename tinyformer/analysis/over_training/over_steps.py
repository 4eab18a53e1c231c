"""Any analysis over the snapshots of a run: its tables and scalars by step, a curve for each head, and events."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from tinyformer.analysis.context import Analysis, AnalysisContext, Trained
from tinyformer.analysis.texts.maps import of_sample
from tinyformer.errors import ArgumentError
from tinyformer.measures.events import TRAITS, Event, EventDetector, control_of
from tinyformer.measures.probe import HeadMeasures
from tinyformer.nn.heads import layer_title
from tinyformer.report.charts import lines
from tinyformer.report.result import AnalysisResult, Table

MOST_NAMED = 8
"""The number of heads whose curves are coloured and named; they are the heads that change most."""


class SnapshotMeasures(NamedTuple):
    """The measures of every head by step, and the events between these steps."""

    steps: Sequence[int]
    measures: Sequence[HeadMeasures]  # of each step
    events: Sequence[Event]  # in the order of their steps


def require_snapshots(context: AnalysisContext, analysis: str) -> None:
    """Raise an error if the run has fewer than two snapshots; `analysis` is the name of the analysis."""
    if len(context.snapshots) < 2:
        reason = f"compares snapshots, and this run has {len(context.snapshots)}; train with "
        reason += "callbacks.snapshots.every_n_steps=100 to save snapshots"
        raise ArgumentError("analysis", analysis, reason, {"analysis": "maps"})


def events_of_snapshots(context: AnalysisContext, rows: int = 256) -> SnapshotMeasures:
    """Measure the heads of each snapshot on the context's sample, and record when a head acquires or loses a trait.

    Such an event has the step of the first snapshot that shows it. A trait that random maps of the sample have,
    too, is left out. For the measures and `rows`, see `maps.of_sample`.
    """
    measure = of_sample(context, rows)
    random = measure(context.network, 0).values
    traits = {name: trait for name, trait in TRAITS.items() if not trait.is_met(control_of(trait, random))}
    measures, detector = list[HeadMeasures](), EventDetector(traits, hysteresis=0.2)
    for step, network in context.snapshots:
        measures.append(of_step := measure(network(), None))
        detector.observe(step, of_step.names, of_step.values, of_step.addresses)
    return SnapshotMeasures([step for step, _ in context.snapshots], measures, detector.events)


@dataclass(eq=False)
class OverSteps:
    """An analysis of each snapshot of a run, one after another, on the same data; only one network is in memory.

    Each table gets a first column `step`, and the table `scalars` has the scalars of the analysis. The figures
    `…_by_step` show each scalar, and each table with a row for each head. Other figures,
    lines and files are those of the last snapshot.
    """

    analysis: Analysis

    def __post_init__(self) -> None:
        self.num_windows, self.needs_gradient = self.analysis.num_windows, self.analysis.needs_gradient

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        tables = dict[str, dict[int, Table]]()
        with TemporaryDirectory() as unkept:
            for snapshot in context.snapshots:
                place = folder if snapshot is context.snapshots[-1] else Path(unkept)
                result = self.analysis(replace(context, network=snapshot.network(), snapshots=()), place)
                scalars = {name.removeprefix("analysis/"): value for name, value in result.scalars.items()}
                own: dict[str, Table] = {"scalars": ([*scalars], [[*scalars.values()]])} if scalars else {}
                for name, table in (own | result.tables).items():
                    tables.setdefault(name, {})[snapshot.step] = table
        result.tables = {name: joined(of_steps) for name, of_steps in tables.items()}
        steps = [snapshot.step for snapshot in context.snapshots]
        span = f"{steps[0]:,} to {steps[-1]:,}"
        result.lines = {"snapshots": f"{len(steps)}, of steps {span}; the lines below are for the last"} | result.lines
        for name, figure in charts(result.tables).items():
            result.figures[f"{name}_by_step"] = figure
            result.own_facts[f"{name}_by_step"] = {**(result.facts or context.facts), "step": span}
        return result


def joined(tables: Mapping[int, Table]) -> Table:
    """The rows of a table at several steps, after a column `step`; None in a column that a step lacks."""
    columns = list(dict.fromkeys(name for names, _ in tables.values() for name in names))
    rows = []
    for step, (names, of_step) in tables.items():
        rows += [[step, *map(dict(zip(names, row, strict=True)).get, columns)] for row in of_step]
    return ["step", *columns], rows


def charts(tables: Mapping[str, Table]) -> dict[str, Figure]:
    """A chart by step of each scalar, and of one column of each table with a row for each head.

    The column is `change` or, without it, the first measure. The `MOST_NAMED` heads that change most are in colour.
    """
    drawn = {}
    for name, (columns, rows) in tables.items():
        at = [columns.index(each) for each in ("kind", "layer", "head") if each in columns and "head" in columns]
        measured = [index for row in rows[:1] for index, value in enumerate(row) if isinstance(value, float)]
        shown = [columns.index("change")] if "change" in columns else measured[:1]
        if name == "scalars":
            at, shown = [], list(range(1, len(columns)))
        elif not at or len({(row[0], *(row[index] for index in at)) for row in rows}) < len(rows):
            continue
        for index in shown:
            curves: dict[str, tuple[list[float], list[float]]] = {}
            for row in rows:
                *layer, head = [row[place] for place in at] or [""]
                curve = curves.setdefault(f"{layer_title(tuple(layer))} head {head}" if layer else "", ([], []))
                curve[0].append(row[0])
                curve[1].append(math.nan if row[index] is None else row[index])
            ranked = sorted(curves, key=lambda head: -np.ptp(np.nan_to_num(curves[head][1])))
            named = {head: curve for head, curve in curves.items() if head in ranked[:MOST_NAMED]}
            grey = {f"_{head}": curves[head] for head in ranked[MOST_NAMED:]}
            words = f"{name}: {columns[index]} by step of training", "optimizer step", columns[index]
            drawn[name if at else columns[index].replace("/", "_")] = lines(named, *words, baselines=grey, by_step=True)
    return drawn
