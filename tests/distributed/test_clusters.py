"""Processes that torchrun and Slurm start: one folder, the losses of one machine, and a job that continues."""

import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from datetime import datetime
from fnmatch import fnmatch, translate
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import PYTHON, ROOT, SMALL, TEXT, Program, ran, results_of, weights_of
from torch.distributed import TCPStore

import tinyformer
from tinyformer.config import folder
from tinyformer.config.errors import ConfigError
from tinyformer.config.folder import name_of_run
from tinyformer.config.launch import CommandLine
from tinyformer.run.run import requeue_on_exit

TWO = f"{SMALL} {TEXT} trainer=ddp trainer.accelerator=cpu model.dropout=0.2 callbacks.attention=null"
SCRIPT = re.search(r"```text\n(#!/bin/bash\n.*?)```", (ROOT / "docs/pages/scale.md").read_text(), re.DOTALL)


@pytest.mark.slow
def test_two_nodes_of_torchrun_train_as_two_processes_of_one(book: Path, program: Program) -> None:
    """Each has its own cache and starts at another second, and both have the folder of the first."""
    words = f"{TWO} trainer.num_nodes=2 trainer.devices=1".split()
    rendezvous = "--nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=localhost:29517 --rdzv-id=1"
    nodes = []
    for node in (1, 2):
        environment = os.environ | {"TINYFORMER_CACHE": f"cache-{node}", "OMP_NUM_THREADS": "1"}
        command = [PYTHON, "-m", "torch.distributed.run", *rendezvous.split(), ROOT / "train.py", *words]
        nodes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
        time.sleep(1.1)
    outs = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outs
    (folder,) = Path("outputs").glob("*/*")
    command = [PYTHON, ROOT / "train.py", *TWO.split(), "trainer.devices=2", "hydra.run.dir=run"]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True)
    one, other = weights_of(folder), weights_of("run")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert results_of(folder)["val/loss"] == results_of("run")["val/loss"]


@pytest.mark.slow
def test_auto_starts_a_run_continues_it_and_skips_it_when_it_has_ended(book: Path, program: Program) -> None:
    words = f"{SMALL} {TEXT} callbacks.attention=null resume=auto"
    assert program("train.py", words).err.endswith("or continues it; hydra.run.dir=outputs/run works.\n")
    assert "length: 4 steps, 0" in ran(program, "train.py", words, "hydra.run.dir=run")
    assert ran(program, "train.py", words, "hydra.run.dir=run") == "run has completed its 4 steps.\n"
    assert "length: 6 steps, from step 4 on" in ran(program, "train.py", words, "hydra.run.dir=run trainer.max_steps=6")
    inheriting = f"{TEXT} init_from=run/checkpoints/last.ckpt resume=auto hydra.run.dir=next trainer.max_steps=1"
    assert "length: 1 step, 0" in ran(program, "train.py", inheriting)
    jobs = f"{words} seed=1,2 hydra.sweep.dir=sweep"
    assert ran(program, "train.py", "-m", jobs).count("val/loss") == 2
    assert ran(program, "train.py", "-m", jobs).count("has completed its 4 steps.") == 2


@pytest.fixture
def in_environment(monkeypatch: pytest.MonkeyPatch):
    """Set variables, and remove those of a cluster that these tests run in."""

    def change(variables):
        for key in [key for key in os.environ if key.startswith(("SLURM", "TORCHELASTIC"))]:
            monkeypatch.delenv(key)
        for key, value in variables.items():
            monkeypatch.setenv(key, value)

    return change


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ("SLURM_PROCID=1", "SLURM_PROCID=1: SLURM_NTASKS is not set, so no process is the first; unset SLURM_P*"),
        (
            "RANK=1 WORLD_SIZE=2 MASTER_ADDR=localhost",
            "trainer.devices=1: is for one process, but RANK=1 says that this one is not the first; unset it, *",
        ),
    ],
)
def test_a_number_left_in_the_environment_is_named(variables, sentence, program, book, trained, in_environment):
    in_environment(dict(each.split("=") for each in variables.split()))
    words = {"train.py": f"{SMALL} {TEXT}", "evaluate.py": f"checkpoint={trained.last}"}
    for script in words if len(variables.split()) == 1 else ["train.py"]:
        ended = program(script, words[script], "hydra.run.dir=run")
        assert (ended.code, fnmatch(ended.err, f"Error: {sentence}\n"), [*Path("run").glob("[!.]*")]) == (2, True, [])
    with pytest.raises(ConfigError, match=translate(sentence)):
        tinyformer.train([*words["train.py"].split(), "hydra.run.dir=run"])


TIME, TASK = r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d", {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "2"}


