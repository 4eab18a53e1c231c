"""`task=seq2seq` from the command line: a run, its files, its checkpoint, and what is refused."""

import re
from pathlib import Path

import pytest
from commands import SMALL, Program, Trained, ran, results_of, table

import tinyformer
from tinyformer.checkpoint.file import load_checkpoint

PAIRS = "task=seq2seq data=text data.files=pairs.tsv tokenizer=byte hydra.run.dir=run"


@pytest.fixture(autouse=True)
def pairs(tmp_path: Path) -> None:
    rows = [(f"{n} {n * 7 % 10}", f"{n * 7 % 10}-{n}") for n in range(80)]
    (tmp_path / "pairs.tsv").write_text("source\ttarget\n" + "".join(f"{one}\t{two}\n" for one, two in rows))


@pytest.mark.slow
def test_a_run_its_continuation_and_its_evaluation(program: Program) -> None:
    overrides = "cross_attention=gqa cross_attention.score=additive model.num_encoder_layers=1"
    out = ran(program, "train.py", SMALL, PAIRS, overrides)
    results = results_of("run")
    names = ("loss", "accuracy", "bleu", "chrf", "rouge1", "rougeL", "exact_match")
    assert {f"{split}/{name}" for split in ("val", "test") for name in names} <= results.keys()
    outputs = table("run/translations.csv")
    assert len(outputs) == 4
    assert results["sample"] == [row["output"] for row in outputs[:3]]
    assert f"source     {outputs[0]['source']}" in out
    heads = table("run/attention/heads.csv")
    kinds = [(row["kind"], row["layer"]) for row in heads[::2]]
    assert kinds == [("encoder", "0"), ("decoder", "0"), ("decoder", "1"), ("cross", "0"), ("cross", "1")]
    assert all(heads[-1][name] for name in ("monotonicity", "coverage", "source_end", "diagonal_distance"))
    assert not heads[0]["coverage"]
    assert "attention/cross/layer_01/head_01/coverage" in Path("run/metrics.csv").read_text().splitlines()[0]
    for name in ("encoder", "decoder", "cross", "measures"):
        assert Path(f"run/attention/{name}_000004.png").exists()
    ran(program, "train.py", "resume=run trainer.max_steps=6")
    assert results_of("run")["steps"] == 6
    checkpoint = "run/checkpoints/last.ckpt"
    out = ran(program, "evaluate.py", f"checkpoint={checkpoint} data.files=pairs.tsv hydra.run.dir=evaluated")
    assert re.search(r"\nvalidation +held out, 4 pairs, \d+ tokens\n", out)
    for name in ("loss", "bleu", "chrf"):
        assert results_of("evaluated")[f"val/{name}"] == pytest.approx(results_of("run")[f"val/{name}"], abs=1e-4)
    assert results_of("evaluated")["val/num_decoded"] == 4
    few = f"checkpoint={checkpoint} data.files=pairs.tsv split=train hydra.run.dir=few data.batch_size=3 "
    for limit, number in (("2", 6), ("0.5", 36)):  # batches, or a fraction of those of the 72 training pairs
        ran(program, "evaluate.py", few, f"trainer.limit_val_batches={limit}")
        assert results_of("few")["train/num_decoded"] == len(table("few/translations.csv")) == number
    prompts = "data.files=pairs.tsv 'generate.prompt=[3 1,4 8]' generate.beams=2 hydra.run.dir=prompted"
    ran(program, "evaluate.py", f"checkpoint={checkpoint}", prompts)
    model = tinyformer.load(checkpoint)
    assert results_of("prompted")["sample"] == model.generate(["3 1", "4 8"], beams=2)


ANALYSES = {
    "heads": ["ablation.csv", "ablation.png"],
    "importance": ["importance.csv", "importance.png"],
    "residual": ["residual.csv", "rank.csv", "encoder_rank.png", "decoder_token_cosine.png"],
    "gradients": ["gradients.csv", "saturation.csv", "encoder_gradients.png", "decoder_gradients.png"],
    "maps analysis.text='4 8'": ["maps.csv", "atlas.html", "encoder_maps.png", "decoder_maps.png", "cross_maps.png"],
}

HEADS = "model.num_heads=4 model.d_model=32 optimizer.lr=1e-2"


def evaluate(program: Program, checkpoint: str, *overrides: str, folder: str = "evaluated") -> tuple[str, dict]:
    """What an evaluation prints, and its results."""
    files = f"checkpoint={checkpoint} data.files=pairs.tsv callbacks.attention=null hydra.run.dir={folder}"
    return ran(program, "evaluate.py", files, *overrides), results_of(folder)


