import math

import pytest
import torch

from nn.variants import attend_by_loops, error, make, projected, tokens
from tinyformer.errors import ArgumentError
from tinyformer.nn import (
    ALiBi,
    Attention,
    AttentionMask,
    LearnedPosition,
    RotaryPosition,
    SinusoidalPosition,
    T5Position,
)


@pytest.mark.parametrize("base", [10_000.0, 100.0])
def test_sinusoidal_follows_the_papers_formula(base):
    d_model, max_seq_len = 6, 50
    position = SinusoidalPosition(max_seq_len, d_model, base)
    out = position(torch.zeros(1, max_seq_len, d_model))
    for pos in (0, 1, 7, 49):
        for i in range(d_model // 2):
            angle = pos / base ** (2 * i / d_model)
            assert out[0, pos, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert out[0, pos, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_sinusoidal_scales_the_embedding_by_the_root_of_the_width():
    position = SinusoidalPosition(8, 16)
    x = torch.randn(2, 5, 16)
    table = position(torch.zeros(1, 5, 16))
    torch.testing.assert_close(position(x), 4 * x + table)


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
    out = RotaryPosition(32, head_dim).rotate(x)
    for pos in (0, 1, 13):
        for i in range(head_dim // 2):
            angle = pos / 10_000 ** (2 * i / head_dim)
            a, b = x[0, 0, pos, i].item(), x[0, 0, pos, i + head_dim // 2].item()
            turned = complex(a, b) * complex(math.cos(angle), math.sin(angle))
            assert out[0, 0, pos, i].item() == pytest.approx(turned.real, abs=1e-6)
            assert out[0, 0, pos, i + head_dim // 2].item() == pytest.approx(turned.imag, abs=1e-6)


def test_rotary_keeps_the_dtype_and_turns_in_fp32():
    x = torch.randn(1, 1, 500, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    position = RotaryPosition(512, 32)
    out = position.rotate(x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, position.rotate(x.float()).bfloat16())


@pytest.mark.parametrize("position", [SinusoidalPosition(300, 8), RotaryPosition(300, 8), ALiBi(6)])
def test_tables_of_a_network_in_bf16_stay_in_fp32(position):
    tables = {name: table.clone() for name, table in position.named_buffers()}
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), position).bfloat16()
    assert network[0].weight.dtype == torch.bfloat16
    assert tables
    for name, table in position.named_buffers():
        assert torch.equal(table, tables[name])
    assert all(table.dtype == torch.float64 for table in position.double().buffers())


def test_rotary_angles_are_exact_at_far_positions():
    x = torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(1, 1, 1, 4)
    position = RotaryPosition(100_001, 4, base=7.0)
    far = position.rotate(x.expand(1, 1, 100_001, 4))[0, 0, -1]
    assert far[0].item() == pytest.approx(math.cos(100_000), abs=1e-6)
    second = position.rotate(torch.tensor([0.0, 1.0, 0.0, 0.0]).expand(1, 1, 100_001, 4))[0, 0, -1]
    # An angle of 38,000 radians that passed through fp32 would be off by 2e-3.
    assert second[1].item() == pytest.approx(math.cos(100_000 / math.sqrt(7)), abs=1e-6)


# What is relative: only the distance of query and key counts.


@pytest.mark.parametrize("position", ["rotary", "rotary+qk_norm", "alibi", "t5", "relative_keys"])
@pytest.mark.parametrize("score", ["", "+dot", "+general", "+additive"], ids=lambda score: score[1:] or "scaled_dot")
@pytest.mark.parametrize("kind", ["gqa", "mla", "differential"])
@torch.no_grad()
def test_a_text_that_begins_20_positions_later_has_the_same_weights(kind, score, position):
    name = f"{kind}{score}+{position}"
    if score == "+additive" and "rotary" in position:
        reason = r"^score='additive': depends on absolute positions .* alibi, t5, .*; score='scaled_dot' works"
        with pytest.raises(ArgumentError, match=reason):
            make(name)
        return
    attention, x = make(name), tokens(2, 31)
    alone = attention.weights(x[:, 20:], AttentionMask(causal=True))
    later = attention.weights(x, AttentionMask(True, documents=torch.arange(31).ge(20).long().expand(2, -1)))
    assert (later[:, :, 20:, 20:] - alone).abs().max() <= 1e-5
    assert (alone - alone.roll(1, dims=0)).abs().max() > 1e-2  # the weights depend on the text


# What is added to the scores. `variants.attend_by_loops` knows neither of tinyformer nor of torch's kernels.


def assert_loops(attention: Attention, score, causal: bool, **rest) -> None:
    attention, x = attention.double(), tokens(2, 9).double()
    heads = attend_by_loops(*attention.project(x), score, may_attend=lambda i, j: not causal or j <= i, **rest)
    assert error(attention(x, AttentionMask(causal)), projected(heads, attention)) <= 1e-12


def test_alibis_slopes_are_those_of_the_paper():
    # Of 8 heads 1/2, 1/4, …, 1/256; of 12 heads those of 8, then every other one of 16, which are powers of 2^-½.
    eight = [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]
    assert ALiBi(8).slopes.tolist() == eight
    twelve = [*eight, 0.70710678, 0.35355339, 0.17677670, 0.08838835]
    assert ALiBi(12).slopes.tolist() == pytest.approx(twelve, rel=1e-6)
    assert ALiBi(1).slopes.tolist() == [2**-8]
    assert ALiBi(4).slopes.tolist() == [0.25, 0.0625, 0.015625, 0.00390625]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_alibi_subtracts_the_slope_times_the_distance(causal):
    slopes = [0.25, 0.0625, 0.015625, 0.00390625]
    score = lambda h, q, k, i, j: 8**-0.5 * float(q @ k) - slopes[h] * abs(i - j)  # noqa: E731
    assert_loops(make("gqa+alibi"), score, causal)


BIDIRECTIONAL = {0: 0, -1: 1, -7: 7, -8: 8, -11: 8, -12: 9, -15: 9, -16: 10, -22: 10, -23: 11, -32: 12, -64: 14}
BIDIRECTIONAL |= {-127: 15, -128: 15, -5000: 15, 1: 17, 7: 23, 8: 24, 12: 25, 23: 27, 64: 30, 127: 31, 5000: 31}
ONE_WAY = {5: 0, 1: 0, 0: 0, -1: 1, -15: 15, -16: 16, -31: 21, -64: 26, -100: 30, -127: 31, -128: 31, -5000: 31}


@pytest.mark.parametrize(("causal", "known"), [(False, BIDIRECTIONAL), (True, ONE_WAY)], ids=["full", "causal"])
def test_t5s_buckets_at_known_distances(causal, known):
    # 8 + ⌊8 · ln(d / 8) / ln(128 / 8)⌋ with half of 32 buckets, 16 + ⌊16 · ln(d / 16) / ln(128 / 16)⌋ with all of them.
    buckets = T5Position(1).bucket(torch.tensor(list(known)), causal)
    assert dict(zip(known, buckets.tolist(), strict=True)) == known


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_t5_adds_its_bucket_of_each_head(causal):
    attention = make("gqa+t5")
    table = attention.position.embedding.weight.detach().double().numpy()
    # 8 buckets up to distance 10: one way 0, 1, 2, 3, then 4 + ⌊4 · ln(d / 4) / ln 2.5⌋;
    # both ways 0, 1, then 2 + ⌊2 · ln(d / 2) / ln 5⌋, and 4 more for keys behind the query.
    one_way, both = [0, 1, 2, 3, 4, 4, 5, 6, 7], [0, 1, 2, 2, 2, 3, 3, 3, 3]
    bucket = lambda i, j: one_way[i - j] if causal else both[abs(i - j)] + 4 * (j > i)  # noqa: E731
    assert_loops(attention, lambda h, q, k, i, j: 8**-0.5 * float(q @ k) + table[bucket(i, j), h], causal)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("name", ["relative", "relative_keys"])
def test_shaws_vectors_of_clipped_distances_join_keys_and_values(name, causal):
    attention = make(name)
    keys = attention.position.keys.weight.detach().double().numpy()
    values = attention.position.values
    row = lambda i, j: max(-3, min(3, j - i)) + 3  # noqa: E731
    score = lambda h, q, k, i, j: 8**-0.5 * float(q @ (k + keys[row(i, j)]))  # noqa: E731
    value = None
    if values is not None:
        table = values.weight.detach().double().numpy()
        value = lambda i, j: table[row(i, j)]  # noqa: E731
    assert_loops(attention, score, causal, value=value)
