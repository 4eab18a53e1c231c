"""What a finding states before its first run, and whether it was changed after it.

A statement has the claim, the bands, the protocol, the evaluation, and the versions of what computes its quantities. It
is kept when the program first sees it, and each run records the statements that were in force when it started.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from hydra.utils import get_class

from tinyformer.analysis.measures.measures import VERSION
from tinyformer.config.conf import config_dir
from tinyformer.files import atomic_write, load_plain_yaml
from tinyformer.programs.findings.files import Finding
from tinyformer.programs.findings.quantities import VERSIONS

Statement: TypeAlias = dict[str, Any]  # plain values by names such as "checks.one_head.at_least"


MANY_CHANGES = 3  # more are not told one by one


def statement_of(finding: Finding) -> Statement:
    """What must not change after the first run. Names of checks, reasons and notes may."""
    stated: Statement = {f"clauses.{key}": text.strip() for key, text in finding.clauses.items()}
    for key, check in finding.checks.items():
        values = check.model_dump(exclude={"name"}, exclude_defaults=True)
        stated |= {f"checks.{key}.{name}": value for name, value in values.items()}
        stated[f"version of {check.quantity}"] = VERSIONS[check.quantity]
    stated |= {f"runs.{run}": words for run, words in finding.runs.items()}
    stated |= finding.model_dump(include={"baseline", "seeds", "program", "evaluate"}, exclude_none=True)
    for word in finding.evaluate or []:
        if word.startswith("analysis="):
            stated[f"version of {word}"] = _version(word.removeprefix("analysis="))
    if "'heads'" in str([check.of for check in finding.checks.values()]):
        stated["version of the measures of heads"] = VERSION
    return stated


def digest_of(stated: Any) -> str:
    """A hash of plain values."""
    return hashlib.sha256(json.dumps(stated, sort_keys=True, default=str).encode()).hexdigest()[:12]


def difference(old: Statement, new: Statement) -> str:
    """What differs: "checks.one_head.at_least: 0.01, now 0.02"; of many changes the parts: "other baseline, checks"."""
    names = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
    if len(names) > MANY_CHANGES:
        parts = dict.fromkeys("versions" if " " in name else name.partition(".")[0] for name in names)
        return f"other {', '.join(parts)}"
    pairs = [(name, old.get(name), new.get(name)) for name in names]
    return "; ".join(f"{name}: {_shown(one, other)}, now {_shown(other, one)}" for name, one, other in pairs)


def state(findings: Iterable[Finding], kept: Path) -> None:
    """Keep the statements of findings that are new, with the time, in the folder of the runs."""
    stated, before = read_statements(kept), json.dumps(read_statements(kept))
    for finding in findings:
        of_finding, statement = stated.setdefault(finding.name, {}), statement_of(finding)
        digest = digest_of(statement)
        # The last is in force: one that comes back is stated anew.
        of_finding[digest] = of_finding.pop(digest, {"time": now(), "statement": statement})
    if json.dumps(stated) != before:
        kept.mkdir(parents=True, exist_ok=True)
        with atomic_write(kept / "statements.json") as path:
            path.write_text(json.dumps(stated, indent=1) + "\n", encoding="utf-8")


def read_statements(kept: Path) -> dict[str, dict[str, Any]]:
    """The time and the statement, by the name of the finding and the hash; the last of a finding is in force."""
    path = kept / "statements.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def in_force(kept: Path) -> dict[str, str]:
    """The hash of the statement that is in force, by the name of the finding."""
    return {name: list(of_finding)[-1] for name, of_finding in read_statements(kept).items()}


def now() -> str:
    """The time in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _version(analysis: str) -> int:
    path = config_dir() / "analysis" / f"{analysis}.yaml"
    target = load_plain_yaml(path.read_text(encoding="utf-8"))["_target_"]
    return getattr(get_class(target), "version", 1)


def _shown(value: Any, other: Any) -> str:
    """A value, or, of two lists, the elements that the other lacks."""
    if isinstance(value, Sequence) and isinstance(other, Sequence) and not isinstance(value, str):
        value = [one for one in value if one not in other]
    if isinstance(value, Mapping):
        return json.dumps(value)
    return "nothing" if value in (None, []) else " ".join(map(str, value)) if isinstance(value, list) else str(value)
