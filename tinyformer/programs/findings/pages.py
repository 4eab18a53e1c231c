"""The page of all findings, and the rows about them in the README."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tinyformer.programs.findings.files import QUESTIONS, Finding
from tinyformer.programs.findings.outcomes import Measurement
from tinyformer.programs.findings.statements import difference, statement_of
from tinyformer.programs.findings.verdicts import HOLDS, summary

PAGE = "findings.md"  # the page of all findings, next to the folder of figures

HEAD = """\
# Findings

Claims of papers about attention, tested on small models. `conf/finding/NAME.yaml` states the clauses, the protocol, and
the band in which each measured quantity is expected; `NAME.json` has every measurement, `NAME.records.json` what was
read of the runs.

A clause **holds** if, for each of its quantities, the 95 % t-interval of the mean over seeds lies in the band; it
**fails** if one interval lies outside its band; it is otherwise **inconclusive**, and **not testable** if a seed misses
a premise. Counts, exact comparisons, and time and memory in cost (without a band) have one seed and no interval. Of a
hundred intervals, five miss the true mean by chance. Ratios are averaged by their logarithms (in circuit as they are),
shares by the arcsine of their root. Seeds differ in weights and order, not in what is held out. "Stated before": the
statement is unchanged since the first run. "Earlier" are verdicts on earlier statements; the notes in the file tell
what was changed, and why.

```bash
tinyformer findings
tinyformer findings cost
tinyformer findings cost --jobs 2
```

The first command lists them, with the published verdicts and yours; the second makes the missing runs of one and prints
its verdict; `tinyformer findings all` does so for each. Interrupted, they continue. The third makes two runs at a time
(`pip install 'tinyformer[sweep]'`). Runs are kept in `outputs/findings` by config and data, your results in `results`
there: after changing the model's code, delete the runs, but not the statements in `statements.json`.
"""


def page(findings: Sequence[Finding], outcomes: Mapping[str, Sequence[Measurement]], folder: str) -> str:
    """The page of all findings, in Markdown, with the folder of figures relative to it."""
    parts = [HEAD]
    for question, asked in QUESTIONS.items():
        of_question = [finding for finding in findings if finding.question == question]
        if of_question:
            parts.append(f"## {asked}\n")
            parts += [_section(finding, outcomes.get(finding.name, []), folder) for finding in of_question]
    return "\n".join(parts)


def headlines(findings: Sequence[Finding], outcomes: Mapping[str, Sequence[Measurement]]) -> list[str]:
    """Rows of a table in Markdown: for each question the finding that answers it, its effect and its verdicts."""
    return [
        f"| `{finding.name}` | {takeaway_of(finding, last)} | {summary(last['verdicts'])} |"
        for question in QUESTIONS
        for finding in findings
        for last in outcomes.get(finding.name, [])[-1:]
        if finding.is_headline and finding.question == question
    ]


def takeaway_of(finding: Finding, last: Measurement) -> str:
    """The takeaway with the measured numbers; the title, if none was written for these verdicts."""
    if finding.concluded != last["verdicts"] or not is_current(finding, last):
        return f"{finding.title}."
    return finding.takeaway.format_map({key: shown(float(check["mean"]), 2) for key, check in last["checks"].items()})


def is_current(finding: Finding, last: Measurement) -> bool:
    """Return True if a measurement is that of the claim, bands, protocol and versions of now."""
    return bool(statement_of(finding) == last["statement"])


def band(check: Mapping[str, Any]) -> str:
    """The band of a check, or of what was measured: "≥ 0.9", "0.01 to 0.06", "= 1", or nothing without one."""
    low, high = (None if check[key] is None else f"{check[key]:g}" for key in ("at_least", "at_most"))
    if low is None or high is None:
        return f"≥ {low}" if low else f"≤ {high}" if high else ""
    return f"= {low}" if low == high else f"{low} to {high}"


def shown(value: float, digits: int = 3) -> str:
    """A number; "never" for a level that was not reached."""
    rounded = f"{value:.{digits}g}"
    return "never" if value == math.inf else rounded if "e+" not in rounded else f"{float(rounded):,.0f}"


def _section(finding: Finding, measurements: Sequence[Measurement], folder: str) -> str:
    paper = f"[{finding.paper.name}](https://arxiv.org/abs/{finding.paper.arxiv})"
    if not measurements:
        return f"### {finding.name}\n\n{finding.claim} ({paper}) **Unmeasured.** It costs {finding.cost.strip()}.\n"
    last = measurements[-1]
    parts = [
        f"### {finding.name}\n\n{takeaway_of(finding, last)} ({paper})",
        "\n".join(lines_of(last, in_full=False)),
        f"![{finding.name}]({folder}/{finding.name}.png)",
        " ".join(_history(finding, measurements)),
    ]
    return "\n\n".join(parts) + "\n"


def lines_of(last: Measurement, in_full: bool = True) -> Iterator[str]:
    """Each clause with its verdict and what decides it, then the premises of all clauses; in full with those met."""
    checks = [check for check in last["checks"].values() if in_full or not _is_met(check)]
    for clause, verdict in last["verdicts"].items():
        yield f"- **{verdict.capitalize()}**: {last['statement'][f'clauses.{clause}']}"
        yield from (f"    - {_told(check)}" for check in checks if check["clause"] == clause)
    yield from (f"- {_told(check)}" for check in checks if check["clause"] is None and band(check))


def _is_met(check: Mapping[str, Any]) -> bool:
    return bool(check["premise"] and check["verdict"] == HOLDS)


def _told(check: Mapping[str, Any]) -> str:
    mean, interval = shown(float(check["mean"])), check["interval"]
    if interval and interval[0] < interval[1]:
        mean += f" [{', '.join(map(shown, interval))}]"
    premise = f"premise, {'met' if _is_met(check) else 'missed by a seed'}: " if check["premise"] else ""
    return f"{check['name']}: {mean} ({premise}{band(check)})"


def _history(finding: Finding, measurements: Sequence[Measurement]) -> Iterator[str]:
    """The time of a measurement, the statement before it, as the records say, and earlier measurements."""
    *earlier, last = measurements
    stated, seeds = [run["statement"] for run in last["runs"]], len({run["seed"] for run in last["runs"]})
    order = ", stated before" if {*stated} == {last["digest"]} else ""
    yield f"{last['time'][:10]}, {seeds} seed{'s' * (seeds > 1)}{order}."
    for digest, known in last["earlier"].items():
        changed = difference(known["statement"], last["statement"])
        yield f"**When {stated.count(digest)} of the runs started, the file said otherwise: {changed}.**"
    if unknown := sum(digest not in (last["digest"], *last["earlier"]) for digest in stated):
        yield f"What was stated before {unknown} of the runs is not recorded."
    if changed := difference(last["statement"], statement_of(finding)):
        yield f"**Its file or code was changed after this measurement: {changed}.**"
    before = [
        summary(one["verdicts"]) + " (the same statement)" * (one["statement"] == last["statement"]) for one in earlier
    ]
    if before:
        yield f"Earlier: {'; '.join(before)}."
