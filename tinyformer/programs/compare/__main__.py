"""Compare the runs of a sweep in a table and a figure: `python -m tinyformer compare multirun/DATE/TIME`.

One row per setting, averaged over seeds; a setting is the values of the config keys that differ between runs.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tinyformer.config.errors import exit_code_of, option_names
from tinyformer.config.invocation import config_dir
from tinyformer.errors import ArgumentError
from tinyformer.files import import_matplotlib
from tinyformer.programs.compare.folders import find_runs, read_run
from tinyformer.programs.compare.grouping import Comparison, compare
from tinyformer.programs.compare.notes import notes_on
from tinyformer.programs.compare.report import as_json, folder_for, print_table, write_csv

CONFIG_DIR, CONFIG_NAME = config_dir(), "train"


def main(arguments: Sequence[str] | None = None, prog: str = "python -m tinyformer compare") -> int:
    """Compare the runs that the command line names.

    Args:
        arguments: the command line; `sys.argv[1:]` by default.
        prog: the name of the program in its help.

    Returns:
        The exit code: 0, 1 for a bug, 2 for a mistake of the user.
    """
    options = _parser(prog).parse_args(arguments)
    return exit_code_of(lambda: _show(options), CONFIG_DIR, CONFIG_NAME)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Compare runs in a table, a CSV file and a figure: one row per setting, averaged over seeds.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run, of a sweep or of many")
    parser.add_argument(
        "--metric", default="val/loss", metavar="KEY", help="the key of results.json to compare (default: val/loss)"
    )
    parser.add_argument("--by", default="seed", metavar="KEY", help="the config key to average over (default: seed)")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="the folder for CSV and figure (default: the one of the runs)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON only")
    return parser


def _show(options: argparse.Namespace) -> None:
    with option_names(folders="RUN", metric="--metric", by="--by", out="--out"):
        folders = find_runs(options.runs)
        comparison = compare([read_run(path) for path in folders.finished], options.metric, options.by)
        out = folder_for(options.runs, options.out)
    notes = notes_on(comparison, folders)
    stem = out / f"compare_{options.metric.replace('/', '_')}"
    csv, picture = stem.with_suffix(".csv"), stem.with_suffix(".png")
    with option_names(out="--out"):
        for path in (csv, picture):
            if path.is_symlink():  # which leads anywhere, in the folder of a stranger
                raise ArgumentError("out", path, "is a symbolic link; remove it")
    write_csv(comparison, csv)
    if not options.json:
        print_table(comparison, notes)
    _draw(comparison, picture)
    if options.json:
        print(as_json(comparison, notes, {"csv": csv, "picture": picture}))
    else:
        print(f"Saved in {csv} and {picture.name}.")


def _draw(comparison: Comparison, path: Path) -> None:
    # Matplotlib takes a second to import; the table does not wait for it.
    import_matplotlib()
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
