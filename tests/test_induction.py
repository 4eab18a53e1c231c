"""`data=induction`, as its users run it: it needs two layers."""

import csv
import json
from pathlib import Path

import pytest
import torch
from programs import SMALL, Program

DATA = (
    "data=induction data.num_sequences=200 data.num_validation_sequences=20 data.num_symbols=8 data.seq_len=16 "
    "data.min_period=3 data.max_period=8"
)


def results_of(run: str) -> dict[str, object]:
    return json.loads(Path(run, "results.json").read_text())


def train(program: Program, run: str, *overrides: str) -> dict[str, object]:
    ended = program("train.py", SMALL, DATA, *overrides, f"hydra.run.dir={run}")
    assert ended.code == 0, ended.err
    return results_of(run)


def test_a_run_reports_what_is_scored_and_no_bits_per_byte(program: Program) -> None:
    ended = program("train.py", SMALL, DATA, "hydra.run.dir=run")
    assert ended.code == 0, ended.err
    assert "bits per byte   none, since not every token is scored" in ended.out
    assert "induction, " in ended.out
    results = results_of("run")
    assert results["val/bits_per_byte"] is None
    assert 0 < results["val/num_tokens"] < 20 * 15 - 20 * 4  # the first period and one more of each are not scored


@pytest.mark.slow
def test_it_is_evaluated_and_resumed_like_any_other(program: Program) -> None:
    constant = "schedule=wsd schedule.warmup_steps=0 schedule.decay_fraction=0"
    unbroken = train(program, "unbroken", constant, "trainer.max_steps=7")
    train(program, "run", constant)
    assert program("train.py", "resume=run trainer.max_steps=7").code == 0
    assert results_of("run")["val/loss"] == unbroken["val/loss"]
    ended = program("evaluate.py", "checkpoint=run/checkpoints/last.ckpt hydra.run.dir=evaluated")
    assert ended.code == 0, ended.err
    assert results_of("evaluated")["val/loss"] == pytest.approx(unbroken["val/loss"], abs=1e-5)
    assert results_of("evaluated")["val/num_tokens"] == unbroken["val/num_tokens"]
    again = f"checkpoint=run/checkpoints/last.ckpt hydra.run.dir=anew {DATA} seed=1"
    assert program("evaluate.py", again).code == 0
    assert results_of("anew")["data_fingerprint"] != results_of("evaluated")["data_fingerprint"]


@pytest.mark.slow
def test_a_model_of_text_is_scored_in_its_own_tokens(program: Program, book: Path) -> None:
    text = "data=text data.files=book.txt tokenizer=byte hydra.run.dir=run"
    assert program("train.py", SMALL, text).code == 0
    ended = program("evaluate.py", f"checkpoint=run/checkpoints/last.ckpt hydra.run.dir=evaluated {DATA}")
    assert ended.code == 0, ended.err
    assert 0 <= results_of("evaluated")["val/accuracy"] < 0.5
    assert "induction, validation split, 20 documents" in ended.out
    ended = program("train.py", SMALL, DATA, "init_from=run/checkpoints/last.ckpt hydra.run.dir=further")
    assert ended.code == 0, ended.err
    tokens = torch.load("further/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert tokens["network.encoder.token_embedding.weight"].shape[0] == 257


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("tokenizer=char", "tokenizer=char: data=induction brings its own tokens; leave tokenizer= out."),
        ("data.batch_size=0", "data.batch_size=0: must be at least 1"),
        ("data.batch_size=many", "data.batch_size=many: "),
        ("data.max_period=9", "data.max_period=9: the symbols of a block are distinct, and there are only 8"),
        ("data.seq_len=17", "data.seq_len=17 is longer than model.max_seq_len=16; data.seq_len=16 works"),
        ("data.max_tokens=5", "data.max_tokens: there is no such key. It belongs to data="),
        ("data.pack=concat", "data.pack: there is no such key. It belongs to data="),
    ],
)
def test_mistakes_are_told_in_a_few_lines(program: Program, override: str, said: str) -> None:
    ended = program("train.py", SMALL, DATA, override)
    assert ended.code == 2
    assert said in ended.err
    assert len(ended.err.strip().splitlines()) == 1


@pytest.mark.parametrize("split", ["test", "all"])
def test_there_is_no_other_split(program: Program, split: str) -> None:
    train(program, "run")
    ended = program("evaluate.py", f"checkpoint=run/checkpoints/last.ckpt split={split}")
    assert ended.code == 2
    assert f"there is no split {split}, only train, validation." in ended.err


@pytest.mark.slow
def test_two_layers_copy_and_one_does_not(program: Program) -> None:
    settings = (
        "data=induction data.seq_len=48 data.num_symbols=48 data.min_period=8 data.max_period=16 data.batch_size=32 "
        "data.num_validation_sequences=128 model.max_seq_len=48 callbacks.attention=null trainer.max_steps=300 "
        "trainer.val_check_interval=300 generate.num_tokens=1"
    )
    accuracy = {}
    for num_layers in (1, 2):
        ended = program("train.py", settings, f"model.num_layers={num_layers} hydra.run.dir={num_layers}")
        assert ended.code == 0, ended.err
        accuracy[num_layers] = results_of(str(num_layers))["val/accuracy"]
    assert accuracy[1] < 0.35
    assert accuracy[2] > 0.7


@pytest.mark.slow
def test_the_circuit_is_found_and_taken_away(program: Program) -> None:
    # ALiBi's slopes tell heads apart, so that some become induction heads and others do not.
    settings = (
        "data=induction data.seq_len=48 data.num_symbols=48 data.min_period=8 data.max_period=16 data.batch_size=32 "
        "data.num_validation_sequences=128 model.max_seq_len=48 callbacks.attention=null trainer.max_steps=400 "
        "trainer.val_check_interval=400 generate.num_tokens=1 model.num_layers=2 position=alibi"
    )
    ended = program("train.py", settings, "hydra.run.dir=run")
    assert ended.code == 0, ended.err

    def evaluate(*overrides: str) -> float:
        common = "checkpoint=run/checkpoints/last.ckpt callbacks.attention=null hydra.run.dir=evaluated"
        ended = program("evaluate.py", common, *overrides)
        assert ended.code == 0, ended.err
        return results_of("evaluated")["val/accuracy"]

    assert evaluate("analysis=maps analysis.importance=false") > 0.8
    with Path("evaluated/maps.csv").open() as file:
        heads = {(int(row["layer"]), int(row["head"])): float(row["induction"]) for row in csv.DictReader(file)}
    found = [pair for pair, score in heads.items() if score > 0.4]
    others = [pair for pair, score in heads.items() if pair[0] == 1 and pair not in found][: len(found)]
    assert {layer for layer, _ in found} == {1}
    assert len(others) == len(found)
    assert evaluate(f"attention.ablated_heads={[list(pair) for pair in found]}".replace(" ", "")) <= 0.3
    assert evaluate(f"attention.ablated_heads={[list(pair) for pair in others]}".replace(" ", "")) >= 0.8
