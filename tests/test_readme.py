"""Every command and every Python block of README.md and docs/pages runs, and tables of the docs are those of the code.

Commands run on a small model and a small text (`SMALL_RUN`, `ADAPTED`), as they stand otherwise. `outputs/…` and
`multirun/…` are runs that the test makes.
"""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, Ended, Program, ran, results_of

from tinyformer.nn import LACKS, Feature
from tinyformer.programs.findings.files import finding_names, read_finding
from tinyformer.programs.findings.outcomes import page, read_outcomes, takeaway_of
from tinyformer.programs.findings.verdicts import summary

DOCS = ROOT / "docs" / "pages"
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))}
FENCE = re.compile(r"^ *```(.*)\n((?:.*\n)*?) *```$", re.MULTILINE)
BLOCKS = [(kind, block) for page in PAGES.values() for kind, block in FENCE.findall(page)]
PYTHON = sorted({block for kind, block in BLOCKS if kind == "python"})
MINE = sorted((block for block in PYTHON if "ScoreMod(" in block), key=len)  # of which the longest is the whole
(CLAIM,) = (block for kind, block in BLOCKS if kind == "text" and block.startswith("title:"))
CARD = re.compile(r"(python -m tinyformer card .*)\n```\n\n```text\n((?:.*\n)*?)```")
SHOWN = {
    line: [row.split() for row in card.splitlines()] for page in PAGES.values() for line, card in CARD.findall(page)
}
# After installation, `tinyformer train` is `python train.py` and `tinyformer card` is `python -m tinyformer card`.
BASH = "".join(block for kind, block in BLOCKS if kind == "bash")
BASH = re.sub(r"(?m)^tinyformer (train|evaluate)", r"python \1.py", BASH)
SHELL = set(re.sub(r"(?m)^tinyformer ", "python -m tinyformer ", BASH).splitlines())
INSTALL = {line for line in SHELL if line.startswith("pip install")}
RUNS = sorted(line for line in SHELL if re.match(r"python (train|evaluate)\.py\b", line))
MODULES = sorted(line for line in SHELL if line.startswith("python -m tinyformer "))

SMALL_RUN = [
    *("model.num_layers=4", "model.num_heads=4", "model.d_model=16", "model.max_seq_len=64", "data.batch_size=4"),
    *("generate.num_tokens=3", "callbacks.attention.num_tokens=6", "trainer.precision=32-true"),
    "trainer.limit_val_batches=2",
]
ADAPTED = {
    "trainer=gpu": "trainer=cpu",
    "data=tinystories": "data=text data.files=book.txt",
    "data=hub data.path=roneneldan/TinyStories": "data=text data.files=book.txt",
    "data.files=tinyshakespeare.txt": "data.files=book.txt",
    "-m model.num_heads=1,2,4,8 seed=1,2,3": "-m model.num_heads=1,2 seed=1",
    "analysis.measures.near=0.5": "analysis.measures.near=0.1",
    "analysis.file=subject_verb": "analysis.file=lines.csv",
    "analysis.file=pronoun_noun": "analysis.file=lines.csv",
    "analysis=gates": "analysis=gates analysis.num_steps=9",
    "analysis=patching": "analysis=patching analysis.num_pairs=9",
    "findings cost": "findings cost --files claims",
    "hydra/launcher=joblib": "hydra/launcher=joblib hydra.launcher.n_jobs=1",
    "outputs/…": "outputs/run",
    "multirun/…": "multirun/sweep",
}
"""The parts of a command that need the internet or an earlier run, and their replacements here."""

SMALL_MODULE = {
    "demo": ["trainer.max_steps=2", "data.num_sequences=64", "data.num_validation_sequences=64"],
    "doctor": ["--variants", "mha", "--dtypes", "fp32"],
    "findings": ["--results", "results"],  # not those of the checkout
}
"""The words that are added to the command of a program other than train and evaluate."""

EARLIER = {
    "outputs/…": "trainer.max_steps=4 data=text data.files=book.txt tokenizer=byte callbacks.snapshots.every_n_steps=2 "
    "hydra.run.dir=outputs/run",
    "outputs/translate": "task=seq2seq data=text data.files=verses_es_en hydra.run.dir=outputs/translate",
    "outputs/reviews": "task=classification data=text data.files=reviews.csv data.label_column=stars "
    "hydra.run.dir=outputs/reviews",
    "outputs/span": "task=span data.num_contexts=40 data.num_held_out=2 hydra.run.dir=outputs/span",
    "multirun/…": "-m attention=mha,gqa data=text data.files=book.txt hydra.sweep.dir=multirun/sweep",
}
"""The runs of earlier commands that a command or a Python block names; the first is there for all."""


def test_every_fence_is_a_command_a_python_block_or_plain_text() -> None:
    assert {kind for kind, _ in BLOCKS} == {"bash", "python", "text"}
    assert sum(page.count("```") + page.count("~~~") for page in PAGES.values()) == 2 * len(BLOCKS)
    assert {*INSTALL, *RUNS, *MODULES} == SHELL
    assert {
        "pip install -c constraints.txt -e . && python train.py",
        "pip install -c constraints.txt -e '.[test]' && pytest",
    } == INSTALL


