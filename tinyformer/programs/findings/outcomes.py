"""The measurements of a finding, with the statement before each, and the files of its runs."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from tinyformer.config.errors import ConfigError
from tinyformer.config.keys import format_value
from tinyformer.files import write_whole
from tinyformer.programs.findings.files import Finding
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
from tinyformer.programs.findings.statements import read_statements, statement_of
from tinyformer.programs.findings.verdicts import Measured, measure, verdicts

Measurement: TypeAlias = dict[str, Any]  # one of the list in `NAME.json`


def conclude(finding: Finding, planned: Sequence[PlannedRun], folder: Path) -> Measurement:
    """Measure a finding whose runs have ended; write `NAME.records.json`, `NAME.png` and, last, `NAME.json`."""
    from tinyformer.programs.findings.figure import CAPTION, draw
    from tinyformer.report import save_png  # these need torch and matplotlib

    facts = facts_of(planned)
    named = [check.of for check in finding.checks.values()] + [curve.of for curve in finding.curves]
    # What is kept of the runs is what is measured, so that a reader computes the same.
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
    """A finding as it was stated, what was measured, and when, where and by which code each of its runs was made."""
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
                "interval": one.interval and list(one.interval),  # as JSON has it
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
    """All measurements, the last one last, by the name of the finding."""
    paths = {name: folder / f"{name}.json" for name in names}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}


def kept_records(folder: Path, name: str, measurement: Measurement) -> list[Records]:
    """The records of a measurement's runs, as far as they were measured: for each seed, by the name of the run."""
    packed_runs, by_seed = _all_records(folder, name)[_key(measurement)], dict[int, dict[str, Record]]()
    for run, plain in zip(measurement["runs"], packed_runs, strict=True):
        by_seed.setdefault(run["seed"], {})[run["run"]] = unpacked(plain)
    return list(by_seed.values())


def refuse_links(folder: Path, page: Path, names: Iterable[str]) -> None:
    """Refuse links in place of the files that findings write: they lead anywhere, in an untrusted folder."""
    files = [folder / f"{name}.{suffix}" for name in names for suffix in ("records.json", "png", "json")]
    for path in (folder, page, *files):
        if path.is_symlink():
            raise ConfigError(f"--results={format_value(folder)}: {path} is a symbolic link; remove it.")


def _picture(finding: Finding, planned: Sequence[PlannedRun]) -> tuple[str, Path] | None:
    """The title and the file of the picture of the first seed's run; of several files, the last."""
    if finding.picture is None:
        return None
    run = next(run for run in planned if run.name == finding.picture.run)
    files = [path for place in (run.analysed, run.folder) if place for path in sorted(place.glob(finding.picture.file))]
    if not files:
        raise ConfigError(f"{finding.name}.yaml: picture.file={finding.picture.file}: {run.folder} has no such file.")
    return finding.picture.name, files[-1]


def _all_records(folder: Path, name: str) -> dict[str, list[Any]]:
    """The packed records of the runs of each measurement, by its `_key`."""
    path = folder / f"{name}.records.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _key(measurement: Measurement) -> str:
    return f"{measurement['time']} {measurement['digest']}"


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
