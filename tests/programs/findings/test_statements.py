"""Statements are kept before runs, the page compares them with the records, and a raised version makes runs anew."""

from pathlib import Path
from typing import Any

import pytest

from tinyformer.analysis import ResidualSurgery
from tinyformer.config.errors import ConfigError
from tinyformer.config.folder import held
from tinyformer.programs.findings import verdicts
from tinyformer.programs.findings.files import Finding, read_finding
from tinyformer.programs.findings.outcomes import page
from tinyformer.programs.findings.records import PlannedRun, digest_of
from tinyformer.programs.findings.running import _recorded_start, plan
from tinyformer.programs.findings.verdicts import in_force, keep_statements, read_statements, statement_of

RANK = read_finding("rank")
SEEDS = " ".join(map(str, RANK.seeds))


def changed(at_most: float) -> Finding:
    residual = RANK.checks["residual"].model_copy(update={"at_most": at_most})
    return RANK.model_copy(update={"checks": RANK.checks | {"residual": residual}})


def started(folder: Path, name: str = "train-1") -> dict[str, Any]:
    return _recorded_start(PlannedRun("rank", "a", 0, "train", [], folder / name, []))


def test_a_run_keeps_what_was_stated_when_it_first_started(tmp_path: Path) -> None:
    keep_statements([RANK], tmp_path)
    first = started(tmp_path)
    assert first["statements"] == {"rank": digest_of(statement_of(RANK))}
    keep_statements([changed(0.9)], tmp_path)
    (tmp_path / "train-1").mkdir()  # killed, and continued
    assert started(tmp_path) == first
    (tmp_path / "train-1").rmdir()  # removed by hand, and made again
    assert started(tmp_path) == first
    assert started(tmp_path, "train-2")["statements"] == {"rank": digest_of(statement_of(changed(0.9)))}
    (tmp_path / "train-3").mkdir()  # of an earlier version
    assert started(tmp_path, "train-3") == {}


def test_statements_are_kept_once_and_the_last_is_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = [digest_of(statement_of(changed(at_most))) for at_most in (0.1, 0.2)]
    for second, at_most in enumerate((0.1, 0.2, 0.1)):
        monkeypatch.setattr(verdicts, "now", lambda second=second: f"at {second}")
        keep_statements([changed(at_most)], tmp_path)
        assert in_force(tmp_path) == {"rank": digests[second % 2]}
    kept = read_statements(tmp_path)["rank"]
    assert {digest: one["time"] for digest, one in kept.items()} == dict(zip(digests, ("at 0", "at 1"), strict=True))
    assert kept[digests[1]]["statement"] == statement_of(changed(0.2))
    with held(tmp_path / ".statements.lock", ""), pytest.raises(ConfigError, match="another process is storing"):
        keep_statements([RANK], tmp_path)


@pytest.mark.parametrize(
    ("recorded", "told"),
    [
        (["now", "now"], "2 seeds, stated before."),
        (["now", "old"], f"2 seeds. **When 1 of the runs started, the file said otherwise: seeds: 7, now {SEEDS}.**"),
        (["old", "old"], "2 seeds. **When 2 of the runs started,"),
        (["now", None], "2 seeds. What was stated before 1 of the runs is not recorded."),
        (["now", "lost"], "2 seeds. What was stated before 1 of the runs is not recorded."),
    ],
)
def test_the_page_says_what_the_records_say(recorded: list[str | None], told: str) -> None:
    statement = statement_of(RANK)
    one = {
        "time": "2026-11-27",
        "verdicts": {},
        "checks": {},
        "digest": "now",
        "statement": statement,
        "earlier": {"old": {"time": "", "statement": statement | {"seeds": [7]}}} if "old" in recorded else {},
        "runs": [{"folder": str(at), "seed": at, "statement": digest} for at, digest in enumerate(recorded)],
    }
    text = page([RANK], {"rank": [one]}, "findings")
    assert told in text
    assert ("stated before." in text) == (recorded == ["now", "now"])


def test_a_raised_version_makes_the_runs_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what was computed in the old way is not called new."""
    finding = RANK.model_copy(update={"seeds": [0], "runs": {"with_skips": []}})
    (before,) = plan(finding, tmp_path)
    monkeypatch.setattr(ResidualSurgery, "version", 2, raising=False)
    (after,) = plan(finding, tmp_path)
    assert before.folder != after.folder


def test_a_file_that_changes_makes_its_runs_and_analyses_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its name; and a folder that is called as a choice is none of the data."""
    monkeypatch.chdir(tmp_path)
    Path("pydoc").mkdir()
    words = {"text": ["data=text", "data.files=a.txt"], "pydoc": ["data=pydoc"], "copy": ["data=copy"]}
    read = {"baseline": [], "seeds": [0], "runs": words, "evaluate": ["analysis=relations", "analysis.file=b.txt"]}
    finding, places = RANK.model_copy(update=read), []
    for a, b in (("old", "old"), ("new", "old"), ("new", "new"), ("old", "old")):
        Path("a.txt").write_text(a)
        Path("b.txt").write_text(b)
        Path("pydoc/a.txt").write_text(a)
        places.append([(run.folder, run.analysed.name) for run in plan(finding, tmp_path) if run.analysed])
    for number, is_anew in enumerate([True, False, False]):
        folders, analyses = (list(kind) for kind in zip(*(place[number] for place in places), strict=True))
        assert (folders[0] != folders[1]) == is_anew
        assert folders[1:] == [folders[1], folders[1], folders[0]]
        assert analyses == [analyses[0], analyses[0], analyses[2], analyses[0]]
        assert analyses[0] != analyses[2]
