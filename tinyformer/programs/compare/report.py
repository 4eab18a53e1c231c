"""A comparison as a printed table, as CSV and as JSON."""

import csv
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tinyformer.config.errors import printable
from tinyformer.errors import ArgumentError
from tinyformer.programs.compare.grouping import SPEED, Comparison, Row, as_typed, number

NONE = "none"
DIGITS = 5
"""Significant digits of the largest mean; the other means have as many decimals."""


def print_table(comparison: Comparison, notes: Sequence[str]) -> None:
    """Print one row per setting; below, the settings that all runs share, and the notes."""
    table = Table(box=box.SIMPLE_HEAD)
    for column in comparison.columns:
        table.add_column(printable(column), justify="left" if comparison.numbers is None else "right")
    counted = "seeds" if comparison.by == "seed" else f"values of {comparison.by}"
    for column in (comparison.metric, "±", counted, "parameters", "tokens/s"):
        table.add_column(column, justify="right")
    decimals = _decimals(comparison)
    for row in comparison.rows:
        table.add_row(*map(printable, row.settings.values()), *_cells(row, decimals))
    # As wide as the table: a terminal may wrap lines, but no digit is cut off. Brackets in settings are not markup.
    console = Console(width=10_000, markup=False, highlight=False)
    console.print(table)
    if comparison.constant:
        console.print(printable(f"Shared by all: {' '.join(comparison.constant)}"))
    for note in notes:
        console.print(printable(f"Note: {note}"))


def as_json(comparison: Comparison, notes: Sequence[str], files: dict[str, Path]) -> str:
    """The comparison as a JSON object, with the value of every run."""
    rows = [
        {
            "settings": row.settings,
            **_statistics(row),
            "runs": [
                {
                    "path": str(run.path),
                    comparison.by: as_typed(run.value(comparison.by)),
                    comparison.metric: number(run, comparison.metric),
                }
                for run in row.runs
            ],
        }
        for row in comparison.rows
    ]
    return json.dumps(
        {
            "metric": comparison.metric,
            "by": comparison.by,
            "columns": comparison.columns,
            "constant": comparison.constant,
            "rows": rows,
            "notes": list(notes),
            "files": {name: str(path) for name, path in files.items()},
        },
        indent=2,
        ensure_ascii=False,
        default=str,  # YAML has dates
    )


def folder_for(runs: Sequence[Path], out: Path | None) -> Path:
    """The folder for CSV and figure, created if needed.

    Args:
        runs: the folders of the command line.
        out: the folder to use; None for the one that contains all of `runs`.

    Raises:
        ArgumentError: the folder cannot be created or written to.
    """
    common = os.path.commonpath([run.resolve() for run in runs])
    folder = runs[0] if len(runs) == 1 else Path(os.path.relpath(common))
    folder = out or folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"cannot be created ({error.strerror})"
        raise ArgumentError("out", folder, reason, {"out": "comparison"}) from error
    if not os.access(folder, os.W_OK):
        raise ArgumentError("out", folder, "is not writable", {"out": "comparison"})
    return folder


def write_csv(comparison: Comparison, path: Path) -> Path:
    """Write one line per setting, with all digits; a missing number is empty."""
    lines = [row.settings | _statistics(row) for row in comparison.rows]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    return path


def _statistics(row: Row) -> dict[str, Any]:
    least, most = (min(row.values), max(row.values)) if row.values else (None, None)
    return {
        "mean": row.mean,
        "std": row.std,
        "min": least,
        "max": most,
        "num_seeds": row.num_seeds,
        "num_runs": len(row.values),
        "num_parameters": max(row.num_parameters, default=None),
        SPEED: row.tokens_per_second,
    }


def _cells(row: Row, decimals: int) -> list[str]:
    sizes, speed = row.num_parameters, row.tokens_per_second
    return [
        NONE if row.mean is None else f"{row.mean:,.{decimals}f}",
        "" if row.std is None else f"± {row.std:,.{decimals}f}",
        str(row.num_seeds),
        "–".join(f"{size:,}" for size in dict.fromkeys(sizes[:1] + sizes[-1:])) or NONE,
        NONE if speed is None else f"{speed:,.0f}",
    ]


def _decimals(comparison: Comparison) -> int:
    largest = max(abs(row.mean) for row in comparison.rows if row.mean is not None)
    before = math.floor(math.log10(largest)) + 1 if largest else 1
    return min(max(DIGITS - before, 0), 6)
