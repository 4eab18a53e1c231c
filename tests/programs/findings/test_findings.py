"""`tinyformer findings`, from a file to its verdict; mechanisms that are broken on purpose make a finding fail."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from commands import ROOT, Ended, Program

from tinyformer.analysis import ResidualSurgery
from tinyformer.config.folder import held
from tinyformer.errors import relative_path
from tinyformer.programs.findings.files import Finding, finding_names, read_finding, trust
from tinyformer.programs.findings.outcomes import kept_records, page, read_outcomes
from tinyformer.programs.findings.quantities import VERSIONS
from tinyformer.programs.findings.records import PlannedRun, records_of
from tinyformer.programs.findings.running import plan, run_all
from tinyformer.programs.findings.verdicts import FAILS, HOLDS, INCONCLUSIVE, measure, statement_of

MINE = """\
title: Two layers have more parameters than one
paper: {name: A 2020, arxiv: "2001.00001"}
clauses: {more: They do.}
baseline: [data=text, data.files=BOOK, tokenizer=char, data.validation_fraction=0.1, model.num_heads=2,
  model.d_model=16, model.max_seq_len=16, data.batch_size=4, trainer.max_steps=STEPS, trainer.val_check_interval=50,
  trainer.precision=32-true, generate.num_tokens=3, callbacks.attention.num_tokens=6]
runs: {one: [model.num_layers=1], two: [model.num_layers=2]}
seeds: [0, 1]
evaluate: [analysis=heads, analysis.num_windows=4, data.files=BOOK]
checks:
  ratio: {name: ratio, quantity: ratio, of: {run: two, than: one, source: {metric: num_parameters}}, clause: more,
    at_least: 1.1, scale: log}
  change: {name: change, quantity: value, of: {run: two, source: {table: ablation, column: change, over: median}}}
curves: [{name: validation loss, of: {metric: val/loss}}]
picture: {run: two, file: "attention/step_*.png", name: maps}
why: W
cost: seconds
takeaway: "{ratio} times as many."
concluded: {more: holds}
"""


@pytest.mark.slow
def test_every_run_of_every_finding_composes(tmp_path):
    for name in finding_names():
        (finding,) = trust([read_finding(name)], [])  # it is data
        planned = plan(finding.model_copy(update={"seeds": finding.seeds[:1]}), tmp_path)
        assert len({(run.folder, run.analysed) for run in planned}) == len(finding.runs)  # no two are alike


@dataclass(frozen=True)
class Place:
    """A folder with findings of a test's own, and the program in it."""

    folder: Path
    book: Path

    def add(self, name: str, text: str, steps: int) -> None:
        """Add a finding."""
        (self.folder / "files").mkdir(exist_ok=True)
        contents = text.replace("BOOK", str(self.book)).replace("STEPS", str(steps))
        (self.folder / "files" / f"{name}.yaml").write_text(contents)

    def start(self, name: str, *words: str) -> subprocess.Popen[str]:
        """Start the program."""
        folders = ["--files=files", "--runs=runs", "--results=results"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        if "--jobs" in words:  # which divides the threads of the machine among its jobs unless their number is given
            del environment["OMP_NUM_THREADS"]
        command = [sys.executable, "-m", "tinyformer", "findings", name, *folders, *words]
        pipes: dict[str, Any] = {"stdout": PIPE, "stderr": PIPE, "text": True, "start_new_session": True}
        return subprocess.Popen(command, cwd=self.folder, env=environment, **pipes)

    def stop(self, name: str, *words: str, by: int) -> str:
        """Stop the program when a run has ended and another has saved a checkpoint; return its errors."""
        begun = self.start(name, *words)
        while not self.kept() or len(list(self.folder.glob("runs/train-*/checkpoints/last.ckpt"))) <= len(self.kept()):
            assert begun.poll() is None
            time.sleep(0.02)
        (os.killpg if by == signal.SIGINT else os.kill)(begun.pid, by)  # Ctrl-C reaches all processes of a terminal
        try:
            # Until the processes that it has started, which write there too, have ended: long before their runs would.
            errors = begun.communicate(timeout=10)[1]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(begun.pid, signal.SIGKILL)
        assert begun.returncode in (-by, 128 + by)
        return errors

    def kept(self) -> dict[Path, str]:
        """The last file of each run that has ended, its analysis included."""
        return {path: path.read_text() for path in self.folder.glob("runs/train-*/evaluate-*/ended.json")}


@pytest.fixture
def place(tmp_path: Path, book: Path) -> Place:
    return Place(tmp_path, book)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("jobs", "by"), [([], signal.SIGINT), pytest.param(["--jobs", "2"], signal.SIGKILL, marks=pytest.mark.nightly)]
)
def test_a_stopped_finding_continues_and_repeats_no_run(place: Place, call: Program, jobs: list[str], by: int) -> None:
    again = "findings mine --files=files --runs=runs --results=results"
    place.add("mine", MINE, 100)
    errors = place.stop("mine", *jobs, by=by)
    assert ("Stopped. The same command continues" in errors) is (by == signal.SIGINT)
    assert "Traceback" not in errors
    before = place.kept()
    assert 0 < len(before) < 4
    assert not [*place.folder.glob("results/*"), *place.folder.glob("findings.md")]
    assert call(again).out.count("made before in") == len(before)
    assert before.items() <= place.kept().items()
    assert call(again).out.count("made before in") == 4
    (outcome,) = json.loads((place.folder / "results" / "mine.json").read_text())  # one, though measured twice
    assert outcome["verdicts"] == {"more": HOLDS}
    assert [len(one["values"]) for one in outcome["checks"].values()] == [2, 2]
    assert (place.folder / "results" / "mine.png").stat().st_size > 5_000
    page = (place.folder / "findings.md").read_text()
    assert "    - ratio: 1.87 (≥ 1.1)\n" in page
    assert ", stated before." in page
    if jobs:
        return
    ended = next(place.folder.glob("runs/train-*/ended.json"))
    ended.unlink()  # as if killed between its results and the end
    assert call(again).out.count("made before in") == 3
    spent = json.loads(ended.with_name("results.json").read_text())["seconds"]
    assert json.loads(ended.read_text())["seconds"] == pytest.approx(spent, abs=0.1)


