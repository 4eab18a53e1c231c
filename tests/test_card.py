"""The card of a variant, as one gets it on the command line."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import Ended

from tinyformer.card import main

Run = Callable[[str], Ended]

WITHOUT = """
import sys
from tinyformer.card import main
code = main()
assert not {unwanted!r} & set(sys.modules)
sys.exit(code)
"""


def spawned(folder: Path, arguments: str, *, how: tuple[str, ...] = ("-m", "tinyformer.card")) -> Ended:
    """The program in a process of its own, in a folder that is not the repository's."""
    command = [sys.executable, *how, *arguments.split()]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    return Ended(ended.returncode, ended.stdout, ended.stderr)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """The program in this process, which takes seconds less."""
    monkeypatch.chdir(tmp_path)

    def run(arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["card", *arguments.split()])
        code = main()
        return Ended(code, *capsys.readouterr())

    return run


def rows(table: str) -> dict[str, list[str]]:
    """The numbers of a table, by their label; of labels that occur twice, the last."""
    parts = [line.split("  ") for line in table.splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in parts]
    return {line[0]: line[1:] for line in cells if line}


@pytest.mark.slow
def test_a_table_shows_variants_side_by_side(tmp_path: Path) -> None:
    ended = spawned(tmp_path, "attention=mha,gqa,mqa,mla,differential model=base --save cards.json")
    assert (ended.code, ended.err) == (0, "")
    assert "model=base" in ended.out.splitlines()[0]
    shown = rows(ended.out)
    assert shown["attention"] != shown["weights of a layer"]
    assert shown["weights of a layer"] == ["2,359,296", "1,769,472", "1,277,952", "2,088,960", "2,359,296"]
    assert shown["cache, bytes per token"] == ["36,864", "18,432", "3,072", "6,912", "36,864"]
    assert shown["reduction from multi-head"] == ["1.00x", "2.00x", "12.00x", "5.33x", "1.00x"]
    assert "one multiply-add is 2" in ended.out
    assert "50,257" in ended.out
    assert ended.out.splitlines()[-1] == "Saved in cards.json."
    saved = json.loads((tmp_path / "cards.json").read_text())["cards"]
    assert [f"{card['num_parameters']:,}" for card in saved] == shown["parameters"]


@pytest.mark.slow
def test_json_is_all_that_json_prints(tmp_path: Path) -> None:
    heavy = WITHOUT.format(unwanted={"lightning", "datasets", "wandb", "transformers"})
    ended = spawned(tmp_path, "model=tiny attention.window=[16,null] --json attention=gqa,mha", how=("-c", heavy))
    assert (ended.code, ended.err) == (0, "")
    cards = json.loads(ended.out)["cards"]
    window = "attention.window=[16,null]"
    assert [card["overrides"] for card in cards] == [["model=tiny", window, f"attention={a}"] for a in ("gqa", "mha")]
    assert {
        *("overrides", "num_parameters", "attention_parameters", "attention_weights", "attention_weights_per_layer"),
        *("flops_per_token", "training_flops_per_token", "flops_per_token_by_part"),
        *("cache_bytes_per_token", "cache_reduction"),
    } <= cards[0].keys()
    assert cards[0]["flops_per_token"] == sum(cards[0]["flops_per_token_by_part"].values())
    assert [card["cache_reduction"] for card in cards] == [2.0, 1.0]


