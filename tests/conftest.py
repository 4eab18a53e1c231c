"""What all tests share: the programs, run as a user runs them, and which skips are allowed."""

import os
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from programs import ROOT, Ended, Program

# The models of the tests are so small that a second thread only waits, and on a busy machine it waits long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One cache of tokenised text for all tests, away from the user's."""
    if "TINYFORMER_CACHE" not in os.environ:
        os.environ["TINYFORMER_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ.pop("WANDB_API_KEY", None)


@pytest.fixture(autouse=True)
def short_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees what a program in this process, before it, has told Hydra."""
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    """Run `train.py` or `evaluate.py` in this process, in an empty folder: `program("train.py", "seed=1 …")`."""
    monkeypatch.chdir(tmp_path)

    def run(script: str, *arguments: str, split: bool = True) -> Ended:
        words = [word for argument in arguments for word in (shlex.split(argument) if split else [argument])]
        monkeypatch.setattr(sys, "argv", [script, *words])
        monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
        GlobalHydra.instance().clear()
        capsys.readouterr()
        code: int | str | None = 0
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as end:
            code = end.code
        printed = capsys.readouterr()
        assert isinstance(code, int)
        return Ended(code, printed.out, printed.err)

    return run


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A text of a few thousand characters, lines and all."""
    path = tmp_path / "book.txt"
    lines = [f"In line {n} the cat sees {n * 7 % 13} birds and {n * 5 % 11} mice.\n" for n in range(120)]
    path.write_text("".join(lines))
    return path


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """In CI a test may be skipped for want of a GPU, and for nothing else."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") != "true" or reporter is None:
        return
    reasons = {report.longrepr[2] for report in reporter.stats.get("skipped", [])}
    other = sorted(reason for reason in reasons if "CUDA" not in reason)
    if other:
        reporter.write_line(f"skipped in CI: {other}", red=True)
        session.exitstatus = 1
