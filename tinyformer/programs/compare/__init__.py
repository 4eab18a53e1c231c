"""Runs of a sweep side by side: `tinyformer compare multirun/DATE/TIME` prints a table and writes a CSV and a figure.

One row per setting, averaged over seeds; a setting is the values of the config keys that differ between runs.
`folders` finds and loads runs, `comparison` averages the runs of each setting, and `chart` draws the result.
"""

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinyformer.config.errors import exit_code_of, option_names, say
from tinyformer.errors import ArgumentError
from tinyformer.files import write_table
from tinyformer.programs.compare.comparison import SPEED, Comparison, Row, compare, notes_on
from tinyformer.programs.compare.folders import find_runs, read_run
from tinyformer.programs.console import print_table

NONE = "none"
DIGITS = 5  # significant digits of the largest mean; the other means have as many decimals


def main(arguments: Sequence[str]) -> int:
    """Compare the runs that the command line names; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="tinyformer compare",
        description="Compare runs in a table, a CSV file and a figure: one row per setting, averaged over seeds.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run, of a sweep or of many")
    parser.add_argument(
        "--metric", default="val/loss", metavar="KEY", help="the key of results.json to compare (default: val/loss)"
    )
    parser.add_argument("--by", default="seed", metavar="KEY", help="the config key to average over (default: seed)")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="the folder for CSV and figure (default: the folder of the runs)"
    )
    options = parser.parse_args(arguments)
    return exit_code_of(lambda: _show(options), "train")


def _show(options: argparse.Namespace) -> None:
    with option_names(folders="RUN", metric="--metric", by="--by", out="--out"):
        folders = find_runs(options.runs)
        comparison = compare([read_run(path) for path in folders.finished], options.metric, options.by)
        stem = _output_folder(options.runs, options.out) / f"compare_{options.metric.replace('/', '_')}"
        table, picture = stem.with_suffix(".csv"), stem.with_suffix(".png")
        for path in (table, picture):
            if path.is_symlink():  # in an untrusted folder, it may lead anywhere
                raise ArgumentError("out", path, "is a symbolic link; remove it")
    notes = notes_on(comparison, folders)
    lines = [row.settings | _statistics(row) for row in comparison.rows]
    write_table(table, list(lines[0]), [list(line.values()) for line in lines])
    _print_table(comparison, notes)
    from tinyformer.programs.compare.chart import chart_of_seeds
    from tinyformer.report import save_png

    save_png(chart_of_seeds(comparison), picture)
    say(f"Saved in {table} and {picture.name}.")


def _output_folder(runs: Sequence[Path], out: Path | None) -> Path:
    """The folder for CSV and figure, created if needed; by default the folder that contains all runs."""
    common = os.path.commonpath([run.resolve() for run in runs])
    folder = out or (runs[0] if len(runs) == 1 else Path(os.path.relpath(common)))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _print_table(comparison: Comparison, notes: Sequence[str]) -> None:
    """Print one row per setting; below, the values that all runs share, and the notes."""
    counted = "seeds" if comparison.by == "seed" else f"values of {comparison.by}"
    columns = [*comparison.columns, comparison.metric, "±", counted, "parameters", "tokens/s"]
    largest = max(abs(row.mean) for row in comparison.rows if row.mean is not None)
    digits_before_point = math.floor(math.log10(largest)) + 1 if largest else 1
    decimals = min(max(DIGITS - digits_before_point, 0), 6)
    rows = [
        [
            *row.settings.values(),
            NONE if row.mean is None else f"{row.mean:,.{decimals}f}",
            f"one {comparison.by}" * bool(row.values) if row.std is None else f"± {row.std:,.{decimals}f}",
            str(row.num_seeds),
            NONE if row.num_parameters is None else f"{row.num_parameters:,}",
            NONE if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
        ]
        for row in comparison.rows
    ]
    print_table(columns, rows, num_left=len(comparison.columns) if comparison.numbers is None else 0)
    if comparison.constant:
        say(f"Shared by all: {' '.join(comparison.constant)}")
    for note in notes:
        say(f"Note: {note}")


def _statistics(row: Row) -> dict[str, Any]:
    """The numbers of a row, under the names of the CSV's columns."""
    return {
        "mean": row.mean,
        "std": row.std,
        "min": min(row.values, default=None),
        "max": max(row.values, default=None),
        "num_seeds": row.num_seeds,
        "num_runs": len(row.values),
        "num_parameters": row.num_parameters,
        SPEED: row.tokens_per_second,
    }
