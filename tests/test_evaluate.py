"""`python evaluate.py` as its users run it: scores, samples, analyses and longer contexts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from commands import BOOK, SMALL, TEXT, Program, Trained, ran, results_of, table, weights_of
from hydra.utils import instantiate
from matplotlib.image import imread
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from wandb_file import read_history

import tinyformer
from tinyformer.checkpoint.file import load_checkpoint, load_raw
from tinyformer.checkpoint.format import write_raw
from tinyformer.config.launch import compose_run
from tinyformer.nn import AttentionMask

pytestmark = pytest.mark.usefixtures("book")  # the text of the run, where an evaluation looks for it
QUICK = "callbacks.attention=null generate.num_tokens=2"


def evaluate(program: Program, checkpoint: Path | str, *overrides: str) -> dict[str, Any]:
    """The results of an evaluation, whose files are left in a folder."""
    ran(program, "evaluate.py", f"checkpoint={checkpoint} data.files=book.txt hydra.run.dir=evaluated", *overrides)
    return results_of("evaluated")


@pytest.mark.smoke
def test_it_gives_the_loss_of_the_run(program: Program, trained: Trained) -> None:
    results = evaluate(program, trained.last)
    for key in ("val/loss", "val/bits_per_byte", "val/accuracy"):
        assert results[key] == pytest.approx(trained.results[key], abs=1e-5)
    for key in ("val/num_tokens", "val/num_bytes", "num_parameters", "steps", "device"):
        assert results[key] == trained.results[key]
    assert results["checkpoint/train/num_tokens"] == trained.results["train/num_tokens"]
    assert results["attention_kernel"] == "flash"
    for picture in ("step", "measures"):
        assert Path(f"evaluated/attention/{picture}_000030.png").exists()
    heads = zip(table("evaluated/attention/heads.csv"), table(trained.folder / "attention/heads.csv"), strict=True)
    for head, trained_head in heads:
        assert head.keys() == trained_head.keys() >= {"layer", "head", "entropy", "induction"}
        assert head.pop("label") == trained_head.pop("label")
        for name, value in head.items():
            assert float(value) == pytest.approx(float(trained_head[name]), abs=1e-5)
    assert "attention/layer_01/head_01/entropy" in Path("evaluated/metrics.csv").read_text().splitlines()[0]


def test_weights_and_backend_are_those_that_are_asked_for(program: Program, trained: Trained) -> None:
    eager = evaluate(program, trained.last, "attention.backend=eager data.batch_size=7 data.pack=document")
    assert (eager["attention_kernel"], eager["val/num_tokens"]) == ("eager", trained.results["val/num_tokens"])
    assert eager["val/loss"] == pytest.approx(trained.results["val/loss"], abs=1e-5)
    # The file alone is needed, wherever it is.
    raw = load_raw(trained.last)
    raw["state_dict"]["network.encoder.layers.0.attention.o_proj.weight"] *= 1.5
    write_raw(Path("scaled.ckpt"), raw)
    assert abs(evaluate(program, "scaled.ckpt")["val/loss"] - trained.results["val/loss"]) > 1e-4


def test_other_text_is_scored_whole(program: Program, trained: Trained) -> None:
    Path("other.txt").write_text("The cat sees 3 birds.\n" * 5)
    results = evaluate(program, trained.last, "data=text data.files=other.txt")
    assert results["all/num_bytes"] == 22 * 5
    assert results["all/num_unknown"] == 5  # the T of The


def test_a_text_that_the_tokenizer_loses_has_no_bits_per_byte(program: Program) -> None:
    letters = {letter: number for number, letter in enumerate(["[UNK]", "[SEP]", *{*BOOK.lower()}])}
    made = Tokenizer(models.WordLevel(letters, unk_token="[UNK]"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    made.normalizer = normalizers.Lowercase()
    made.save("letters.json")
    file = "tokenizer=file tokenizer.path=letters.json hydra.run.dir=run"
    ended = program("train.py", SMALL, TEXT, file, "'generate.prompt=the dog'")
    assert ended.err.count("The tokenizer encodes 'g', 'o' as [UNK].\n") == 1
    facts, trained = load_checkpoint("run/checkpoints/last.ckpt").facts, results_of("run")
    assert trained["lost_bytes"] == facts["lost_bytes"] == pytest.approx(120 / len(BOOK), rel=0.01)  # a line's capital
    Path("other.txt").write_text("The dog sees THE CAT\n" * 10)
    other = ran(program, "evaluate.py", "checkpoint=run/checkpoints/last.ckpt data.files=other.txt hydra.run.dir=other")
    assert "unknown 20 tokens for text that the vocabulary lacks" in " ".join(other.split())
    assert trained["val/bits_per_byte"] is results_of("other")["all/bits_per_byte"] is None
    assert "val/bits_per_byte" not in table("run/metrics.csv")[0]


def test_a_key_names_the_split_that_it_is_of(program: Program, trained: Trained) -> None:
    Path("other").mkdir()
    for name in ("train", "valid", "test"):
        Path(f"other/{name}.txt").write_text("In line 1 the cat sees 3 birds.\n" * 20)
    for split, prefix in {"train": "train", "test": "test", "all": "all"}.items():
        results = evaluate(program, trained.last, QUICK, f"data.files=other split={split}")
        assert results[f"{prefix}/num_bytes"] == 640 * (3 if split == "all" else 1)
        assert {key.partition("/")[0] for key in results if "/" in key} == {prefix, "checkpoint", "throughput"}
        assert results[f"{prefix}/loss"] == pytest.approx(float(table("evaluated/metrics.csv")[-1][f"{prefix}/loss"]))


def test_text_of_the_training_split_is_never_scored_as_held_out(program: Program, trained: Trained) -> None:
    """Whatever the path of the data, what is added to them, and how they are divided."""
    Path("there").mkdir()
    Path("there/moved.txt").write_text(BOOK)
    moved = evaluate(program, trained.last, f"data.files={Path('there').resolve()}")
    assert (moved["split"], moved["val/loss"]) == ("validation", pytest.approx(trained.results["val/loss"], abs=1e-5))
    facts = {"files": 0, "documents": 1, "tokens": trained.results["val/num_tokens"]}
    facts |= {"left_out": {}, "classes": {}, "too_long": {}}
    assert trained.results["data"]["validation"] == facts  # held out of the training file
    unseen = BOOK[int(len(BOOK) * 0.8) :]  # beside the training text, 127 characters may belong to it
    new = "The mice do not see this line.\n" * 9
    Path("there/appended.txt").write_text(BOOK + new)
    for overrides, size in {
        "data.files=there/appended.txt": len(unseen) + len(new) - 127,
        "data.test_fraction=0.5 data.validation_fraction=0 split=test": len(unseen) - 127,
    }.items():
        results = evaluate(program, trained.last, overrides)
        assert results[f"{results['split']}/num_bytes"] == size, overrides
        assert results["data"][results["split"]]["left_out"].keys() == {"characters that the weights were trained on"}


def test_text_of_the_starting_weights_is_text_that_the_run_was_trained_on(program: Program, trained: Trained) -> None:
    """Over two runs, also in an evaluation; and what that leaves of a split must not be empty."""
    dogs, cows, unseen = (
        "".join(f"{n} {who} in line {n * n}.\n" for n in range(90)) for who in ("dogs", "cows", "mice")
    )
    texts = {"b": (dogs, BOOK[:640] + unseen), "c": (cows, BOOK[:640] + unseen + dogs[:640]), "d": (cows, BOOK[:640])}
    for folder, (train, validation) in texts.items():
        Path(folder).mkdir()
        Path(folder, "train.txt").write_text(train)
        Path(folder, "validation.txt").write_text(validation)
    start = trained.last
    for folder, margins in {"b": 1, "c": 2}.items():
        settings = f"init_from={start} data=text data.files={folder} data.test_fraction=0 hydra.run.dir=run-{folder}"
        ran(program, "train.py", SMALL, settings, "callbacks.attention=null")
        results, start = results_of(f"run-{folder}"), Path(f"run-{folder}/checkpoints/last.ckpt")
        assert results["val/num_bytes"] == len(unseen) - margins * 127
        assert results["data"]["validation"]["left_out"].keys() == {"characters that the weights were trained on"}
        own = evaluate(program, start, f"data.files={folder}")
        assert own["val/num_bytes"] == results["val/num_bytes"]
        assert own["val/loss"] == pytest.approx(results["val/loss"], abs=1e-5)
        ran(program, "train.py", f"resume=run-{folder} trainer.max_steps=6")
    for words in ("evaluate.py", f"checkpoint={start}"), ("train.py", f"{SMALL} init_from={start} data=text"):
        refused = program(*words, "data.files=d data.test_fraction=0")
        sentence = "its validation split is empty without the text that the weights were trained on"
        assert (refused.code, sentence in refused.err) == (2, True), refused.err


def test_a_prompt_is_continued(program: Program, trained: Trained) -> None:
    prompts, greedy = ["In line 3", "the cat sees 1 of the birds"], "generate.temperature=0 generate.num_tokens=12"
    asked = f"checkpoint={trained.last} data.files=book.txt hydra.run.dir=run 'generate.prompt=[{', '.join(prompts)}]'"
    out = ran(program, "evaluate.py", asked, greedy)
    first, second = results_of("run")["sample"]
    assert out.replace("\n  ", "\n").endswith(f"\nSample 1 of 2:\n{first}\n\nSample 2 of 2:\n{second}\n")
    assert first.startswith("In line 3")
    assert len(first) == len("In line 3") + 12
    Path("prompt.txt").write_text("In line 3")
    likeliest = "generate.top_k=1 generate.num_tokens=12 generate.prompt_file=prompt.txt"
    assert evaluate(program, trained.last, likeliest)["sample"] == first
    assert tinyformer.load(trained.last).generate(prompts, num_tokens=12, temperature=0) == [first, second]


MISTAKES = {
    "checkpoint=none.ckpt": "checkpoint=none.ckpt: does not exist",
    "model.num_layers=3": "checkpoint=",
    "optimizer.lr=1": "optimizer.lr: there is no such key here; train.py has it.",
    "data.test_fraction=0.2 data.validation_fraction=0.05 split=validation": "data.source=text: its validation ",
    "analysis=heads generate.prompt=The": "generate.prompt=The: has no effect on an analysis alone;",
    "analysis=maps analysis.text=[a,b]": "analysis.text=[a,b]: must be one text",
    "analysis=heads analysis.num_windows=-1": "analysis.num_windows=-1: must be at least 1",
    "analysis=importance attention.backend=flex": "attention.backend=",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_reported_in_a_few_lines_and_leaves_no_results(
    words: str, program: Program, trained: Trained
) -> None:
    ended = program("evaluate.py", f"checkpoint={trained.last} data.files=book.txt hydra.run.dir=evaluated", words)
    assert ended.code == 2, ended.err
    assert ended.err.startswith(f"Error: {MISTAKES[words]}"), ended.err
    assert len(ended.err.strip().splitlines()) <= 4
    assert not [path for path in Path("evaluated").rglob("*") if path.is_file() and ".hydra" not in path.parts]


@pytest.mark.slow
def test_no_number_of_tokens_is_claimed_where_a_part_is_scored(program: Program, trained: Trained) -> None:
    asked = f"checkpoint={trained.last} data.files=book.txt trainer.limit_val_batches=1 hydra.run.dir=part"
    assert "over a part of the text (trainer.limit_val_batches=1)" in ran(program, "evaluate.py", asked)
    results = results_of("part")
    assert results["val/num_tokens"] is results["val/num_bytes"] is results["throughput/tokens_per_second"] is None


# Analyses.

EVERY_HEAD = [[layer, head] for layer in range(2) for head in range(2)]
ALL = "analysis.num_windows=100"  # more than the split has
RELATIONS = "analysis=relations analysis.text='cat sees 3 mice' analysis.pairs=[[mice,cat],[3,sees]]"
WRITTEN = {
    f"analysis=heads {ALL}": ({"ablation": 4, "kv_groups": 2}, ["ablation"]),
    f"analysis=importance {ALL}": ({"importance": 4}, ["importance"]),
    f"analysis=gates {ALL} analysis.num_steps=3 analysis.num_fits=2": (
        {"gates": 4, "gate_scores": 4},
        ["gates"],
    ),
    f"analysis=prune {ALL}": ({"prune": 3}, ["prune"]),
    f"analysis=residual {ALL}": ({"residual": 8, "rank": 12, "reading": 12}, ["residual", "rank", "tokens_read"]),
    f"analysis=gradients {ALL}": ({"gradients": 12, "saturation": 4, "logits": 4, "sublayers": 8}, ["saturation"]),
    f"analysis=lens {ALL}": ({"lens": 6, "logit_lens": 48}, ["logit_lens", "lens_kl"]),
    f"analysis=maps {ALL}": ({"maps": 4, "labels": 12}, ["maps"]),
    RELATIONS: ({"relations": 8}, ["relations"]),
}
"""By analysis, its tables with their number of rows, and its pictures."""


@pytest.mark.parametrize("analysis", WRITTEN)
def test_an_analysis_writes_its_tables_and_pictures(program: Program, trained: Trained, analysis: str) -> None:
    is_alone = analysis == RELATIONS
    results = evaluate(program, trained.last, "" if is_alone else f"{QUICK} score=true", analysis)
    tables, pictures = WRITTEN[analysis]
    assert {name: len(table(f"evaluated/{name}.csv")) for name in tables} == tables
    assert all(min(imread(f"evaluated/{name}.png").shape[:2]) > 100 for name in pictures)
    if is_alone:  # nothing is scored, sampled or drawn besides
        assert results["sample"] is None
        assert not [key for key in results if key.startswith(("val/", "throughput/"))]
        assert not Path("evaluated/attention").exists()
    if "analysis/loss" in results:
        assert results["analysis/loss"] == pytest.approx(results["val/loss"], abs=1e-5)
    if "=maps" in analysis:
        assert 'id="atlas-data"' in Path("evaluated/atlas.html").read_text(encoding="utf-8")
    if "=heads" in analysis:  # the worst head, ablated by the config
        losses = [float(row["loss"]) for row in table("evaluated/ablation.csv")]
        worst = EVERY_HEAD[losses.index(max(losses))]
        without = evaluate(program, trained.last, QUICK, f"attention.ablated_heads={[worst]}".replace(" ", ""))
        assert max(losses) == pytest.approx(without["val/loss"], abs=1e-5)
    if "=prune" in analysis:  # the checkpoint is evaluated and analysed like any other
        path = Path("evaluated/pruned.ckpt").rename("pruned.ckpt")
        left = [pair for pair in EVERY_HEAD if pair not in load_checkpoint(path).overrides["model.pruned_heads"]]
        assert len(left) == 4 - results["analysis/num_pruned"] == 2
        smaller = evaluate(program, path, QUICK, f"analysis=heads score=true {ALL}")
        assert [[int(row["layer"]), int(row["head"])] for row in table("evaluated/ablation.csv")] == left
        assert smaller["num_parameters"] == results["analysis/pruned_num_parameters"] < results["num_parameters"]
        assert len(smaller["sample"]) == 2
        for loss in (smaller["analysis/loss"], results["analysis/pruned_loss"]):
            assert smaller["val/loss"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.slow
def test_python_finds_what_the_command_line_writes_and_wandb_has_it(program: Program, trained: Trained) -> None:
    evaluate(program, trained.last, QUICK, "analysis=maps logger=wandb")
    written = {path.name: path.read_bytes() for path in Path("evaluated").glob("*.[ph][nt][gm]*")}
    state = torch.get_rng_state()
    found = tinyformer.load(trained.last).analyse("maps", ["data.files=book.txt"], folder="python")
    assert torch.equal(torch.get_rng_state(), state)
    assert written == {name: Path("python", name).read_bytes() for name in written}
    (file,) = Path("evaluated").glob("wandb/offline-run-*/run-*.wandb")
    (logged,) = [row for row in read_history(file) if any(key.startswith("analysis/") for key in row)]
    paths = {name: file.parent / "files" / logged[f"analysis/{name}"]["path"] for name in ("maps", "atlas")}
    assert 'id="atlas-data"' in paths["atlas"].read_text(encoding="utf-8")
    assert logged["analysis/maps_figure"]["width"] > 100
    stored = json.loads(paths["maps"].read_text())
    columns, rows = found.tables["maps"]
    assert stored["columns"] == columns == [*table("evaluated/maps.csv")[0]]
    shown = [["" if value is None else str(value) for value in values] for values in stored["data"]]
    assert shown == [[*row.values()] for row in table("evaluated/maps.csv")] == [list(map(str, row)) for row in rows]


MEAN = """
import torch
from torch import nn

