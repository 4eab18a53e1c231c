"""`evaluate.py checkpoint=… analysis=…`: the analyses as users run them."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
from commands import SMALL, TEXT, Program, Trained, ran
from matplotlib.image import imread
from wandb_file import read_history

import tinyformer
from tinyformer.analysis import HeadAblation
from tinyformer.checkpoint.file import load_checkpoint
from tinyformer.config.errors import ConfigError

EVERY_HEAD = [[layer, head] for layer in range(2) for head in range(2)]
ALL = "analysis.num_windows=100"  # more than the split has


@pytest.fixture(autouse=True)
def here(program: Program, book: Path) -> None:
    """The text of the shared run, in the folder where the programs run."""


def evaluate(program: Program, checkpoint: Path | str, *overrides: str, folder: str = "evaluated") -> dict:
    """The results of an evaluation, whose files are left in a folder."""
    quick = f"callbacks.attention=null generate.num_tokens=2 hydra.run.dir={folder}"
    ran(program, "evaluate.py", f"checkpoint={checkpoint} data.files=book.txt", quick, *overrides)
    return json.loads(Path(folder, "results.json").read_text())


def table(name: str) -> list[dict[str, str]]:
    with Path("evaluated", f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def heads_in(name: str) -> list[list[int]]:
    return [[int(row["layer"]), int(row["head"])] for row in table(name)]


def pruned_heads(path: str | Path) -> list[list[int]]:
    return load_checkpoint(path).overrides["model.pruned_heads"]


RELATIONS = "analysis=relations analysis.text='cat sees 3 mice' analysis.pairs=[[mice,cat],[3,sees]]"
WRITTEN = {
    f"analysis=heads {ALL}": ({"ablation": 4, "kv_groups": 2}, ["ablation"]),
    f"analysis=importance {ALL}": ({"importance": 4}, ["importance"]),
    f"analysis=prune {ALL}": ({"prune": 3}, ["prune"]),
    f"analysis=residual {ALL}": ({"residual": 8, "rank": 12}, ["residual", "rank", "token_cosine"]),
    f"analysis=gradients {ALL}": ({"gradients": 12, "saturation": 4, "logits": 4, "sublayers": 8}, ["saturation"]),
    f"analysis=maps {ALL}": ({"maps": 4}, ["maps"]),
    RELATIONS: ({"relations": 8}, ["relations"]),
}
"""By analysis, its tables with their number of rows, and its pictures."""


@pytest.mark.parametrize("analysis", WRITTEN)
def test_an_analysis_writes_its_tables_and_pictures(program: Program, trained: Trained, analysis: str) -> None:
    results = evaluate(program, trained.last, f"{analysis} score=true")
    tables, pictures = WRITTEN[analysis]
    assert {name: len(table(name)) for name in tables} == tables
    assert all(min(imread(f"evaluated/{name}.png").shape[:2]) > 100 for name in pictures)
    if "analysis/loss" in results:
        assert results["analysis/loss"] == pytest.approx(results["val/loss"], abs=1e-5)
    if "=maps" in analysis:
        assert 'id="atlas-data"' in Path("evaluated/atlas.html").read_text(encoding="utf-8")
    if "=heads" in analysis:  # the worst head, ablated by the config
        losses = [float(row["loss"]) for row in table("ablation")]
        worst = EVERY_HEAD[losses.index(max(losses))]
        without = evaluate(program, trained.last, f"attention.ablated_heads={[worst]}".replace(" ", ""))
        assert max(losses) == pytest.approx(without["val/loss"], abs=1e-5)
    if "=prune" in analysis:  # the checkpoint is evaluated and analysed like any other
        path = Path("evaluated/pruned.ckpt").rename("pruned.ckpt")
        left = [pair for pair in EVERY_HEAD if pair not in pruned_heads(path)]
        assert len(left) == 4 - results["analysis/num_pruned"] == 2
        smaller = evaluate(program, path, f"analysis=heads score=true {ALL}")
        assert heads_in("ablation") == left
        assert smaller["num_parameters"] == results["analysis/pruned_num_parameters"] < results["num_parameters"]
        assert len(smaller["sample"]) == 2
        for loss in (smaller["analysis/loss"], results["analysis/pruned_loss"]):
            assert smaller["val/loss"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.slow
def test_python_finds_what_the_command_line_writes(program: Program, trained: Trained) -> None:
    model, data = tinyformer.load(trained.last), ["data.files=book.txt"]
    for analysis, options in (("heads", ["analysis.mode=resample"]), ("maps", [])):
        evaluate(program, trained.last, f"analysis={analysis}", *options)
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
    columns, rows = model.analyse("heads", data).tables["ablation"]
    with model.ablated([(0, 1)]):  # the model as it is
        loss = model.analyse(HeadAblation(), data).scalars["analysis/loss"]
    assert loss == pytest.approx(rows[1][columns.index("loss")], abs=1e-5)
    with pytest.raises(ConfigError, match=r"^analysis\.mode=x: must be one of"):
        model.analyse("heads", ["analysis.mode=x", *data])
    with pytest.raises(ConfigError, match=r"a checkpoint's paths are not followed; add data\.files="):
        HeadAblation()(model)


@pytest.mark.slow
def test_a_run_started_from_a_pruned_checkpoint_keeps_its_heads_pruned(program: Program, trained: Trained) -> None:
    evaluate(program, trained.last, f"analysis=prune analysis.order=random analysis.seed=4 {ALL}")
    pruned = Path("evaluated/pruned.ckpt").rename("pruned.ckpt")
    heads, before = pruned_heads(pruned), evaluate(program, pruned)
    network = "attention=gqa position=rotary optimizer.lr=1e-3 trainer.max_steps=30"
    ran(program, "train.py", SMALL, TEXT, network, f"init_from={pruned} hydra.run.dir=next")
    results = json.loads(Path("next/results.json").read_text())
    assert results["val/loss"] < before["val/loss"]
    assert results["num_parameters"] == before["num_parameters"]
    pruned.unlink()  # the run does not need it any more
    ran(program, "train.py", "resume=next trainer.max_steps=32")
    assert pruned_heads("next/checkpoints/last.ckpt") == heads


def test_an_analysis_alone_neither_scores_nor_draws_nor_samples(program: Program, trained: Trained) -> None:
    own = f"checkpoint={trained.last} data.files=book.txt"
    out = ran(program, "evaluate.py", own, "hydra.run.dir=run analysis=importance")
    assert not [word for word in ("val loss", "attention maps", "A sample") if word in out]
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
        ("analysis=prune analysis.fraction=0.9", "Error: analysis.fraction=0.9: is "),
        ("analysis=importance attention.backend=flex", "attention.backend="),
    ],
)
def test_a_mistake_leaves_no_results(program: Program, trained: Trained, overrides: str, message: str) -> None:
    asked = f"checkpoint={trained.last} data.files=book.txt hydra.run.dir=evaluated"
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


@pytest.mark.slow
def test_any_module_can_be_the_attention(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path.cwd())
    Path("plain_mean.py").write_text(MEAN)
    Path("pairs.tsv").write_text("source\ttarget\n" + "".join(f"{n} mice\tmice {n}\n" for n in range(80)))
    data = "data.files=pairs.tsv data.validation_fraction=0.2 data.text_column=source"
    evaluated = {}
    for axis, task, told in (
        ("attention", "causal_lm", "telemetry left out: attention='Mean': is no BaseAttention"),
        ("cross_attention", "seq2seq", "attention/heads.csv"),
    ):
        own = f"task={task} tokenizer=byte '{axis}={{_target_: plain_mean.Mean, _partial_: true}}'"
        out = ran(program, "train.py", SMALL, f"data=text {data} {own} hydra.run.dir={axis}")
        assert told in " ".join(out.split())
        trusted = f"checkpoint={axis}/checkpoints/last.ckpt {data} {axis}._target_=plain_mean.Mean"
        evaluated[axis] = f"{trusted} hydra.run.dir=evaluated"
    related = "analysis=relations 'analysis.text=7 mice' 'analysis.pairs=[[7,mice]]'"
    for axis, analysis in (("attention", "analysis=heads"), ("cross_attention", related)):
        ended = program("evaluate.py", evaluated[axis], analysis)
        assert (ended.code, f"{axis}=Mean: is no BaseAttention, so it has no heads" in ended.err) == (2, True), ended
    for analysis, name in (("heads", "ablation"), ("maps analysis.importance=false", "maps")):
        ran(program, "evaluate.py", evaluated["cross_attention"], f"score=true analysis={analysis}")
        assert {row["kind"] for row in table(name)} == {"encoder", "decoder"}


@pytest.mark.slow
def test_wandb_has_the_tables_pictures_and_pages(program: Program, trained: Trained) -> None:
    evaluate(program, trained.last, "analysis=maps logger=wandb")
    (file,) = Path("evaluated").glob("wandb/offline-run-*/run-*.wandb")
    (row,) = [row for row in read_history(file) if any(key.startswith("analysis/") for key in row)]
    files = file.parent / "files"
    stored, rows = json.loads((files / row["analysis/maps"]["path"]).read_text()), table("maps")
    assert stored["columns"] == list(rows[0])
    shown = [["" if value is None else str(value) for value in values] for values in stored["data"]]
    assert shown == [list(row.values()) for row in rows]
    assert min(imread(files / row["analysis/maps_figure"]["path"]).shape[:2]) > 100
    assert 'id="atlas-data"' in (files / row["analysis/atlas"]["path"]).read_text(encoding="utf-8")
