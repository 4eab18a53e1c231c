"""Runs and sweeps that are killed or fail, and damaged checkpoints: nothing that was whole is lost."""

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from commands import ROOT, SMALL, TEXT, Program, Trained, ran, results_of, weights_of
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import OmegaConf

import tinyformer
from tinyformer import files
from tinyformer.checkpoint.file import load_checkpoint, snapshots_of
from tinyformer.config.errors import ConfigError
from tinyformer.config.folder import claim_folder
from tinyformer.model import loading

CHECKPOINTS = Path("run/checkpoints")
CONSTANT = "schedule=wsd schedule.decay_fraction=0 schedule.warmup_steps=2"
LONG = f"{SMALL} {TEXT} {CONSTANT} callbacks.attention=null trainer.val_check_interval=2 hydra.run.dir=run"

REVIEWS = "text,label\n" + "".join(
    f"film {n} is {('dull', 'fine')[n * 7 % 3 % 2]},{n * 7 % 3 % 2}\n" for n in range(203)
)
CLASSIFIED = "task=classification data=text data.files=reviews.csv data.label_column=label data.test_fraction=0.2"


def flip(path: Path) -> None:
    """Change bytes in the middle of a file, more than the padding between its parts has."""
    data, middle = bytearray(path.read_bytes()), path.stat().st_size // 2
    data[middle : middle + 100] = bytes(255 - byte for byte in data[middle : middle + 100])
    path.write_bytes(data)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_noticed_and_the_newest_whole_one_is_resumed(program: Program, book: Path) -> None:
    assert program("train.py", LONG.replace("dir=run", "dir=unbroken"), "trainer.max_steps=8").code == 0
    assert program("train.py", LONG, "trainer.max_steps=6").code == 0
    steps = {name: load_checkpoint(CHECKPOINTS / f"{name}.ckpt").step for name in ("last", "previous", "best")}
    assert (steps["last"], steps["previous"]) == (6, 4)
    Path("run/checkpoints/last.ckpt.partial").write_bytes(b"what a killed process left")
    flip(CHECKPOINTS / "last.ckpt")
    ended = program("train.py", "resume=run trainer.max_steps=8")
    assert ended.code == 0, ended.err
    assert "last.ckpt is missing or damaged: the run continues from" in ended.out
    unbroken, resumed = weights_of("unbroken"), weights_of("run")
    assert all(torch.equal(unbroken[name], resumed[name]) for name in unbroken)
    assert not list(CHECKPOINTS.glob("*.partial"))
    for name in ("last", "previous", "best"):
        flip(CHECKPOINTS / f"{name}.ckpt")
    refused = program("train.py", "resume=run trainer.max_steps=10")
    assert (refused.code, refused.err.startswith("Error: resume=")) == (2, True), refused.err


