"""The table of variants agrees with the config files, and the docs show the recorded losses."""

import json
import math
import runpy

import pytest
import torch
from commands import ROOT
from hydra.utils import instantiate

from tinyformer.config.compose import compose_sweep
from tinyformer.nn import AttentionMask, BaseAttention
from tinyformer.programs.doctor.cases import TIMED_SHAPE, make_module
from tinyformer.programs.doctor.variants import VARIANTS as TABLE

BENCHMARK = runpy.run_path(str(ROOT / "benchmarks" / "variants.py"))
RECORD = json.loads((ROOT / "benchmarks" / "results" / "variants.json").read_text())
ROWS = RECORD["variants"]


def kind_of(attention: BaseAttention) -> tuple[object, ...]:
    """The class, the parameters and the features that an attention needs of a backend."""
    features = attention.planned_case("cpu", torch.float32, AttentionMask(), 8, True).features
    names = {name: tuple(parameter.shape) for name, parameter in attention.named_parameters()}
    return type(attention), type(attention.position), attention.window, names, features


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TABLE if name != "cross"])
def test_the_overrides_of_a_variant_make_the_same_attention_as_its_arguments(name: str) -> None:
    overrides = ["experiment=gpt2", "model=nano", "model.num_layers=1", "model.vocab_size=9", *TABLE[name].overrides]
    (_, config), *_ = compose_sweep("card", overrides)
    with torch.device("meta"):
        made = instantiate(config.network, _convert_="all").attentions()[0]
    assert kind_of(made) == kind_of(make_module(TABLE[name], TIMED_SHAPE))


def test_each_documented_variant_was_brought_below_the_unigram_entropy() -> None:
    assert {name: row["overrides"] for name, row in ROWS.items()} == BENCHMARK["VARIANTS"]
    assert RECORD["unigram_entropy"] == pytest.approx(3.3128, abs=1e-4)  # of tiny Shakespeare
    assert all(row["val/loss"] < RECORD["unigram_entropy"] and row["steps"] == 200 for row in ROWS.values())
    assert len({row["val/loss"] for row in ROWS.values()}) == len(ROWS)
    assert BENCHMARK["table"](ROWS) in (ROOT / "docs" / "pages" / "variants.md").read_text()
    # One unit of d_ff is 1,024 parameters in 4 layers of 128.
    assert all(abs(row["num_parameters"] - ROWS["multi-head"]["num_parameters"]) <= 512 for row in ROWS.values())


def test_unigram_entropy_by_hand() -> None:
    assert BENCHMARK["unigram_entropy"]("aabb") == pytest.approx(math.log(2))
    assert BENCHMARK["unigram_entropy"]("aaab") == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
