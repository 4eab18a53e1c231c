"""Rotary positions of a fraction, of few frequencies and of longer texts: those of `transformers`."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb

from tinyformer.errors import ArgumentError
from tinyformer.nn import RotaryPosition

HEAD_DIM, SEQ, BASE = 32, 512, 5000.0
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def theirs(kind, factor=1.0, fraction=1.0, original=128, seq_len=None, **parameters):
    """The cosines and sines of `transformers`, for all positions."""
    rope = {"rope_type": kind, "rope_theta": BASE, "factor": factor, "partial_rotary_factor": fraction, **parameters}
    rope["original_max_position_embeddings"] = original
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM, num_attention_heads=4, max_position_embeddings=SEQ, rope_parameters=rope
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len)
    angles = torch.outer(torch.arange(SEQ).double(), frequencies.double())
    return tuple(scale * torch.cat([of, of], dim=-1) for of in (angles.cos(), angles.sin()))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"fraction": 0.25}, ("linear", 1.0, 0.25)),
        ({"p": 0.75}, ("proportional", 1.0, 0.75)),
        ({"scaling": "linear", "factor": 4.0}, ("linear", 4.0)),
        ({"scaling": "yarn", "factor": 4.0}, ("yarn", 4.0)),
        ({"scaling": "yarn", "factor": 2.0, "original_seq_len": 64, "fraction": 0.5}, ("yarn", 2.0, 0.5, 64)),
        ({"scaling": "llama3", "factor": 4.0}, ("llama3", 4.0)),
        # The base of "dynamic" for texts n times as long as `max_position_embeddings` grows by factor · n - factor + 1.
        ({"scaling": "ntk", "factor": 4.0}, ("dynamic", 3.0, 1.0, 128, 2 * SEQ)),
    ],
)
def test_rotated_queries_are_those_of_transformers(options, expected):
    kind, *rest = expected
    cos, sin = theirs(kind, *rest, **LLAMA3 if kind == "llama3" else {})
    q = torch.randn(1, 2, SEQ, HEAD_DIM, dtype=torch.float64)
    rotated, _ = apply_rotary_pos_emb(q, q, cos.unsqueeze(0), sin.unsqueeze(0))
    ours = RotaryPosition(SEQ, HEAD_DIM, BASE, **options).rotate(q)
    torch.testing.assert_close(ours, rotated, atol=2e-4, rtol=0)  # their frequencies are rounded to fp32
    torch.testing.assert_close(ours[:, :, :8], rotated[:, :, :8], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"fraction": 0.1},
            "fraction=0.1: must rotate an even number of dimensions, and rotates 3 of 32",
        ),
        ({"fraction": 0}, "fraction=0: must be above 0 and at most 1; fraction=0.5 works"),
        ({"scaling": "yarm", "factor": 2.0}, "scaling='yarm': must be one of linear, ntk, yarn, llama3"),
        ({"factor": 4.0}, "factor=4.0: must be above 1 with a scaling, and 1 without; "),
        ({"scaling": "yarn"}, "factor=1.0: must be above 1 with a scaling, and 1 without; "),
        ({"base": 1}, "base=1: must be above 1; base=10000.0 works"),
        ({"original_seq_len": 5}, "original_seq_len=5: has an effect only with the scaling yarn or llama3; "),
    ],
)
def test_mistakes_name_a_value_that_works(options, message):
    with pytest.raises(ArgumentError) as caught:
        RotaryPosition(SEQ, HEAD_DIM, **options)
    assert message in str(caught.value)
    assert not caught.value.works or RotaryPosition(SEQ, HEAD_DIM, **options | caught.value.works)


def test_shares_of_dimensions_are_not_rounded_down():
    """30 / 44 of 44 is 29.999…, and 0.58 of 50 is 28.999…"""
    position = RotaryPosition(SEQ, 44, fraction=30 / 44)
    assert position.dim == 30
    assert RotaryPosition(SEQ, 100, p=0.58).cos[1, :50].lt(1).sum() == 29
