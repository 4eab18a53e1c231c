"""The result of an analysis, and the captions of its pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from matplotlib.figure import Figure

from tinyformer.report.picture import Picture

Table: TypeAlias = tuple[list[str], list[list[Any]]]  # columns and rows


@dataclass
class AnalysisResult:
    """The results of an analysis."""

    scalars: dict[str, float | int | None] = field(default_factory=dict)  # the values in `results.json`, by key
    lines: dict[str, str] = field(default_factory=dict)  # the lines of the printed summary, by heading
    tables: dict[str, Table] = field(default_factory=dict)  # the table of each NAME.csv
    figures: dict[str, Figure | Picture] = field(default_factory=dict)  # the figure of each NAME.png
    files: list[Path] = field(default_factory=list)  # the files that the analysis itself has written
    facts: Mapping[str, str] | None = None  # for the figures' captions; None for the facts of the context
    own_facts: dict[str, Mapping[str, str]] = field(default_factory=dict)  # for single figures' captions, by figure


def caption(facts: Mapping[str, str]) -> str:
    """The line above a picture that names its origin: "checkpoint run/last.ckpt · step 2,000"."""
    return " · ".join(f"{name} {value}" for name, value in facts.items())


def naming_ablated(columns: list[str], rows: list[list[Any]], ablated: Sequence[bool]) -> Table:
    """A table with a row for each head; the column `ablated` is added if any head is ablated."""
    if not any(ablated):
        return columns, rows
    return [*columns, "ablated"], [[*row, flag] for row, flag in zip(rows, ablated, strict=True)]
