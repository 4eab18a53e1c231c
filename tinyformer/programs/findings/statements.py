"""The statement of a finding before its first run, and its later changes.

A statement has the claim, the bands, the protocol, the evaluation, and the versions of what computes its quantities. It
is kept when the program first sees it, and each run records the statements that were in force when it started.
"""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

from hydra.utils import get_class

from tinyformer.config.conf import config_dir
from tinyformer.config.folder import held
from tinyformer.files import load_plain_yaml, write_whole
from tinyformer.programs.findings.files import Finding
from tinyformer.programs.findings.quantities import VERSIONS
from tinyformer.programs.findings.records import digest_of, sources

Statement: TypeAlias = dict[str, Any]  # plain values by names such as "checks.one_head.at_least"

MANY_CHANGES = 3  # more are not listed one by one


def statement_of(finding: Finding) -> Statement:
    """The part of a finding that must not change after the first run. Names of checks, reasons and notes may."""
    stated: Statement = {f"clauses.{key}": text.strip() for key, text in finding.clauses.items()}
    for key, check in finding.checks.items():
        values = check.model_dump(exclude={"name"}, exclude_defaults=True)
        stated |= {f"checks.{key}.{name}": value for name, value in values.items()}
        stated[f"version of {check.quantity}"] = VERSIONS[check.quantity]
    stated |= {f"runs.{run}": words for run, words in finding.runs.items()}
    stated |= finding.model_dump(include={"baseline", "seeds", "program"})
    stated |= {"evaluate": finding.evaluate} if finding.evaluate else {}
    stated |= {"is_exact": True} if finding.is_exact else {}
    return stated | versions_of(finding)


def versions_of(finding: Finding) -> dict[str, int]:
    """The versions of the measures of heads and of the analysis whose tables a finding measures."""
    from tinyformer.measures.formulas import VERSIONS as OF_MEASURES  # which needs torch

    versions = {f"version of {word}": _version(word) for word in finding.evaluate if word.startswith("analysis=")}
    named = [source for check in finding.checks.values() for source in sources(check.of) if "heads" in source]
    if named:
        versions["version of the measures of heads"] = max(OF_MEASURES.get(source["heads"], 1) for source in named)
    return versions


def difference(old: Statement, new: Statement) -> str:
    """The differences: "checks.one_head.at_least: 0.01, now 0.02"; of many the parts: "other baseline, checks"."""
    names = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
    if len(names) > MANY_CHANGES:
        parts = dict.fromkeys("versions" if " " in name else name.partition(".")[0] for name in names)
        return f"other {', '.join(parts)}"
    return "; ".join(f"{name}: {', now '.join(_only_different(old.get(name), new.get(name)))}" for name in names)


def keep_statements(findings: Iterable[Finding], runs: Path) -> None:
    """Keep what findings state, with the time, in the folder of the runs, unless it is kept; the last is in force."""
    runs.mkdir(parents=True, exist_ok=True)
    problem = "another process keeps its statements there; run the same command again"
    with held(runs / ".statements.lock", f"--runs={runs}: {problem}."):
        stated = read_statements(runs)
        for finding in findings:
            of_finding, statement = stated.setdefault(finding.name, {}), statement_of(finding)
            digest = digest_of(statement)
            of_finding[digest] = of_finding.pop(digest, {"time": now(), "statement": statement})
        write_whole(runs / "statements.json", json.dumps(stated, indent=1) + "\n")


def read_statements(runs: Path) -> dict[str, dict[str, Any]]:
    """The time and the statement, by the name of the finding and the hash; the last of a finding is in force."""
    path = runs / "statements.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def in_force(runs: Path) -> dict[str, str]:
    """The hash of the statement that is in force, by the name of the finding."""
    return {name: list(of_finding)[-1] for name, of_finding in read_statements(runs).items()}


def now() -> str:
    """The time in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _version(word: str) -> int:
    """The version of an analysis of `conf/analysis`; 1 of what has none."""
    path = config_dir() / "analysis" / f"{word.removeprefix('analysis=')}.yaml"
    if path.stem not in (known.stem for known in path.parent.glob("*.yaml")):
        return 1
    return getattr(get_class(load_plain_yaml(path.read_text(encoding="utf-8"))["_target_"]), "version", 1)


def _only_different(old: Any, new: Any) -> list[str]:
    """Two values as text: of lists the elements that the other lacks, unless only their order differs."""
    shown = []
    for value, other in ((old, new), (new, old)):
        text = "" if value is None else str(value)
        if isinstance(value, list):
            is_reordered = isinstance(other, list) and sorted(map(str, value)) == sorted(map(str, other))
            text = " ".join(str(one) for one in value if is_reordered or one not in (other or []))
        shown.append(text or "nothing")
    return shown
