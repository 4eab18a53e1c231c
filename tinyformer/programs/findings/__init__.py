"""Claims of papers about attention, tested on this machine: `tinyformer findings`, `tinyformer findings NAME`.

A finding is a file, `conf/finding/NAME.yaml` (`files`), with a protocol and bands. The program stores both before the
first run, and a verdict compares an interval over seeds with a band (`verdicts`). Runs are made by the code of `train`
and `evaluate`, in a folder for each config (`running`). Quantities are computed from the files of the runs (`records`,
`quantities`). The measurements are stored, with a page (`outcomes`) and a figure (`figure`).
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyformer.config.errors import exit_code_of, say
from tinyformer.files import write_whole

if TYPE_CHECKING:
    from tinyformer.programs.findings.files import Finding


def main(arguments: Sequence[str]) -> int:
    """List the findings, or measure one or all.

    The exit code is 0 whatever the verdict, 1 for a bug, 2 for a user's mistake, 128 + SIGINT after Ctrl-C.
    """
    parser = argparse.ArgumentParser(
        prog="tinyformer findings", description="Claims of papers about attention, tested on this machine."
    )
    parser.add_argument("name", nargs="?", help="a finding, or all; without it, the list of findings")
    trust = "an override in the file of the finding that names a class outside tinyformer, which you trust"
    parser.add_argument("trusted", nargs="*", metavar="KEY=CLASS", help=trust)
    results = "the folder of tables and figures, next to which the page of all findings is written"
    runs = Path("outputs/findings")
    parser.add_argument("--results", type=Path, metavar="FOLDER", default=runs / "results", help=results)
    parser.add_argument("--runs", type=Path, metavar="FOLDER", default=runs, help="the folder of the runs")
    jobs = "the number of runs that are made in parallel, each in a process"
    parser.add_argument("--jobs", type=int, metavar="N", default=1, help=jobs)
    parser.add_argument("--files", type=Path, metavar="FOLDER", help="a folder of findings that replaces conf/finding")
    options = parser.parse_intermixed_args(arguments)
    if options.jobs > 1 and find_spec("joblib") is None:
        parser.error(f"--jobs {options.jobs}: needs joblib. pip install 'tinyformer[sweep]' installs it.")
    code = exit_code_of(lambda: _show(options), "train")
    if code == 128 + signal.SIGINT:
        print("Stopped. The same command continues from here.", file=sys.stderr)
    return code


def _show(options: argparse.Namespace) -> int:
    from tinyformer.config.folder import refuse_foreign_files
    from tinyformer.programs.findings.files import finding_names, read_finding, trust
    from tinyformer.programs.findings.outcomes import PAGE, page, read_outcomes, refuse_links
    from tinyformer.programs.findings.verdicts import keep_statements

    names = finding_names(options.files)
    path = options.results.parent / PAGE
    refuse_links(options.results, path, names)
    known = [read_finding(name, options.files) for name in names]
    outcomes = read_outcomes(options.results, names)
    if options.name is None:
        for finding in known:
            _tell(finding, f"{finding.title} ({finding.paper})", outcomes.get(finding.name, [None])[-1])
        return 0
    refuse_foreign_files(options.runs, "--runs")
    chosen = trust(known if options.name == "all" else [read_finding(options.name, options.files)], options.trusted)
    options.results.mkdir(parents=True, exist_ok=True)  # an error now, not after hours of runs
    keep_statements(chosen, options.runs)
    # With one job, each finding is measured before the next finding runs; with several, all runs are made first.
    codes = []
    for findings in [[finding] for finding in chosen] if options.jobs == 1 else [chosen]:
        codes.append(_measure(findings, options))
        if outcomes := read_outcomes(options.results, names):  # after each finding, in case the next is stopped
            write_whole(path, page(known, outcomes, options.results.name))
            print(f"Page: {path}")
    return max(codes)


def _tell(finding: "Finding", title: str, last: dict[str, Any] | None) -> None:
    """Print a finding's verdict on this machine, its published verdict and, if they were measured, its clauses."""
    from tinyformer.programs.findings.outcomes import lines_of
    from tinyformer.programs.findings.verdicts import summary

    here = f"{summary(last['verdicts']) if last else 'unmeasured'} here"
    published = f" (published: {summary(finding.concluded)}; {finding.published})" if finding.published else ""
    say(f"{finding.name}: {here}{published}: {title}")
    for line in lines_of(last) if last else []:
        say(f"  {line.replace('**', '')}")


def _measure(findings: Sequence["Finding"], options: argparse.Namespace) -> int:
    """Make the runs of findings, and measure each finding whose runs have all ended; returns the exit code."""
    from tinyformer.programs.findings.outcomes import conclude
    from tinyformer.programs.findings.running import plan, run_all

    planned = {}
    for finding in findings:
        say(f"{finding.name}: {finding.claim} ({finding.paper})", flush=True)
        planned[finding.name] = plan(finding, options.runs.absolute())
    code = run_all([run for runs in planned.values() for run in runs], options.jobs)
    for finding in findings:
        num_lacking = sum(not run.has_ended for run in planned[finding.name])
        if num_lacking:
            print(f"{finding.name}: not measured; runs that have not ended: {num_lacking}.", file=sys.stderr)
        else:
            _tell(finding, finding.title, conclude(finding, planned[finding.name], options.results))
            print(f"Figure: {options.results / finding.name}.png; all measurements: {finding.name}.json next to it")
    return code