@pytest.mark.nightly
def test_a_failed_run_is_told_and_stops_no_other(place: Place, call: Program) -> None:
    """Of findings that share their training."""
    one_seed = MINE.replace("seeds: [0, 1]", "seeds: [0]")
    place.add("mine", one_seed, 4)
    place.add("twin", one_seed.replace("num_windows=4", "num_windows=2"), 4)
    place.add("wrong", one_seed.replace("model.num_layers=1]", "model.num_heads=3]"), 4)
    ended = call("findings all --files=files --runs=runs --results=results")
    assert ended.code == 2
    assert "wrong/one, seed 0: Error: model.num_heads=3: " in ended.err
    assert ended.err.count("Error") == 1
    assert "wrong: not measured; runs that have not ended: 1." in ended.err
    assert len(list(place.folder.glob("runs/train-*/ended.json"))) == 2
    assert len(list(place.folder.glob("runs/train-*/evaluate-*/ended.json"))) == 4
    for name in ("mine", "twin"):
        (one,) = json.loads((place.folder / "results" / f"{name}.json").read_text())
        assert {run["statement"] for run in one["runs"]} == {one["digest"]}


@pytest.fixture
def mine(place: Place, call: Program) -> Program:
    """Run the finding with one seed in this process, with some text replaced."""

    def run(words: str = "", old: str = "", new: str = "") -> Ended:
        place.add("mine", MINE.replace(old, new).replace("seeds: [0, 1]", "seeds: [0]"), 4)
        return call(f"findings mine {words} --files=files --runs=runs --results=findings")

    return run


