"""The cost card on the command line, and what every program answers at once.

The figures themselves are tested in tests/analysis/test_costs.py.
"""

import json
from pathlib import Path

import pytest
from commands import Program, spawned, without


def test_variants_stand_side_by_side(call: Program) -> None:
    words = "card attention=mha,gqa model=base attention.window=[null,16]"
    saved, ended = json.loads(call(f"{words} --json").out)["cards"], call(words)
    assert (ended.code, ended.err) == (0, "")
    title, *lines = [" ".join(line.split()) for line in ended.out.splitlines()]
    assert title == "model=base attention.window=[null,16]"
    for label, *shown in (
        ("attention", "mha", "gqa"),
        ("weights of a layer", "2,359,296", "1,769,472"),
        ("vocabulary, tokens", "50,257", "50,257"),
        ("KV cache, bytes per token", "36,864", "18,432"),
        ("reduction from multi-head", "1.00x", "2.00x"),
        ("parameters", *(f"{card['num_parameters']:,}" for card in saved)),
        ("if masked pairs are skipped", *(f"{card['attended_flops_per_token']:,}" for card in saved)),
    ):
        assert " ".join([label, *shown]) in lines
    assert "bytes of a training step" not in ended.out


def test_alternatives_are_combined(call: Program) -> None:
    ended = call("card dtype=bf16,fp32 model.num_layers=range(1,3) model.vocab_size=100 --json")
    first, *_, last = cards = json.loads(ended.out)["cards"]
    assert first["overrides"][:3] == ["dtype=bf16", "model.num_layers=1", "model.vocab_size=100"]
    assert last["overrides"][:3] == ["dtype=fp32", "model.num_layers=2", "model.vocab_size=100"]
    assert [card["cache_bytes_per_token"] for card in cards] == [2 * 128 * size for size in (2, 4, 4, 8)]
    assert [card["flops_per_token_by_part"]["readout"] for card in cards] == [2 * 100 * 128] * 4
    refused = call("card dtype=fp8")
    assert (refused.code, refused.err.startswith("Error: dtype=fp8: ")) == (2, True)


@pytest.mark.slow
def test_the_largest_preset_takes_no_memory_and_waits_for_no_training_library(tmp_path: Path) -> None:
    first = "import resource; resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))\n"
    first += without("lightning", "datasets", "transformers", "wandb")
    (ended,) = spawned(["card experiment=gpt2 model=gpt3 batch=16 --json"], tmp_path, first)
    assert (ended.code, ended.err) == (0, "")
    assert json.loads(ended.out)["cards"][0]["batch"]["training_bytes"] > 4e12


ANSWERS = {
    "": (0, "usage: tinyformer PROGRAM"),
    "doctr": (2, "Error: tinyformer doctr: there is no such program."),
    "card --help": (0, "differential"),
    "card atention=mha": (2, "Error: atention: "),
    "card seed=interval(1,2)": (2, "Error: seed=interval(1,2): lists no values; "),
    "compare nowhere": (2, "Error: RUN=nowhere: does not exist; a sweep is in multirun/DATE/TIME."),
    "convert import gpt2 in.ckpt": (2, "invalid choice: 'import'"),
    "doctor --help": (0, "differential"),
    "doctor --masks=full,nonsense": (2, "nonsense: must be among full,causal,padded,causal+padded,documents"),
    "findings": (0, "cost: unmeasured here (published: "),
}


def test_help_and_mistakes_do_not_wait_for_torch(tmp_path: Path) -> None:
    answers = spawned(list(ANSWERS), tmp_path, without("torch", "matplotlib", "lightning"))
    for (code, words), ended in zip(ANSWERS.values(), answers, strict=True):
        assert (ended.code, words in ended.out + ended.err) == (code, True), ended
