"""Measures of heads, against values computed by hand."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nn.model_cases import make_transformer, token_ids

from tinyformer.analysis import MEASURES, PATTERNS, capture_attention, measure_layers, repeated_tokens
from tinyformer.analysis.measures import (
    distance,
    entropy_share,
    induction,
    near,
    previous_token,
    self_attention,
)
from tinyformer.nn import AttentionMaps, AttentionMask, Cache

ALL = MEASURES | PATTERNS
# One head on three tokens.
THREE = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.25, 0.25, 0.5]])
# The last two of four positions.
OFFSET = torch.tensor([[0.1, 0.2, 0.7, 0.0], [0.4, 0.3, 0.2, 0.1]])


def measure(name, weights, rows, tokens=None):
    """A measure of one head on one sequence; a weight of 0 means that the mask hides the key."""
    weights = weights.expand(1, 1, *weights.shape)
    tokens = torch.arange(weights.shape[-1]).unsqueeze(0) if tokens is None else tokens
    return ALL[name].compute(AttentionMaps(weights, weights.log()), torch.tensor(rows), tokens).item()


def nats(*weights):
    return -sum(w * math.log(w) for w in weights)


def random_maps(seed=0, batch=2, heads=3, seq=8, causal=True):
    """Random weights with their logits, and tokens that occur several times."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(batch, heads, seq, seq, generator=generator, dtype=torch.float64)
    if causal:
        logits = logits.masked_fill(~torch.ones(seq, seq, dtype=torch.bool).tril(), -torch.inf)
    return AttentionMaps(logits.softmax(dim=-1), logits), torch.randint(4, (batch, seq), generator=generator)


@pytest.mark.parametrize(
    ("name", "three", "offset"),
    [
        ("entropy", (nats(0.5, 0.5) + nats(0.25, 0.25, 0.5)) / 3, (nats(0.1, 0.2, 0.7) + nats(0.4, 0.3, 0.2, 0.1)) / 2),
        # The first of the three rows has one visible key, the first of the two has three.
        (
            "entropy_share",
            (nats(0.5, 0.5) / math.log(2) + nats(0.25, 0.25, 0.5) / math.log(3)) / 2,
            (nats(0.1, 0.2, 0.7) / math.log(3) + nats(0.4, 0.3, 0.2, 0.1) / math.log(4)) / 2,
        ),
        ("distance", (0 + 0.5 + 0.25 * 2 + 0.25) / 3, ((0.1 * 2 + 0.2) + (0.4 * 3 + 0.3 * 2 + 0.2)) / 2),
        ("first_token", (1 + 0.5 + 0.25) / 3, (0.1 + 0.4) / 2),
        ("previous_token", (0.5 + 0.25) / 2, (0.2 + 0.2) / 2),
        ("self", (1 + 0.5 + 0.5) / 3, (0.7 + 0.1) / 2),
        ("near", 1, 1),
        ("largest_logit", math.log(1), math.log(0.7)),
        # w wᵀ is [[1, .5, .25], [.5, .5, .25], [.25, .25, .375]], and [[.54, .24], [.24, .3]].
        (
            "rank",
            (1 + 0.5 + 0.375) ** 2 / (1 + 0.5**2 + 0.375**2 + 2 * (0.5**2 + 0.25**2 + 0.25**2)),
            (0.54 + 0.3) ** 2 / (0.54**2 + 0.3**2 + 2 * 0.24**2),
        ),
        ("similarity", math.nan, math.nan),
        ("induction", math.nan, math.nan),
        ("duplicate_token", math.nan, math.nan),
    ],
)
def test_measures_by_hand(name, three, offset):
    assert measure(name, THREE, [0, 1, 2]) == pytest.approx(three, rel=1e-6, nan_ok=True)
    assert measure(name, OFFSET, [2, 3]) == pytest.approx(offset, rel=1e-6, nan_ok=True)