def test_a_mistake_is_told_at_once(tmp_path: Path) -> None:
    ended = spawned(tmp_path, "atention=mha", how=("-c", WITHOUT.format(unwanted={"torch"})))
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("Error: atention: there is no such key. Did you mean attention")
    assert len(ended.err.splitlines()) <= 4


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("attention=mha,gqaa", "attention=gqaa: there is no such choice. Did you mean gqa"),
        ("attention={", "attention={: "),
        ("model.num_heads=5", "model.num_heads=5 does not divide model.d_model=128; model.num_heads=4 does."),
        ("model.num_heads=4,abc", "model.num_heads=abc: should be a valid integer; model.num_heads=4 works."),
        ("model.d_model=0", "model.d_model=0 is no size; one of at least 1 is, such as model.d_model=128."),
        ("attention.score=no", "attention.score=no: choose one of"),
        ("attention=differential model.d_model=4", "attention.head_dim=1 (d_model / num_heads) has no halves"),
        ("dtype=fp8", "dtype=fp8: choose one of bf16, fp32."),
        ("seed=interval(1,2)", "Can only enumerate CHOICE and RANGE sweeps"),
        ("--save nowhere/cards.json", "--save nowhere/cards.json is no file in a folder that exists"),
        ("--save .", "--save . is no file in a folder that exists"),
    ],
)
def test_mistakes_are_told_in_a_few_lines(card: Run, arguments: str, text: str) -> None:
    ended = card(arguments)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"Error: {text}")
    assert len(ended.err.splitlines()) <= 4


def test_a_bug_keeps_its_traceback(card: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinyformer.app.cards.count_costs", lambda network, dtype: 1 / 0)
    ended = card("")
    assert ended.code == 1
    assert "ZeroDivisionError" in ended.err


def test_alternatives_are_combined(card: Run) -> None:
    cards = json.loads(card("dtype=bf16,fp32 model.num_layers=range(1,3) model.vocab_size=100 --json").out)["cards"]
    assert [card["overrides"] for card in cards] == [
        [f"dtype={dtype}", f"model.num_layers={layers}", "model.vocab_size=100"]
        for dtype in ("bf16", "fp32")
        for layers in (1, 2)
    ]
    assert [card["cache_bytes_per_token"] for card in cards] == [2 * 128 * size for size in (2, 4, 4, 8)]
    assert [card["flops_per_token_by_part"]["readout"] for card in cards] == [2 * 100 * 128] * 4


def test_what_differs_stands_above_the_columns(card: Run) -> None:
    ended = card("attention.window=[null,16],16 seed=1")
    shown = rows(ended.out)
    assert shown["attention.window"] == ["[null,16]", "16"]
    assert "seed=1" in shown
    assert ended.out.splitlines()[-1] == "--save cards.json keeps these numbers as JSON."


def test_one_variant_has_no_header(card: Run) -> None:
    title, blank, first = card("attention.window=[null,16]").out.splitlines()[:3]
    assert title.strip() == "attention.window=[null,16]"
    assert not blank.strip()
    assert first.split()[0] == "parameters"


def test_pruned_heads_are_counted_no_more(card: Run) -> None:
    """A head of 64 dimensions in a model of 512: 2 x 64 x 512 weights for queries and outputs, as many for its K/V."""
    model = "model=small model.vocab_size=100 --json"
    whole, pruned = (
        json.loads(card(f"{model} model.pruned_heads={pairs} attention=mha,gqa").out)["cards"]
        for pairs in ("[]", "[[0,1]]")
    )
    head, kv_head = 2 * 64 * 512, 2 * 64 * 512
    # With grouped queries the K/V head stays, which head 0 reads.
    for before, after, weights, cache in zip(whole, pruned, (head + kv_head, head), (2 * 2 * 64, 0), strict=True):
        assert before["num_parameters"] - after["num_parameters"] == weights
        assert before["attention_weights"] - after["attention_weights"] == weights
        assert before["flops_per_token"] - after["flops_per_token"] == 2 * weights + 2 * 512 * (64 + 64)
        assert before["cache_bytes_per_token"] - after["cache_bytes_per_token"] == cache


def test_a_head_that_is_not_there_cannot_be_pruned(card: Run) -> None:
    ended = card("model=nano model.pruned_heads=[[0,9]]")
    assert ended.code == 2
    assert ended.err.startswith("Error: model.pruned_heads holds [0, 9], which is no [layer, head] of a model with")
