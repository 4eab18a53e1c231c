"""Statements of findings, stored before any run, and verdicts, from the mean, interval and band of each quantity.

A statement has the claim, the bands, the protocol, the evaluation, and the versions of the code of its quantities. It
is stored when the program first loads it, and each run records the statements that were in force when it started.
"""

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from hydra.utils import get_class

from tinyformer.config.conf import config_dir, load_plain_yaml
from tinyformer.config.folder import held
from tinyformer.files import write_whole
from tinyformer.programs.findings.files import Check, Finding
from tinyformer.programs.findings.quantities import QUANTITIES, VERSIONS
from tinyformer.programs.findings.records import Records, digest_of, sources

HOLDS, FAILS, INCONCLUSIVE, NOT_TESTABLE = "holds", "fails", "inconclusive", "not testable"

SCALES: dict[str, tuple[Callable[[float], float], Callable[[float], float]]] = {
    "linear": (lambda value: value, lambda value: value),
    "log": (math.log, lambda value: math.exp(min(value, 700)) if value < math.inf else value),  # the largest float
    "share": (lambda share: math.asin(math.sqrt(share)), lambda angle: math.sin(min(max(angle, 0), math.pi / 2)) ** 2),
}
"""Functions to a scale on which values are averaged, and back: ratios by their logarithm, and shares from 0 to 1 by the
arcsine of their root, whose variance depends little on the share (Anscombe 1948)."""

MANY_CHANGES = 3  # more changes are not listed one by one


