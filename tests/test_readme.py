"""Every shell line and every Python block of the README does what it says.

Lines that train are shortened by `trainer.max_steps`. Only these are adapted otherwise:
- the two `pip install` lines: `.ci/run` runs the second as it stands, and the first is its beginning;
- `trainer=gpu` and the Hub (`data=tinystories`, `data=hub`, `experiment=` without `data=text`), which need what a test
  machine may lack: they run on the CPU and on a local text;
- `python -m tinyformer.doctor` looks at one variant; all of them are a slow test, `tests/test_doctor.py`;
- placeholders: `outputs/…` and `multirun/…` are runs of the test's own, with two heads in a layer (so the third and
  fourth become the first and second); `book.txt` and `other.txt` are texts that it writes.
"""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from programs import ROOT, SMALL, Program

from tinyformer.nn import LACKS, Feature

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
SHELL = [line for language, block in BLOCKS if language == "bash" for line in block.splitlines() if line]
PYTHON = [block for language, block in BLOCKS if language == "python"]
INSTALL = [line for line in SHELL if line.startswith("pip install")]
MODULES = [line for line in SHELL if line.startswith("python -m")]
PROGRAMS = [line for line in SHELL if line not in INSTALL + MODULES]

ADAPTED = {
    "python -m tinyformer.doctor": "python -m tinyformer.doctor --variants mha --dtypes fp32",
    "data=tinystories trainer=gpu": "data=text data.files=book.txt trainer=cpu model.num_layers=1",
    "data=hub data.path=roneneldan/TinyStories": "data=text data.files=book.txt",
    "experiment=shakespeare_gpu trainer=gpu": "experiment=shakespeare_gpu trainer=cpu data=text data.files=book.txt",
    "data.files=tinyshakespeare.txt": "data.files=book.txt",
    "data.files=sst2": "data.files=sst2 data.batch_size=4",
    "outputs/…": "outputs/run",
    "multirun/…": "multirun/sweep",
    "[[1,2],[1,3]]": "[[1,0],[1,1]]",
    "trainer.max_steps=4000": "trainer.max_steps=6",
}


def adapted(line: str) -> str:
    for written, run in ADAPTED.items():
        line = line.replace(written, run)
    if line == "python train.py experiment=shakespeare_cpu":
        line += " data=text data.files=book.txt"
    if "init_from=outputs" in line:
        line += f" {SMALL}"  # the model that the run has
    if "train.py" in line and "max_steps" not in line:
        line += " trainer.max_steps=" + ("6" if "resume=" in line else "2")
    return line


def test_the_two_set_up_commands_are_there() -> None:
    assert INSTALL == [
        "pip install -c constraints.txt -e . && python train.py",
        "pip install -c constraints.txt -e '.[test]' && pytest",
    ]


