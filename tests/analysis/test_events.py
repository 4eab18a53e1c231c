"""What heads become, from series that one can follow by hand."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyformer.analysis import Event, EventDetector, Trait, head_traits

HIGH = Trait("induction", 0.4, "came", "went")
LOW = Trait("entropy_share", 0.05, "came", "went", below=True)


def events_of(trait, series, hysteresis=0.25):
    """What is said of one head at each step of a series."""
    detector = EventDetector({"it": trait}, hysteresis)
    for step, value in enumerate(series):
        detector.observe(step, [["00"]], {trait.measure: [[value]]})
    return [(event.step, event.event) for event in detector.events]


@pytest.mark.parametrize(
    ("series", "events"),
    [
        ([0.1, 0.39, 0.4], [(2, "came")]),
        ([0.1, 0.5, 0.6, 0.9], [(1, "came")]),
        # It has to fall to below 0.3 to be gone.
        ([0.1, 0.5, 0.31, 0.5, 0.301, 0.29], [(1, "came"), (5, "went")]),
        ([0.1, 0.5, 0.2, 0.39, 0.41], [(1, "came"), (2, "went"), (4, "came")]),
        # What it was at first is no event; that it ends is one.
        ([0.9, 0.8], []),
        ([0.9, 0.2], [(1, "went")]),
        # A measurement without a number says nothing.
        ([0.1, math.nan, 0.5, math.nan, 0.1], [(2, "came"), (4, "went")]),
        ([math.nan, 0.5, 0.1], [(2, "went")]),
        ([], []),
    ],
)
def test_a_measure_that_rises_above_its_threshold(series, events):
    assert events_of(HIGH, series) == events


@pytest.mark.parametrize(
    ("series", "events"),
    [
        ([0.9, 0.06, 0.05], [(2, "came")]),
        ([0.9, 0.04, 0.06, 0.062], [(1, "came")]),
        ([0.9, 0.04, 0.063], [(1, "came"), (2, "went")]),
        ([0.01, 0.9], [(1, "went")]),
    ],
)
def test_a_measure_that_falls_below_its_threshold(series, events):
    assert events_of(LOW, series) == events


@given(st.lists(st.floats(0.301, 0.999)))
def test_a_head_that_hovers_at_the_threshold_is_told_once(series):
    assert len(events_of(HIGH, [0.0, *series])) <= 1


@given(st.lists(st.floats(0, 1)), st.floats(0, 0.9))
def test_what_comes_goes_before_it_comes_again(series, hysteresis):
    found = [event for _, event in events_of(HIGH, [0.0, *series], hysteresis)]
    assert found == ["came", "went"] * (len(found) // 2) + ["came"] * (len(found) % 2)


def test_without_hysteresis_each_crossing_is_told():
    assert events_of(HIGH, [0.1, 0.5, 0.39, 0.4], hysteresis=0.0) == [(1, "came"), (2, "went"), (3, "came")]


def two_layers(induction, first_token, entropy_share):
    return {"induction": induction, "first_token": first_token, "entropy_share": entropy_share}


def test_heads_layers_and_traits_are_kept_apart():
    detector = EventDetector(head_traits(induction=0.4, sink=0.5, collapse=0.05), hysteresis=0.2)
    names = [["00a", "00b"], ["03"]]  # a differential layer beside one whose other heads were pruned
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
    assert sorted(map(str, after)) == [
        "layer 0 head 0a is no longer collapsed in entropy at step 500",
        "layer 0 head 0b is no longer an induction head at step 500",
        "layer 1 head 3 is no longer a first-token sink at step 500",
        "layer 1 head 3 is no longer an induction head at step 500",
    ]
    assert detector.events == found + after


@pytest.mark.parametrize(("head", "said"), [("00", "0"), ("07", "7"), ("12", "12"), ("100", "100"), ("10b", "10b")])
def test_heads_are_called_by_their_numbers(head, said):
    assert f"head {said} " in str(Event(1, 0, head, "came", "induction", 0.5))


def test_a_measure_that_was_not_taken_says_nothing():
    assert EventDetector({"it": HIGH}, 0.2).observe(1, [["00"]], {"entropy": [[1.0]]}) == []


def test_a_saved_state_goes_on():
    whole, first = EventDetector({"it": HIGH}, 0.2), EventDetector({"it": HIGH}, 0.2)
    series = [0.1, 0.5, 0.35, 0.1, 0.6]
    for step, value in enumerate(series):
        whole.observe(step, [["00"]], {"induction": [[value]]})
    for step, value in enumerate(series[:3]):
        first.observe(step, [["00"]], {"induction": [[value]]})
    second = EventDetector({"it": HIGH}, 0.2)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step, value in enumerate(series[3:], 3):
        second.observe(step, [["00"]], {"induction": [[value]]})
    assert second.events == whole.events
    assert [event.step for event in whole.events] == [1, 3, 4]