@dataclass(frozen=True)
class Measured:
    """A measured quantity, with its value for each seed.

    Args:
        is_exact: whether every seed gives the same value, so that one seed suffices.
    """

    check: Check
    values: tuple[float, ...]
    is_exact: bool = False

    @property
    def mean(self) -> float:
        """The mean over seeds on the check's scale; infinite if a value is infinite, nan if undefined."""
        to, back = SCALES[self.check.scale]
        try:
            return back(statistics.fmean(map(to, self.values)))
        except ValueError:  # a value outside the scale, such as 0 for the logarithm
            return math.nan

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean over 2 to 10 seeds, see `student_interval`.

        None if a value or the mean is not finite, or if there is one seed and `is_exact` is False.
        """
        if (len(self.values) == 1 and not self.is_exact) or not all(map(math.isfinite, (*self.values, self.mean))):
            return None
        if len({*self.values}) == 1:  # the way to the scale and back would round it
            return self.values[0], self.values[0]
        to, back = SCALES[self.check.scale]
        from tinyformer.measures.intervals import student_interval  # which needs torch

        low, high = student_interval([to(value) for value in self.values])
        return back(low), back(high)

    @property
    def verdict(self) -> str | None:
        """The verdict: "holds" if the interval lies in the band, "fails" if it lies beyond an end; None without a band.

        Otherwise it is "inconclusive". A premise holds if each seed's value lies in the band, else it fails.
        """
        if not self.check.has_band:
            return None
        if self.check.premise:
            return HOLDS if all(map(self.check.contains, self.values)) else FAILS
        if self.interval is None:
            return INCONCLUSIVE
        low, high = self.interval
        if self.check.contains(low) and self.check.contains(high):
            return HOLDS
        at_least, at_most = self.check.at_least, self.check.at_most
        is_beyond = (at_least is not None and high < at_least) or (at_most is not None and low > at_most)
        return FAILS if is_beyond else INCONCLUSIVE


def measure(finding: Finding, records: Sequence[Records]) -> dict[str, Measured]:
    """The quantities of a finding, given the records of each seed."""
    return {
        key: Measured(
            check, tuple(QUANTITIES[check.quantity](of_seed, **check.of) for of_seed in records), finding.is_exact
        )
        for key, check in finding.checks.items()
    }


def verdicts(finding: Finding, measured: Mapping[str, Measured]) -> dict[str, str]:
    """The verdict on each clause of a claim."""
    return {clause: _verdict(clause, list(measured.values())) for clause in finding.clauses}


def _verdict(clause: str, measured: Sequence[Measured]) -> str:
    """The verdict: not testable if a premise fails; else fails if a check fails, holds if all hold, or inconclusive."""
    premises = [one.verdict for one in measured if one.check.premise and one.check.clause in (None, clause)]
    found = [one.verdict for one in measured if not one.check.premise and one.check.clause == clause]
    if FAILS in premises:
        return NOT_TESTABLE
    if FAILS in found:
        return FAILS
    return HOLDS if {*found} == {HOLDS} else INCONCLUSIVE


def summary(of_clauses: Mapping[str, str]) -> str:
    """A summary of the verdicts on clauses: "holds", or "2 hold, 1 inconclusive"."""
    found = list(of_clauses.values())
    if len({*found}) == 1:
        return found[0]
    counts = {one: found.count(one) for one in (HOLDS, FAILS, INCONCLUSIVE, NOT_TESTABLE) if one in found}
    return ", ".join(f"{count} {one if count == 1 else one.removesuffix('s')}" for one, count in counts.items())


Statement: TypeAlias = dict[str, Any]  # plain values by names such as "checks.one_head.at_least"


def statement_of(finding: Finding) -> Statement:
    """The part of a finding that must not change after the first run. Names of checks, reasons and notes may change."""
    stated: Statement = {f"clauses.{key}": text.strip() for key, text in finding.clauses.items()}
    for key, check in finding.checks.items():
        values = check.model_dump(exclude={"name"}, exclude_defaults=True)
        stated |= {f"checks.{key}.{name}": value for name, value in values.items()}
        stated[f"version of {check.quantity}"] = VERSIONS[check.quantity]
    stated |= {f"runs.{run}": words for run, words in finding.runs.items()}
    stated |= finding.model_dump(include={"baseline", "seeds", "program"})
    stated |= {"evaluate": finding.evaluate} if finding.evaluate else {}
    stated |= {f"evaluations.{run}": words for run, words in finding.evaluations.items()}
    stated |= {"is_exact": True} if finding.is_exact else {}
    return stated | versions_of(finding)


def versions_of(finding: Finding) -> dict[str, int]:
    """The versions of the measures of heads and of the analysis whose tables a finding measures."""
    from tinyformer.measures.formulas import VERSIONS as OF_MEASURES  # which needs torch

    evaluated = [*finding.evaluate, *itertools.chain(*finding.evaluations.values())]
    versions = {f"version of {word}": _version(word) for word in evaluated if word.startswith("analysis=")}
    named = [source for check in finding.checks.values() for source in sources(check.of) if "heads" in source]
    if named:
        versions["version of the measures of heads"] = max(OF_MEASURES.get(source["heads"], 1) for source in named)
    return versions


def difference(old: Statement, new: Statement) -> str:
    """The differences as text: "checks.one_head.at_least: 0.01, now 0.02"; if many: "other baseline, checks"."""
    names = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
    if len(names) > MANY_CHANGES:
        parts = dict.fromkeys("versions" if " " in name else name.partition(".")[0] for name in names)
        return f"other {', '.join(parts)}"
    return "; ".join(f"{name}: {', now '.join(_only_different(old.get(name), new.get(name)))}" for name in names)


def keep_statements(findings: Iterable[Finding], runs: Path) -> None:
    """Store new statements of findings, with the time, in the folder of the runs; the last of a finding is in force."""
    runs.mkdir(parents=True, exist_ok=True)
    problem = "another process is storing statements there; run the same command again"
    with held(runs / ".statements.lock", f"--runs={runs}: {problem}."):
        stated = read_statements(runs)
        for finding in findings:
            of_finding, statement = stated.setdefault(finding.name, {}), statement_of(finding)
            digest = digest_of(statement)
            of_finding[digest] = of_finding.pop(digest, {"time": now(), "statement": statement})
        write_whole(runs / "statements.json", json.dumps(stated, indent=1) + "\n")


def read_statements(runs: Path) -> dict[str, dict[str, Any]]:
    """The stored statements and their times, by finding and hash; the last statement of a finding is in force."""
    path = runs / "statements.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def in_force(runs: Path) -> dict[str, str]:
    """The hash of the statement that is in force, by the name of the finding."""
    return {name: list(of_finding)[-1] for name, of_finding in read_statements(runs).items()}


def now() -> str:
    """The current time in UTC, such as "2026-01-31T12:00:00Z"."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _version(word: str) -> int:
    """The version of an analysis in `conf/analysis`; 1 if it has no version."""
    path = config_dir() / "analysis" / f"{word.removeprefix('analysis=')}.yaml"
    if path.stem not in (known.stem for known in path.parent.glob("*.yaml")):
        return 1
    return getattr(get_class(load_plain_yaml(path.read_text(encoding="utf-8"))["_target_"]), "version", 1)


def _only_different(old: Any, new: Any) -> list[str]:
    """Two values as text; for lists, only the elements that the other list lacks, unless only their order differs."""
    shown = []
    for value, other in ((old, new), (new, old)):
        text = "" if value is None else str(value)
        if isinstance(value, list):
            is_reordered = isinstance(other, list) and sorted(map(str, value)) == sorted(map(str, other))
            text = " ".join(str(one) for one in value if is_reordered or one not in (other or []))
        shown.append(text or "nothing")
    return shown
