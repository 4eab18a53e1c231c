"""What each measure says about weights that one can follow by hand."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nn.model_cases import make_transformer, token_ids

from tinyformer.analysis import MEASURES, PATTERNS, capture_attention, measure_layers, repeated_tokens
from tinyformer.analysis.measures import (
    REACH,
    distance,
    duplicate_token,
    effective_rank,
    entropy,
    entropy_share,
    first_token,
    induction,
    largest_logit,
    near,
    nearest_head,
    previous_token,
    self_attention,
    similarity,
)
from tinyformer.nn import AttentionMaps, AttentionMask, Cache

ALL = MEASURES | PATTERNS
# One head, three tokens: looks at itself; half before, half itself; 1/4, 1/4, 1/2.
THREE = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.25, 0.25, 0.5]])
# The last two of four positions.
OFFSET = torch.tensor([[0.1, 0.2, 0.7, 0.0], [0.4, 0.3, 0.2, 0.1]])


def measure(name, weights, rows, tokens=None):
    """A measure of one head in one sequence, whose weights are 0 where the mask hides the key and nowhere else."""
    weights = weights.expand(1, 1, *weights.shape)
    tokens = torch.arange(weights.shape[-1]).unsqueeze(0) if tokens is None else tokens
    return ALL[name].of(AttentionMaps(weights, weights.log()), torch.tensor(rows), tokens).item()


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
        # The first of the three sees one key alone; the first of the two sees three.
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
def test_by_hand(name, three, offset):
    assert measure(name, THREE, [0, 1, 2]) == pytest.approx(three, rel=1e-6, nan_ok=True)
    assert measure(name, OFFSET, [2, 3]) == pytest.approx(offset, rel=1e-6, nan_ok=True)


def test_every_measure_is_followed_by_hand():
    [marked] = [mark for mark in test_by_hand.pytestmark if mark.name == "parametrize"]
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
def test_chosen_rows_stand_where_they_stand(name, expected):
    assert measure(name, THREE[[0, 2]], [0, 2]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("of", [distance, previous_token, self_attention, near])
def test_without_rows_they_are_the_last(of):
    weights = random_maps(seq=20)[0].weights[:, :, 15:]
    rows = torch.arange(15, 20)
    assert torch.equal(of(weights), of(weights, rows))
    assert not torch.allclose(of(weights), of(weights, rows - 5))


@pytest.mark.parametrize("of", [induction, duplicate_token])
def test_without_rows_patterns_are_of_the_last(of):
    maps, tokens = random_maps(seq=12)
    weights, rows = maps.weights[:, :, 7:], torch.arange(7, 12)
    assert torch.equal(of(weights, tokens), of(weights, tokens, rows))
    assert not torch.allclose(of(weights, tokens), of(weights, tokens, rows - 4))


def test_uniform_causal_weights():
    seq = 16
    weights = torch.tril(torch.ones(seq, seq)) / torch.arange(1, seq + 1).unsqueeze(-1)
    places, rows = list(range(seq)), range(1, seq + 1)
    assert measure("entropy", weights, places) == pytest.approx(sum(map(math.log, rows)) / seq)
    assert measure("entropy_share", weights, places) == pytest.approx(1)
    assert measure("distance", weights, places) == pytest.approx(sum((k - 1) / 2 for k in rows) / seq)
    assert measure("first_token", weights, places) == pytest.approx(sum(1 / k for k in rows) / seq)
    assert measure("self", weights, places) == pytest.approx(sum(1 / k for k in rows) / seq)
    assert measure("previous_token", weights, places) == pytest.approx(sum(1 / k for k in rows if k > 1) / (seq - 1))
    # At most 8 tokens away, and the query's own: 9 of k keys.
    assert measure("near", weights, places) == pytest.approx(sum(min(9, k) / k for k in rows) / seq)


@pytest.mark.parametrize(
    ("shift", "expected"),
    [
        (0, {"entropy": 0, "distance": 0, "self": 1, "previous_token": 0, "first_token": 1 / 4, "rank": 4}),
        # The first token has none before it and looks at itself, as the second does: 4² / (2² + 1 + 1).
        (
            1,
            {"entropy": 0, "distance": 3 / 4, "self": 1 / 4, "previous_token": 1, "first_token": 2 / 4, "rank": 16 / 6},
        ),
    ],
    ids=["itself", "the-one-before"],
)
def test_a_head_that_looks_at_one_place(shift, expected):
    weights = torch.eye(4)[(torch.arange(4) - shift).clamp(min=0)]
    assert {name: measure(name, weights, [0, 1, 2, 3]) for name in expected} == pytest.approx(expected)


def test_a_head_that_looks_ahead_has_a_distance_too():
    weights = torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    assert measure("distance", weights, [0, 1, 2]) == pytest.approx(2 / 3)
    assert near(weights.expand(1, 1, 3, 3), reach=1).item() == pytest.approx(2 / 3)


@pytest.mark.parametrize(("reach", "expected"), [(0, (1 + 0.5 + 0.5) / 3), (1, (1 + 1 + 0.75) / 3), (2, 1)])
def test_how_far_is_near(reach, expected):
    assert near(THREE.expand(1, 1, 3, 3), reach=reach).item() == pytest.approx(expected)


# Hidden keys and sinks.


def test_the_share_counts_visible_keys_not_attended_ones():
    weights = torch.tensor([[[[0.5, 0.5, 0.0, 0.0]]]])
    logits = torch.tensor([0.0, 0.0, -50.0, -torch.inf]).expand(1, 1, 1, 4)
    assert entropy_share(weights, logits).item() == pytest.approx(math.log(2) / math.log(3))


def test_a_query_without_a_choice_is_left_out():
    one = torch.tensor([[[[1.0, 0.0]], [[1.0, 0.0]]]])
    assert entropy_share(one, one.log()).isnan().all()
    assert entropy(one).tolist() == [0, 0]


def test_what_a_sink_takes_is_no_part_of_the_share():
    # Half of the attention goes to the sink, the other half to two keys alike, and to one alone.
    weights = torch.tensor([[[[0.25, 0.25]], [[0.5, 0.0]]]])
    assert entropy_share(weights, torch.zeros(1, 2, 1, 2)).tolist() == pytest.approx([1, 0])


def test_a_sequence_without_keys_says_nothing():
    maps, _ = random_maps(batch=1)
    weights = torch.cat([maps.weights, torch.zeros_like(maps.weights)])
    logits = torch.cat([maps.logits, torch.full_like(maps.logits, -torch.inf)])
    assert torch.equal(entropy_share(weights, logits), entropy_share(*maps))
    assert torch.equal(effective_rank(weights), effective_rank(maps.weights))
    assert torch.equal(nearest_head(weights), nearest_head(maps.weights))
    assert torch.equal(largest_logit(logits), largest_logit(maps.logits))


def test_the_largest_logit_of_the_whole_batch():
    logits = torch.zeros(2, 2, 3, 3)
    logits[0, 0, 2, 1], logits[1, 0, 1, 0], logits[:, 1], logits[1, 1, 0, 0] = 3.5, 2, -torch.inf, -7
    assert largest_logit(logits).tolist() == [3.5, -7]


# Ranks and similarities.


@pytest.mark.parametrize("seq", [1, 2, 5])
def test_the_rank_of_equal_rows_is_one_and_of_the_identity_the_number_of_rows(seq):
    equal = torch.rand(seq, generator=torch.Generator().manual_seed(0)).softmax(-1).expand(seq, seq)
    assert effective_rank(torch.stack([equal, torch.eye(seq)]).unsqueeze(0)).tolist() == pytest.approx([1, seq])


def test_the_rank_is_that_of_the_singular_values():
    weights = random_maps(seq=6)[0].weights[:, :, 2:]
    squares = torch.linalg.svdvals(weights).square()
    expected = (squares.sum(-1) ** 2 / squares.square().sum(-1)).mean(0)
    torch.testing.assert_close(effective_rank(weights), expected)


def test_similarity_by_hand():
    # Σ w w' = .5, Σ w² = 2 and .5 + .5: .5 / √2 in the first sequence; the same maps in the second.
    first = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[0.5, 0.5], [0.5, 0.5]], [[0.0, 1.0], [1.0, 0.0]]])
    weights = torch.stack([first, torch.eye(2).expand(3, 2, 2)])
    a = (1 / math.sqrt(2) + 1) / 2
    expected = torch.tensor([[1, a, 0.5], [a, 1, a], [0.5, a, 1]])
    torch.testing.assert_close(similarity(weights), expected)
    assert nearest_head(weights).tolist() == pytest.approx([a, a, a])
    assert nearest_head(weights[:, [0, 2]]).tolist() == pytest.approx([0.5, 0.5])


def test_a_head_alone_is_like_no_other():
    assert nearest_head(THREE.expand(2, 1, 3, 3)).isnan().tolist() == [True]


# Tokens.

TOKENS = torch.tensor([[7, 3, 7, 3, 3]])
# What the last three look at: 7 stood at 0 and 3 followed; 3 at 1, then 7; 3 at 1 and 3, then 7 and 3 itself.
LAST = torch.tensor([[[[0.1, 0.6, 0.3, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4, 0.0], [0.05, 0.1, 0.35, 0.2, 0.3]]]])


def test_patterns_by_hand():
    assert induction(LAST, TOKENS).item() == pytest.approx((0.6 + 0.3 + (0.35 + 0.3)) / 3)
    assert duplicate_token(LAST, TOKENS).item() == pytest.approx((0.1 + 0.2 + (0.1 + 0.2)) / 3)
    rows = torch.tensor([2, 4])
    assert induction(LAST[:, :, [0, 2]], TOKENS, rows).item() == pytest.approx((0.6 + (0.35 + 0.3)) / 2)
    assert duplicate_token(LAST[:, :, [0, 2]], TOKENS, rows).item() == pytest.approx((0.1 + (0.1 + 0.2)) / 2)


def test_only_queries_count_whose_token_occurred_before():
    whole = torch.cat([torch.tensor([[1.0, 0, 0, 0, 0], [0.5, 0.5, 0, 0, 0]]).expand(1, 1, 2, 5), LAST], dim=2)
    assert torch.equal(induction(whole, TOKENS), induction(LAST, TOKENS))
    assert torch.equal(duplicate_token(whole, TOKENS), duplicate_token(LAST, TOKENS))
    assert induction(whole[:, :, :2], TOKENS, torch.tensor([0, 1])).isnan().item()
    assert duplicate_token(whole[:, :, :2], TOKENS, torch.tensor([0, 1])).isnan().item()


def test_each_sequence_has_its_own_tokens():
    # In the second, only 4 at 3 stood before, at 0: what followed is at 1. The third has nothing twice.
    tokens = torch.cat([TOKENS, torch.tensor([[4, 5, 6, 4, 8], [1, 2, 3, 4, 5]])])
    weights = LAST.expand(3, 1, 3, 5)
    assert induction(weights, tokens).item() == pytest.approx((0.6 + 0.3 + (0.35 + 0.3) + 0.2) / 4)
    assert duplicate_token(weights, tokens).item() == pytest.approx((0.1 + 0.2 + (0.1 + 0.2) + 0.1) / 4)


@pytest.mark.parametrize("of", [induction, duplicate_token])
def test_where_nothing_occurs_twice_there_is_no_pattern(of):
    maps, _ = random_maps()
    assert of(maps.weights, torch.arange(16).view(2, 8)).isnan().tolist() == [True] * 3


@pytest.mark.parametrize(
    ("back", "expected"),
    [(5, {"induction": 1, "duplicate_token": 0}), (6, {"induction": 0, "duplicate_token": 1})],
    ids=["induction", "duplicate"],
)
def test_a_perfect_head_and_its_opposite(back, expected):
    tokens = repeated_tokens(50, 3, period=6)
    # The first half of the sequence has nothing to repeat and looks at itself.
    places = torch.where(torch.arange(12) >= 6, torch.arange(12) - back, torch.arange(12))
    weights = torch.eye(12)[places].expand(3, 1, 12, 12)
    maps = AttentionMaps(weights, weights.log())
    assert {name: m.of(maps, torch.arange(12), tokens).item() for name, m in PATTERNS.items()} == expected


def test_a_head_that_looks_one_back_does_neither():
    tokens, weights = repeated_tokens(50, 3, period=6), torch.eye(12)[(torch.arange(12) - 1).clamp(min=0)]
    assert induction(weights.expand(3, 1, 12, 12), tokens).item() == 0
    assert duplicate_token(weights.expand(3, 1, 12, 12), tokens).item() == 0


def test_repeated_tokens_are_distinct_and_said_twice():
    tokens = repeated_tokens(40, 5, period=30)
    assert tokens.shape == (5, 60)
    assert torch.equal(tokens[:, :30], tokens[:, 30:])
    assert all(len(set(row.tolist())) == 30 for row in tokens)
    assert len({tuple(row.tolist()) for row in tokens}) == 5
    assert set(tokens.flatten().tolist()) == set(range(40))


def test_a_small_vocabulary_is_used_up_before_a_token_returns():
    tokens = repeated_tokens(4, 3, period=10)
    assert tokens.shape == (3, 20)
    for row in tokens:
        assert sorted(row[:4].tolist()) == sorted(row[4:8].tolist()) == [0, 1, 2, 3]
        assert torch.equal(row[:10], row[10:])


def test_repeated_tokens_are_the_same_every_time_and_leave_the_global_draw_alone():
    state = torch.get_rng_state()
    tokens = repeated_tokens(50, 2, period=8)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert torch.equal(repeated_tokens(50, 2, period=8), tokens)
    assert not torch.equal(repeated_tokens(50, 2, period=8, seed=1), tokens)


# What holds of all weights.

FEW = settings(max_examples=25, deadline=None, derandomize=True)
SEEDS, SEQS, CAUSAL = st.integers(0, 1000), st.integers(2, 12), st.booleans()


@FEW
@given(seed=SEEDS, seq=SEQS, causal=CAUSAL, sink=st.floats(0.01, 1))
def test_numbers_stay_in_their_range(seed, seq, causal, sink):
    maps, _ = random_maps(seed, seq=seq, causal=causal)
    weights, rows = maps.weights, torch.arange(seq)
    values = {name: m.of(maps, rows, torch.zeros(2, seq, dtype=torch.long)) for name, m in ALL.items()}
    tiny = 1e-12
    for name in ("entropy_share", "first_token", "previous_token", "self", "near", "induction", "similarity"):
        assert ((values[name] >= 0) & (values[name] <= 1 + tiny)).all(), name
    assert ((values["entropy"] > 0) & (values["entropy"] < math.log(seq))).all()
    assert ((values["distance"] > 0) & (values["distance"] < seq)).all()
    assert ((values["rank"] >= 1 - tiny) & (values["rank"] <= seq + tiny)).all()
    # Beside a sink the share is that of the rest.
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


@FEW
@given(seed=SEEDS, period=st.integers(1, 6))
def test_patterns_of_distinct_tokens_are_shares_of_the_same_attention(seed, period):
    maps, _ = random_maps(seed, seq=2 * period)
    tokens = repeated_tokens(9, 2, period, seed)
    both = induction(maps.weights, tokens) + duplicate_token(maps.weights, tokens)
    assert ((both > 0) & (both <= 1 + 1e-12)).all()


@FEW
@given(seed=SEEDS, heads=st.integers(2, 5))
def test_similarity_is_a_cosine(seed, heads):
    found = similarity(random_maps(seed, heads=heads)[0].weights)
    torch.testing.assert_close(found, found.mT)
    torch.testing.assert_close(found.diagonal(), torch.ones(heads, dtype=torch.float64))
    assert (found > 0).all()


@pytest.mark.parametrize("name", ALL)
@FEW
@given(order=st.permutations(range(4)))
def test_the_order_of_the_batch_says_nothing(name, order):
    maps, tokens = random_maps(batch=4)
    rows = torch.arange(8)
    permuted = AttentionMaps(maps.weights[order], maps.logits[order])
    torch.testing.assert_close(ALL[name].of(permuted, rows, tokens[order]), ALL[name].of(maps, rows, tokens))


@pytest.mark.parametrize("name", [name for name in ALL if name != "similarity"])
def test_heads_are_kept_apart_and_the_batch_averaged(name):
    maps, tokens = random_maps(batch=3, heads=4)
    tokens, rows = tokens[:1].expand(3, -1), torch.arange(8)
    together = ALL[name].of(maps, rows, tokens)
    assert together.shape == (4,)
    for head in range(4):
        parts = [AttentionMaps(*(x[b : b + 1, head : head + 1] for x in maps)) for b in range(3)]
        alone = torch.cat([ALL[name].of(part, rows, tokens[:1]) for part in parts])
        torch.testing.assert_close(together[head], alone.max() if name == "largest_logit" else alone.mean())


@pytest.mark.parametrize("of", [entropy, distance, first_token, self_attention, near])
def test_the_last_queries_count_as_in_the_whole(of):
    """The mean over all rows is that over the first rows and over the last, by their number."""
    weights = random_maps()[0].weights
    first, last = of(weights[:, :, :5, :5]), of(weights[:, :, 5:])
    torch.testing.assert_close((5 * first + 3 * last) / 8, of(weights))


# Captured maps.


def test_the_layers_of_a_model():
    network, tokens = make_transformer(), token_ids(vocab_size=6)
    with capture_attention(network, rows=5) as maps, torch.no_grad():
        network(tokens, AttentionMask(causal=True))
    found = measure_layers(ALL, maps, tokens)
    assert list(found) == list(ALL)
    for name, layers in found.items():
        assert [len(heads) for heads in layers] == [4, 4]
        for layer, heads in zip(maps.layers, layers, strict=True):
            assert heads == ALL[name].of(layer, maps.rows, tokens).tolist()
    assert found["distance"][1] == distance(maps[1], maps.rows).tolist()
    assert found["induction"][0] == induction(maps[0], tokens, maps.rows).tolist()


@torch.no_grad()
def test_tokens_behind_a_cache_measure_as_in_the_whole_sequence():
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


def test_near_is_said_in_tokens():
    assert str(REACH) in MEASURES["near"].meaning
