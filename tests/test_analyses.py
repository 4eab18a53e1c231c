"""`evaluate.py checkpoint=… analysis=…`: the analyses as users run them."""

import contextlib
import csv
import io
import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import SMALL, Program
from matplotlib.image import imread
from wandb_file import read_history

import tinyformer
from tinyformer.analysis import HeadAblation
from tinyformer.checkpoint.file import load_checkpoint
from tinyformer.config.compose import compose_run
from tinyformer.config.errors import ConfigError
from tinyformer.run.pipeline import train as train_run

EVERY_HEAD = [[layer, head] for layer in range(2) for head in range(4)]

MODEL = f"{SMALL} model.num_heads=4 model.d_model=32 trainer.max_steps=30 optimizer.lr=1e-2 callbacks.attention=null"
TEXT = "data=text data.files=book.txt tokenizer=char data.validation_fraction=0.1 data.test_fraction=0.1"
ALL = "analysis.num_windows=100"  # more than the split has

Checkpoints = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Trains each model once per session: `checkpoint_of("attention=gqa")`."""
    trained: dict[tuple[str, ...], Path] = {}

    def train(*overrides: str) -> Path:
        if overrides in trained:
            return trained[overrides]
        folder = tmp_path_factory.mktemp("trained")
        lines = [f"In line {n} the cat sees {n * 7 % 13} birds and {n * 5 % 11} mice.\n" for n in range(120)]
        (folder / "book.txt").write_text("".join(lines))
        (folder / "documents").mkdir()
        for number in range(40):
            (folder / "documents" / f"{number:02d}.txt").write_text(lines[3 * number])
        text = TEXT.replace("book.txt", str(folder / "book.txt"))
        words = shlex.split(" ".join((MODEL, text, *overrides)).replace("DOCUMENTS", str(folder / "documents")))
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
            config, invocation = compose_run("train", words)
            train_run(config, folder / "run", invocation)
        trained[overrides] = folder / "run" / "checkpoints" / "last.ckpt"
        return trained[overrides]

    return train


def own_data(checkpoint: Path | str) -> str:
    """The override that names the text of a checkpoint's run."""
    return f"data.files={load_checkpoint(checkpoint).overrides['data.files']}"


def evaluate(program: Program, checkpoint: Path | str, *overrides: str, folder: str = "evaluated") -> dict:
    """The results of an evaluation, whose files are left in a folder."""
    quick = f"callbacks.attention=null generate.num_tokens=2 hydra.run.dir={folder}"
    ended = program("evaluate.py", f"checkpoint={checkpoint} {own_data(checkpoint)}", quick, *overrides)
    assert ended.code == 0, ended.err
    return json.loads(Path(folder, "results.json").read_text())


