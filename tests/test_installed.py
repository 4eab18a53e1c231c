"""The programs from a wheel, in an empty folder: nothing of the repository is at hand."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from commands import ROOT, SMALL, results_of

pytestmark = pytest.mark.slow


def outside() -> dict[str, str]:
    """The environment, without a path to the clone."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def test_a_run_is_trained_evaluated_compared_and_exported(tmp_path: Path) -> None:
    """In an environment with the wheel and with the packages of this one, in an empty folder."""
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT]
    subprocess.run(build, check=True)
    venv.create(tmp_path / "venv", with_pip=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # A .pth adds the folder alone: the editable install of this environment stays out.
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))
    programs, folder = tmp_path / "venv" / "bin", tmp_path / "empty"
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([programs / "pip", "install", "-q", "--no-deps", "--force-reinstall", wheel], check=True)
    folder.mkdir()

    def run(words: str) -> str:
        command = [str(programs / "tinyformer"), *words.split()]
        ended = subprocess.run(command, cwd=folder, env=outside(), capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    two_processes = "trainer=ddp trainer.accelerator=cpu trainer.devices=2"  # which the word train starts
    run(f"train {SMALL} model.bias=true {two_processes} hydra.run.dir=run")
    run("evaluate checkpoint=run/checkpoints/last.ckpt generate.num_tokens=3 hydra.run.dir=evaluated")
    ended, evaluated = (results_of(folder / name) for name in ("run", "evaluated"))
    assert ended["steps"] == 4
    assert ended["val/loss"] == pytest.approx(evaluated["val/loss"], abs=1e-5)
    assert "Saved in run/" in run("compare run")
    assert "GPT-NeoX, saved in out" in run("convert export run/checkpoints/last.ckpt out")
    assert "parameters" in run("card attention=mha,gqa")
    assert "eager" in run("doctor --variants mha --masks causal --dtypes fp32 --backends eager,sdpa")
    assert {path.name for path in folder.iterdir()} == {"run", "evaluated", "out"}
