"""The benchmark of telemetry counts blocks with it and without it, and reads a whole run's own account."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from programs import ROOT, SMALL


@pytest.mark.nightly
def test_blocks_with_telemetry_alternate_with_blocks_without(tmp_path: Path, book: Path) -> None:
    settings = f"{SMALL} data=text data.files={book} callbacks.attention.every_n_steps=4 trainer.max_steps=20"
    command = [sys.executable, ROOT / "benchmarks/telemetry.py", "--blocks=6", "--output=out.json", *settings.split()]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    record = json.loads((tmp_path / "out.json").read_text())
    assert f"data.files={book.name}" in record["command"]
    in_turn, whole = record["in_turn"], record["whole_run"]
    for kind in ("seconds", "processor_seconds"):
        blocks = in_turn[kind]["blocks"]
        assert [len(blocks["with"]), len(blocks["without"])] == [3, 3]
        assert sorted(blocks["with"])[1] == in_turn[kind]["medians"]["with"]
    assert 0 < in_turn["median_seconds_of_measuring"] < sum(in_turn["seconds"]["blocks"]["with"])
    assert whole["steps"] == 20
    assert 0 < whole["telemetry/seconds"] < whole["seconds"]
    assert "whole run" in ended.stdout
