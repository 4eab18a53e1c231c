"""Measures of heads against values computed by hand, and the labels and events that follow from them."""

import math
from contextlib import nullcontext

import pytest
import torch
from nn.model_cases import make_transformer

from analysis.contexts import ADDRESSES, TOKENIZER, loud_encoder_decoder, pair_context
from tinyformer.measures import (
    CROSS_MEASURES,
    MEASURES,
    PATTERNS,
    EventDetector,
    Trait,
    capture_weights,
    head_labels,
    head_roles,
    head_traits,
    measure_layers,
    measure_pairs,
    pairs_of,
    repeated_tokens,
)
from tinyformer.measures.capture import CapturedMaps
from tinyformer.measures.formulas import coverage, diagonal_distance, monotonicity, source_end
from tinyformer.measures.probe import random_maps as random_maps_of
from tinyformer.nn import AttentionMaps, AttentionMask

ALL = MEASURES | PATTERNS
NEW = ("offset_share", "offset", "segment_vertical", "horizontal", "phrases")
THREE = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.25, 0.25, 0.5]])
OFFSET = torch.tensor([[0.1, 0.2, 0.7, 0.0], [0.4, 0.3, 0.2, 0.1]])  # the last two of four positions


def measure(name, weights, rows):
    """A measure of one head on one sequence; a weight of 0 means that the mask hides the key."""
    weights = weights.expand(1, 1, *weights.shape)
    tokens = torch.arange(weights.shape[-1]).unsqueeze(0)
    return ALL[name].compute(AttentionMaps(weights, weights.log()), torch.tensor(rows), tokens).item()


def nats(*weights):
    return -sum(w * math.log(w) for w in weights)


