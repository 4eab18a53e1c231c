"""Events of heads, from short series of values."""

import json
import math

import pytest

from tinyformer.analysis import Event, EventDetector, Trait, head_traits

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
        (HIGH, [0.1, 0.39, 0.4], [(2, "came")]),
        # The trait is lost below 0.3.
        (HIGH, [0.1, 0.5, 0.31, 0.5, 0.301, 0.29], [(1, "came"), (5, "went")]),
        (HIGH, [0.1, 0.5, 0.2, 0.39, 0.41], [(1, "came"), (2, "went"), (4, "came")]),
        # The first measurement causes no event.
        (HIGH, [0.9, 0.8], []),
        (HIGH, [0.9, 0.2], [(1, "went")]),
        # nan is ignored.
        (HIGH, [0.1, math.nan, 0.5, math.nan, 0.1], [(2, "came"), (4, "went")]),
        (HIGH, [math.nan, 0.5, 0.1], [(2, "went")]),
        (HIGH, [], []),
        # Traits of small values, lost above 0.0625.
        (LOW, [0.9, 0.06, 0.05], [(2, "came")]),
        (LOW, [0.9, 0.04, 0.06, 0.062], [(1, "came")]),
        (LOW, [0.9, 0.04, 0.063], [(1, "came"), (2, "went")]),
        (LOW, [0.01, 0.9], [(1, "went")]),
    ],
)
def test_traits_begin_at_the_threshold_and_end_behind_it(trait, series, events):
    assert events_of(trait, series) == events


def two_layers(induction, first_token, entropy_share):
    return {"induction": induction, "first_token": first_token, "entropy_share": entropy_share}


def test_heads_layers_and_traits_are_independent():
    detector = EventDetector(head_traits(induction=0.4, sink=0.5, collapse=0.05), hysteresis=0.2)
    names = [["00a", "00b"], ["03"]]  # a differential layer, and a layer with one head left
    calm = two_layers([[0.0, 0.0], [0.0]], [[0.1, 0.1], [0.1]], [[0.5, 0.5], [0.5]])
    assert detector.observe(0, names, calm) == []
    found = detector.observe(410, names, two_layers([[0.0, 0.5], [0.41]], [[0.1, 0.1], [0.6]], [[0.01, 0.5], [0.5]]))
    assert sorted(map(str, found)) == [
        "layer 0 head 0a collapsed in entropy at step 410",
        "layer 0 head 0b became an induction head at step 410",
        "layer 1 head 3 became a first-token sink at step 410",
        "layer 1 head 3 became an induction head at step 410",
    ]
    assert Event(410, 1, "03", "became an induction head", "induction", 0.41) in found
    after = detector.observe(500, names, calm)
    assert min(map(str, after)) == "layer 0 head 0a is no longer collapsed in entropy at step 500"
    assert len(after) == 4
    assert detector.events == found + after


def test_a_saved_state_continues():
    whole, first = EventDetector({"it": HIGH}, 0.2), EventDetector({"it": HIGH}, 0.2)
    series = [0.1, 0.5, 0.35, 0.1, 0.6]
    for step, value in enumerate(series):
        whole.observe(step, [["00"]], {"induction": [[value]]})
        if step < 3:
            first.observe(step, [["00"]], {"induction": [[value]]})
    second = EventDetector({"it": HIGH}, 0.2)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step, value in enumerate(series[3:], 3):
        second.observe(step, [["00"]], {"induction": [[value]]})
    assert second.events == whole.events
    assert [event.step for event in whole.events] == [1, 3, 4]
