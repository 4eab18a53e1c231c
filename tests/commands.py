"""Running the programs in tests."""

import csv
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tinyformer.checkpoint.file import load_raw

ROOT = Path(__file__).parent.parent
PYTHON = Path(sys.executable)

SMALL = (
    "model.num_layers=2 model.num_heads=2 model.d_model=16 model.max_seq_len=16 data.batch_size=4 "
    "trainer.max_steps=4 generate.num_tokens=3 callbacks.attention.num_tokens=6 trainer.precision=32-true"
)
"""Overrides that make a run take about a second."""

TEXT = "data=text data.files=book.txt tokenizer=char data.validation_fraction=0.1"
"""Overrides that train on the text of the `book` fixture."""

BOOK = "".join(f"In line {n} the cat sees {n * 7 % 13} birds and {n * 5 % 11} mice.\n" for n in range(120))


@dataclass(frozen=True)
class Ended:
    """A program that has ended."""

    code: int
    out: str
    err: str


Program = Callable[..., Ended]


@dataclass(frozen=True)
class Trained:
    """A run that tests share: its folder, its results and what it printed."""

    folder: Path
    results: dict[str, Any]
    out: str

    @property
    def last(self) -> Path:
        """The checkpoint of its last step."""
        return self.folder / "checkpoints" / "last.ckpt"


def ran(program: Program, script: str, *overrides: str, **options: bool) -> str:
    """Run a program that has to succeed, and return what it prints."""
    ended = program(script, *overrides, **options)
    assert ended.code == 0, ended.err
    return ended.out


def table(path: str | Path) -> list[dict[str, str]]:
    """The rows of a table that a run has written."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def results_of(run: str | Path) -> dict[str, Any]:
    """The `results.json` of a run."""
    return json.loads((Path(run) / "results.json").read_text(encoding="utf-8"))


def weights_of(run: str | Path, name: str = "last") -> dict[str, torch.Tensor]:
    """The weights of a checkpoint of a run."""
    return load_raw(Path(run) / "checkpoints" / f"{name}.ckpt")["state_dict"]


def column(run: str | Path, name: str) -> dict[int, str]:
    """A metric of `metrics.csv` by step, of the steps that have it."""
    return {int(row["step"]): row[name] for row in table(Path(run) / "metrics.csv") if row[name]}


SEVERAL = """
import contextlib, io, json, os, sys
from tinyformer.__main__ import main
ended = []
for line in json.loads(sys.argv[1]):
    os.environ.pop("HYDRA_FULL_ERROR", None)  # which train and evaluate leave behind
    sys.argv, out, err = ["tinyformer", *line.split()], io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main()
        except SystemExit as end:  # of argparse
            code = end.code
    ended.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(ended))
"""


def spawned(
    lines: Sequence[str], folder: Path, first: str = "", env: Mapping[str, str] | None = None, python: Path = PYTHON
) -> list[Ended]:
    """Programs, such as "card attention=mha", one after the other in a new process, which executes `first` before."""
    command = [python, "-c", first + SEVERAL, json.dumps(lines)]
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return [Ended(*each) for each in json.loads(ended.stdout)]


def without(*modules: str) -> str:
    """Code after which importing these modules fails."""
    return f"import sys; sys.modules |= dict.fromkeys({modules})\n"
