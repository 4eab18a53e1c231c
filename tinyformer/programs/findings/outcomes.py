"""The stored measurements of a finding, each with its statement and records, and the page of all findings."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from tinyformer.config.conf import format_value
from tinyformer.config.errors import ConfigError
from tinyformer.files import write_whole
from tinyformer.programs.findings.files import QUESTIONS, Finding
from tinyformer.programs.findings.records import (
    PlannedRun,
    Record,
    Records,
    digest_of,
    facts_of,
    packed,
    records_of,
    unpacked,
)
from tinyformer.programs.findings.verdicts import (
    HOLDS,
    Measured,
    difference,
    measure,
    read_statements,
    statement_of,
    summary,
    verdicts,
)

Measurement: TypeAlias = dict[str, Any]  # an element of the list in `NAME.json`


def conclude(finding: Finding, planned: Sequence[PlannedRun], folder: Path) -> Measurement:
    """Measure a finding whose runs have ended; write `NAME.records.json`, `NAME.png` and, last, `NAME.json`."""
    from tinyformer.programs.findings.figure import CAPTION, draw
    from tinyformer.report import save_png  # these need torch and matplotlib

    facts = facts_of(planned)
    named = [check.of for check in finding.checks.values()] + [curve.of for curve in finding.curves]
    # Quantities are computed from the stored part of the records, so that a reader can compute them again.
    records = [{run: record.only(named) for run, record in of_seed.items()} for of_seed in records_of(planned)]
    measured = measure(finding, records)
    figure = draw(list(measured.values()), finding.curves, records, _picture(finding, planned))
    last = _measurement(finding, measured, facts, planned[0].folder.parent)
    packed_runs = [packed(record) for of_seed in records for record in of_seed.values()]
    kept = _all_records(folder, finding.name) | {_key(last): packed_runs}
    lines = (f"{json.dumps(key)}: [\n" + ",\n".join(map(json.dumps, runs)) + "\n]" for key, runs in kept.items())
    write_whole(folder / f"{finding.name}.records.json", "{\n" + ",\n".join(lines) + "\n}\n")
    save_png(figure, folder / f"{finding.name}.png", f"{finding.name} · {CAPTION}")
    before = read_outcomes(folder, [finding.name]).get(finding.name, [])
    if before and all(before[-1][key] == last[key] for key in ("statement", "runs")):  # measured again
        before = before[:-1]
    write_whole(folder / f"{finding.name}.json", json.dumps([*before, last], indent=1, ensure_ascii=False) + "\n")
    return last


def _measurement(
    finding: Finding, measured: Mapping[str, Measured], runs: list[dict[str, Any]], runs_folder: Path
) -> Measurement:
    """The measurement of a finding: its statement, values and verdicts, and the time, machine and code of each run."""
    statement, stated = statement_of(finding), read_statements(runs_folder).get(finding.name, {})
    digest = digest_of(statement)
    used = {run["statement"] for run in runs} - {digest}
    return {
        "time": max(run.get("analysis", run)["time"] for run in runs),
        "verdicts": verdicts(finding, measured),
        "checks": {
            key: {
                **one.check.model_dump(include={"name", "at_least", "at_most", "premise", "clause", "scale"}),
                "values": list(map(_plain, one.values)),
                "mean": _plain(one.mean),
                "interval": one.interval and list(one.interval),  # a list, as in JSON
                "verdict": one.verdict,
            }
            for key, one in measured.items()
        },
        "digest": digest,
        "statement": statement,
        "earlier": {old: text for old, text in stated.items() if old in used},
        "runs": runs,
    }


def read_outcomes(folder: Path, names: Iterable[str]) -> dict[str, list[Measurement]]:
    """All measurements in the order of time, by the name of the finding."""
    paths = {name: folder / f"{name}.json" for name in names}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}


def kept_records(folder: Path, name: str, measurement: Measurement) -> list[Records]:
    """For each seed, the stored records of a measurement's runs, by the name of the run."""
    packed_runs, by_seed = _all_records(folder, name)[_key(measurement)], dict[int, dict[str, Record]]()
    for run, plain in zip(measurement["runs"], packed_runs, strict=True):
        by_seed.setdefault(run["seed"], {})[run["run"]] = unpacked(plain)
    return list(by_seed.values())