@pytest.mark.parametrize(
    ("variables", "resume", "name"),
    [
        ({}, None, TIME),
        ({"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "auto", TIME),  # in the script itself
        (TASK, None, TIME),
        (TASK, "auto", r"slurm-12\.2"),
        (TASK | {"SLURM_NTASKS": "4"}, None, r"slurm-12\.2"),
        (TASK | {"SLURM_JOB_NAME": "bash"}, "auto", TIME),  # a shell
    ],
)
def test_a_run_is_named_by_its_job_where_processes_have_to_agree(variables, resume, name, in_environment):
    in_environment(variables)
    assert re.fullmatch(name, name_of_run(resume))


def test_processes_of_torchrun_agree_on_the_time_of_the_first(in_environment, monkeypatch):
    store, days = TCPStore("localhost", 0, is_master=True), itertools.count(1)
    monkeypatch.setattr(folder, "datetime", SimpleNamespace(now=lambda: datetime(2026, 1, next(days))))
    variables = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    in_environment(variables)
    assert [name_of_run(), name_of_run("auto"), name_of_run()] == ["2026-01-01/00-00-00"] * 3


@pytest.mark.parametrize(
    ("variables", "number", "words", "asked"),
    [
        ({"SLURM_JOB_ID": "12"}, signal.SIGUSR1, ["seed=1", "resume=auto"], "requeue 12\n"),
        (
            {"SLURM_JOB_ID": "13", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"},
            signal.SIGUSR1,
            ["resume=auto"],
            "requeue 12_3\n",
        ),
        ({"SLURM_JOB_ID": "12"}, signal.SIGTERM, ["resume=auto"], None),
        ({"SLURM_JOB_ID": "12"}, signal.SIGUSR1, ["resume=run"], None),
        ({}, signal.SIGUSR1, ["resume=auto"], None),
    ],
)
def test_a_job_is_requeued_after_its_signal(variables, number, words, asked, in_environment, tmp_path):
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho $@ > {tmp_path}/asked\n")
    (tmp_path / "scontrol").chmod(0o755)
    in_environment(variables | {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    run = SimpleNamespace(invocation=CommandLine(words))
    with pytest.raises(SystemExit), requeue_on_exit(run):
        raise SystemExit(128 + number)
    assert ((tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else None) == asked


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory):
    """The environment of programs that talk to a Slurm of this machine alone, which is started."""
    if shutil.which("slurmctld") is None:
        pytest.skip("needs Slurm: apt-get install slurm-wlm munge")
    folder = tmp_path_factory.mktemp("slurm")
    subprocess.run(["bash", ROOT / "tests/distributed/slurm.sh", folder], check=True)
    environment = os.environ | {
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": f"{PYTHON.parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    yield environment
    subprocess.run(["scontrol", "shutdown"], check=True, env=environment)


def until(happens, seconds=120):
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.fixture
def call_slurm(slurm: dict[str, str], book: Path, monkeypatch: pytest.MonkeyPatch):
    """Run a program that can reach Slurm in the folder of the book, and return what it prints."""
    monkeypatch.chdir(book.parent)

    def call(*command):
        return subprocess.run(command, check=True, env=slurm, capture_output=True, text=True).stdout

    return call


@pytest.mark.nightly
def test_a_job_that_is_requeued_ends_as_an_unbroken_one(call_slurm) -> None:
    """By the script of the documentation."""
    assert SCRIPT is not None
    script = SCRIPT[1].replace("#SBATCH --gpus-per-node=8\n", "")
    Path("train.sh").write_text(script.replace("train.py", str(ROOT / "train.py")))
    words = f"{TWO} trainer.max_steps=1500 trainer.val_check_interval=500".split()
    sizes = ["--nodes=1", "--ntasks-per-node=2", "--time=5"]
    job = call_slurm("sbatch", "--parsable", *sizes, "train.sh", *words).strip()
    folder, out = Path(f"outputs/slurm-{job}.0"), Path(f"slurm-{job}.out")

    def is_in(state):
        return f"JobState={state}" in call_slurm("scontrol", "show", "job", job)

    until((folder / "checkpoints/last.ckpt").exists)
    call_slurm("scancel", "--signal=USR1", job)
    until(lambda: is_in("PENDING"))
    assert "Slurm is asked to start the job again." in out.read_text()
    assert not (folder / "results.json").exists()
    call_slurm("scontrol", "update", f"JobId={job}", "StartTime=now+3")  # Slurm fails a job in the second of its end
    until(lambda: is_in("COMPLETED"))
    assert results_of(folder)["steps"] == 1500, out.read_text()
    call_slurm(PYTHON, ROOT / "train.py", *words, "trainer.devices=2", "hydra.run.dir=unbroken")
    one, other = weights_of(folder), weights_of("unbroken")
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.nightly
def test_a_sweep_is_an_array_of_jobs(call_slurm) -> None:
    words = f"-m hydra/launcher=submitit_slurm {SMALL} {TEXT} data.files={Path('book.txt').absolute()} seed=1,2"
    call_slurm(PYTHON, ROOT / "train.py", *words.split(), "attention=mha,mqa", "hydra.sweep.dir=sweep")
    assert call_slurm(PYTHON, "-m", "tinyformer", "compare", "sweep", "--json").count('"path": "sweep/') == 4