@pytest.mark.slow
def test_a_class_of_ones_own_is_named_on_the_command_line(mine: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path.cwd())
    Path("own_score.py").write_text("from tinyformer.nn import ScaledDotScore\n\nclass Mine(ScaledDotScore): ...\n")
    own = "attention.score=own_score.Mine"
    change = ("[model.num_layers=2]", f"[model.num_layers=2, {own}]")
    assert f"mine.yaml: says {own}, which calls 'own_score.Mine'" in mine("", *change).err
    assert "seed=1: no file of these findings has this override." in mine(f"{own} seed=1", *change).err
    assert not Path("runs").exists()
    assert mine(own, *change).code == 0
    assert json.loads(Path("findings/mine.json").read_text())[0]["verdicts"] == {"more": INCONCLUSIVE}  # of one seed
    assert Path("findings.md").read_text().startswith("# Findings")


def test_a_file_of_a_finding_is_data_and_no_link_is_followed(mine: Program) -> None:
    called = "+callbacks.x={_target_: os.mkdir, path: made}"
    for old, new in {"[model.num_layers=2]": f'["{called}"]', "analysis=heads": "analysis._target_=os.mkdir"}.items():
        ended = mine("", old, new)
        assert (ended.code, "os.mkdir" in ended.err, "add it to the command" in ended.err) == (2, True, True)
    names = "findings findings.md findings/mine.json findings/mine.records.json findings/mine.png runs/x"
    for name in names.split():
        link = Path(name)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to("elsewhere")
        ended = mine()
        assert (ended.code, f"{name} is a symbolic link" in ended.err) == (2, True)
        link.unlink()
    assert {path.name for path in Path().iterdir()} == {"book.txt", "files", "findings", "runs"}


def test_a_run_that_another_process_makes_is_refused(tmp_path, capfd):
    run = PlannedRun("cost", "heads_1", 0, "costs", [], tmp_path / "run", [])
    with held(tmp_path / ".run.ended.lock", ""):
        assert run_all([run]) == 2
    sentence = "another process is making this run; run the same command again when it has ended."
    told = f"[1/1] cost/heads_1, seed 0: Error: {relative_path(run.folder)}: {sentence}\n"
    printed, said = capfd.readouterr()
    assert (printed, told in said) == ("", True)  # loggers of other tests may have closed streams
    assert not run.folder.exists()


IN_BF16 = ["variants=mha", "masks=full", "dtypes=bf16", "lengths=128,256"]

# By finding: the check that is then outside of its band; what its runs are instead, or the one of its runs that all of
# them are, or what all are changed by. A few steps show it, as they do not where the mechanism has to be learnt.
BROKEN: dict[str, dict[str, Any]] = {
    "alignment": {"fails": "additive"},
    "circuit": {"fails": "all"},
    "cost": {"fails": "filled", "runs": {"kv_heads_8": []}},
    "dispersion": {"fails": "less", "alike": "softmax"},
    "entropy": {"fails": "loss", "alike": "normed_high"},
    "exact": {"fails": "error", "baseline": IN_BF16, "runs": {"kernels": ["backends=flash"]}},
    "forgetting": {"fails": "rotary", "alike": "forgetting"},
    "grokking": {"fails": "generalises"},
    "grouped": {"fails": "mqa", "runs": {"mqa": ["attention=mha", "optimizer.lr=0"]}, "steps": 20},
    "heads": {"fails": "one", "alike": "heads_8"},
    "induction": {"fails": "two_layers"},
    "longer": {"fails": "sinusoidal", "alike": "alibi"},
    "nope": {"fails": "short_none"},
    "rank": {"fails": "residual", "alike": "attention_with_skips"},
    "recall": {"fails": "attention"},
    "recurrence": {"fails": "lstm", "alike": "mha"},
    "redundancy": {"fails": "trained"},
    "relative": {"fails": "shaw", "alike": "sinusoidal"},
    "robust": {"fails": "trained"},
    "scale": {"fails": "unscaled", "alike": "scaled_64"},
    "shifted": {"fails": "shifted", "alike": "plain"},
    "sinks": {"fails": "sink"},
    "skips": {"fails": "muon_8", "alike": "muon_skips_8"},
    "unscaled": {"fails": "adamw_128", "alike": "adamw_scaled_128"},
    "value_residual": {"fails": "lower", "alike": "plain"},
    "warmup": {
        "fails": "post",
        "runs": {f"post_{n}": ["block=pre_norm", f"model.num_layers={n}"] for n in (2, 4, 8, 16)},
    },
    "yarn": {"fails": "linear", "evaluations": {}},
}


