"""The programs from a wheel, in an empty folder: nothing of the repository is at hand."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import ROOT, SMALL

pytestmark = pytest.mark.slow

Run = Callable[[str], str]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel, and with the packages of this one."""
    folder = tmp_path_factory.mktemp("installed")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    subprocess.run(build, check=True)
    venv.create(folder / "venv", with_pip=True)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # A .pth adds the folder alone: the editable install of this environment stays out.
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))
    programs = folder / "venv" / "bin"
    (wheel,) = folder.glob("*.whl")
    subprocess.run([programs / "pip", "install", "-q", "--no-deps", "--force-reinstall", wheel], check=True)
    return programs


def outside() -> dict[str, str]:
    """The environment, without a path to the clone."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


@pytest.fixture
def run(installed: Path, tmp_path: Path) -> Run:
    """Run a program of the environment in an empty folder; what it prints."""

    def run(words: str) -> str:
        command = [str(installed / "tinyformer"), *words.split()]
        ended = subprocess.run(command, cwd=tmp_path, env=outside(), capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    return run


def test_a_run_is_trained_evaluated_compared_and_exported(run: Run, tmp_path: Path) -> None:
    two_processes = "trainer=ddp trainer.accelerator=cpu trainer.devices=2"  # which the word train starts
    run(f"train {SMALL} model.bias=true {two_processes} hydra.run.dir=run")
    run("evaluate checkpoint=run/checkpoints/last.ckpt generate.num_tokens=3 hydra.run.dir=evaluated")
    ended, evaluated = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("run", "evaluated"))
    assert ended["steps"] == 4
    assert ended["val/loss"] == pytest.approx(evaluated["val/loss"], abs=1e-5)
    assert "Saved in run/" in run("compare run")
    assert "GPT-NeoX, saved in out" in run("convert export run/checkpoints/last.ckpt out")
    assert "parameters" in run("card attention=mha,gqa")
    assert "eager" in run("doctor --variants mha --masks causal --dtypes fp32 --backends eager,sdpa")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "evaluated", "out"}


def test_an_editable_install_is_found_from_the_folder_above_the_clone(tmp_path: Path) -> None:
    """There, a clone called tinyformer is on the path itself, as a package without a file."""
    (tmp_path / "tinyformer").mkdir()
    build = f"import os, hatchling.build; os.chdir({str(ROOT)!r}); hatchling.build.build_editable({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    find = "from importlib.util import find_spec; print(find_spec('tinyformer').origin)"
    ask = f"import site; site.addsitedir({str(tmp_path / 'site')!r}); {find}"
    found = subprocess.check_output([sys.executable, "-S", "-c", ask], cwd=tmp_path, env=outside(), text=True)
    assert found.strip() == str(ROOT / "tinyformer" / "__init__.py")
