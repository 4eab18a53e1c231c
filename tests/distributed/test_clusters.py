"""Processes that torchrun and Slurm start: one folder, the losses of one machine, and a job that continues."""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch
from commands import PYTHON, ROOT, SMALL, TEXT, Program, ran, results_of, weights_of

from tinyformer.config.run_name import name_of_run

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
    jobs = f"{words} seed=1,2 hydra.sweep.dir=sweep"
    assert ran(program, "train.py", "-m", jobs).count("val/loss") == 2
    assert ran(program, "train.py", "-m", jobs).count("has completed its 4 steps.") == 2


@pytest.mark.parametrize(
    ("environment", "resume", "name"),
    [
        ({}, None, r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d"),
        ({"SLURM_JOB_ID": "12"}, "auto", r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d"),  # beside the job's tasks
        ({"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None, r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d"),
        ({"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, "auto", r"slurm-12\.0"),
        ({"SLURM_JOB_ID": "12", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "2"}, None, r"slurm-12\.2"),
    ],
)
def test_a_run_is_named_by_its_job_where_processes_have_to_agree(environment, resume, name, monkeypatch):
    for key in [key for key in os.environ if key.startswith(("SLURM", "TORCHELASTIC"))]:
        monkeypatch.delenv(key)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert re.fullmatch(name, name_of_run(resume))


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
    """What a program prints in the folder of the book, in which Slurm can be reached."""
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
    assert "Slurm starts the job again." in out.read_text()
    assert not (folder / "results.json").exists()
    call_slurm("scontrol", "update", f"JobId={job}", "StartTime=now")
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
