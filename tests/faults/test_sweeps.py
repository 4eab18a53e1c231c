"""Sweeps whose jobs fail or are killed, one after the other or side by side."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import ROOT, SMALL, TEXT, Program, results_of, weights_of

SWEEP = f"{SMALL} {TEXT} hydra.sweep.dir=sweep"


@pytest.mark.slow
def test_a_resumed_sweep_skips_resumes_and_starts_its_jobs(program: Program, book: Path) -> None:
    jobs = "attention=mha,gqa 'seed=choice(1,2)'"
    assert program("train.py", "-m", SWEEP, jobs).code == 0
    unbroken = [weights_of(f"sweep/{n}") for n in range(4)]
    finished = Path("sweep/0/checkpoints/last.ckpt").stat().st_mtime_ns
    Path("sweep/1/results.json").unlink()  # killed before it was scored
    shutil.rmtree("sweep/2/checkpoints")  # killed before its first checkpoint
    shutil.rmtree("sweep/3")
    ended = program("train.py", "-m resume=sweep")
    assert ended.code == 0, ended.err
    assert "sweep/0 has completed its 4 steps." in ended.out
    assert Path("sweep/0/checkpoints/last.ckpt").stat().st_mtime_ns == finished
    for number, expected in enumerate(unbroken):
        assert results_of(f"sweep/{number}")["steps"] == 4
        resumed = weights_of(f"sweep/{number}")
        assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    longer = program("train.py", "-m resume=sweep trainer.max_steps=6")
    assert longer.code == 0, longer.err
    assert [results_of(f"sweep/{number}")["steps"] for number in range(4)] == [6] * 4


REFUSED = {
    "-m resume=run": "resume=run: a sweep cannot resume a run; leave -m out.",
    "-m resume=nowhere": "resume=nowhere: the folder contains no sweep; a sweep's folder looks like multirun/2026-",
    "resume=sweep": "resume=sweep: the folder contains a sweep; add -m to resume all of its jobs.",
    "-m resume=sweep seed=3,4": "seed=3,4: the sweep has values of its own; its jobs are resumed with these.",
    "-m resume=sweep optimizer.lr=1": "optimizer.lr=1: jobs of the sweep have ended without it; resume=sweep/N",
    "-m resume=sweep trainer.max_steps=9": "resume=sweep: sweep/multirun.yaml says attention=mha,x, which chooses 'x'",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_no_sweep_is_reported(words: str, program: Program) -> None:
    Path("sweep/0").mkdir(parents=True)
    Path("run/checkpoints").mkdir(parents=True)
    Path("run/checkpoints/last.ckpt").touch()
    Path("sweep/0/results.json").touch()
    Path("sweep/multirun.yaml").write_text("hydra: {overrides: {hydra: [], task: ['seed=1,2', 'attention=mha,x']}}")
    ended = program("train.py", words)
    assert (ended.code, ended.err.removeprefix("Error: ")[: len(REFUSED[words])]) == (2, REFUSED[words]), ended.err


def test_a_strangers_sweep_makes_no_million_jobs(program: Program) -> None:
    Path("sweep").mkdir()
    task = ["seed=range(300)", "model.d_ff=range(1,300)", "data.batch_size=range(1,300)"]
    jobs = f"hydra: {{overrides: {{hydra: [hydra.mode=MULTIRUN], task: {task}}}}}"
    Path("sweep/multirun.yaml").write_text(jobs)
    ended = program("train.py", "-m resume=sweep")
    assert (ended.code, "makes more than 10,000 jobs." in ended.err) == (2, True), ended.err


@pytest.mark.slow
def test_jobs_run_side_by_side_and_a_failed_one_is_reported(tmp_path: Path, book: Path) -> None:
    """With the threads of the machine divided among them, beside folders that a stranger named like libraries."""
    for library in ("joblib", "multiprocessing", "signal"):
        (tmp_path / library).mkdir()
        (tmp_path / library / "__init__.py").write_text("raise SystemExit('a stranger was here')")
    words = [*SWEEP.split(), "model.num_heads=2,3", "seed=1,2", "hydra/launcher=joblib"]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, str(ROOT / "train.py"), "-m", *words]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count("Error: model.num_heads=3: must divide model.d_model=16") == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout.count("val loss") == 2
    of_hydra = r"\[\d+-\d+-\d+ .*|Error executing job with overrides: .*"
    lines = [line for line in f"{ended.stdout}\n{ended.stderr}".splitlines() if not re.fullmatch(of_hydra, line)]
    assert {line.partition(" ")[0] for line in lines if line} == {"[0]", "[1]", "[2]", "[3]"}, lines
    assert ended.stdout.count(", 1 thread)") == 2, ended.stdout
    assert [results_of(tmp_path / "sweep" / str(n))["steps"] for n in (0, 1)] == [4, 4]
