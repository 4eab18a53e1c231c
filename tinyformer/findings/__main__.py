"""Claims of papers about attention, tested on this machine: `tinyformer findings`, `tinyformer findings NAME`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from tinyformer.app.config import config_dir
from tinyformer.app.entry import ending_at_ctrl_c
from tinyformer.app.errors import exit_code_of

if TYPE_CHECKING:
    from tinyformer.findings.files import Finding


def main(arguments: Sequence[str] | None = None, prog: str = "python -m tinyformer.findings") -> int:
    """List the findings, or measure one or all.

    Args:
        arguments: the command line; `sys.argv[1:]` by default.
        prog: the name of the program in its help.

    Returns:
        The exit code: 0 whatever the verdict, 1 for a bug, 2 for a mistake of the user.
    """
    options = _parser(prog).parse_args(arguments)
    return exit_code_of(lambda: _show(options), config_dir(), "train")


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="Claims of papers about attention, tested on this machine.")
    parser.add_argument("name", nargs="?", help="a finding, or all; without it, the list of findings")
    pages = config_dir().parent / "docs" / "pages"
    default = pages / "findings" if pages.is_dir() else Path("findings")  # a checkout keeps what was measured
    parser.add_argument("--results", type=Path, metavar="FOLDER", default=default, help="of tables and figures")
    parser.add_argument("--runs", type=Path, metavar="FOLDER", default=Path("outputs/findings"), help="of the runs")
    parser.add_argument("--files", type=Path, metavar="FOLDER", help="of findings of yours, in place of conf/finding")
    return parser


def _show(options: argparse.Namespace) -> None:
    from tinyformer.findings.files import finding_names, read_finding
    from tinyformer.findings.pages import page, read_outcomes

    names = finding_names(options.files)
    if options.name is None:
        _list(options)
        return
    chosen = names if options.name == "all" else [options.name]
    for finding in [read_finding(name, options.files) for name in chosen]:
        _measure(finding, options)
        path = options.results.parent / "findings.md"  # after each, so that a program that is stopped leaves it true
        of_all = [read_finding(name, options.files) for name in names]
        path.write_text(page(of_all, read_outcomes(options.results, names), options.results.name), encoding="utf-8")
        print(f"Page: {path}")


def _list(options: argparse.Namespace) -> None:
    from tinyformer.findings.files import finding_names, read_finding
    from tinyformer.findings.pages import measured_line, read_outcomes

    names = finding_names(options.files)
    outcomes = read_outcomes(options.results, names)
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("finding", "claim", "paper", "measured last", "verdict"):
        table.add_column(column)
    for name in names:
        finding, outcome = read_finding(name, options.files), outcomes.get(name)
        last = measured_line(outcome) if outcome else ""
        paper = f"{finding.paper.name}, arXiv {finding.paper.arxiv}"
        table.add_row(name, finding.title, paper, last, outcome["verdict"] if outcome else "unmeasured")
    Console(markup=False).print(table)


def _measure(finding: "Finding", options: argparse.Namespace) -> None:
    with ending_at_ctrl_c():
        from tinyformer.findings.pages import COLUMNS, rows_of, write_outcome
        from tinyformer.findings.running import facts_of, plan, run_all
        from tinyformer.findings.verdicts import measure, verdict

    print(f"{finding.name}: {finding.claim.strip()} ({finding.paper.name}, arXiv {finding.paper.arxiv})", flush=True)
    planned = plan(finding, options.runs.absolute())
    records = run_all(planned, lambda line: print(line, flush=True))
    measured = measure(finding, records)
    write_outcome(finding, measured, facts_of(planned), options.results)
    table = Table(box=box.SIMPLE_HEAD)
    for column in COLUMNS:
        table.add_column(column)
    for row in rows_of(measured):
        table.add_row(*row)
    Console(markup=False).print(table)
    print(f"{finding.name}: {verdict(measured)}")
    print(f"Table, figure and JSON: {options.results / finding.name}.csv, .png, .json")


if __name__ == "__main__":
    sys.exit(main())
