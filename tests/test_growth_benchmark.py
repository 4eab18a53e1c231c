"""The benchmark of growth: memory is linear in the sequence for flash and quadratic for eager."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from programs import ROOT


def test_the_peak_is_the_most_that_is_held_at_a_time() -> None:
    """Two tensors of 4 MB, of which one goes before a third comes."""
    growth = runpy.run_path(str(ROOT / "benchmarks" / "growth.py"))

    def step() -> None:
        first = torch.zeros(1024, 1024)
        second = first + 1
        del first
        third = torch.zeros(512, 1024)
        del second, third

    assert growth["peak_bytes"](step, "cpu") == pytest.approx(2 * 2**22, rel=0.01)


@pytest.mark.nightly
def test_memory_grows_with_the_square_for_eager_alone(tmp_path: Path) -> None:
    arguments = ["--axes", "seq", "depth", "--longest=2048", "--repeats=1", "--output", str(tmp_path / "growth.json")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "benchmarks" / "growth.py"), *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    record = json.loads((tmp_path / "growth.json").read_text())
    by_length = {backend: kinds["bytes"] for backend, kinds in record["exponents"]["seq"].items()}
    assert 1.7 <= by_length["eager"] <= 2.1
    assert 0.8 <= by_length["flash"] <= 1.2
    assert by_length["flex"] is None  # which trains on CUDA only
    assert 0.5 <= record["exponents"]["depth"]["flash"]["bytes"] <= 1.1
    times = [row["seconds"] for row in record["rows"] if (row["axis"], row["backend"]) == ("seq", "flash")]
    assert times == sorted(times)
    assert (tmp_path / "growth.png").stat().st_size > 10_000
    assert "seq^" in ended.stdout
