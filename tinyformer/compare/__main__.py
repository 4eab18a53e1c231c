"""A sweep as one table and one picture: `python -m tinyformer.compare multirun/DATE/TIME`.

A row for each setting, averaged over seeds; the settings are what differs between the runs.
"""

import argparse
import sys
from pathlib import Path

from tinyformer.app.errors import exit_code_of
from tinyformer.compare.folders import find_runs, read_run
from tinyformer.compare.grouping import Comparison, compare
from tinyformer.compare.notes import notes_on
from tinyformer.compare.report import as_json, folder_for, print_table, write_csv

CONFIG_DIR, CONFIG_NAME = Path(__file__).parents[2] / "conf", "train"


def main() -> int:
    """Compare the runs that the command line names.

    Returns:
        The exit code: 0, 1 for a bug, 2 for a mistake of the user.
    """
    arguments = _parser().parse_args()
    return exit_code_of(lambda: _show(arguments), CONFIG_DIR, CONFIG_NAME)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tinyformer.compare",
        description="Runs side by side: a row for each setting, averaged over seeds, as a table, a CSV and a picture.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or one with runs below it")
    parser.add_argument("--metric", default="val/loss", metavar="KEY", help="of results.json (default: val/loss)")
    parser.add_argument("--by", default="seed", metavar="KEY", help="what is averaged over (default: seed)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for CSV and picture (default: beside the runs)")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    return parser


def _show(arguments: argparse.Namespace) -> None:
    found = find_runs(arguments.runs, CONFIG_DIR)
    comparison = compare([read_run(path) for path in found.finished], arguments.metric, arguments.by)
    notes = notes_on(comparison, found)
    stem = folder_for(arguments.runs, arguments.out) / f"compare_{arguments.metric.replace('/', '_')}"
    csv, picture = stem.with_suffix(".csv"), stem.with_suffix(".png")
    write_csv(comparison, csv)
    if not arguments.json:
        print_table(comparison, notes)
    _draw(comparison, picture)
    if arguments.json:
        print(as_json(comparison, notes, {"csv": csv, "picture": picture}))
    else:
        print(f"Saved in {csv} and {picture.name}.")


def _draw(comparison: Comparison, path: Path) -> None:
    # Matplotlib takes a second to import: not before the table is there.
    from tinyformer.analysis import save_png, seeds_by_number, seeds_by_setting

    values = [row.values for row in comparison.rows]
    settings = " · ".join(comparison.columns)
    if comparison.numbers is not None:
        figure = seeds_by_number(comparison.numbers, values, settings, comparison.metric)
    else:
        labels = [" · ".join(row.settings.values()) or "all runs" for row in comparison.rows]
        figure = seeds_by_setting(labels, values, settings, comparison.metric)
    save_png(figure, path)


if __name__ == "__main__":
    sys.exit(main())
