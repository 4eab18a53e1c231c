"""The programs from a wheel, in an empty folder: nothing of the repository is at hand."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from commands import ROOT, SMALL, results_of, spawned

pytestmark = pytest.mark.slow


def test_a_run_is_trained_evaluated_compared_and_exported(tmp_path: Path) -> None:
    """In an environment with the wheel and with the packages of this one, in an empty folder."""
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT], check=True)
    venv.create(tmp_path / "venv")
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # A .pth adds the folder alone: the editable install of this environment stays out.
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))
    programs, folder = tmp_path / "venv" / "bin", tmp_path / "empty"
    (wheel,) = tmp_path.glob("*.whl")
    install = [*pip, "--python", programs / "python", "install", "-q", "--no-deps", "--force-reinstall", wheel]
    subprocess.run(install, check=True)
    folder.mkdir()
    outside = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}  # no path to the clone
    two_processes = "trainer=ddp trainer.accelerator=cpu trainer.devices=2"  # which the word train starts
    command = [programs / "tinyformer", "train", *f"{SMALL} model.bias=true {two_processes} hydra.run.dir=run".split()]
    trained = subprocess.run(command, cwd=folder, env=outside, capture_output=True, text=True, check=False)
    assert trained.returncode == 0, trained.stderr
    shown = {
        "evaluate checkpoint=run/checkpoints/last.ckpt generate.num_tokens=3 hydra.run.dir=evaluated": "val loss",
        "compare run": "Saved in run/",
        "convert export run/checkpoints/last.ckpt out": "sequential GPT-NeoX, saved in out",
        "card attention=mha,gqa": "parameters",
    }
    several = spawned([*shown], folder, env=outside, python=programs / "python")
    for part, ended in zip(shown.values(), several, strict=True):
        assert (ended.code, part in ended.out) == (0, True), ended
    results, evaluated = (results_of(folder / name) for name in ("run", "evaluated"))
    assert results["steps"] == 4
    assert results["val/loss"] == pytest.approx(evaluated["val/loss"], abs=1e-5)
    assert {path.name for path in folder.iterdir()} == {"run", "evaluated", "out"}
