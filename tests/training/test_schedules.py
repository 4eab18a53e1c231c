"""Schedules, against values computed by hand."""

import pytest

from tinyformer.training import WarmupCosine, WarmupStableDecay


@pytest.mark.parametrize(
    ("step", "factor"),
    [
        (0, 1 / 5),  # the first step is no wasted one
        (3, 4 / 5),
        (4, 1.0),  # the end of the warm-up
        (8, 0.1 + 0.9 * 0.5 * (1 + 2**-0.5)),  # a quarter of the way: cos(π/4)
        (12, 0.1 + 0.9 * 0.5),  # the middle: cos(π/2) = 0
        (20, 0.1),
        (25, 0.1),  # beyond the end it stays
    ],
)
def test_cosine_by_hand(step, factor):
    assert WarmupCosine(warmup_steps=4, final_factor=0.1).factor(step, 20) == pytest.approx(factor)


@pytest.mark.parametrize(
    ("step", "factor"),
    [
        (0, 1 / 5),
        (3, 4 / 5),
        (4, 1.0),
        (10, 1.0),
        (16, 1.0),
        (17, 0.8),
        (18, 0.6),
        (19, 0.4),
        (20, 0.2),
        (25, 0.2),
    ],
)
def test_stable_decay_by_hand(step, factor):
    schedule = WarmupStableDecay(warmup_steps=4, decay_fraction=0.2, final_factor=0.2)
    assert schedule.factor(step, 20) == pytest.approx(factor)


@pytest.mark.parametrize("schedule", [WarmupCosine, WarmupStableDecay])
@pytest.mark.parametrize("final_factor", [0.0, 0.25])
@pytest.mark.parametrize("total", [10, 1000])
def test_both_end_at_the_final_factor_and_fall_only(schedule, final_factor, total):
    factor = schedule(warmup_steps=3, final_factor=final_factor).factor
    values = [factor(step, total) for step in range(total + 1)]
    assert values[-1] == pytest.approx(final_factor)
    assert values[:4] == sorted(values[:4])
    assert values[3:] == sorted(values[3:], reverse=True)
    assert values[-2] == pytest.approx(final_factor, abs=0.51 if total == 10 else 0.01)


@pytest.mark.parametrize("schedule", [WarmupCosine, WarmupStableDecay])
def test_without_warm_up_the_first_step_has_the_full_rate(schedule):
    assert schedule(warmup_steps=0).factor(0, 10) == pytest.approx(1.0)


@pytest.mark.parametrize("schedule", [WarmupCosine, WarmupStableDecay])
def test_a_run_shorter_than_the_warm_up_only_rises(schedule):
    values = [schedule(warmup_steps=100).factor(step, 5) for step in range(4)]
    assert values == pytest.approx([1 / 101, 2 / 101, 3 / 101, 4 / 101])


def test_without_decay_the_plateau_lasts():
    assert WarmupStableDecay(warmup_steps=0, decay_fraction=0.0).factor(99, 100) == 1.0
