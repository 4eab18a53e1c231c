"""Runs on `data=induction`: which figures they report, and that the task needs two layers."""

import csv
import json
from pathlib import Path

import pytest
from commands import SMALL, Program

DATA = (
    "data=induction data.num_sequences=200 data.num_validation_sequences=20 data.num_symbols=8 data.seq_len=16 "
    "data.min_period=3 data.max_period=8"
)
LEARNED = (
    "data=induction data.seq_len=48 data.num_symbols=48 data.min_period=8 data.max_period=16 data.batch_size=32 "
    "data.num_validation_sequences=128 model.max_seq_len=48 callbacks.attention=null generate.num_tokens=1"
)


def results_of(program: Program, script: str, run: str, *overrides: str) -> dict[str, float]:
    ended = program(script, *overrides, f"hydra.run.dir={run}")
    assert ended.code == 0, ended.err
    return json.loads(Path(run, "results.json").read_text())


def test_not_every_token_is_scored_so_that_there_are_no_bits_per_byte(program: Program) -> None:
    ended = program("train.py", SMALL, DATA, "hydra.run.dir=run")
    assert ended.code == 0, ended.err
    assert "not every token is scored" in ended.out
    results = json.loads(Path("run/results.json").read_text())
    assert results["val/bits_per_byte"] is None
    assert 0 < results["val/num_tokens"] < 20 * 15 - 20 * 4  # not the first period of a sequence and one more token


@pytest.mark.nightly
def test_two_layers_learn_induction_and_one_does_not(program: Program) -> None:
    steps = "trainer.max_steps=300 trainer.val_check_interval=300"
    one, two = (
        results_of(program, "train.py", f"{n}", LEARNED, steps, f"model.num_layers={n}")["val/accuracy"] for n in (1, 2)
    )
    assert one < 0.35
    assert two > 0.7


@pytest.mark.nightly
def test_the_induction_heads_are_found_and_ablated(program: Program) -> None:
    # ALiBi's slopes differ between heads, so that some become induction heads and others do not.
    steps = "trainer.max_steps=400 trainer.val_check_interval=400 model.num_layers=2 position=alibi"
    results_of(program, "train.py", "run", LEARNED, steps)

    def accuracy(*overrides: str) -> float:
        checkpoint = "checkpoint=run/checkpoints/last.ckpt callbacks.attention=null"
        return results_of(program, "evaluate.py", "evaluated", checkpoint, *overrides)["val/accuracy"]

    assert accuracy("analysis=maps analysis.importance=false score=true") > 0.8
    with Path("evaluated/maps.csv").open() as file:
        scores = {(int(row["layer"]), int(row["head"])): float(row["induction"]) for row in csv.DictReader(file)}
    induction = [head for head, score in scores.items() if score > 0.4]
    others = [head for head in scores if head[0] == 1 and head not in induction][: len(induction)]
    assert {layer for layer, _ in induction} == {1}
    assert len(others) == len(induction)
    assert accuracy(f"attention.ablated_heads={[[*head] for head in induction]}".replace(" ", "")) <= 0.3
    assert accuracy(f"attention.ablated_heads={[[*head] for head in others]}".replace(" ", "")) >= 0.8
