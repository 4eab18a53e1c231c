"""Sizes that are solved for equal parameters or FLOPs, against hand-computed widths."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from tinyformer.config.errors import ConfigError
from tinyformer.config.launch import CommandLine, compose_run
from tinyformer.run.match import match_size

NANO = ("model=nano", "model.vocab_size=100", "model.max_seq_len=128")


def matched(*overrides: str) -> Any:
    config, invocation = compose_run("train", [*NANO, *overrides])
    found = match_size(config, CommandLine(invocation.overrides), 100)
    assert OmegaConf.select(config, found.by) == found.size
    return found


# One unit of d_ff is a row and a column of each layer's two matrices: 4 layers x 2 x 128 = 1,024 parameters, and twice
# as many FLOPs. The default is 512, with a gate 8/3 of d_model.
SOLVED = {
    # Grouped queries on 2 of 4 key/value heads have 2 x 128 x 64 fewer parameters in each of 4 layers.
    "match=flops attention=gqa": (512 + 64, 0),
    "match=parameters attention=gqa": (512 + 64, 0),
    # 128 vectors of 128; a matrix product has none of them.
    "match=parameters position=learned": (512 - 16, 0),
    "match=flops position=learned": (512, 0),
    # A query norm and a key norm of 32 in each layer.
    "match=parameters attention.qk_norm=true": (512, 4 * 2 * 32),
    "match=parameters attention=mqa match.multiple_of=64": (576, -32 * 1024),
    "match=parameters attention=gqa match.multiple_of=100": (600, 24 * 1024),
    # 8 x 128 x 128 weights and 8 x 128 biases in each layer, in place of 4 x 128 x 128 weights.
    "match=parameters attention=lstm": (512 - 260, 0),
    # 128 x 128 weights, filters of 3 or 128 for 128 dimensions, 2 x 128 biases.
    "match=parameters attention=conv": (512 + 158, -256),
    "match=parameters attention=gqa model.d_ff=3": (512 + 64, 0),
}
FIRST, *OTHERS = SOLVED


@pytest.mark.parametrize("overrides", [FIRST, *(pytest.param(other, marks=pytest.mark.slow) for other in OTHERS)])
def test_the_width_that_makes_up_for_a_variants_cost(overrides: str) -> None:
    found, (size, difference) = matched(*overrides.split()), SOLVED[overrides]
    assert (found.by, found.size, found.number - found.target) == ("model.d_ff", size, difference)


@pytest.mark.slow
def test_another_size_and_a_number_to_match() -> None:
    layer = 12 * 128 * 128 + 2 * 128  # projections and feed-forward network, two norms without biases
    embedding = 100 * 128 + 128  # the readout is the embedding, and there is a last norm
    deep = matched("match=parameters", "match.by=model.num_layers", f"match.to={7 * layer + embedding}")
    assert (deep.size, deep.number) == (7, deep.target)
    wide = matched("match=parameters", "attention=mqa", "match.by=model.d_model", "match.multiple_of=8")
    assert wide.size == 136


REFUSED = {
    "match.to=1000": "match.by=model.d_ff: no value of it gives 1,000 parameters, only",
    "match.by=model.max_seq_len": "match.by=model.max_seq_len: no value of it gives",
    "match.by=model.nothing": "match.by=model.nothing: must be a config key whose value is a whole number; match.by=",
    "match.by=model.d_model": "match.by=model.d_model: 1 does not work: .*match.multiple_of",
}


@pytest.mark.slow
@pytest.mark.parametrize("override", REFUSED)
def test_what_no_size_matches_is_refused(override: str) -> None:
    config, invocation = compose_run("train", [*NANO, "match=parameters", "attention=mqa"])
    key, _, value = override.partition("=")
    OmegaConf.update(config, key, int(value) if value.isdigit() else value)
    with pytest.raises(ConfigError, match=f"^{REFUSED[override]}"):
        match_size(config, invocation, 100)