def test_every_measure_is_computed_by_hand():
    [marked] = [mark for mark in test_measures_by_hand.pytestmark if mark.name == "parametrize"]
    assert [case[0] for case in marked.args[1]] == list(ALL)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("distance", (0 + 0.25 * 2 + 0.25) / 2),
        ("previous_token", 0.25),
        ("self", (1 + 0.5) / 2),
        ("first_token", (1 + 0.25) / 2),
        ("entropy", (0 + nats(0.25, 0.25, 0.5)) / 2),
        ("entropy_share", nats(0.25, 0.25, 0.5) / math.log(3)),
    ],
)
def test_chosen_rows_keep_their_positions(name, expected):
    assert measure(name, THREE[[0, 2]], [0, 2]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("of", [distance, previous_token, self_attention, near])
def test_rows_are_the_last_positions_by_default(of):
    weights = random_maps(seq=20)[0].weights[:, :, 15:]
    rows = torch.arange(15, 20)
    assert torch.equal(of(weights), of(weights, rows))
    assert not torch.allclose(of(weights), of(weights, rows - 5))


def test_repeated_tokens():
    state = torch.get_rng_state()
    tokens = repeated_tokens(40, 5, period=30)
    assert torch.equal(torch.get_rng_state(), state)
    assert tokens.shape == (5, 60)
    assert torch.equal(tokens[:, :30], tokens[:, 30:])
    assert all(len(set(row.tolist())) == 30 for row in tokens)
    assert len({tuple(row.tolist()) for row in tokens}) == 5
    assert set(tokens.flatten().tolist()) == set(range(40))
    torch.manual_seed(1)
    assert torch.equal(repeated_tokens(40, 5, period=30), tokens)
    assert not torch.equal(repeated_tokens(40, 5, period=30, seed=1), tokens)
    # A small vocabulary is used up before a token returns.
    for row in repeated_tokens(4, 3, period=10):
        assert sorted(row[:4].tolist()) == sorted(row[4:8].tolist()) == [0, 1, 2, 3]
        assert torch.equal(row[:10], row[10:])


# Laws of all weights.

FEW = settings(max_examples=25)
SEEDS, SEQS, CAUSAL = st.integers(0, 1000), st.integers(2, 12), st.booleans()


@FEW
@given(seed=SEEDS, seq=SEQS, causal=CAUSAL, sink=st.floats(0.01, 1))
def test_values_stay_in_their_range(seed, seq, causal, sink):
    maps, _ = random_maps(seed, seq=seq, causal=causal)
    weights, rows = maps.weights, torch.arange(seq)
    values = {name: m.compute(maps, rows, torch.zeros(2, seq, dtype=torch.long)) for name, m in ALL.items()}
    tiny = 1e-12
    for name in ("entropy_share", "first_token", "previous_token", "self", "near", "induction", "similarity"):
        assert ((values[name] >= 0) & (values[name] <= 1 + tiny)).all(), name
    assert ((values["entropy"] > 0) & (values["entropy"] < math.log(seq))).all()
    assert ((values["distance"] > 0) & (values["distance"] < seq)).all()
    assert ((values["rank"] >= 1 - tiny) & (values["rank"] <= seq + tiny)).all()
    # A sink does not change the share.
    torch.testing.assert_close(entropy_share(weights * sink, maps.logits), values["entropy_share"])


@FEW
@given(seed=SEEDS, seq=SEQS, causal=CAUSAL)
def test_shares_add_up_to_one_at_most(seed, seq, causal):
    maps, _ = random_maps(seed, seq=seq, causal=causal)
    weights, rows = maps.weights[:, :, 1:], torch.arange(1, seq)
    close = near(weights, rows, reach=1)
    assert (self_attention(weights, rows) + previous_token(weights, rows) <= close + 1e-12).all()
    by_reach = [near(weights, rows, reach) for reach in range(seq)]
    assert all((wider >= narrow).all() for narrow, wider in itertools.pairwise(by_reach))
    torch.testing.assert_close(by_reach[-1], torch.ones(3, dtype=torch.float64))
    # Σ w d = Σ_r (share beyond r).
    torch.testing.assert_close(distance(weights, rows), sum(1 - share for share in by_reach))


@pytest.mark.parametrize("name", [name for name in ALL if name != "similarity"])
def test_heads_are_independent_and_the_batch_is_averaged(name):
    maps, tokens = random_maps(batch=3, heads=4)
    tokens, rows = tokens[:1].expand(3, -1), torch.arange(8)
    together = ALL[name].compute(maps, rows, tokens)
    assert together.shape == (4,)
    for head in range(4):
        parts = [AttentionMaps(*(x[b : b + 1, head : head + 1] for x in maps)) for b in range(3)]
        alone = torch.cat([ALL[name].compute(part, rows, tokens[:1]) for part in parts])
        torch.testing.assert_close(together[head], alone.max() if name == "largest_logit" else alone.mean())


# Captured maps.


def test_measures_of_the_layers_of_a_model():
    network, tokens = make_transformer(), token_ids(vocab_size=6)
    with capture_attention(network, rows=5) as maps, torch.no_grad():
        network(tokens, AttentionMask(causal=True))
    found = measure_layers(ALL, maps, tokens)
    assert list(found) == list(ALL)
    for name, layers in found.items():
        assert [len(heads) for heads in layers] == [4, 4]
        for layer, heads in zip(maps.layers, layers, strict=True):
            assert heads == ALL[name].compute(layer, maps.rows, tokens).tolist()
    assert found["distance"][1] == distance(maps[1], maps.rows).tolist()
    assert found["induction"][0] == induction(maps[0], tokens, maps.rows).tolist()


@torch.no_grad()
def test_tokens_after_a_cache_have_the_measures_of_the_whole_sequence():
    network, tokens, cache = make_transformer(), token_ids(seq=14, vocab_size=6), Cache(2)
    mask, rows = AttentionMask(causal=True), torch.arange(9, 14)
    with capture_attention(network, rows) as whole:
        network(tokens, mask)
    network(tokens[:, :9], mask, cache)
    with capture_attention(network) as continued:
        network(tokens[:, 9:], mask, cache)
    assert continued.rows.tolist() == rows.tolist()
    found, expected = measure_layers(ALL, continued, tokens), measure_layers(ALL, whole, tokens)
    for name in ALL:
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(expected[name]))
