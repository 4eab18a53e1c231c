import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyformer.nn import Attention, LearnedPosition, RotaryPosition, SinusoidalPosition


def test_sinusoidal_follows_the_papers_formula():
    d_model, max_seq_len = 6, 50
    position = SinusoidalPosition(max_seq_len, d_model)
    out = position(torch.zeros(1, max_seq_len, d_model))
    for pos in (0, 1, 7, 49):
        for i in range(d_model // 2):
            angle = pos / 10_000 ** (2 * i / d_model)
            assert out[0, pos, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert out[0, pos, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_sinusoidal_scales_the_embedding_by_the_root_of_the_width():
    position = SinusoidalPosition(8, 16)
    x = torch.randn(2, 5, 16)
    table = position(torch.zeros(1, 5, 16))
    torch.testing.assert_close(position(x), 4 * x + table)


def test_sinusoidal_takes_another_base():
    out = SinusoidalPosition(8, 4, base=100.0)(torch.zeros(1, 8, 4))
    assert out[0, 5, 2].item() == pytest.approx(math.sin(5 / 10), abs=1e-6)


def test_sinusoidal_refuses_an_odd_width_and_names_one_that_works():
    with pytest.raises(ValueError, match=r"model\.d_model=7: .* 8 works"):
        SinusoidalPosition(4, 7)
    assert SinusoidalPosition(4, 8)(torch.zeros(1, 4, 8)).shape == (1, 4, 8)


def test_learned_adds_one_vector_for_each_position():
    position = LearnedPosition(8, 4)
    x = torch.randn(2, 5, 4)
    out = position(x)
    for pos in range(5):
        torch.testing.assert_close(out[:, pos], x[:, pos] + position.embedding.weight[pos])
    out.sum().backward()
    # Two sequences of five tokens: each seen position gets their sum, the others nothing.
    assert position.embedding.weight.grad.sum(1).tolist() == [8, 8, 8, 8, 8, 0, 0, 0]


def test_rotary_turns_each_pair_by_the_papers_angle():
    head_dim = 6
    x = torch.randn(1, 1, 20, head_dim, generator=torch.Generator().manual_seed(0))
    out = RotaryPosition(32, head_dim)(x)
    for pos in (0, 1, 13):
        for i in range(head_dim // 2):
            angle = pos / 10_000 ** (2 * i / head_dim)
            a, b = x[0, 0, pos, i].item(), x[0, 0, pos, i + head_dim // 2].item()
            turned = complex(a, b) * complex(math.cos(angle), math.sin(angle))
            assert out[0, 0, pos, i].item() == pytest.approx(turned.real, abs=1e-6)
            assert out[0, 0, pos, i + head_dim // 2].item() == pytest.approx(turned.imag, abs=1e-6)


def test_rotary_by_hand_in_two_dimensions():
    # At position 1 the only frequency is 1 radian: (1, 0) becomes (cos 1, sin 1).
    x = torch.tensor([1.0, 0.0]).expand(1, 1, 2, 2)
    expected = torch.tensor([[[[1.0, 0.0], [math.cos(1), math.sin(1)]]]])
    torch.testing.assert_close(RotaryPosition(2, 2)(x), expected)


def test_rotary_takes_another_base():
    x = torch.tensor([0.0, 1.0, 0.0, 0.0]).expand(1, 1, 4, 4)
    out = RotaryPosition(4, 4, base=100.0)(x)
    assert out[0, 0, 3, 1].item() == pytest.approx(math.cos(0.3), abs=1e-6)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(first=st.integers(0, 900), distance=st.integers(0, 100), shift=st.integers(0, 900))
def test_rotary_scores_depend_on_the_distance_alone(first, distance, shift):
    random = torch.Generator().manual_seed(first)
    q, k = torch.randn(2, 1, 1, 1, 32, generator=random)
    position = RotaryPosition(2048, 32)
    turned_q, turned_k = (position(x.expand(1, 1, 2000, 32))[0, 0] for x in (q, k))
    score = turned_q[first + distance] @ turned_k[first]
    shifted = turned_q[first + distance + shift] @ turned_k[first + shift]
    assert score.item() == pytest.approx(shifted.item(), abs=2e-5)


def test_rotary_scores_depend_on_the_direction_of_the_distance():
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    position = RotaryPosition(16, 8)
    turned_q, turned_k = (position(x.expand(1, 1, 16, 8))[0, 0] for x in (q, k))
    assert abs((turned_q[5] @ turned_k[8]).item() - (turned_q[8] @ turned_k[5]).item()) > 1e-2


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seq=st.integers(1, 300), half=st.integers(1, 64), heads=st.integers(1, 4))
def test_rotary_preserves_length_and_shape(seq, half, heads):
    x = torch.randn(2, heads, seq, 2 * half, generator=torch.Generator().manual_seed(seq))
    out = RotaryPosition(300, 2 * half)(x)
    assert out.shape == x.shape
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(out[:, :, 0], x[:, :, 0])


def test_rotary_keeps_the_dtype_and_turns_in_fp32():
    x = torch.randn(1, 1, 500, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    position = RotaryPosition(512, 32)
    out = position(x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, position(x.float()).bfloat16())


def test_rotary_angles_are_exact_at_far_positions():
    x = torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(1, 1, 1, 4)
    position = RotaryPosition(100_001, 4, base=7.0)
    far = position(x.expand(1, 1, 100_001, 4))[0, 0, -1]
    assert far[0].item() == pytest.approx(math.cos(100_000), abs=1e-6)
    second = position(torch.tensor([0.0, 1.0, 0.0, 0.0]).expand(1, 1, 100_001, 4))[0, 0, -1]
    # An angle of 38,000 radians that passed through fp32 would be off by 2e-3.
    assert second[1].item() == pytest.approx(math.cos(100_000 / math.sqrt(7)), abs=1e-6)


def test_rotary_refuses_an_odd_head_and_names_one_that_works():
    with pytest.raises(ValueError, match=r"attention\.head_dim=5 .* 6 works"):
        Attention(15, 3, position=partial(RotaryPosition, 8))
    assert RotaryPosition(8, 6)(torch.zeros(1, 1, 8, 6)).shape == (1, 1, 8, 6)


@pytest.mark.parametrize("position", [SinusoidalPosition(8, 4), RotaryPosition(8, 4)], ids=["sinusoidal", "rotary"])
def test_tables_are_no_part_of_the_weights(position):
    assert list(position.state_dict()) == []
    assert list(position.parameters()) == []