class Mean(nn.Module):
    def __init__(self, **layer):
        super().__init__()
        self.proj = nn.Linear(16, 16)

    def forward(self, x, mask=None, context=None, context_mask=None):
        return self.proj(x if context is None else x + context.mean(1, keepdim=True))
"""


@pytest.mark.slow
def test_any_module_can_be_the_attention(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path.cwd())
    Path("plain_mean.py").write_text(MEAN)
    Path("pairs.tsv").write_text("source\ttarget\n" + "".join(f"{n} mice\tmice {n}\n" for n in range(80)))
    mean = "{_target_: plain_mean.Mean, _partial_: true}"
    out = ran(program, "train.py", SMALL, TEXT, f"'attention={mean}' hydra.run.dir=causal")
    assert "telemetry left out: attention='Mean': is no BaseAttention" in " ".join(out.split())
    own = f"task=seq2seq tokenizer=byte 'cross_attention={mean}'"
    out = ran(program, "train.py", SMALL, f"data=text data.files=pairs.tsv {own} hydra.run.dir=run")
    assert "attention/heads.csv" in out  # of the other layers
    suggested = out.splitlines()[-1].strip()
    assert suggested.startswith(
        "python evaluate.py checkpoint=run/checkpoints/last.ckpt data.files=pairs.tsv cross_att"
    )
    ran(program, *suggested.split()[1:])
    trusted = f"{QUICK} data.files=pairs.tsv cross_attention._target_=plain_mean.Mean"
    model = tinyformer.load("run/checkpoints/last.ckpt", trusted=["plain_mean.Mean"])
    assert model.analyse("heads", ["data.files=pairs.tsv"]).tables["ablation"][1]  # the class stays trusted
    for analysis, name in (("heads", "ablation"), ("maps analysis.importance=false", "maps")):
        evaluate(program, "run/checkpoints/last.ckpt", trusted, f"score=true analysis={analysis}")
        assert {row["kind"] for row in table(f"evaluated/{name}.csv")} == {"encoder", "decoder"}


# Longer contexts: the loss of a model that was built for them with the weights of the run.

LONGER = 40  # trained at 16


@pytest.mark.slow
@pytest.mark.parametrize("position", ["sinusoidal", "rotary", "alibi", "t5", "relative", "none"])
def test_a_longer_context_is_that_of_a_model_built_for_it(position: str, program: Program) -> None:
    run = f"{SMALL} {TEXT} callbacks.attention=null position={position}"
    ran(program, "train.py", run, "hydra.run.dir=run")
    results = evaluate(program, "run/checkpoints/last.ckpt", QUICK, f"model.max_seq_len={LONGER}")
    config, _ = compose_run("train", [*run.split(), f"model.max_seq_len={LONGER}"])
    data = instantiate(config.datamodule, _convert_="all")
    data.prepare()
    config.model.vocab_size = data.tokenizer.vocab_size
    built = instantiate(config.network, _convert_="all").eval()
    built.load_state_dict({name.removeprefix("network."): weight for name, weight in weights_of("run").items()})
    nats, number = 0.0, 0
    with torch.no_grad():
        for batch in data.val_dataloader():
            assert batch["inputs"].shape[1] == LONGER
            logits = built(batch["inputs"], AttentionMask(causal=True))
            nats += float(F.cross_entropy(logits.mT, batch["targets"], ignore_index=-100, reduction="sum"))
            number += int((batch["targets"] != -100).sum())
    assert results["val/num_tokens"] == number
    assert results["val/loss"] == pytest.approx(nats / number, rel=1e-5)
    assert results["val/loss"] != results_of("run")["val/loss"]  # windows of 16