KILLED = {
    # Its best checkpoint is chosen by accuracy.
    "classifier": (f"{CLASSIFIED} callbacks.snapshots.every_n_steps=5", ("best.ckpt", "last.ckpt")),
    "language model": (f"{TEXT} generate.temperature=0", ("results.json",)),
}
"""Settings of a run, and files: the first write that a kill prevents is that of the last of them to be there."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KILLED)
def test_a_run_killed_between_any_two_writes_ends_as_an_unbroken_one(
    kind: str, program: Program, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the run before each write is what a kill leaves; a row appended to `metrics.csv` is cut short."""
    Path("reviews.csv").write_text(REVIEWS)
    data, begun = KILLED[kind]
    command = f"{SMALL} {CONSTANT} trainer.val_check_interval=2 trainer.log_every_n_steps=1 {data}"
    assert program("train.py", command, "hydra.run.dir=unbroken").code == 0
    replace, opened, written = os.replace, Path.open, []

    def copied(target: str | Path) -> Path:
        left = Path(f"killed-{len(written)}")
        written.append(Path(target).name)
        return shutil.copytree("run", left)

    def counted(source: str, target: str) -> None:
        copied(target)
        replace(source, target)

    def appended(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if mode == "a" and path.name == "metrics.csv":
            with opened(copied(path) / path.name, "a") as file:
                file.write("6,0.")
        return opened(path, mode, *arguments, **options)

    def measured(run: str) -> tuple[dict[str, object], list[list[str]], dict[str, bytes]]:
        timed = ("throughput", "telemetry", "seconds", "memory")
        table = list(csv.DictReader(Path(run, "metrics.csv").read_text().splitlines()))
        logged = [[value for name, value in row.items() if not name.startswith("throughput")] for row in table]
        results = {key: value for key, value in results_of(run).items() if not key.startswith(timed)}
        return results, logged, {path.name: path.read_bytes() for path in Path(run).glob("snapshots/*")}

    with monkeypatch.context() as patched:
        patched.setattr(files.os, "replace", counted)
        patched.setattr(Path, "open", appended)
        assert program("train.py", command, "hydra.run.dir=run").code == 0
    first, last = max(map(written.index, begun)), len(written) - written[::-1].index("results.json")
    assert kind != "classifier" or {"metrics.csv", "step_000004.ckpt"} <= {*written[first:last]}
    for number in range(first, last):
        shutil.rmtree("run")
        Path(f"killed-{number}").rename("run")
        assert program("train.py", "resume=run").code == 0
        assert measured("run") == measured("unbroken"), written[number]
        best = [load_checkpoint(f"{run}/checkpoints/best.ckpt").step for run in ("run", "unbroken")]
        assert best[0] == best[1], written[number]


USED = {
    "train.py hydra.run.dir=run seed=5": "hydra.run.dir=run: this folder contains a run; resume=run continues it",
    "evaluate.py checkpoint=run/checkpoints/last.ckpt hydra.run.dir=run data.files=book.txt": "hydra.run.dir=run: this",
    "train.py -m hydra.sweep.dir=sweep seed=1,2": "hydra.sweep.dir=sweep: this folder contains a sweep; -m resume=",
    "train.py -m resume=run": "resume=run: the folder contains no sweep; leave -m out to resume a run.",
    "train.py resume=sweep": "resume=sweep: the folder contains no run; add -m to resume all jobs of a sweep.",
    "train.py -m resume=sweep seed=3,4": "seed=3,4: a resumed sweep keeps the swept values that it began with.",
    "train.py -m resume=sweep optimizer.lr=1": "optimizer.lr=1: finished jobs of the sweep ran without it; resume=",
    "train.py -m resume=sweep trainer.max_steps=0": "trainer.max_steps=0: must be at least 1",
    "train.py -m resume=unknown": "resume=unknown: unknown/multirun.yaml says attention=mha,x, which chooses 'x'",
    "evaluate.py checkpoint=run/checkpoints/last.ckpt hydra.run.dir=evaluated data.files=book.txt split=tes": "split=t",
    "train.py resume=run trainer.max_steps=40 optimizer=adamw": "resume=run: the optimizer, trainer and callbacks",
}


def test_a_refused_command_changes_nothing_in_a_used_folder(program: Program, book: Path, trained: Trained) -> None:
    for folder in ("run", "sweep/0"):
        shutil.copytree(trained.folder, folder)
    shutil.copytree(trained.folder / ".hydra", "evaluated/.hydra")
    for sweep, jobs in (("sweep", ["seed=1,2"]), ("unknown", ["attention=mha,x"])):
        Path(sweep).mkdir(exist_ok=True)
        task = f"{{overrides: {{hydra: [hydra.mode=MULTIRUN], task: {jobs}}}}}"
        Path(sweep, "multirun.yaml").write_text(f"hydra: {task}")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    for words, sentence in USED.items():
        refused = program(*words.split(" "))
        assert (refused.code, refused.err[: 7 + len(sentence)]) == (2, f"Error: {sentence}"), refused.err
        assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before, words


@pytest.mark.slow
def test_a_second_run_in_a_folder_is_refused_until_the_first_is_dead(program: Program, book: Path) -> None:
    command = [sys.executable, str(ROOT / "train.py"), *LONG.split(), "trainer.max_steps=1000000"]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    problem = "another program is writing into this folder"
    Path("link").symlink_to("run")
    words = [*SMALL.split(), *TEXT.split()]
    try:
        while not Path("run/.hydra/overrides.yaml").exists() and first.poll() is None:
            time.sleep(0.01)
        with pytest.raises(ConfigError, match=problem):
            tinyformer.train([*words, "hydra.run.dir=link"])
        while not (CHECKPOINTS / "last.ckpt").exists() and first.poll() is None:
            time.sleep(0.05)
        refused = program("train.py", "resume=run")
        assert (refused.code, problem in refused.err, first.poll()) == (2, True, None), refused.err
    finally:
        first.kill()
        first.wait()
    # Killed between two renames, it leaves previous.ckpt alone.
    step = max(load_checkpoint(path).step for path in CHECKPOINTS.glob("*.ckpt"))
    ended = program("train.py", f"resume=run trainer.max_steps={step + 2}")
    assert ended.code == 0, ended.err
    assert not list(Path().glob(".*.lock"))


def test_a_folder_belongs_to_one_process_and_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = {"hydra": {"run": {"dir": "outputs/day/now"}, "overrides": {"hydra": []}}}
    with ThreadPoolExecutor(8) as threads:
        claims = list(threads.map(lambda _: claim_folder(OmegaConf.create(config), "hydra.run.dir"), range(8)))
    names = {path.name for path in Path("outputs/day").iterdir() if path.is_dir()}
    assert names == {"now", *(f"now-{number}" for number in range(2, 9))} == {each.folder.name for each in claims}
    for each in claims:
        (each.folder / ".hydra").mkdir()
        (each.folder / ".hydra/overrides.yaml").touch()
        (each.folder / "checkpoints").mkdir() if each.folder.name == "now-4" else None
        each.withdraw()
        each.lock.close()
    names = [".", "now-4", "now-4/.hydra", "now-4/.hydra/overrides.yaml", "now-4/checkpoints"]
    assert sorted(Path("outputs").rglob("*")) == [Path("outputs/day", name) for name in names]


def test_a_second_thread_does_not_train(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(book.parent)
    with loading._TRAINING, ThreadPoolExecutor(1) as thread:
        refused = thread.submit(tinyformer.train, ["data=text", "data.files=book.txt"]).exception()
    assert isinstance(refused, ConfigError)
    assert "another thread is training" in str(refused)
    assert [path.name for path in Path().iterdir()] == ["book.txt"]


def test_results_are_those_of_the_settings_next_to_them(
    program: Program, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = "checkpoint=run/checkpoints/last.ckpt data.files=book.txt hydra.run.dir=scored"
    ran(program, "train.py", f"{SMALL} {TEXT} hydra.run.dir=run")
    ran(program, "evaluate.py", scored)

    def die(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with mock.patch("lightning.Trainer.validate", side_effect=SIGTERMException):
        assert program("evaluate.py", scored).code == 128 + signal.SIGTERM
    monkeypatch.setattr("tinyformer.run.pipeline.score_training", die)
    monkeypatch.setattr("tinyformer.run.pipeline.score_evaluation", die)
    assert program("train.py", "resume=run optimizer.lr=0.5 trainer.max_steps=6").code == 130
    assert program("evaluate.py", scored, "model.dropout=0.5").code == 130
    assert [*Path().glob("*/results.json")] == []


TWO = f"trainer.accelerator=cpu trainer.devices=2 hydra.run.dir=run {CONSTANT} model.dropout=0.2"


def start(*arguments: str) -> subprocess.Popen[str]:
    words = [word for argument in arguments for word in argument.split()]
    command = [sys.executable, str(ROOT / "train.py"), *words]
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def end(run: subprocess.Popen[str]) -> tuple[int, str, str]:
    """The exit code and the output of a run, which is killed with its processes if it does not end."""
    try:
        out, error = run.communicate(timeout=120)
        return run.returncode, out, error
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)


@pytest.mark.slow
def test_where_a_process_is_killed_the_others_end_and_the_run_continues(book: Path, program: Program) -> None:
    """Even as one process, though each of the two had a part of the weights."""
    run = start(f"{LONG} {TWO} trainer=fsdp trainer.max_steps=1000000")
    while not (CHECKPOINTS / "last.ckpt").exists() and run.poll() is None:
        time.sleep(0.05)
    (second,) = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    os.kill(int(second), signal.SIGKILL)
    code, _, error = end(run)
    said = r"Another process of the run has ended during step \d+\. Steps since .* are lost\. To continue: .*=run"
    assert (code, bool(re.search(said, error))) == (1, True), error
    step = load_checkpoint(CHECKPOINTS / "last.ckpt").step
    out = ran(program, "train.py", f"resume=run trainer=cpu trainer.devices=1 trainer.max_steps={step + 2}")
    assert "processes: 1 instead of 2" in out


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.nightly)])
def test_a_signal_or_a_bad_step_of_one_process_stops_both_and_they_resume_bit_equal(
    strategy: str, program: Program, book: Path
) -> None:
    """Then the final test is scored once, and as one process scores it."""
    Path("reviews.csv").write_text(REVIEWS)
    settings = f"{SMALL} {CLASSIFIED} trainer={strategy} {TWO} trainer.val_check_interval=1 "
    settings += "callbacks.snapshots.every_n_steps=64"
    run = start(settings, "trainer.max_steps=1000000")
    while not Path("run/checkpoints/last.ckpt").exists() and run.poll() is None:
        time.sleep(0.05)
    begun = time.monotonic()
    (second,) = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    os.kill(int(second), signal.SIGTERM)
    code, out, _ = end(run)
    assert time.monotonic() - begun < 30
    step = load_checkpoint("run/checkpoints/last.ckpt").step
    assert code == 128 + signal.SIGTERM
    assert f"Stopped at step {step}. To continue: " in out
    code, out, error = end(start("resume=run", f"trainer.max_steps={step + 3}"))
    assert code == 0, error
    # The first process alone writes snapshots, looks at the heads, and counts its time.
    assert {*snapshots_of(Path("run"))} >= {0, 1, 2, step + 3}
    assert out.count("snapshots: ") == 1
    assert len(Path("run/attention/heads.csv").read_text().splitlines()) == 1 + 2 * 2
    assert out.count("measurements") == 1
    test = "checkpoint=run/checkpoints/best.ckpt split=test data.files=reviews.csv hydra.run.dir=evaluated"
    ran(program, "evaluate.py", test)
    trained, evaluated = results_of("run"), results_of("evaluated")
    assert trained["test/num_tokens"] == evaluated["test/num_tokens"] > 0
    for name in ("loss", "accuracy", "macro_f1"):
        assert trained[f"test/{name}"] == pytest.approx(evaluated[f"test/{name}"], rel=1e-6)
    Path("poison_of_one.py").write_text(
        "import lightning as L\n"
        "class Poison(L.Callback):\n"
        "    def setup(self, trainer, module, stage):\n"
        "        compute = module.training_step\n"
        "        def training_step(batch, batch_idx):\n"
        f"            bad = trainer.global_rank == 1 and trainer.global_step == {step + 3}\n"
        "            loss = compute(batch, batch_idx)\n"
        "            return loss.detach() * float('inf') + loss * 0 if bad else loss\n"
        "        module.training_step = training_step\n"
    )
    unbroken = settings.replace("dir=run", "dir=unbroken")
    code, _, error = end(start(unbroken, "+callbacks.poison._target_=poison_of_one.Poison trainer.max_steps=1000000"))
    assert code == 2, error
    assert error.count(f"Error: step {step + 4} has a loss of ") == 1, error
    weights, resumed = weights_of("unbroken"), weights_of("run")
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


