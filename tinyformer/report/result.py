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

    scalars: dict[str, float | int | None] = field(default_factory=dict)  # for `results.json`
    lines: dict[str, str] = field(default_factory=dict)  # of the summary, by heading
    tables: dict[str, Table] = field(default_factory=dict)  # each NAME.csv
    figures: dict[str, Figure | Picture] = field(default_factory=dict)  # each NAME.png
    files: list[Path] = field(default_factory=list)  # that the analysis itself has written
    facts: Mapping[str, str] | None = None  # of the figures, if they do not show the subject's sample
    own_facts: dict[str, Mapping[str, str]] = field(default_factory=dict)  # of single figures, by name


def caption(facts: Mapping[str, str]) -> str:
    """The line above a picture that says where it comes from: "checkpoint run/last.ckpt · step 2,000"."""
    return " · ".join(f"{name} {value}" for name, value in facts.items())


def naming_ablated(columns: list[str], rows: list[list[Any]], ablated: Sequence[bool]) -> Table:
    """A table with a row for each head, and with the column `ablated` if any of them is."""
    if not any(ablated):
        return columns, rows
    return [*columns, "ablated"], [[*row, flag] for row, flag in zip(rows, ablated, strict=True)]
