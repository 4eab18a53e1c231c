"""The cost card on the command line, and what every program answers at once.

The figures themselves are tested in tests/analysis/test_costs.py.
"""

import json
from pathlib import Path

import pytest
from commands import Program, spawned, without


def rows(table: str) -> dict[str, list[str]]:
    """The numbers of a table by label; the last row of a label that occurs twice."""
    parts = [line.split("  ") for line in table.splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in parts]
    return {line[0]: line[1:] for line in cells if line}


def test_variants_stand_side_by_side_and_are_saved(call: Program) -> None:
    ended = call("card attention=mha,gqa model=base attention.window=[null,16] --save cards.json")
    assert (ended.code, ended.err) == (0, "")
    assert "model=base attention.window=[null,16]" in ended.out.splitlines()[0]
    assert ["attention", "mha", "gqa"] in map(str.split, ended.out.splitlines())
    assert "50,257" in ended.out
    assert ended.out.splitlines()[-1] == "Saved in cards.json."
    shown = rows(ended.out)
    assert shown["weights of a layer"] == ["2,359,296", "1,769,472"]
    assert shown["KV cache, bytes per token"] == ["36,864", "18,432"]
    assert shown["reduction from multi-head"] == ["1.00x", "2.00x"]
    assert shown["if masked pairs are skipped"] != shown["FLOPs per token, forward"]
    assert "bytes of a training step" not in ended.out
    saved = json.loads(Path("cards.json").read_text())["cards"]
    assert [f"{card['num_parameters']:,}" for card in saved] == shown["parameters"]


MISTAKES = {
    "attention=mha,gqaa": "attention=gqaa: ",
    "model.num_heads=5": "model.num_heads=5",
    "dtype=fp8": "dtype=fp8: ",
    "batch=0": "batch=0: must be at least 1; batch=8 works.",
    "batch=many": "batch=many: should be a valid integer",
    "seed=interval(1,2)": "seed=interval(1,2): lists no values; ",
    "--save nowhere/cards.json": "--save=nowhere/cards.json: must be a file in a folder that exists",
}


def test_a_mistake_exits_with_2_and_a_short_sentence(call: Program) -> None:
    for arguments, start in MISTAKES.items():
        ended = call(f"card {arguments}")
        assert (ended.code, ended.out) == (2, "")
        assert ended.err.startswith(f"Error: {start}")
        assert len(ended.err.splitlines()) <= 4


def test_alternatives_are_combined(call: Program) -> None:
    ended = call("card dtype=bf16,fp32 model.num_layers=range(1,3) model.vocab_size=100 --json")
    first, *_, last = cards = json.loads(ended.out)["cards"]
    assert first["overrides"] == ["dtype=bf16", "model.num_layers=1", "model.vocab_size=100"]
    assert last["overrides"] == ["dtype=fp32", "model.num_layers=2", "model.vocab_size=100"]
    assert [card["cache_bytes_per_token"] for card in cards] == [2 * 128 * size for size in (2, 4, 4, 8)]
    assert [card["flops_per_token_by_part"]["readout"] for card in cards] == [2 * 100 * 128] * 4


def test_a_batch_has_flops_and_memory_of_its_own(call: Program) -> None:
    shown = rows(call("card optimizer=adamw,muon model.vocab_size=100 batch=3").out)
    assert (shown["batch, sequences"], shown["tokens"]) == (["3", "3"], ["768", "768"])
    names = ("FLOPs per token, training", "FLOPs of a training step", "state of the optimizer")
    per_token, of_step, state = ([int(cell.replace(",", "")) for cell in shown[name]] for name in names)
    assert of_step == [768 * flops for flops in per_token]
    assert state[0] - state[1] == pytest.approx(4 * 12 * 128 * 128 * 4, abs=100)  # one moment of each matrix; steps


@pytest.mark.slow
def test_the_largest_preset_takes_no_memory_and_waits_for_no_training_library(tmp_path: Path) -> None:
    first = "import resource; resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))\n"
    first += without("lightning", "datasets", "transformers", "wandb")
    (ended,) = spawned(["card experiment=gpt2 model=gpt3 batch=16 --json"], tmp_path, first)
    assert (ended.code, ended.err) == (0, "")
    assert json.loads(ended.out)["cards"][0]["batch"]["training_bytes"] > 4e12


ANSWERS = {
    "": (0, "usage: tinyformer PROGRAM"),
    "doctr": (2, "Error: tinyformer doctr: there is no such program. Did you mean doctor?"),
    "card --help": (0, "differential"),
    "card atention=mha": (2, "Error: atention: "),
    "compare nowhere": (2, "Error: RUN=nowhere: does not exist"),
    "convert import gpt2 in.ckpt": (2, "invalid choice: 'import'"),
    "doctor --help": (0, "differential"),
    "doctor --masks=full,nonsense": (2, "nonsense: must be among full,causal,padded,causal+padded,documents"),
    "findings --help": (0, "--launcher"),
}


def test_help_and_mistakes_do_not_wait_for_torch(tmp_path: Path) -> None:
    """Which takes seconds."""
    answers = spawned(list(ANSWERS), tmp_path, without("torch", "matplotlib", "lightning"))
    for (code, words), ended in zip(ANSWERS.values(), answers, strict=True):
        assert (ended.code, words in ended.out + ended.err) == (code, True), ended
        assert not ended.err.startswith("Error: ") or len(ended.err.splitlines()) <= 4