def broken(name: str) -> Finding:
    """A finding whose mechanism is taken away, with one seed, short runs, and of its checks the one that fails."""
    finding, changed = read_finding(name), BROKEN[name]
    runs = finding.runs | changed.get("runs", {})
    if "alike" in changed:
        runs = dict.fromkeys(runs, runs[changed["alike"]])
    steps = changed.get("steps", 3)
    short = [f"trainer.max_steps={steps}", f"trainer.val_check_interval={steps}", "schedule.warmup_steps=1"]
    baseline = [*changed.get("baseline", finding.baseline), *(short if finding.program == "train" else [])]
    checks = {changed["fails"]: finding.checks[changed["fails"]]}
    runs = {run: words for run, words in runs.items() if f"'{run}'" in str([check.of for check in checks.values()])}
    evaluate = finding.evaluate and [re.sub(r"(?<=num_windows=)\d+", "4", word) for word in finding.evaluate]
    evaluations = changed.get("evaluations", finding.evaluations)
    changes = {"runs": runs, "baseline": baseline, "checks": checks, "seeds": [0], "evaluate": evaluate}
    return finding.model_copy(update=changes | {"evaluations": evaluations})


def test_every_finding_is_broken() -> None:
    assert sorted(BROKEN) == finding_names()


LONGEST = ("rank", "warmup", "grouped", "robust", "scale", "longer")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name in LONGEST else []) for name in BROKEN]
)
def test_a_finding_without_its_mechanism_fails(name: str, tmp_path: Path) -> None:
    finding = broken(name)
    planned = plan(finding, tmp_path)
    assert run_all(planned) == 0
    records = records_of(planned)
    (measured,) = measure(finding, records * 2).values()  # as of two seeds
    assert measured.verdict == FAILS, measured


@pytest.mark.slow
def test_what_was_changed_after_the_first_run_is_printed(mine: Program) -> None:
    """A threshold within a quantity; a name is not stated."""
    assert mine().code == 0
    mine("", "name: ratio", "name: quotient")
    assert ", stated before." in Path("findings.md").read_text()
    assert mine("", "over: median", "over: largest").code == 0
    text = Path("findings.md").read_text()
    assert "'over': 'median'}}, now {'run': 'two'" in text
    assert "Earlier: inconclusive." in text
    for one in (kept := json.loads(Path("findings/mine.json").read_text())):  # all of which can be computed again
        assert [*map(len, kept_records(Path("findings"), "mine", one))] == [2]
    assert len(kept) == 2


def test_a_page_says_what_was_changed_after_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, kept = read_finding("rank"), read_outcomes(ROOT / "docs/pages/findings", ["rank"])["rank"]
    now = {"statement": statement_of(rank), "verdicts": dict.fromkeys(rank.clauses, HOLDS)}
    outcomes = {"rank": [kept[-1] | now]}
    assert "changed after" not in page([rank], outcomes, "findings")
    others = {key: check for key, check in rank.checks.items() if key != "residual"}
    changes: dict[str, dict[str, Any]] = {
        "baseline: nothing, now model.dropout=0.1": {"baseline": [*rank.baseline, "model.dropout=0.1"]},
        "baseline: experiment=gpt2, now nothing": {"baseline": rank.baseline[1:]},
        f"{rank.baseline[1]} {rank.baseline[0]}": {"baseline": [*rank.baseline[1::-1], *rank.baseline[2:]]},
        "other checks.": {"checks": others},
        "clauses.skips: Skip connections prevent it., now So.": {"clauses": rank.clauses | {"skips": "So."}},
        "version of value: 1, now 2": {},
        "version of analysis=residual: 1, now 3": {},
    }
    for told, change in changes.items():
        with monkeypatch.context() as patched:
            if told.endswith("now 2"):
                patched.setitem(VERSIONS, "value", 2)
            if told.endswith("now 3"):
                patched.setattr(ResidualSurgery, "version", 3, raising=False)
            text = page([rank.model_copy(update=change)], outcomes, "findings")
        assert "**Its file or code was changed after this measurement: " in text
        assert told in text
