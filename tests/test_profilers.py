"""Runs with a profiler."""

import json
import re
from collections import Counter
from pathlib import Path

from commands import SMALL, Program

TEXT = "data=text data.files=book.txt tokenizer=char data.validation_fraction=0.1 trainer.limit_val_batches=2"


def traced(folder: Path) -> Counter[str]:
    """How often each thing is in a Chrome trace."""
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return Counter(event["name"].rpartition(".")[2] for event in events)


def test_a_torch_profile_traces_three_steps(program: Program, book: Path) -> None:
    settings = "trainer.profiler=torch hydra.run.dir=run trainer.max_steps=9"
    ended = program("train.py", SMALL, TEXT, settings)
    assert ended.code == 0, ended.err
    names = traced(Path("run"))
    assert names["training_step"] == 3
    assert names["aten::scaled_dot_product_attention"] >= 3 * 2  # in two layers
    table = (Path("run") / "fit-profile.txt").read_text()
    assert re.search(r"^ +aten::linear +[\d.]+%", table, re.MULTILINE)
    assert json.loads((Path("run") / "results.json").read_text())["steps"] == 9