def table(name: str) -> list[dict[str, str]]:
    with Path("evaluated", f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def numbers(name: str, column: str) -> list[float]:
    return [float(row[column]) for row in table(name)]


def heads_in(name: str) -> list[list[int]]:
    return [[int(row["layer"]), int(row["head"])] for row in table(name)]


def pruned_heads(path: str | Path) -> list[list[int]]:
    return load_checkpoint(path).overrides["model.pruned_heads"]


RELATIONS = "analysis=relations analysis.text='cat sees 3 mice' analysis.pairs=[[mice,cat],[3,sees]]"
WRITTEN = {
    "analysis=heads": ({"ablation": 8, "kv_groups": 4}, ["ablation"]),
    "analysis=importance": ({"importance": 8}, ["importance"]),
    "analysis=prune": ({"prune": 7}, ["prune"]),
    "analysis=residual": ({"residual": 8, "rank": 12}, ["residual", "rank", "token_cosine"]),
    "analysis=gradients": (
        {"gradients": 12, "saturation": 8, "logits": 8, "sublayers": 8},
        ["gradients", "saturation"],
    ),
    "analysis=maps": ({"maps": 8}, ["maps"]),
    RELATIONS: ({"relations": 16}, ["relations"]),
}
"""By analysis, its tables with their number of rows, and its pictures."""


@pytest.mark.parametrize("analysis", WRITTEN)
def test_an_analysis_writes_its_tables_and_pictures(
    program: Program, checkpoint_of: Checkpoints, analysis: str
) -> None:
    checkpoint = checkpoint_of("attention=gqa")
    number = [] if analysis == RELATIONS else [ALL]
    results = evaluate(program, checkpoint, f"{analysis} score=true", *number)
    tables, pictures = WRITTEN[analysis]
    assert {name: len(table(name)) for name in tables} == tables
    assert all(min(imread(f"evaluated/{name}.png").shape[:2]) > 100 for name in pictures)
    if "analysis/loss" in results:
        assert results["analysis/loss"] == pytest.approx(results["val/loss"], abs=1e-5)
    if analysis == "analysis=maps":
        assert 'id="atlas-data"' in Path("evaluated/atlas.html").read_text(encoding="utf-8")
    if analysis == "analysis=heads":  # the worst head, ablated by the config
        losses = numbers("ablation", "loss")
        worst = max(range(8), key=losses.__getitem__)
        without = evaluate(program, checkpoint, f"attention.ablated_heads=[[{worst // 4},{worst % 4}]]")
        assert losses[worst] == pytest.approx(without["val/loss"], abs=1e-5)
    if analysis == "analysis=prune":  # the checkpoint is evaluated and analysed like any other
        path = Path("evaluated/pruned.ckpt").rename("pruned.ckpt")
        left = [pair for pair in EVERY_HEAD if pair not in pruned_heads(path)]
        assert len(left) == 8 - results["analysis/num_pruned"] == 5
        smaller = evaluate(program, path, f"analysis=heads score=true {ALL}")
        assert heads_in("ablation") == left
        assert smaller["num_parameters"] == results["analysis/pruned_num_parameters"] < results["num_parameters"]
        assert len(smaller["sample"]) == 2
        for loss in (smaller["analysis/loss"], results["analysis/pruned_loss"]):
            assert smaller["val/loss"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.slow
def test_python_finds_what_the_command_line_writes(program: Program, checkpoint_of: Checkpoints) -> None:
    checkpoint = checkpoint_of("attention=gqa")
    model, data = tinyformer.load(checkpoint), [own_data(checkpoint)]
    for analysis, options in (("heads", ["analysis.mode=resample"]), ("maps", [])):
        evaluate(program, checkpoint, f"analysis={analysis}", *options)
        written = {path.name: path.read_bytes() for path in Path("evaluated").glob("*.[ph][nt][gm]*")}
        state = torch.get_rng_state()
        found = model.analyse(analysis, [*options, *data], folder="python")
        assert torch.equal(torch.get_rng_state(), state)
        assert written == {name: Path("python", name).read_bytes() for name in written}
        for name, (columns, rows) in found.tables.items():
            assert [[*row.values()] for row in table(name)] == [list(map(str, row)) for row in rows]
            assert [*table(name)[0]] == columns
        shutil.rmtree("python")
        shutil.rmtree("evaluated")
    evaluated = HeadAblation("resample")(model.sample(32, data))
    assert evaluated.tables == model.analyse(HeadAblation("resample"), data).tables
    columns, rows = model.analyse("heads", data).tables["ablation"]
    with model.ablated([(0, 1)]):  # the model as it is
        loss = model.analyse("heads", data).scalars["analysis/loss"]
    assert loss == pytest.approx(rows[1][columns.index("loss")], abs=1e-5)
    with pytest.raises(ConfigError, match=r"^analysis\.mode=x: must be one of zero, mean, resample\.$"):
        model.analyse("heads", ["analysis.mode=x", *data])
    with pytest.raises(ConfigError, match=r"a checkpoint's paths are not followed; add data\.files="):
        HeadAblation()(model)


@pytest.mark.slow
def test_a_run_started_from_a_pruned_checkpoint_keeps_its_heads_pruned(
    program: Program, checkpoint_of: Checkpoints, book: Path
) -> None:
    evaluate(program, checkpoint_of("attention=gqa"), f"analysis=prune analysis.order=random analysis.seed=4 {ALL}")
    pruned = Path("evaluated/pruned.ckpt").rename("pruned.ckpt")
    heads, before = pruned_heads(pruned), evaluate(program, pruned)
    started = program("train.py", MODEL, TEXT, f"attention=gqa init_from={pruned} hydra.run.dir=next optimizer.lr=1e-3")
    assert started.code == 0, started.err
    results = json.loads(Path("next/results.json").read_text())
    assert results["val/loss"] < before["val/loss"]
    assert results["num_parameters"] == before["num_parameters"]
    assert pruned_heads("next/checkpoints/last.ckpt") == heads
    pruned.unlink()  # the run does not need it any more
    resumed = program("train.py", "resume=next trainer.max_steps=32")
    assert resumed.code == 0, resumed.err
    assert pruned_heads("next/checkpoints/last.ckpt") == heads


@pytest.mark.slow
def test_models_with_masks_and_ablated_heads(program: Program, checkpoint_of: Checkpoints) -> None:
    masks = "attention.window=[4,null] data.files=DOCUMENTS data.document_mask=true"
    checkpoint = checkpoint_of(f"attention=gqa attention.ablated_heads=[[0,1],[1,3]] {masks}")
    results = evaluate(program, checkpoint, f"analysis=heads score=true {ALL}")
    assert results["analysis/loss"] == pytest.approx(results["val/loss"], abs=1e-5)
    changes = zip(heads_in("ablation"), numbers("ablation", "change"), strict=True)
    assert [head for head, change in changes if change == 0] == [[0, 1], [1, 3]]
    evaluate(program, checkpoint, "analysis=maps")
    assert heads_in("maps") == EVERY_HEAD


def test_an_analysis_alone_neither_scores_nor_draws_nor_samples(program: Program, checkpoint_of: Checkpoints) -> None:
    checkpoint = checkpoint_of("attention=gqa")
    own = f"checkpoint={checkpoint} {own_data(checkpoint)}"
    ended = program("evaluate.py", own, "hydra.run.dir=run analysis=importance")
    assert ended.code == 0, ended.err
    assert not [word for word in ("val loss", "attention maps", "A sample") if word in ended.out]
    results = json.loads(Path("run/results.json").read_text())
    assert results["sample"] is None
    assert not [key for key in results if key.startswith(("val/", "throughput/"))]
    assert not Path("run/attention").exists()
    assert Path("run/importance.csv").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("score=false", "Error: score=false: leaves nothing to do without an analysis; score=true works."),
        ("analysis=heads generate.prompt=The", "Error: generate.prompt=The: is not read by an analysis alone;"),
        ("analysis=prune analysis.fraction=0.9", "Error: analysis.fraction=0.9: is 7 of 8 heads;"),
        ("analysis=importance attention.backend=flex", "attention.backend="),
        ("analysis=relations", "Error: analysis.text=null: must be the text that has the words of analysis.pairs;"),
    ],
)
def test_a_mistake_leaves_no_results(
    program: Program, checkpoint_of: Checkpoints, overrides: str, message: str
) -> None:
    checkpoint = checkpoint_of("attention=gqa")
    asked = f"checkpoint={checkpoint} {own_data(checkpoint)} hydra.run.dir=evaluated"
    ended = program("evaluate.py", asked, overrides)
    assert (ended.code, message in ended.err) == (2, True), ended.err
    files = {path for path in Path("evaluated").rglob("*") if path.is_file() and ".hydra" not in path.parts}
    assert {path.name: path.read_text().split() for path in files} in ({}, {"metrics.csv": ["step"]})