def test_the_adaptations_are_of_lines_that_the_readme_has() -> None:
    assert all(written in README for written in ADAPTED)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run that lines speak of is kept: it is trained once."""
    return tmp_path_factory.mktemp("kept") / "run"


LONG = (
    *("-m ", "shakespeare_gpu", "logger=wandb", "num_layers=1", "backend=flash", "block=", "position=none", "resample"),
    *("mine.Sharper", "data=hub", "=[[", "analysis=importance", "split=test", "analysis=residual", "tinyformer.card"),
    *(
        "task=",
        "experiment=",
        "position=alibi",
        "tokenizer=char",
        "convert",
        "compare",
        "doctor",
        "attention=gqa",
        "[The cat,A dog]",
        "profiler",
        "checkpoint_activations",
    ),
)
"""Parts of lines that take seconds, and show little that others do not: slow tests."""


def marked(lines: list[str]) -> list[Any]:
    return [
        pytest.param(line, marks=pytest.mark.slow)
        if any(part in line.replace("python -m", "") for part in LONG)
        else line
        for line in lines
    ]


def write_reviews() -> None:
    """A table with a header, and the folder of a data set without."""
    rows = [(f"film {n} is {('dull', 'fine')[n % 2]}", n % 2) for n in range(40)]
    Path("reviews.csv").write_text("".join(f"{text},{label}\n" for text, label in [("text", "stars"), *rows]))
    Path("sst2").mkdir()
    for split in ("train", "validation", "test"):
        Path("sst2", f"{split}.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in rows))


@pytest.mark.parametrize("line", ["python train.py", *marked(PROGRAMS)])
def test_shell_line(line: str, program: Program, book: Path, monkeypatch: pytest.MonkeyPatch, kept: Path) -> None:
    Path("other.txt").write_text("Once there was a cat.\n" * 9)
    Path("mine.py").write_text(next(block for block in PYTHON if "Sharper" in block))
    write_reviews()
    monkeypatch.syspath_prepend(str(Path.cwd()))
    if "outputs/…" in line:
        if not kept.exists():
            small = f"{SMALL} data=text data.files=book.txt tokenizer=char"
            assert program("train.py", small, "hydra.run.dir=outputs/run").code == 0
            shutil.copytree("outputs/run", kept)
        shutil.copytree(kept, "outputs/run", dirs_exist_ok=True)
    _, script, *arguments = shlex.split(adapted(line))
    ended = program(script, *arguments, split=False)
    assert ended.code == 0, ended.err
    assert "val loss" in ended.out or "test loss" in ended.out


@pytest.mark.parametrize("line", marked(MODULES))
def test_module_line(line: str, program: Program, book: Path, tmp_path: Path) -> None:
    if "convert" in line:
        run = f"{SMALL} data=text data.files=book.txt tokenizer=byte hydra.run.dir=outputs/run"
        assert program("train.py", run).code == 0
    if "convert hf" in line:
        export = [sys.executable, "-m", "tinyformer.convert", "export", "outputs/run/checkpoints/last.ckpt", "exported"]
        subprocess.run(export, cwd=tmp_path, check=True)
    if "multirun/…" in line:
        sweep = f"-m attention=mha,gqa {SMALL} data=text data.files=book.txt tokenizer=char"
        assert program("train.py", sweep, "hydra.sweep.dir=multirun/sweep").code == 0
    command = [sys.executable, *shlex.split(adapted(line))[1:]]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ("ported" if "convert" in line else "mha") in ended.stdout


@pytest.mark.parametrize(
    ("part", "printed"),
    [
        pytest.param("tinyformer.load", "['The cat", marks=pytest.mark.slow),
        ("capture_attention", "torch.Size([1, 4, 32, 32])"),
    ],
)
def test_python_blocks(part: str, printed: str, program: Program, book: Path, tmp_path: Path) -> None:
    block = adapted(next(block for block in PYTHON if part in block))
    if "outputs/run" in block:
        run = f"{SMALL} data=text data.files=book.txt tokenizer=byte model.max_seq_len=32 hydra.run.dir=outputs/run"
        assert program("train.py", run).code == 0
    ended = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert printed in ended.stdout


def test_the_table_of_axes_lists_every_choice() -> None:
    rows = {row.split("|")[1].strip(" `"): row for row in README.splitlines() if row.startswith("| `")}
    for group in (
        "attention",
        "position",
        "block",
        "feed_forward",
        "norm",
        "model",
        "task",
        "data",
        "tokenizer",
        "optimizer",
        "analysis",
    ):
        choices = {file.stem for file in (ROOT / "conf" / group).glob("[!_]*.yaml")}
        assert choices <= set(re.findall(r"`(\w+)`", rows[group])), group


def test_the_table_of_backends_is_that_of_the_code() -> None:
    def where(backend: str, feature: Feature) -> str:
        able = [device.upper() for device in ("cpu", "cuda") if feature not in LACKS[backend, device]]
        return " ".join(able) or "–"

    for feature in Feature:
        cells = [feature.value, "CPU CUDA", *(where(backend, feature) for backend in ("sdpa", "flash", "flex"))]
        assert f"| {' | '.join(cells)} |" in README


def test_the_pictures_are_there() -> None:
    paths = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert len(paths) == 3
    assert all((ROOT / path).stat().st_size > 10_000 for path in paths)