def refuse_links(folder: Path, page: Path, names: Iterable[str]) -> None:
    """Refuse symbolic links at paths that findings write, since links in an untrusted folder may lead anywhere."""
    files = [folder / f"{name}.{suffix}" for name in names for suffix in ("records.json", "png", "json")]
    for path in (folder, page, *files):
        if path.is_symlink():
            raise ConfigError(f"--results={format_value(folder)}: {path} is a symbolic link; remove it.")


def _picture(finding: Finding, planned: Sequence[PlannedRun]) -> tuple[str, Path] | None:
    """The title of the picture, and its file from the run of the first seed; if several files match, the last one."""
    if finding.picture is None:
        return None
    run = next(run for run in planned if run.name == finding.picture.run)
    files = [path for place in (run.analysed, run.folder) if place for path in sorted(place.glob(finding.picture.file))]
    if not files:
        raise ConfigError(f"{finding.name}.yaml: picture.file={finding.picture.file}: {run.folder} has no such file.")
    return finding.picture.name, files[-1]


def _all_records(folder: Path, name: str) -> dict[str, list[Any]]:
    """The packed records of each measurement's runs, by the `_key` of the measurement."""
    path = folder / f"{name}.records.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _key(measurement: Measurement) -> str:
    return f"{measurement['time']} {measurement['digest']}"


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


PAGE = "findings.md"  # the page of all findings, next to the folder of figures

HEAD = """\
# Findings

Claims of papers about attention, tested on small models. `conf/finding/NAME.yaml` states the clauses, the protocol, and
the band in which each measured quantity is expected; `NAME.json` has every measurement, `NAME.records.json` the values
of the runs from which it was computed.

A clause **holds** if, for each of its quantities, the 95 % t-interval of the mean over seeds lies in the band; it
**fails** if one interval lies outside its band; it is otherwise **inconclusive**, and **not testable** if a seed misses
a premise. Counts, exact comparisons, and time and memory in cost (without a band) have one seed and no interval. Of a
hundred intervals, five miss the true mean by chance. Ratios are averaged by their logarithms (in circuit as they are),
shares by the arcsine of their root. Seeds differ in weights and order, not in held-out data. "Stated before": the
statement is unchanged since the first run. "Earlier" are verdicts on earlier statements; the notes in the file tell
what was changed, and why.

```bash
tinyformer findings
tinyformer findings cost
tinyformer findings cost --jobs 2
```

The first command lists all findings, with the published verdicts and yours. The second makes the missing runs of one
finding and prints its verdict; `tinyformer findings all` does so for each finding. After an interruption, the same
command continues. The third command makes two runs at a time (`pip install 'tinyformer[sweep]'`). Runs are stored in
`outputs/findings` by config and data, your results in `results` there. After changing the model's code, delete the
runs, but not the statements in `statements.json`.
"""


def page(findings: Sequence[Finding], outcomes: Mapping[str, Sequence[Measurement]], folder: str) -> str:
    """The page of all findings, in Markdown; `folder` is the path from the page to the folder of figures."""
    parts = [HEAD]
    for question, asked in QUESTIONS.items():
        of_question = [finding for finding in findings if finding.question == question]
        if of_question:
            parts.append(f"## {asked}\n")
            parts += [_section(finding, outcomes.get(finding.name, []), folder) for finding in of_question]
    return "\n".join(parts)


def takeaway_of(finding: Finding, last: Measurement) -> str:
    """The takeaway with the measured numbers, or the title if the finding has another statement or other verdicts."""
    if finding.concluded != last["verdicts"] or not is_current(finding, last):
        return f"{finding.title}."
    return finding.takeaway.format_map({key: shown(float(check["mean"]), 2) for key, check in last["checks"].items()})


def is_current(finding: Finding, last: Measurement) -> bool:
    """Return True if the claim, bands, protocol and versions have not changed since a measurement."""
    return bool(statement_of(finding) == last["statement"])


def band(check: Mapping[str, Any]) -> str:
    """The band of a stored check as text: "≥ 0.9", "0.01 to 0.06", "= 1", or an empty text without a band."""
    low, high = (None if check[key] is None else f"{check[key]:g}" for key in ("at_least", "at_most"))
    if low is None or high is None:
        return f"≥ {low}" if low else f"≤ {high}" if high else ""
    return f"= {low}" if low == high else f"{low} to {high}"


def shown(value: float, digits: int = 3) -> str:
    """A number as text; infinity as "never", since it stands for a level that a series does not reach."""
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
    """Each clause with its verdict and checks, then the shared premises; `in_full` includes premises that are met."""
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
    """Sentences about the date of a measurement, changes of its statement, and earlier measurements."""
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
