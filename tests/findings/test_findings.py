"""`tinyformer findings`, from a file to its verdict; mechanisms that are broken on purpose make a finding fail."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import ROOT

from tinyformer.findings.__main__ import main
from tinyformer.findings.files import Finding, finding_names, read_finding
from tinyformer.findings.running import plan, run_all
from tinyformer.findings.verdicts import FAILS, HOLDS, measure, verdict

MINE = """\
title: Two layers have more parameters than one
paper: {name: A 2020, arxiv: "2001.00001"}
claim: They do.
baseline: [data=text, data.files=BOOK, tokenizer=char, data.validation_fraction=0.1, model.num_heads=2,
  model.d_model=16, model.max_seq_len=16, data.batch_size=4, trainer.max_steps=STEPS, trainer.val_check_interval=50,
  trainer.precision=32-true, generate.num_tokens=3, callbacks.attention.num_tokens=6]
runs: {one: [model.num_layers=1], two: [model.num_layers=2]}
seeds: [0, 1]
evaluate: [analysis=heads, analysis.num_windows=4, data.files=BOOK]
checks:
  - {name: ratio, quantity: ratio, of: {run: two, than: one, source: {metric: num_parameters}}, at_least: 1.1}
  - {name: change, quantity: value, of: {run: two, source: {table: ablation, column: change, over: median}}}
why: W
refuted_by: R
cost: seconds
"""


def test_the_list_and_an_unknown_name(capsys, tmp_path):
    assert main(["--results", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in finding_names())
    assert out.count("unmeasured") == len(finding_names())
    assert main(["nothing"]) == 2
    assert "Findings: cost, diverse" in capsys.readouterr().err


@pytest.mark.slow
def test_every_run_of_every_finding_composes(tmp_path):
    for name in finding_names():
        finding = read_finding(name)
        folders = {run.folder for run in plan(finding.model_copy(update={"seeds": finding.seeds[:1]}), tmp_path)}
        assert len(folders) == len(finding.runs)  # no two are alike


@pytest.mark.slow
def test_a_finding_that_was_killed_goes_on_and_is_not_made_again(tmp_path: Path, book: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "mine.yaml").write_text(MINE.replace("BOOK", str(book)).replace("STEPS", "300"))
    words = [sys.executable, "-m", "tinyformer.findings", "mine", "--files=files", "--runs=runs", "--results=results"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    begun = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    # The first run has ended, and the second has saved a checkpoint.
    while len(list(tmp_path.glob("runs/train-*/checkpoints/last.ckpt"))) < 2 and time.monotonic() < deadline:
        assert begun.poll() is None
        time.sleep(0.02)
    begun.send_signal(signal.SIGKILL)
    begun.wait()
    (first,) = tmp_path.glob("runs/train-*/ended.json")
    before = first.read_text()
    assert not list(tmp_path.glob("results/*"))
    assert not (tmp_path / "findings.md").exists()

    ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "[1/4] one, seed 0: kept in" in ended.stdout
    assert first.read_text() == before
    outcome = json.loads((tmp_path / "results" / "mine.json").read_text())
    assert outcome["verdict"] == HOLDS
    assert [len(one["values"]) for one in outcome["measured"]] == [2, 2]
    assert outcome["runs"][0]["machine"]
    assert (tmp_path / "results" / "mine.png").stat().st_size > 5_000
    assert "ratio,at least 1.1" in (tmp_path / "results" / "mine.csv").read_text()

    page = (tmp_path / "findings.md").read_text()
    assert "| [mine](#mine) | Two layers have more parameters than one | holds |" in page
    assert "(results/mine.png)" in page

    again = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert again.stdout.count("kept in") == 4


def broken(name: str, run: str, **changes) -> Finding:
    """A finding one of whose runs has other overrides."""
    values = read_finding(name).model_dump()
    values["runs"][run] = changes.pop("overrides")
    values["baseline"] += changes.pop("more", [])
    return Finding.model_validate(values | {"seeds": [0]} | changes)


def verdict_of(finding: Finding, kept: Path) -> str:
    return verdict(measure(finding, run_all(plan(finding, kept), print)))


@pytest.mark.slow
def test_rank_fails_with_skips_left_in(tmp_path: Path) -> None:
    assert verdict_of(broken("rank", "attention_alone", overrides=[]), tmp_path) == FAILS


@pytest.mark.slow
def test_cost_fails_with_as_many_key_value_heads_as_heads(tmp_path: Path) -> None:
    assert verdict_of(broken("cost", "kv_heads_8", overrides=[]), tmp_path) == FAILS


@pytest.mark.nightly
def test_induction_fails_with_a_window_of_two(tmp_path: Path) -> None:
    finding = broken("induction", "two_layers", overrides=["model.num_layers=2", "attention.window=2"])
    assert verdict_of(finding, tmp_path) == FAILS