def adapted(line: str) -> str:
    """The command for two steps on a small text; six where a run of four steps is resumed."""
    for written, run in ADAPTED.items():
        line = line.replace(written, run)
    if "train.py" not in line:
        return line
    is_data_given = re.search(r"\bdata=", line)
    is_own_text = is_data_given or re.search(r"data\.files=|resume=|task=seq2seq|dates|span|induction", line)
    if not is_own_text:
        is_labelled = "task=classification" in line
        line += " data=text data.files=" + ("reviews.csv data.label_column=stars" if is_labelled else "book.txt")
    if "span" in line and not is_data_given:
        line += " data.num_contexts=40 data.num_held_out=2"
    if "resume=multirun" in line:
        return line
    return re.sub(r" trainer\.max_steps=\d+", "", line) + f" trainer.max_steps={6 if 'resume=' in line else 2}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies of the runs in `EARLIER`, each of which the first test that names it makes."""
    return tmp_path_factory.mktemp("trained")


@pytest.fixture
def place(
    program: Program, book: Path, trained: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Path:
    """A folder with everything that a test's command or Python block names: runs, texts, labels, and `mine.py`."""
    Path("other.txt").write_text("Once there was a cat.\n" * 9)
    Path("stories.txt").write_text(book.read_text().replace("\n", "\n<|endoftext|>\n"))
    Path("mine.py").write_text(MINE[-1])
    Path("lines.csv").write_text("text,query,key,distractor\n" + "A cat met a hen.,hen,cat,met\n" * 4)
    Path("claims").mkdir()
    short = ", ".join(["trainer.max_steps=10", "data=text", "data.files=book.txt", *SMALL_RUN[4:]])
    claim = CLAIM.replace("trainer.max_steps=200", short).replace("seeds: [0, 1, 2]", "seeds: [0]")
    Path("claims/window.yaml").write_text(claim)
    cost = (ROOT / "conf/finding/cost.yaml").read_text().replace("d_model=512", "d_model=128")
    Path("claims/cost.yaml").write_text(cost.replace("256", "64").replace("1024", "128"))
    rows = [(f"film {n} is {('dull', 'fine')[n % 2]}", n % 2) for n in range(200)]
    Path("reviews.csv").write_text("".join(f"{text},{label}\n" for text, label in [("text", "stars"), *rows]))
    Path("new.csv").write_text("text\nfilm 1 is fine\n")
    pairs = [("es", "en"), *((f"uno {n}", f"one {n}") for n in range(60))]
    Path("pairs.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    for folder, lines in {"sst2": rows, "verses_es_en": [("source", "target"), *pairs[1:]]}.items():
        Path(folder).mkdir()
        for split in ("train", "validation", "test"):
            Path(folder, f"{split}.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in lines))
    asked = {"question": "What sees birds?", "answers": [{"text": "the cat", "answer_start": 0}]}
    paragraphs = [{"context": f"the cat sees {n} birds", "qas": [asked]} for n in range(20)]
    Path("squad").mkdir()
    for split in ("train", "dev"):
        Path("squad", f"{split}-v1.1.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    monkeypatch.syspath_prepend(str(Path.cwd()))
    named = f"outputs/… {request.node.callspec.params}"
    for folder, words in ((words.rpartition("=")[2], words) for part, words in EARLIER.items() if part in named):
        if not (trained / folder).exists():
            ran(program, "train.py", *sorted([*SMALL_RUN, "trainer.max_steps=2", *words.split()], key="-m".__ne__))
            shutil.copytree(folder, trained / folder)
        shutil.copytree(trained / folder, folder, dirs_exist_ok=True)
    return Path.cwd()


def test_every_adaptation_and_every_shown_card_is_of_a_command() -> None:
    assert [part for part in ADAPTED if not any(part in line for line in RUNS + MODULES)] == []
    assert len(SHOWN) == 3
    assert set(MODULES) >= set(SHOWN)


def as_process(script: str, *arguments: str, split: bool) -> Ended:
    """`train.py` in a process of its own, which can start others."""
    command = [sys.executable, str(ROOT / script), *arguments]
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return Ended(ended.returncode, ended.stdout, ended.stderr)


@pytest.mark.parametrize("line", RUNS)
def test_command(line: str, program: Program, place: Path) -> None:
    _, script, *arguments = shlex.split(adapted(line))
    if script == "evaluate.py":
        translates = "outputs/translate" in line
        is_given = "data=" in line or "new.csv" in line
        data = ["data.files=verses_es_en" if translates else "data.files=book.txt"] * (not is_given)
        words = [*arguments, *data, "generate.num_tokens=3", "hydra.run.dir=evaluation"]
        ran(program, script, *words, split=False)  # what it scores, writes and prints: test_evaluate.py
        assert "mine.WorstWindow" not in line or results_of("evaluation")["worst_window"] > 0
        return
    if "resume=" in line:
        out = ran(program, script, *arguments, split=False)
        assert out.count("has completed its 2 steps") == 2 or results_of("outputs/run")["steps"] == 6
        return
    start = as_process if "trainer=ddp" in line else program
    out = ran(start, script, *sorted([*SMALL_RUN, *arguments], key="-m".__ne__), split=False)
    shown = "val/loss" if "-m" in arguments else "val loss"
    assert shown in out or "launcher=joblib" in line  # whose jobs print in processes of their own


@pytest.mark.slow
@pytest.mark.parametrize("line", MODULES)
def test_module_command(line: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, _, module, *arguments = shlex.split(adapted(line))
    arguments += SMALL_MODULE.get(module, [])
    main = importlib.import_module(f"tinyformer.programs.{module}").main
    if "convert hf" in line:
        assert main(["export", "outputs/run/checkpoints/last.ckpt", "exported"]) == 0
    capsys.readouterr()
    assert main(arguments) == 0
    shows = {"convert": "ported", "batch=": "state of the optimizer"}
    shows |= {
        "demo": "film.html",
        "findings cost": "cost: holds",
        "findings window": "window: ",
        "findings": "redundancy: ",
    }
    out = capsys.readouterr().out
    assert next((text for part, text in shows.items() if part in line), "mha") in out
    printed = [row.split() for row in out.splitlines()]
    assert [row for row in SHOWN.get(line, []) if row not in printed] == []


PYTHON_ADAPTED = {
    "analysis.file=subject_verb": "analysis.file=lines.csv",
    "analysis.file=pronoun_noun": "analysis.file=lines.csv",
    "outputs/…": "outputs/run",
    '"analysis.mode=mean"': '"analysis.mode=mean", "data.files=book.txt"',
    "return scores.softmax(-1) @ x\n": "return scores.softmax(-1) @ x\n\n\nprint(OneHead()(torch.ones(1, 2, 4)))\n",
    "(model)  # the same": '(model.sample(9, ["data.files=book.txt"]))',
    '"trainer.max_steps=200"': f"*{[*SMALL_RUN, 'data=text', 'data.files=book.txt', 'trainer.max_steps=2']}",
}
"""The replacements of the run, the text and the size of a Python block."""


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in PYTHON if block not in MINE])
def test_python_block(block: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for written, run in PYTHON_ADAPTED.items():
        block = block.replace(written, run)
    capsys.readouterr()
    names: dict[str, Any] = {}
    exec(block, names)
    is_shown = capsys.readouterr().out or any(Path.cwd().glob("*.png"))
    assert is_shown or names["findings"].tables["ablation"] == (names["columns"], names["rows"])


def test_the_classes_of_ones_own_are_parts_of_the_whole_file() -> None:
    classes = {part for block in MINE for part in block.split("\n\n\n")[1:]}
    assert all(part.strip() in MINE[-1] for part in classes)  # commands run with the whole


def axes(page: str) -> dict[str, set[str]]:
    """The choices of each axis in the table of axes of a page."""
    table = PAGES[page].split("| axis | choices | meaning |\n")[1].split("\n\n")[0]
    cells = [row.split(" | ") for row in table.splitlines()[1:]]
    return {axis.strip("| `"): set(re.findall(r"`(\w+)`", choices)) for axis, choices, _ in cells}


def test_the_table_of_axes_lists_every_choice() -> None:
    listed = axes("docs/pages/variants.md")
    for group in (path for path in (ROOT / "conf").iterdir() if path.is_dir()):
        if group.name in ("callbacks", "experiment", "finding", "generate"):
            continue
        choices = {file.stem for file in group.glob("[!_]*.yaml")}
        assert choices <= listed[group.name], group.name
    asked_first = axes("README.md")
    assert [axis for axis, choices in asked_first.items() if not choices <= listed[axis]] == []


def test_the_table_of_backends_is_that_of_the_code() -> None:
    def where(backend: str, feature: Feature) -> str:
        devices = [device.upper() for device in ("cpu", "cuda") if feature not in LACKS[backend, device]]
        return " ".join(devices) or "–"

    rows = [
        f"| {' | '.join([feature.value, 'CPU CUDA', *(where(name, feature) for name in ('sdpa', 'flash', 'flex'))])} |"
        for feature in Feature
    ]
    assert "\n".join(rows) in PAGES["docs/pages/backends.md"]


def test_findings_are_those_that_were_measured() -> None:
    findings = [read_finding(name) for name in finding_names()]
    outcomes = read_outcomes(ROOT / "docs/pages/findings", finding_names())
    measured = [(one, outcomes[one.name][-1]) for one in findings if one.is_headline]
    lines = [f"| `{one.name}` | {takeaway_of(one, last)} | {summary(last['verdicts'])} |" for one, last in measured]
    assert len(lines) == 5
    assert {*lines} <= {*PAGES["README.md"].splitlines()}
    assert PAGES["docs/pages/findings.md"] == page(findings, outcomes, "findings")


def test_the_pictures_are_there() -> None:
    pictures = [(page, path) for page, text in PAGES.items() for path in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)]
    assert len([page for page, _ in pictures if page != "docs/pages/findings.md"]) == 14  # it has one of each measured
    assert all((ROOT / page).parent.joinpath(path).stat().st_size > 5_000 for page, path in pictures)