MEAN = """
import torch
from torch import nn

class Mean(nn.Module):
    def __init__(self, **layer):
        super().__init__()
        self.proj = nn.Linear(16, 16)

    def forward(self, x, mask=None, context=None, context_mask=None):
        if context is not None:
            return self.proj(x + context.mean(1, keepdim=True))
        return self.proj(x.cumsum(1) / torch.arange(1, x.shape[1] + 1).unsqueeze(1))
"""
NO_HEADS = "attention=Mean: is no BaseAttention, so it has no heads."
OF_HEADS, OF_MAPS = "analysis=heads", "analysis=maps analysis.importance=false"
RELATED = "analysis=relations 'analysis.text=7 mice' 'analysis.pairs=[[7,mice]]'"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "task", "told", "analyses"),
    [
        (
            "attention",
            "tokenizer=byte",
            "telemetry left out: attention='Mean': is no BaseAttention",
            {OF_HEADS: NO_HEADS, OF_MAPS: NO_HEADS},
        ),
        (
            "cross_attention",
            "task=seq2seq tokenizer=byte",
            "logs run/metrics.csv, attention/heads.csv",
            {"analysis=alignment": f"cross_{NO_HEADS}", RELATED: f"cross_{NO_HEADS}", OF_HEADS: "", OF_MAPS: ""},
        ),
    ],
    ids=["causal", "cross"],
)
def test_any_module_can_be_the_attention(
    program: Program, monkeypatch: pytest.MonkeyPatch, axis: str, task: str, told: str, analyses: dict[str, str]
) -> None:
    monkeypatch.syspath_prepend(Path.cwd())
    Path("plain_mean.py").write_text(MEAN)
    Path("pairs.tsv").write_text("source\ttarget\n" + "".join(f"{n} mice\tmice {n}\n" for n in range(80)))
    data = "data.files=pairs.tsv data.validation_fraction=0.2 data.text_column=source"
    own = f"'{axis}={{_target_: plain_mean.Mean, _partial_: true}}'"
    ended = program("train.py", SMALL, f"data=text {data} {task} {own} hydra.run.dir=run")
    assert (ended.code, told in " ".join(ended.out.split())) == (0, True), ended
    trusted = f"checkpoint=run/checkpoints/last.ckpt {data} {axis}._target_=plain_mean.Mean"
    ended = program("evaluate.py", trusted, "hydra.run.dir=scored")
    assert (ended.code, "val loss" in ended.out) == (0, True), ended
    for analysis, refusal in analyses.items():
        ended = program("evaluate.py", trusted, analysis, "hydra.run.dir=evaluated")
        assert (ended.code, refusal in ended.err) == (2 if refusal else 0, True), ended
    if axis == "cross_attention":
        assert {row["kind"] for name in ("ablation", "maps") for row in table(name)} == {"encoder", "decoder"}


@pytest.mark.slow
def test_wandb_has_the_tables_pictures_and_pages(program: Program, checkpoint_of: Checkpoints) -> None:
    evaluate(program, checkpoint_of("attention=gqa"), "analysis=maps logger=wandb")
    (file,) = Path("evaluated").glob("wandb/offline-run-*/run-*.wandb")
    (row,) = [row for row in read_history(file) if any(key.startswith("analysis/") for key in row)]
    files = file.parent / "files"
    stored, rows = json.loads((files / row["analysis/maps"]["path"]).read_text()), table("maps")
    assert stored["columns"] == list(rows[0])
    shown = [["" if value is None else str(value) for value in values] for values in stored["data"]]
    assert shown == [list(row.values()) for row in rows]
    assert min(imread(files / row["analysis/maps_figure"]["path"]).shape[:2]) > 100
    assert 'id="atlas-data"' in (files / row["analysis/atlas"]["path"]).read_text(encoding="utf-8")
