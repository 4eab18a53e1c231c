"""The programs beside training and evaluation, in the process of the tests."""

import importlib
import shlex
from pathlib import Path

import pytest
from commands import Ended, Program


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    """Call a program in an empty folder: `call("card attention=mha --json")`."""
    monkeypatch.chdir(tmp_path)

    def call(line: str) -> Ended:
        monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)  # which train and evaluate leave behind
        capsys.readouterr()
        name, *arguments = shlex.split(line)
        code = importlib.import_module(f"tinyformer.programs.{name}").main(arguments)
        return Ended(code, *capsys.readouterr())

    return call