@pytest.mark.slow
def test_analyses_and_a_pruned_checkpoint_which_is_one_like_any_other(program: Program) -> None:
    out = ran(program, "train.py", SMALL, PAIRS, HEADS, "model.max_seq_len=4")
    assert "72 pairs, 288 tokens, 64 pairs truncated\n" in out
    for analysis, files in ANALYSES.items():
        options = f"analysis={analysis} analysis.num_windows=100 score=true"
        _, results = evaluate(program, "run/checkpoints/last.ckpt", options)
        assert all((Path("evaluated") / name).exists() for name in files)
        assert results.get("analysis/loss", results["val/loss"]) == pytest.approx(results["val/loss"], abs=1e-5)
        assert table(f"evaluated/{files[0]}")[0]["kind"] == "encoder"
    prune = "analysis=prune analysis.num_windows=100 score=true"
    out, results = evaluate(program, "run/checkpoints/last.ckpt", prune, folder="pruned")
    # 70 of the 80 pairs have more than three characters on a side.
    assert re.search(r"\nvalidation +held out, 4 pairs, \d+ tokens, \d pairs truncated\n", out), out
    assert results["analysis/loss"] == pytest.approx(results["val/loss"], abs=1e-5)
    pruned = tinyformer.load("pruned/pruned.ckpt", backend="eager")
    assert {layer.backend for layer in pruned.network.attentions()} == {"eager"}
    heads = load_checkpoint("pruned/pruned.ckpt").overrides["model.pruned_heads"]
    assert len(heads) == results["analysis/num_pruned"] == 10
    assert pruned.network.pruned_heads() == heads
    again = "analysis=heads analysis.num_windows=100 score=true"
    _, smaller = evaluate(program, "pruned/pruned.ckpt", again, folder="smaller")
    assert smaller["val/loss"] == pytest.approx(results["analysis/pruned_loss"], abs=1e-5)
    left = [[row["kind"], int(row["layer"]), int(row["head"])] for row in table("smaller/ablation.csv")]
    assert len(left) == 14
    assert not any(head in heads for head in left)
    rows = table("smaller/translations.csv")
    assert pruned.generate([row["source"] for row in rows]) == [row["output"] for row in rows]
    from_pruned = "init_from=pruned/pruned.ckpt model.max_seq_len=4"
    ran(program, "train.py", SMALL, PAIRS.replace("=run", "=next"), HEADS, from_pruned)
    ran(program, "train.py", "resume=next trainer.max_steps=6")
    assert load_checkpoint("next/checkpoints/last.ckpt").overrides["model.pruned_heads"] == heads
    measured = table("next/attention/heads.csv")
    assert not any([row["kind"], int(row["layer"]), int(row["head"])] in heads for row in measured)


MISTAKES = {
    "cross_attention: only an encoder–decoder has it": "data=text data.files=book.txt cross_attention=gqa",
    "network: Seq2Seq needs EncoderDecoder": f"{PAIRS} network=transformer",
    "data.too_long=error: ": f"{PAIRS} data.too_long=error model.max_seq_len=4",
    "cross_attention.window": f"{PAIRS} cross_attention.window=4",
    "freeze_encoder=true: ": f"{PAIRS} freeze_encoder=true init_from=null",
    "attention.ablated_heads=[[0,1]]: must hold [kind, layer, head]": f"{PAIRS} attention.ablated_heads=[[0,1]]",
    "network: its decoder has no cross_attention": "data=text data.files=book.txt network=encoder_decoder",
    "network: CausalLM needs": "data=text data.files=book.txt network=encoder_decoder cross_attention=mha",
    "generate.beams=1000000": f"{PAIRS} generate.beams=1000000",
    "cross_attention.backend=flash": f"{PAIRS} cross_attention.score=additive cross_attention.backend=flash",
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes(message: str, program: Program, book: Path) -> None:
    ended = program("train.py", SMALL, MISTAKES[message])
    assert (ended.code, ended.out) == (2, ""), ended.err
    assert message in ended.err
    assert not Path("run").exists()


def test_a_checkpoint_of_another_task(program: Program, trained: Trained) -> None:
    ended = program("train.py", PAIRS.replace("tokenizer=byte", ""), f"init_from={trained.last}")
    assert ended.code == 2
    assert "is of class Transformer, and this run trains EncoderDecoder" in ended.err