# Sweeps.

SWEEP = f"{SMALL} {TEXT} callbacks.attention=null hydra.sweep.dir=sweep"


@pytest.mark.slow
def test_a_resumed_sweep_skips_resumes_and_starts_its_jobs(program: Program, book: Path) -> None:
    jobs = "attention=mha,gqa 'seed=choice(1,2)'"
    lines = ran(program, "train.py", "-m", SWEEP, jobs).splitlines()
    for number, (attention, seed) in enumerate([("mha", 1), ("mha", 2), ("gqa", 1), ("gqa", 2)]):
        scores = f"val/loss {results_of(f'sweep/{number}')['val/loss']:.4f}  sweep/{number}"
        assert lines[number].endswith(f"attention={attention} seed={seed}  {scores}")
    assert len(lines) == 4
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
    assert ended.stderr.count("Error: model.num_heads=3: ") == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert len(re.findall(r"^\[[01]\] .*model.num_heads=2 .*  val/loss \d.*  sweep/[01]$", ended.stdout, re.M)) == 2
    of_hydra = r"\[\d+-\d+-\d+ .*|Error executing job with overrides: .*"
    lines = [line for line in f"{ended.stdout}\n{ended.stderr}".splitlines() if not re.fullmatch(of_hydra, line)]
    assert {line.partition(" ")[0] for line in lines if line} == {"[0]", "[1]", "[2]", "[3]"}, lines
    results = [results_of(tmp_path / "sweep" / str(n)) for n in (0, 1)]
    assert [(result["steps"], result["device"][-10:]) for result in results] == [(4, " 1 thread)")] * 2
