"""Schedules, compared with values computed by hand."""

import pytest

from tinyformer.errors import ArgumentError
from tinyformer.training import InverseSquareRoot, WarmupCosine, WarmupStableDecay


def test_cosine_by_hand():
    schedule = WarmupCosine(warmup_steps=4, final_factor=0.1)
    for step, factor in {
        0: 1 / 5,  # not 0, which would waste a step
        3: 4 / 5,
        4: 1.0,  # the end of the warm-up
        8: 0.1 + 0.9 * 0.5 * (1 + 2**-0.5),  # after a quarter: cos(π/4)
        12: 0.1 + 0.9 * 0.5,  # after half: cos(π/2) = 0
        20: 0.1,
        25: 0.1,  # constant after the end
    }.items():
        assert schedule.factor(step, 20) == pytest.approx(factor), step


def test_stable_decay_by_hand():
    schedule = WarmupStableDecay(warmup_steps=4, decay_fraction=0.2, final_factor=0.2)
    factors = {0: 1 / 5, 3: 4 / 5, 4: 1.0, 16: 1.0, 17: 0.8, 18: 0.6, 19: 0.4, 20: 0.2, 25: 0.2}
    for step, factor in factors.items():
        assert schedule.factor(step, 20) == pytest.approx(factor), step
    assert WarmupStableDecay(warmup_steps=0, decay_fraction=0.0).factor(99, 100) == 1.0


@pytest.mark.parametrize("schedule", [WarmupCosine(4), WarmupStableDecay(4)])
def test_a_run_of_unknown_length_does_not_decay(schedule):
    assert [schedule.factor(step, None) for step in (0, 4, 10**6)] == [1 / 5, 1.0, 1.0]


def test_inverse_square_root_by_hand():
    schedule = InverseSquareRoot(warmup_steps=3)
    for step, factor in {0: 1 / 4, 2: 3 / 4, 3: 1.0, 15: 1 / 2, 35: 1 / 3}.items():
        assert schedule.factor(step, 20) == pytest.approx(factor), step


@pytest.mark.parametrize("schedule", [WarmupCosine, WarmupStableDecay, InverseSquareRoot])
def test_warm_up(schedule):
    assert schedule(warmup_steps=0).factor(0, 10) == pytest.approx(1.0)
    assert schedule(warmup_steps=100).factor(3, 5) == pytest.approx(4 / 101)  # longer than the run
    with pytest.raises(ArgumentError, match=r"^warmup_steps=-1: must be at least 0; warmup_steps=100 works\.$"):
        schedule(warmup_steps=-1)
