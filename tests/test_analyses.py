"""`evaluate.py checkpoint=… analysis=…`: every analysis of every kind of attention, as its users run it."""

import csv
import json
import os
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from matplotlib.image import imread
from programs import ROOT, SMALL, Program
from wandb_file import read_history, read_records

from tinyformer.checkpoint import load_checkpoint

SHARINGS = ("mha", "gqa", "mqa", "mla", "differential")
ANALYSES = ("heads", "importance", "prune", "residual", "maps")
LAYERS, HEADS = 2, 4

MODEL = f"{SMALL} model.num_heads=4 model.d_model=32 trainer.max_steps=30 optimizer.lr=1e-2 callbacks.attention=null"
TEXT = "data=text data.files=book.txt tokenizer=char data.validation_fraction=0.1 data.test_fraction=0.1"
QUICK = "callbacks.attention=null generate.num_tokens=2 hydra.run.dir=evaluated"
ALL = "analysis.num_windows=100"  # of the 30 or so that the split has

Checkpoints = Callable[..., Path]


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Trains a model once for all tests: `checkpoint_of("attention=gqa")`."""
    made: dict[tuple[str, ...], Path] = {}

    def train(*overrides: str) -> Path:
        if overrides in made:
            return made[overrides]
        folder = tmp_path_factory.mktemp("trained")
        lines = [f"In line {n} the cat sees {n * 7 % 13} birds and {n * 5 % 11} mice.\n" for n in range(120)]
        (folder / "book.txt").write_text("".join(lines))
        (folder / "documents").mkdir()
        for number in range(40):
            (folder / "documents" / f"{number:02d}.txt").write_text("".join(lines[3 * number : 3 * number + 1]))
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            text = TEXT.replace("book.txt", str(folder / "book.txt"))
            words = shlex.split(" ".join((MODEL, text, *overrides)).replace("DOCUMENTS", str(folder / "documents")))
            patch.setattr(sys, "argv", ["train.py", *words, "hydra.run.dir=run"])
            GlobalHydra.instance().clear()
            with pytest.raises(SystemExit) as end:
                runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
        assert end.value.code == 0
        made[overrides] = folder / "run" / "checkpoints" / "last.ckpt"
        return made[overrides]

    return train


def evaluate(program: Program, checkpoint: Path | str, *overrides: str, folder: str = "evaluated") -> dict:
    """The results of an evaluation, left in a folder."""
    ended = program("evaluate.py", f"checkpoint={checkpoint}", QUICK, *overrides, f"hydra.run.dir={folder}")
    assert ended.code == 0, ended.err
    return json.loads(Path(folder, "results.json").read_text())


def table(name: str, folder: str = "evaluated") -> list[dict[str, str]]:
    with Path(folder, f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def numbers(name: str, column: str, folder: str = "evaluated") -> list[float]:
    return [float(row[column]) for row in table(name, folder)]


def heads_in(rows: list[dict[str, str]]) -> list[list[int]]:
    return [[int(row["layer"]), int(row["head"])] for row in rows]


def hydra_list(pairs: list[list[int]]) -> str:
    return json.dumps(pairs).replace(" ", "")


EVERY_HEAD = [[layer, head] for layer in range(LAYERS) for head in range(HEADS)]


# Every analysis of every kind of attention.


def check_heads(program: Program, checkpoint: Path, sharing: str, results: dict) -> None:
    assert heads_in(table("heads")) == EVERY_HEAD
    changes = numbers("heads", "change")
    assert all(
        low <= change <= high
        for low, change, high in zip(numbers("heads", "low"), changes, numbers("heads", "high"), strict=True)
    )
    groups = {"gqa": ["0 1", "2 3"] * 2, "mqa": ["0 1 2 3"] * 2}.get(sharing)
    assert Path("evaluated/kv_groups.csv").exists() is (groups is not None)
    if groups:
        assert [row["heads"] for row in table("kv_groups")] == groups
    assert results["analysis/loss"] == pytest.approx(results["val/loss"], abs=1e-5)
    worst = max(range(8), key=changes.__getitem__)
    without = evaluate(program, checkpoint, f"attention.ablated_heads=[[{worst // 4},{worst % 4}]]")
    assert numbers("heads", "loss")[worst] == pytest.approx(without["val/loss"], abs=1e-5)


def check_importance(program: Program, checkpoint: Path, sharing: str, results: dict) -> None:
    assert heads_in(table("importance")) == EVERY_HEAD
    assert all(value > 0 for value in numbers("importance", "importance"))
    assert -1 <= results["analysis/rank_correlation"] <= 1


def check_prune(program: Program, checkpoint: Path, sharing: str, results: dict) -> None:
    path = Path("evaluated/pruned.ckpt").rename("pruned.ckpt")
    config = load_checkpoint(path).config
    pruned = config["model"]["pruned_heads"]
    assert len(pruned) == results["analysis/num_pruned"] == 3
    again = evaluate(program, path)
    gated = evaluate(program, checkpoint, f"attention.ablated_heads={hydra_list(pruned)}")
    assert again["val/loss"] == pytest.approx(gated["val/loss"], abs=1e-5)
    assert again["val/loss"] == pytest.approx(results["analysis/pruned_loss"], abs=1e-5)
    assert again["num_parameters"] == results["analysis/pruned_num_parameters"] < results["num_parameters"]
    assert len(again["sample"]) == 2
    assert results["analysis/loss"] == pytest.approx(results["val/loss"], abs=1e-5)


def check_residual(program: Program, checkpoint: Path, sharing: str, results: dict) -> None:
    assert len(table("residual")) == 2 * 2 * LAYERS
    assert len(table("rank")) == 4 * (LAYERS + 1)
    row = table("residual")[5]
    assert (row["layer"], row["sublayer"], row["removed"]) == ("1", "attention_residual", "branch")
    without = evaluate(program, checkpoint, "block.attention_residual.branch=[1,0]")
    assert float(row["loss"]) == pytest.approx(without["val/loss"], abs=1e-5)
    assert 0 < results["analysis/trained_without_skips/rank_distance"] <= 1


def check_maps(program: Program, checkpoint: Path, sharing: str, results: dict) -> None:
    letters = "ab" if sharing == "differential" else [""]
    names = [f"{head:02d}{letter}" for head in range(HEADS) for letter in letters]
    assert [row["head"] for row in table("maps")] == names * LAYERS
    assert all(value > 0 for value in numbers("maps", "importance"))
    page = Path("evaluated/atlas.html").read_text(encoding="utf-8")
    assert all(f'"{name.removeprefix("0")}"' in page for name in names)


CHECKS = {name: globals()[f"check_{name}"] for name in ANALYSES}
PICTURES = {"residual": ["rank", "token_cosine"]}


def analyse(program: Program, checkpoint: Path, sharing: str, analysis: str) -> None:
    results = evaluate(program, checkpoint, f"analysis={analysis} {ALL}")
    for name in PICTURES.get(analysis, [analysis]):
        assert min(imread(f"evaluated/{name}.png").shape[:2]) > 100
        Path(f"evaluated/{name}.png").unlink()
    CHECKS[analysis](program, checkpoint, sharing, results)


@pytest.mark.parametrize("analysis", ANALYSES)
def test_an_analysis(program: Program, checkpoint_of: Checkpoints, analysis: str) -> None:
    analyse(program, checkpoint_of("attention=gqa"), "gqa", analysis)


@pytest.mark.slow
def test_every_analysis_of_every_attention(program: Program, checkpoint_of: Checkpoints, tmp_path: Path) -> None:
    ran = 0
    for sharing in SHARINGS:
        for analysis in ANALYSES:
            folder = tmp_path / f"{sharing}-{analysis}"
            folder.mkdir()
            os.chdir(folder)
            analyse(program, checkpoint_of(f"attention={sharing}"), sharing, analysis)
            ran += 1
    print(f"{ran} of {len(SHARINGS) * len(ANALYSES)} analyses ran")


@pytest.mark.parametrize("mode", ["mean", pytest.param("resample", marks=pytest.mark.slow)])
def test_what_stands_in_for_a_head_can_be_chosen(program: Program, checkpoint_of: Checkpoints, mode: str) -> None:
    checkpoint, few = checkpoint_of("attention=gqa"), "analysis=heads analysis.num_windows=8"
    ended = program("evaluate.py", f"checkpoint={checkpoint}", QUICK, few, f"analysis.mode={mode}")
    assert f"{mode}; 8 windows" in ended.out
    chosen = numbers("heads", "change")
    evaluate(program, checkpoint, few)
    assert all(abs(a - b) > 1e-7 for a, b in zip(chosen, numbers("heads", "change"), strict=True))


@pytest.mark.slow
def test_the_oracle_takes_the_head_that_changes_least(program: Program, checkpoint_of: Checkpoints) -> None:
    checkpoint = checkpoint_of("attention=gqa")
    evaluate(program, checkpoint, "analysis=prune analysis.order=oracle analysis.fraction=0.125")
    (pruned,) = load_checkpoint("evaluated/pruned.ckpt").config["model"]["pruned_heads"]
    evaluate(program, checkpoint, "analysis=heads")
    changes = numbers("heads", "change")
    assert pruned == EVERY_HEAD[min(range(8), key=changes.__getitem__)]


@pytest.mark.slow
def test_a_random_order_is_drawn_from_its_seed(program: Program, checkpoint_of: Checkpoints) -> None:
    pruned = []
    for seed in (0, 0, 1):
        settings = f"analysis=prune analysis.order=random analysis.seed={seed} analysis.num_windows=4"
        evaluate(program, checkpoint_of("attention=gqa"), settings)
        pruned.append(load_checkpoint("evaluated/pruned.ckpt").config["model"]["pruned_heads"])
    assert pruned[0] == pruned[1] != pruned[2]


# What a pruned checkpoint is good for.


@pytest.fixture
def pruned(program: Program, checkpoint_of: Checkpoints) -> Path:
    """Three heads are gone, and the groups that share a K/V head are unequal."""
    evaluate(program, checkpoint_of("attention=gqa"), f"analysis=prune analysis.order=random analysis.seed=4 {ALL}")
    return Path("evaluated/pruned.ckpt").rename("pruned.ckpt")


def test_a_pruned_checkpoint_is_analysed(program: Program, pruned: Path) -> None:
    gone = load_checkpoint(pruned).config["model"]["pruned_heads"]
    left = [pair for pair in EVERY_HEAD if pair not in gone]
    results = evaluate(program, pruned, f"analysis=heads {ALL}")
    assert heads_in(table("heads")) == left
    assert results["analysis/loss"] == pytest.approx(results["val/loss"], abs=1e-5)
    evaluate(program, pruned, "analysis=maps")
    assert heads_in(table("maps")) == left


@pytest.mark.slow
def test_pruned_heads_stay_pruned_when_more_go(program: Program, pruned: Path) -> None:
    first = load_checkpoint(pruned).config["model"]["pruned_heads"]
    results = evaluate(program, pruned, f"analysis=prune {ALL}")
    both = load_checkpoint("evaluated/pruned.ckpt").config["model"]["pruned_heads"]
    assert all(pair in both for pair in first)
    assert len(both) == len(first) + 2
    Path("evaluated/pruned.ckpt").rename("twice.ckpt")
    assert evaluate(program, "twice.ckpt")["val/loss"] == pytest.approx(results["analysis/pruned_loss"], abs=1e-5)


@pytest.mark.slow
def test_a_run_that_starts_from_a_pruned_checkpoint_keeps_its_heads_away(
    program: Program, pruned: Path, book: Path
) -> None:
    gone = load_checkpoint(pruned).config["model"]["pruned_heads"]
    before = evaluate(program, pruned)
    started = program("train.py", MODEL, TEXT, f"attention=gqa init_from={pruned} hydra.run.dir=next optimizer.lr=1e-3")
    assert started.code == 0, started.err
    results = json.loads(Path("next/results.json").read_text())
    assert results["val/loss"] < before["val/loss"]
    assert results["num_parameters"] == before["num_parameters"]
    last = load_checkpoint("next/checkpoints/last.ckpt")
    assert last.config["model"]["pruned_heads"] == gone
    assert evaluate(program, last.path)["val/loss"] == pytest.approx(results["val/loss"], abs=1e-5)
    pruned.unlink()  # the run has all that it needs
    resumed = program("train.py", "resume=next trainer.max_steps=32")
    assert resumed.code == 0, resumed.err
    last = load_checkpoint("next/checkpoints/last.ckpt")
    assert (last.step, last.config["model"]["pruned_heads"]) == (32, gone)


def test_the_network_is_stored_as_it_was_evaluated(program: Program, checkpoint_of: Checkpoints) -> None:
    settings = "attention.ablated_heads=[[0,1],[1,3]] block.feed_forward_residual.branch=[1,0.5]"
    results = evaluate(
        program, checkpoint_of("attention=gqa"), f"analysis=prune analysis.fraction=0.125 {ALL}", settings
    )
    assert load_checkpoint("evaluated/pruned.ckpt").config["model"]["pruned_heads"] in ([[0, 1]], [[1, 3]])
    Path("evaluated/pruned.ckpt").rename("pruned.ckpt")
    again = evaluate(program, "pruned.ckpt")
    assert again["val/loss"] == pytest.approx(results["val/loss"], abs=1e-5)


# Other backends, texts, precisions and masks.


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "sdpa", "flash"])
def test_heads_matter_alike_on_every_backend(program: Program, checkpoint_of: Checkpoints, backend: str) -> None:
    checkpoint = checkpoint_of("attention=gqa")
    evaluate(program, checkpoint, "analysis=heads", folder="auto")
    results = evaluate(program, checkpoint, f"analysis=heads attention.backend={backend}")
    assert results["attention_backend"] == backend
    assert numbers("heads", "change") == pytest.approx(numbers("heads", "change", "auto"), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("analysis", ["heads", "prune", "residual"])
def test_in_every_precision(program: Program, checkpoint_of: Checkpoints, precision: str, analysis: str) -> None:
    checkpoint = checkpoint_of("attention=gqa")
    results = evaluate(program, checkpoint, f"analysis={analysis} {ALL} trainer.precision={precision}")
    assert results["precision"] == precision
    assert results["analysis/loss"] == pytest.approx(results["val/loss"], abs=1e-5)


@pytest.mark.slow
def test_of_another_text_and_split(program: Program, checkpoint_of: Checkpoints) -> None:
    Path("other.txt").write_text("mice see the cat in line 5.\n" * 30)
    checkpoint, losses = checkpoint_of("attention=gqa"), set()
    for where, key in (("", "val"), ("split=test", "test"), ("data=text data.files=other.txt", "val")):
        results = evaluate(program, checkpoint, f"analysis=heads {ALL}", where)
        assert results["analysis/loss"] == pytest.approx(results[f"{key}/loss"], abs=1e-5)
        losses.add(results["analysis/loss"])
    assert len(losses) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "trained",
    [
        "attention=mha attention.window=[4,null]",
        "attention=gqa data.files=DOCUMENTS data.document_mask=true",
        "attention=gqa attention.ablated_heads=[[0,1],[1,3]]",
    ],
    ids=["window", "documents", "ablated"],
)
def test_of_models_with_a_mask_of_their_own(program: Program, checkpoint_of: Checkpoints, trained: str) -> None:
    checkpoint = checkpoint_of(trained)
    results = evaluate(program, checkpoint, f"analysis=heads {ALL}")
    assert results["analysis/loss"] == pytest.approx(results["val/loss"], abs=1e-5)
    changes = dict(zip(map(tuple, heads_in(table("heads"))), numbers("heads", "change"), strict=True))
    still = {pair for pair, change in changes.items() if change == 0}
    assert still == ({(0, 1), (1, 3)} if "ablated" in trained else set())
    analyse(program, checkpoint, "mha" if "mha" in trained else "gqa", "prune")
    results = evaluate(program, checkpoint, "analysis=maps")
    assert len(table("maps")) == LAYERS * HEADS


# The text of the maps.


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("", "8 maps of 16 tokens;"),
        ("analysis.num_tokens=5", "8 maps of 5 tokens;"),
        ("'analysis.text=The cat.'", "8 maps of 8 tokens;"),
        ("'analysis.text=In line 77 the cat sees 6 birds'", "8 maps of 16 of the text's 31 tokens;"),
    ],
)
def test_the_text_of_the_maps(program: Program, checkpoint_of: Checkpoints, choice: str, said: str) -> None:
    ended = program("evaluate.py", f"checkpoint={checkpoint_of('attention=gqa')}", QUICK, "analysis=maps", choice)
    assert ended.code == 0, ended.err
    assert said in ended.out


# Mistakes.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("analysis=nonsense", "Choices: heads, importance, maps, prune, residual."),
        ("analysis=heads analysis.mode=nil", "analysis.mode=nil: must be one of zero, mean, resample."),
        ("analysis=heads analysis.mod=mean", "analysis.mod: there is no such key. Did you mean analysis.mode"),
        ("analysis.mode=mean", "It belongs to analysis=heads."),
        ("analysis=heads analysis.num_windows=0", "analysis.num_windows=32 works."),
        ("analysis=heads analysis.num_windows=many", "analysis.num_windows=many: should be a valid integer"),
        ("analysis=heads analysis.mode=resample analysis.num_windows=1", "analysis.mode=mean works."),
        ("analysis=prune analysis.order=nil", "analysis.order=nil: must be one of importance, oracle, random."),
        ("analysis=prune analysis.fraction=0", "analysis.fraction=0.4 works."),
        ("analysis=prune analysis.fraction=1", "analysis.fraction=0.4 works."),
        ("analysis=prune analysis.fraction=0.9", "analysis.fraction=0.75 works."),
        ("analysis=maps analysis.num_tokens=17", "the context length of the model; analysis.num_tokens=16 works."),
        ("analysis=maps analysis.num_tokens=0", "analysis.num_tokens=0: must be at least 1"),
        ("analysis=maps analysis.rows=0", "analysis.rows=256 works."),
        ("analysis=maps analysis.text=", "works."),
        ("analysis=maps analysis.text=7", "analysis.text=7: should be a valid string"),
        ("analysis=importance attention.backend=flex", "(eager, sdpa, flash can); attention.backend=auto works."),
        ("analysis=heads attention.ablated_heads=[[2,0]]", "attention.ablated_heads=[[1,3]] works."),
        ("analysis=heads attention.ablated_heads=[[0,4]]", "attention.ablated_heads=[[1,3]] works."),
        ("analysis=heads model.pruned_heads=[[0,4]]", "model.pruned_heads=[[1,3]] works."),
        (
            "analysis=heads model.pruned_heads=[[1,0],[1,1],[1,2],[1,3]]",
            "block.attention_residual.branch=[1,0] works.",
        ),
        ("analysis=heads checkpoint=foreign.ckpt", "was not written by tinyformer"),
        ("analysis=heads checkpoint=book.txt", "no checkpoint"),
    ],
)
def test_mistakes_are_told_and_leave_nothing(
    program: Program, checkpoint_of: Checkpoints, book: Path, overrides: str, said: str
) -> None:
    torch.save({"state_dict": {}, "global_step": 1}, "foreign.ckpt")
    ended = program("evaluate.py", f"checkpoint={checkpoint_of('attention=gqa')}", QUICK, overrides)
    assert ended.code == 2, ended.err
    assert said in ended.err
    assert len(ended.err.strip().splitlines()) <= 2
    left = {path for path in Path("evaluated").rglob("*") if path.is_file() and ".hydra" not in path.parts}
    assert {path.name: path.read_text().split() for path in left} in ({}, {"metrics.csv": ["step"]})


@pytest.mark.parametrize("overrides", ["analysis=heads", "analysis.mode=mean", "+analysis=heads checkpoint=last.ckpt"])
def test_training_knows_no_analysis(program: Program, overrides: str) -> None:
    ended = program("train.py", MODEL, overrides)
    assert (ended.code, "It belongs to evaluate.py." in ended.err) == (2, True), ended.err


@pytest.mark.slow
def test_a_layer_without_any_head_adds_nothing(program: Program, checkpoint_of: Checkpoints) -> None:
    checkpoint = checkpoint_of("attention=gqa")
    none = "attention.ablated_heads=[[1,0],[1,1],[1,2],[1,3]]"
    results = evaluate(program, checkpoint, f"analysis=heads {ALL}", none)
    assert numbers("heads", "change")[4:] == [0, 0, 0, 0]
    assert all(change != 0 for change in numbers("heads", "change")[:4])
    whole = evaluate(program, checkpoint, "block.attention_residual.branch=[1,0]")
    assert results["val/loss"] == pytest.approx(whole["val/loss"], abs=1e-6)


# Weights & Biases.


def logged(analysis: str) -> tuple[dict, dict, Path]:
    """What an offline run logged of an analysis, its summary, and where its files lie."""
    (file,) = Path("evaluated").glob("wandb/offline-run-*/run-*.wandb")
    rows = [row for row in read_history(file) if any(key.startswith("analysis/") for key in row)]
    summary: dict = {}
    for record in read_records(file):
        if record.WhichOneof("record_type") == "summary":
            summary |= {item.key: json.loads(item.value_json) for item in record.summary.update if item.key}
    (row,) = rows
    return row, summary, file.parent / "files"


@pytest.mark.slow
@pytest.mark.parametrize("analysis", ["heads", "maps"])
def test_wandb_holds_the_tables_the_pictures_and_the_pages(
    program: Program, checkpoint_of: Checkpoints, analysis: str
) -> None:
    results = evaluate(program, checkpoint_of("attention=gqa"), f"analysis={analysis} logger=wandb")
    row, summary, files = logged(analysis)
    for path in Path("evaluated").glob("*.csv"):
        if path.name == "metrics.csv":
            continue
        stored = json.loads((files / row[f"analysis/{path.stem}"]["path"]).read_text())
        rows = table(path.stem)
        assert stored["columns"] == list(rows[0])
        shown = [["" if value is None else str(value) for value in values] for values in stored["data"]]
        assert shown == [list(row.values()) for row in rows]
    picture = row[f"analysis/{analysis}_figure"]
    assert picture["_type"] == "image-file"
    assert min(imread(files / picture["path"]).shape[:2]) > 100
    if analysis == "maps":
        page = row["analysis/atlas"]
        assert page["_type"] == "html-file"
        assert 'id="atlas-data"' in (files / page["path"]).read_text(encoding="utf-8")
    else:
        assert summary["analysis/loss"] == pytest.approx(results["analysis/loss"])
        assert "analysis/kv_groups" in row