def random_maps(seed=0, batch=2, heads=3, seq=8):
    """Random weights with their logits, and tokens that occur several times."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(batch, heads, seq, seq, generator=generator, dtype=torch.float64)
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
        ("vertical", (0.5 + 0.25) / 3, (0.7 + 0.2) / 2),  # of the second key, of the third
        ("block", math.nan, math.nan),  # too short
        ("largest_logit", math.log(1), math.log(0.7)),
        # w wᵀ is [[1, .5, .25], [.5, .5, .25], [.25, .25, .375]], and [[.54, .24], [.24, .3]].
        (
            "rank",
            (1 + 0.5 + 0.375) ** 2 / (1 + 0.5**2 + 0.375**2 + 2 * (0.5**2 + 0.25**2 + 0.25**2)),
            (0.54 + 0.3) ** 2 / (0.54**2 + 0.3**2 + 2 * 0.24**2),
        ),
        *((name, math.nan, math.nan) for name in ("similarity", "mean_similarity", "induction", "duplicate_token")),
        *((name, math.nan, math.nan) for name in NEW),  # too short
    ],
)
def test_measures_by_hand(name, three, offset):
    assert measure(name, THREE, [0, 1, 2]) == pytest.approx(three, rel=1e-6, nan_ok=True)
    assert measure(name, OFFSET, [2, 3]) == pytest.approx(offset, rel=1e-6, nan_ok=True)


def test_keys_are_near_up_to_a_distance_of_8():
    weights = torch.tensor([[0.0, 0.1, 0.2, 0, 0, 0, 0, 0, 0, 0, 0.3, 0.4]])
    assert measure("near", weights, [10]) == pytest.approx(0.2 + 0.3 + 0.4)


def test_a_sink_and_a_map_without_keys_do_not_count():
    assert measure("entropy_share", THREE / 2, [0, 1, 2]) == pytest.approx(measure("entropy_share", THREE, [0, 1, 2]))
    both = torch.stack([THREE, torch.zeros(3, 3)]).unsqueeze(1)
    found = MEASURES["rank"].compute(AttentionMaps(both, both.log()), torch.arange(3), torch.arange(3))
    assert found.item() == pytest.approx(measure("rank", THREE, [0, 1, 2]))


def test_similarities_of_heads_by_hand():
    # Of the first map with the others 1/√2 and 0; of the second with the third 1/√2.
    weights = torch.tensor([[[1.0, 0, 0]], [[0.5, 0.5, 0]], [[0, 1, 0]]]).unsqueeze(0)
    maps, rows = AttentionMaps(weights, weights.log()), torch.tensor([2])
    half = math.sqrt(0.5)
    for name, expected in {"similarity": [half] * 3, "mean_similarity": [half / 2, half, half / 2]}.items():
        assert ALL[name].compute(maps, rows, rows).tolist() == pytest.approx(expected)


def halves(seq, boundary, causal):
    """Even attention within two blocks."""
    side = torch.arange(seq) >= boundary
    weights = (side.unsqueeze(1) == side).float()
    weights = weights.tril() if causal else weights
    return weights / weights.sum(dim=-1, keepdim=True)


@pytest.mark.parametrize(
    ("weights", "causal", "expected"),
    [
        (halves(16, 8, causal=True), True, 1),
        (halves(16, 6, causal=False), False, 1),
        (halves(400, 198, causal=False), False, 1),  # a seventh of the boundaries is tried
        (torch.eye(8), True, (1 + 1 / 2 + 1 / 3 + 1 / 4) / 4),  # of the second half, which sees both
        (torch.full((12, 12), 1 / 12), False, (4 * 4 + 8 * 8) / 144),  # of 4 and 8 tokens, where the least crosses
        (torch.eye(8)[:1].expand(8, 8), True, 0),
        (0.5 * halves(8, 4, causal=False), False, 1 / 2),  # with a sink
        (halves(8, 4, causal=True), None, math.nan),  # the mask made them
    ],
)
def test_overlap_with_blocks_by_hand(weights, causal, expected):
    visible = torch.ones(weights.shape).tril() > 0 if causal else weights >= 0 if causal is False else weights > 0
    logits = torch.zeros(weights.shape).masked_fill(~visible, -torch.inf)
    maps = AttentionMaps(*(x.expand(2, 1, *x.shape) for x in (weights, logits)))
    rows = torch.arange(len(weights))
    assert MEASURES["block"].compute(maps, rows, rows).item() == pytest.approx(expected, rel=1e-5, nan_ok=True)


def segments(*lengths):
    block = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    same = (block.unsqueeze(1) == block).float()
    return same / same.sum(dim=-1, keepdim=True)


def with_rows(weights, rows):
    weights = weights.clone()
    weights[rows] = 1 / weights.shape[-1]
    return weights


EYE = torch.eye(16)
HALF = torch.cat([EYE[:8], 0.4 * EYE[8:] + 0.6 * EYE[5]])  # the second half attends to key 5


@pytest.mark.parametrize(
    ("name", "weights", "causal", "expected"),
    [
        ("offset_share", 0.7 * EYE.roll(1, 1) + 0.3 * EYE, False, 0.7),
        ("offset", 0.7 * EYE.roll(1, 1) + 0.3 * EYE, False, 1),
        ("offset_share", 0.6 * EYE.roll(-3, 1) + 0.4 * EYE.roll(-1, 1), True, 0.6),
        ("offset", 0.6 * EYE.roll(-3, 1) + 0.4 * EYE.roll(-1, 1), True, -3),
        ("offset_share", 0.9 * EYE + 0.1 / 16, False, 0.1 / 16),  # its own token does not count
        ("offset_share", EYE.roll(-12, 1), True, 0),  # too few queries see so far
        ("offset_share", EYE.roll(-8, 1), True, 1),  # half of them do
        ("segment_vertical", HALF, False, 0.6),
        ("segment_vertical", EYE, False, 1 / 8),
        ("segment_vertical", EYE[[0]].expand(16, 16), True, 0),  # the first token
        ("segment_vertical", EYE[:15], False, math.nan),
        ("horizontal", with_rows(EYE, [9]), False, 15 / 16),
        ("horizontal", with_rows(EYE, [8, 9, 10, 11]), False, 15 / 16),
        ("horizontal", with_rows(EYE, list(range(8))), False, 0),  # a block of even rows is no stripe
        ("horizontal", torch.full((16, 16), 1 / 16), False, 0),
        ("phrases", segments(2, 3, 4, 5, 2), False, 1),
        ("phrases", segments(2, 3, 4, 5, 2) / 2, False, 1 / 2),  # with a sink
        ("phrases", segments(8, 8), False, 5 / 8 * 5 / 8 + 3 / 8 * 3 / 8),
        ("phrases", EYE, False, 1 / 2),
        ("phrases", EYE, True, (0.5 + 5 * 1.5) / 11),  # tokens 5 to 15, as the ends and beginnings of pairs
        ("phrases", EYE[:15], False, math.nan),  # not all queries
    ],
)
def test_patterns_by_hand(name, weights, causal, expected):
    rows = torch.arange(len(weights))
    weights = weights.tril() if causal else weights
    visible = torch.ones(weights.shape).tril() if causal else torch.ones(weights.shape)
    maps = AttentionMaps(weights.expand(2, 1, -1, -1), visible.log().expand(2, 1, -1, -1))
    assert MEASURES[name].compute(maps, rows, rows).item() == pytest.approx(expected, abs=1e-6, nan_ok=True)


def test_repeated_tokens():
    state = torch.get_rng_state()
    tokens = repeated_tokens(60, 5, 30, TOKENIZER)  # of 50 ids with a token
    assert torch.equal(torch.get_rng_state(), state)
    assert tokens.shape == (5, 61)
    assert (tokens[:, 0] == TOKENIZER.eos_id).all()  # as a text begins
    assert torch.equal(tokens[:, 1:31], tokens[:, 31:])
    assert all(len(set(row.tolist())) == 30 and {*row.tolist()} <= {*range(2, 50)} for row in tokens[:, 1:])
    for row in repeated_tokens(6, 3, 10, TOKENIZER)[:, 1:]:  # a small vocabulary is used up before a token returns
        assert sorted(row[:4].tolist()) == sorted(row[4:8].tolist()) == [2, 3, 4, 5]


@pytest.mark.parametrize("name", [name for name in ALL if "similarity" not in name and "offset" not in name])
def test_heads_are_independent_and_the_batch_is_averaged(name):
    maps, tokens = random_maps(batch=3, heads=4, seq=20)
    tokens, rows = tokens[:1].expand(3, -1), torch.arange(20)
    together = ALL[name].compute(maps, rows, tokens)
    for head in range(4):
        parts = [AttentionMaps(*(x[row : row + 1, head : head + 1] for x in maps)) for row in range(3)]
        alone = torch.cat([ALL[name].compute(part, rows, tokens[:1]) for part in parts])
        torch.testing.assert_close(together[head], alone.max() if name == "largest_logit" else alone.mean())


def test_layers_are_measured_as_if_each_were_alone():
    """Layers of the same number of heads together, and a pruned one between them."""
    maps, (_, tokens) = CapturedMaps(), random_maps()
    maps.rows = torch.arange(8)
    maps.layers = [random_maps(seed, heads=heads)[0] for seed, heads in ((1, 3), (2, 1), (3, 3))]
    for name, values in measure_layers(ALL, maps, tokens).items():
        for layer, found in zip(maps.layers, values, strict=True):
            expected = ALL[name].compute(layer, maps.rows, tokens).tolist()
            assert found == pytest.approx(expected, rel=1e-12, nan_ok=True), name


# Of cross-attention.

# Diagonal, backwards, on the first key, and even.
MAPS = torch.stack([torch.eye(3), torch.eye(3).flip(0), torch.eye(3)[[0, 0, 0]], torch.full((3, 3), 1 / 3)])[None]


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        (diagonal_distance, [0, 2 / 3, 1 / 2, (1 / 2 + 1 / 3 + 1 / 2) / 3]),
        (monotonicity, [1, -1, 0, 0]),
        (coverage, [1, 1, 1 / 3, 1]),
        (source_end, [1 / 3, 1 / 3, 0, 1 / 3]),
    ],
)
def test_cross_measures_by_hand(measure, expected):
    stacked = torch.stack([MAPS, MAPS.flip(1)])
    assert measure(stacked).tolist() == [pytest.approx(expected), pytest.approx(expected[::-1])]
    low, high = CROSS_MEASURES[measure.__name__].limits(3)
    assert all(low <= value <= high for value in expected)


def test_measures_of_pairs_are_means_and_of_logits_the_largest():
    """Each kind of attention has its own measures, and each pair is measured alone."""
    network = loud_encoder_decoder().train()
    pairs = [pair for batch in pair_context(network).batches for pair in pairs_of(batch)]
    whole, *alone = (measure_pairs(network, some, nullcontext()) for some in (pairs, *([one] for one in pairs)))
    assert network.training
    assert whole.addresses == ADDRESSES
    assert "attention/cross/layer_00/head_03/coverage" in whole.scalars()
    assert whole.values.keys() >= set(NEW)
    for name, layers in ((name, layers) for name, layers in whole.values.items() if name not in NEW):  # short pairs
        known = [name in MEASURES] * 3 + [name in CROSS_MEASURES]
        assert [not math.isnan(values[0]) for values in layers] == known
        values = torch.tensor([[value for layer in one.values[name] for value in layer] for one in alone])
        expected = values.amax(dim=0) if name == "largest_logit" else values.nanmean(dim=0)
        found = torch.tensor([value for layer in layers for value in layer])
        torch.testing.assert_close(found, expected, equal_nan=True, msg=name)


# Events and labels.


HIGH = Trait("induction", 0.4, "came", "went")
LOW = Trait("entropy_share", 0.05, "came", "went", below=True)


def events_of(trait, series, hysteresis=0.25):
    """The events of one head over a series of values."""
    detector = EventDetector({"it": trait}, hysteresis)
    for step, value in enumerate(series):
        detector.observe(step, [["00"]], {trait.measure: [[value]]})
    return [(event.step, event.event) for event in detector.events]


@pytest.mark.parametrize(
    ("trait", "series", "events"),
    [
        (HIGH, [0.1, 0.39, 0.4, 0.31, 0.5, 0.301, 0.29], [(2, "came"), (6, "went")]),  # lost below 0.3
        (HIGH, [0.9, 0.8, 0.2], [(2, "went")]),  # the first measurement causes no event
        (HIGH, [0.1, math.nan, 0.5, math.nan, 0.1], [(2, "came"), (4, "went")]),  # nan is ignored
        (LOW, [0.9, 0.06, 0.05, 0.06, 0.062, 0.063], [(2, "came"), (5, "went")]),  # lost above 0.0625
    ],
)
def test_traits_begin_at_the_threshold_and_end_behind_it(trait, series, events):
    assert events_of(trait, series) == events


def test_heads_layers_traits_and_kinds_are_independent():
    detector = EventDetector(head_traits(), hysteresis=0.2)
    names = [["00a", "00b"], ["03"]]  # a differential layer, and a layer with one head left

    def observe(step, *values):
        measures = dict(zip(("induction", "first_token", "entropy_share"), values, strict=True))
        return detector.observe(step, names, measures)

    calm = [[0.0, 0.0], [0.0]], [[0.1, 0.1], [0.1]], [[0.5, 0.5], [0.5]]
    assert observe(0, *calm) == []
    found = observe(410, [[0.0, 0.5], [0.41]], [[0.1, 0.1], [0.6]], [[0.01, 0.5], [0.5]])
    assert sorted(map(str, found)) == [
        "layer 0 head 0a collapsed in entropy at step 410",
        "layer 0 head 0b became an induction head at step 410",
        "layer 1 head 3 became a first-token sink at step 410",
        "layer 1 head 3 became an induction head at step 410",
    ]
    after = observe(500, *calm)
    assert min(map(str, after)) == "layer 0 head 0a is no longer collapsed in entropy at step 500"
    assert len(after) == 4
    assert detector.events == found + after
    detector = EventDetector({"it": HIGH}, 0.2)
    for step, value in enumerate((0.9, 0.2)):
        measures = {"induction": [[0.1], [value]]}
        events = detector.observe(step, [["00"], ["00"]], measures, [("encoder", 0), ("cross", 0)])
    assert list(map(str, events)) == ["cross layer 0 head 0 went at step 1"]


def causal_maps(weigh, seq=32):
    """One causal head, by the weight of a query and a key before each row is made to sum to 1."""
    positions = torch.arange(seq, dtype=torch.float64)
    weights = weigh(*torch.meshgrid(positions, positions, indexing="ij")).double().tril() + 1e-9
    hidden = torch.ones(seq, seq).triu(1) > 0
    weights = weights.masked_fill(hidden, 0)
    return maps_of(weights, torch.zeros(seq, seq).masked_fill(hidden, -torch.inf))


def maps_of(weights, logits):
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return AttentionMaps(weights[None, None], logits[None, None])


TOKENS = repeated_tokens(40, 1, 16, TOKENIZER)[:, 1:]
CAUSAL = [
    (lambda q, k: 1.1 * (k == q - 1) + (k == q - 2), "previous token"),
    (lambda q, k: (k == q - 1) + 1.1 * (k == q - 2), "offset -2"),
    (lambda q, k: (k == q - 1) + (k == q - 2) + 0.2 * (k == q), ""),
    (lambda q, k: 1.2 * (k == q - 5) + (k == q // 2), "offset -5"),
    (lambda q, k: 1.1 * (k == 0) + (k == q), "first token"),
    (lambda q, k: (k == 0) + 1.3 * (k == q - 2), "offset -2"),
    (lambda q, k: 1.1 * (k == q) + (k == q - 2), "self"),
    # A third of the queries, and then most of them, are before the column.
    (lambda q, k: (k == 10) + 0.2 * (k == q // 2), "vertical"),
    (lambda q, k: (k == 20) + 0.2 * (k == q // 2) + 0.1 * (k == q), "segment vertical"),
    (lambda q, k: (k == q // 8 * 8) + 0.2 * (k == q // 2), "segment vertical"),
    (lambda q, k: (k == q // 4 * 4) + 0.2 * (k == q // 2), ""),  # segments too short
    (lambda q, k: (k == q // 2) + (q % 8 == 6), "horizontal"),
    (lambda q, k: 40 * (k == q // 2) + (q % 8 == 6), ""),
    (lambda q, k: (k < 14) == (q < 14), "block"),
    (lambda q, k: (k // 8) == (q // 8), ""),
    (lambda q, k: (k // 5) == (q // 5), "phrases"),
    (lambda q, k: q - k < 14, ""),
    (lambda q, k: q >= 0, "uniform"),
    (lambda q, k: 1 + (k < q / 3), "uniform"),
    (lambda q, k: 1 + 8 * (k < q / 3), ""),
    (lambda q, k: (k - q // 2).abs() < 1, "collapsed"),
    (lambda q, k: k == q - 1, "previous token + collapsed"),
]
CROSS = [
    (torch.eye(8, 12).roll(2, 1), "collapsed"),  # two tokens ahead
    (torch.eye(12) + 0.5 * torch.eye(12).roll(1, 1), "diagonal"),
    (torch.ones(8, 12) / 12, "uniform"),
    (torch.eye(12)[11:].expand(8, 12) + 0.5 * torch.eye(12)[:8], "source end"),
    (torch.eye(12)[3:4].expand(8, 12) + 0.5 * torch.eye(12)[:8].flip(0), "vertical"),
]
BIDIRECTIONAL = [
    (segments(2, 3, 4, 5, 5, 2, 3), "phrases"),
    (segments(12, 12), "block"),
    (torch.eye(24).roll(1, 1) + 0.6 * torch.eye(24), "next token"),
    (torch.eye(24).roll(3, 1) + 0.6 * torch.eye(24), "offset +3"),
]
CASES = [(causal_maps(weigh), MEASURES, label) for weigh, label in CAUSAL]
CASES += [(maps_of(weights + 1e-3, torch.zeros(24, 24)), MEASURES, label) for weights, label in BIDIRECTIONAL]
CASES += [(maps_of(weights, weights.clamp(min=1e-9).log()), CROSS_MEASURES, label) for weights, label in CROSS]
CASES += [
    (causal_maps(lambda q, k, share=share: share * (k == q - 15) + (1 - share) * (k == q // 2)), PATTERNS, label)
    for share, label in ((0.45, "induction"), (0.3, ""))
]


@pytest.mark.parametrize(("maps", "measures", "label"), CASES, ids=[label for *_, label in CASES])
def test_labels_of_maps_and_of_their_near_misses(maps, measures, label):
    rows = torch.arange(maps.weights.shape[-2])
    values = {name: [measure.compute(maps, rows, TOKENS).tolist()] for name, measure in measures.items()}
    assert head_labels(values) == [[label]]


def test_the_heads_of_a_role_begin_with_the_clearest():
    values = {
        "previous_token": [[0.6, 0.9], [0.4, math.nan]],
        "vertical": [[0.1, 0.7], [0.2, 0.3]],
        "segment_vertical": [[0.8, 0.9], [0.1, 0.1]],
        "offset_share": [[0.6, 0.1], [0.7, 0.8]],
        "offset": [[-3.0, 1.0], [1.0, -3.0]],
        "entropy_share": [[0.04, 0.5], [0.01, 0.96]],
    }
    roles = {
        "previous token": {(0, 1): 0.9, (0, 0): 0.6},
        "vertical": {(0, 1): 0.7},
        "segment vertical": {(0, 0): 0.8},  # that of the vertical head goes without saying
        "offset -3": {(1, 1): 0.8, (0, 0): 0.6},
        "next token": {(1, 0): 0.7},
        "uniform": {(1, 1): 0.96},
        "collapsed": {(1, 0): 0.01, (0, 0): 0.04},
    }
    assert str(head_roles(values)) == str(roles)  # also in their order
    first = "previous token + segment vertical + offset -3 + collapsed"
    labels = [[first, "previous token + vertical"], ["next token + collapsed", "offset -3 + uniform"]]
    assert head_labels(values) == labels


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("causal", [False, True])
def test_neither_random_nor_untrained_maps_have_a_label(seed, causal):
    """Random rows that are even in the mean, or peaked as those of a trained head; untrained heads are uniform."""
    torch.manual_seed(seed)
    network = make_transformer(max_seq_len=48).eval()
    tokens = torch.randint(50, (2, 48))
    captured = capture_weights(network, tokens, AttentionMask(causal=causal))
    labels = [head_labels(measure_layers(ALL, captured, tokens))]
    random_maps_of(captured, seed)
    assert all((weights.sum(dim=-1) - 1).abs().max() < 1e-5 for weights in captured)
    assert all(torch.equal(weights == 0, logits == -torch.inf) for weights, logits in captured.layers)
    labels.append(head_labels(measure_layers(ALL, captured, tokens)))
    peaked = [2 * torch.randn(2, 4, 48, 48).where(layer.logits > -torch.inf, -torch.inf) for layer in captured.layers]
    captured.layers = [AttentionMaps(logits.softmax(dim=-1), logits) for logits in peaked]
    labels.append(head_labels(measure_layers(ALL, captured, tokens)))
    assert labels == [[["uniform"] * 4] * 2, [[""] * 4] * 2, [[""] * 4] * 2]
