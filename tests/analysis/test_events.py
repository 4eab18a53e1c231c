"""Events of heads, from short series of values."""

import json
import math

import pytest
import torch

from tinyformer.analysis import (
    CROSS_MEASURES,
    MEASURES,
    PATTERNS,
    EventDetector,
    Trait,
    head_labels,
    head_traits,
    repeated_tokens,
)
from tinyformer.nn import AttentionMaps

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
        (HIGH, [0.1, 0.5, 0.2, 0.39, 0.41], [(1, "came"), (2, "went"), (4, "came")]),
        (HIGH, [0.9, 0.8, 0.2], [(2, "went")]),  # the first measurement causes no event
        (HIGH, [0.1, math.nan, 0.5, math.nan, 0.1], [(2, "came"), (4, "went")]),  # nan is ignored
        (HIGH, [math.nan, 0.5, 0.1], [(2, "went")]),
        (LOW, [0.9, 0.06, 0.05, 0.06, 0.062, 0.063], [(2, "came"), (5, "went")]),  # lost above 0.0625
        (LOW, [0.01, 0.9], [(1, "went")]),
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


def test_a_saved_state_continues():
    detector = EventDetector({"it": HIGH}, 0.2)
    for step, value in enumerate([0.1, 0.5, 0.35, 0.1, 0.6]):
        state = json.loads(json.dumps(detector.state_dict()))
        detector = EventDetector({"it": HIGH}, 0.2)
        detector.load_state_dict(state)
        detector.observe(step, [["00"]], {"induction": [[value]]})
    assert [event.step for event in detector.events] == [1, 3, 4]


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


TOKENS = repeated_tokens(40, 1, 16)
CAUSAL = [
    (lambda q, k: 1.1 * (k == q - 1) + (k == q - 2), "previous token"),
    (lambda q, k: (k == q - 1) + 1.1 * (k == q - 2), ""),
    (lambda q, k: 1.1 * (k == 0) + (k == q), "first token"),
    (lambda q, k: (k == 0) + 1.3 * (k == q - 2), ""),
    (lambda q, k: 1.1 * (k == q) + (k == q - 2), "self"),
    (lambda q, k: (k == q) + 1.3 * (k == q - 2), ""),
    # A third of the queries, and then most of them, are before the column.
    (lambda q, k: (k == 10) + 0.2 * (k == q // 2), "vertical"),
    (lambda q, k: (k == 20) + 0.2 * (k == q // 2) + 0.1 * (k == q), ""),
    (lambda q, k: (k < 14) == (q < 14), "block"),
    (lambda q, k: ((k < 14) == (q < 14)) * (1 + k % 2), "block"),
    (lambda q, k: (k // 8) == (q // 8), ""),
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
CASES = [(causal_maps(weigh), MEASURES, label) for weigh, label in CAUSAL]
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


def test_a_threshold_of_its_own_changes_the_label():
    values = {"block": [[0.7, 0.5]], "entropy_share": [[0.99, math.nan]]}
    assert head_labels(values) == [["uniform", ""]]
    assert head_labels(values, head_traits({"block": 0.6, "uniform": 0.995})) == [["block", ""]]
