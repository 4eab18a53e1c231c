"""Kinds of attention and of positions by layer are the layers that are assembled by hand."""

from functools import partial

import pytest
from hydra.utils import instantiate

from nn.variants import CAUSAL, error, mha, t5, tokens
from tinyformer.config.launch import compose_run
from tinyformer.nn import ALiBi, Attention, LatentAttention, RelativePosition, RotaryPosition, Shared, by_layer

SIZES = ["model.num_layers=4", "model.d_model=32", "model.max_seq_len=16", "model.vocab_size=50", "norm=rms_norm"]
OWN = partial(RotaryPosition, 16)
OVERRIDES = {
    "attention=[mha,mla] attention.kinds.mla.kv_rank=12 attention.sink=true": lambda layer: (
        partial(LatentAttention, kv_rank=12, sink=True, position=OWN)
        if layer % 2
        else partial(Attention, sink=True, position=OWN)
    ),
    "position=[rotary,rotary,rotary,none] position.relative.base=500": lambda layer: partial(
        Attention, position=RelativePosition if layer == 3 else partial(OWN, base=500)
    ),
    "position.relative.base=[100,100,1e4]": lambda layer: partial(
        Attention, position=partial(OWN, base=[100, 100, 1e4][layer % 3])
    ),
    "attention=[gqa,mqa] position=[alibi,none]": lambda layer: partial(
        Attention, num_kv_heads=2 - layer % 2, position=[partial(ALiBi, 4), RelativePosition][layer % 2]
    ),
}


@pytest.mark.parametrize("overrides", OVERRIDES)
def test_an_override_makes_the_layers_that_are_assembled_by_hand(overrides: str) -> None:
    made = instantiate(compose_run("train", [*SIZES, *overrides.split()])[0].network, _convert_="all").encoder.layers
    x = tokens()
    for index, block in enumerate(made):
        by_hand = OVERRIDES[overrides](index)(32, 4)
        by_hand.load_state_dict(block.attention.state_dict())  # strict about names and shapes
        assert error(block.attention(x, CAUSAL), by_hand(x, CAUSAL)) == 0


def test_layers_with_t5_share_one_table_and_other_layers_have_none() -> None:
    positions = partial(by_layer, ["t5", "none", "t5"], {"t5": Shared(t5), "none": RelativePosition})
    first, second, third = (mha(position=positions, layer_index=index).position for index in range(3))
    assert first is third
    assert not list(second.parameters())
