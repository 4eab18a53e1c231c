"""The quantities of findings, by hand-computed values, and the verdicts that they lead to."""

import math

import pytest

from tinyformer.config.errors import ConfigError
from tinyformer.programs.findings.files import Check, finding_names, read_finding
from tinyformer.programs.findings.pages import band, outcome_of, verdict_of
from tinyformer.programs.findings.quantities import QUANTITIES, Record, read_record
from tinyformer.programs.findings.verdicts import FAILS, HOLDS, NOT_TESTABLE, Measured, verdict

RISING = [
    {
        "step": str(step),
        "val/accuracy": accuracy,
        "val/loss": loss,
        **{f"attention/layer_00/head_0{head}/near": number for head, number in enumerate(near)},
    }
    for step, accuracy, loss, near in (
        (0, "0.0", "4.0", ["0.1", "0.3"]),
        (20, "0.2", "3.0", ["0.2", "0.4"]),
        (30, "", "", ["0.1", "0.2", "0.9"]),
        (40, "0.6", "2.0", ["0.5", "0.7"]),
        (80, "1.0", "2.5", ["0.6", "0.9"]),
    )
]
CELLS = {
    "cells": [
        {"at": str(n), "is": kind, "y": str(y), "none": none}
        for n, kind, y, none in ((1, "a", 3, "7"), (2, "a", 12, ""), (4, "b", 5, "nan"))
    ]
}
RECORDS = {
    "one": Record({"loss": 2.0, "size": 3}, {"loss": 2.5}, RISING, CELLS),
    "two": Record({"loss": 8.0, "root": 2.0}),
    "none": Record({"loss": 0.0}),
}
LOSS, ACCURACY = {"metric": "loss"}, {"metric": "val/accuracy"}
NEAR = {"heads": "near", "over": "largest"}


@pytest.mark.parametrize(
    ("name", "of", "expected"),
    [
        ("value", {"run": "one", "source": LOSS}, 2),
        ("value", {"run": "one", "source": NEAR}, 0.9),
        ("value", {"run": "one", "source": {"heads": "near", "over": "median"}}, 0.75),
        ("value", {"run": "one", "source": {"heads": "near", "over": "smallest"}}, 0.6),
        (
            "value",
            {"run": "one", "source": {"table": "cells", "column": "y", "over": "mean", "where": {"is": "a"}}},
            7.5,
        ),
        ("value", {"run": "one", "source": {"table": "cells", "column": "y", "over": "last"}}, 5),
        ("value", {"run": "one", "source": {"table": "cells", "column": "none", "over": "largest"}}, math.nan),
        ("difference", {"run": "two", "than": "one", "source": LOSS}, 6),
        ("difference_ratio", {"run": "two", "than": "one", "to": ["one", "none"], "source": LOSS}, 3),
        ("difference_ratio", {"run": "two", "than": "one", "to": ["one", "one"], "source": LOSS}, math.inf),
        ("ratio", {"run": "two", "than": "one", "source": LOSS}, 4),
        ("ratio", {"run": "two", "than": "none", "source": LOSS}, math.inf),
        ("ratio_within_run", {"run": "one", "source": {"metric": "size"}, "other": LOSS}, 1.5),
        ("log_ratio_within_run", {"run": "two", "source": LOSS, "other": {"metric": "root"}}, 3),  # 8 = 2³
        ("log_ratio_within_run", {"run": "none", "source": LOSS, "other": LOSS}, math.nan),
        ("difference_within_run", {"run": "one", "source": {"metric": "size"}, "other": LOSS}, 1),
        ("difference_within_run", {"run": "one", "source": {"evaluated": "loss"}, "other": LOSS}, 0.5),
        ("exponent", {"points": {"one": 1, "two": 2}, "source": LOSS}, 2),  # 2 x²
        ("exponent", {"points": {"one": 1, "none": 2}, "source": LOSS}, math.nan),  # no logarithm of 0
        ("exponent_in_table", {"run": "one", "table": "cells", "x": "at", "y": "y", "where": {"is": "a"}}, 2),  # 3 x²
        # At step 80 and, the largest of two heads, at step 30; a level that only one of the two reaches.
        ("delay", {"run": "one", "source": ACCURACY, "level": 1, "other": NEAR, "other_level": 0.9}, 80 / 30),
        ("delay", {"run": "one", "source": ACCURACY, "level": 2, "other": NEAR, "other_level": 0.9}, math.inf),
        ("delay", {"run": "one", "source": ACCURACY, "level": 1, "other": NEAR, "other_level": 2}, math.nan),
        ("rise", {"run": "one", "source": ACCURACY, "low": 0.1, "high": 0.5}, 0.25),  # (40 - 20) / 80
        ("rise", {"run": "one", "source": ACCURACY, "low": 0.1, "high": 1.1}, math.inf),
        ("change", {"run": "one", "source": NEAR}, 0.6),
        ("change", {"run": "one", "source": {"metric": "val/loss"}}, -1.5),
        # Without step 30: deviations (-.45 -.25 .15 .55) and (-.275 -.175 .125 .325) of the two.
        ("correlation", {"run": "one", "source": ACCURACY, "other": NEAR}, 0.365 / math.sqrt(0.59 * 0.2275)),
    ],
)
def test_quantities_by_hand(name, of, expected):
    assert QUANTITIES[name](RECORDS, **of) == pytest.approx(expected, nan_ok=True)


def test_a_measure_by_step_is_the_mean_over_heads():
    series = RECORDS["one"].series({"heads": "near"})
    assert list(series.values()) == pytest.approx([0.2, 0.3, 0.4, 0.6, 0.75])


def test_every_quantity_is_computed_by_hand():
    (mark,) = test_quantities_by_hand.pytestmark
    assert {case[0] for case in mark.args[1]} == set(QUANTITIES)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ({"metric": "speed"}, "metric=speed: results.json has no such number"),
        ({"evaluated": "size"}, "evaluated=size: results.json has no such number"),
        ({"heads": "far", "over": "mean"}, "metrics.csv has no such values"),
        ({"table": "rank", "column": "y"}, "the run left cells"),
        ({"table": "cells", "column": "y", "where": {"is": "c"}}, "no row has"),
    ],
)
def test_what_a_run_lacks_is_named(source, problem):
    with pytest.raises(ConfigError, match=problem):
        RECORDS["one"].value(source)


def test_a_record_has_the_numbers_of_run_and_evaluation(tmp_path):
    for folder, loss in ((tmp_path, 2.0), (tmp_path / "evaluated", 3.0)):
        folder.mkdir(exist_ok=True)
        (folder / "results.json").write_text(f'{{"loss": {loss}}}')
        (folder / "metrics.csv").write_text(f"step,loss\n1,{loss}\n")
    (tmp_path / "evaluated" / "ablation.csv").write_text("head,loss\n0,4\n")
    record = read_record(tmp_path, tmp_path / "evaluated")
    assert [record.value({kind: "loss"}) for kind in ("metric", "evaluated")] == [2, 3]
    assert record.series({"metric": "loss"}) == {1: 2}
    assert record.value({"table": "ablation", "column": "loss"}) == 4
    assert not read_record(tmp_path).evaluated


def test_the_interval_is_students():
    # Mean 2, standard deviation 1: 4.303 / √3 on either side.
    assert measured(1, 2, 3).interval == pytest.approx((2 - 2.4843, 2 + 2.4843), abs=1e-3)
    assert measured(1).interval is None
    assert measured(1, math.inf).interval is None


def measured(*values, premise=False, **band):
    check = Check(name="x", quantity="value", of={}, premise=premise, **band)
    return Measured(check, tuple(map(float, values)))


@pytest.mark.parametrize(
    ("several", "expected"),
    [
        ([measured(1, at_most=1), measured(9)], HOLDS),
        ([measured(1, at_most=1), measured(2, at_most=1)], FAILS),
        ([measured(math.nan, at_most=1)], FAILS),
        ([measured(1, math.inf, at_most=5)], FAILS),  # a seed that never got there
        ([measured(0, 3, at_least=1, at_most=2)], HOLDS),
        ([measured(1, at_least=2, premise=True), measured(9, at_most=1)], NOT_TESTABLE),
        ([measured(3, at_least=2, premise=True), measured(9, at_most=1)], FAILS),
    ],
)
def test_verdicts(several, expected):
    assert verdict(several) == expected


@pytest.mark.parametrize("name", finding_names())
def test_each_band_decides_on_both_of_its_sides(name):
    """Where all quantities lie in their bands a finding holds; it does not where any one is outside, or nan."""
    checks = read_finding(name).checks
    ends = [[end for end in (check.at_least, check.at_most) if end is not None] for check in checks]
    inside = [sum(both) / len(both) if both else 0.0 for both in ends]
    assert verdict([Measured(check, (value,)) for check, value in zip(checks, inside, strict=True)]) == HOLDS
    for index, check in enumerate(checks):
        beyond = [end + step for end, step in ((check.at_least, -1), (check.at_most, 1)) if end is not None]
        for value in [*beyond, math.nan] if check.decides else []:
            moved = [*inside[:index], value, *inside[index + 1 :]]
            expected = NOT_TESTABLE if check.premise else FAILS
            assert verdict([Measured(one, (at,)) for one, at in zip(checks, moved, strict=True)]) == expected


def test_the_band_in_words():
    bands = ({"at_least": 0.9}, {"at_most": 0}, {"at_least": 0.01, "at_most": 0.06}, {"at_least": 1, "at_most": 1}, {})
    words = [band(measured(1, **ends).check.model_dump()) for ends in bands]
    assert words == ["≥ 0.9", "≤ 0", "0.01 to 0.06", "= 1", "reported"]


@pytest.mark.parametrize(
    ("several", "expected"),
    [
        ([measured(1, 1.1, at_most=9), measured(0, 9)], "holds"),
        ([measured(1, 1.1, at_most=9), measured(0, 1, at_most=2)], "holds, not clearly"),
        ([measured(5, 5.1, at_most=2), measured(0, 1, at_most=2)], "fails"),
        ([measured(1, 5, at_most=2), measured(1, 1.1, at_most=9)], "fails, not clearly"),
        ([measured(1, 1.1, at_least=2, premise=True), measured(0, 1, at_most=2)], "not testable here"),
    ],
)
def test_whether_a_verdict_is_clear(several, expected):
    finding = read_finding("cost")
    assert verdict_of(outcome_of(finding, several, [])) == expected


def test_a_run_that_two_names_share_is_counted_once():
    runs = [{"run": name, "seed": 0, "folder": folder, "seconds": 2} for name, folder in zip("abc", "xxy", strict=True)]
    assert outcome_of(read_finding("cost"), [measured(1, at_most=1)], runs)["seconds"] == 4


def test_a_mean_is_clear_where_its_interval_lies_on_one_side_of_the_band():
    assert measured(1, 1.1, 1.2, at_most=2).is_clear
    assert not measured(0, 1, 2, at_most=2).is_clear
    assert measured(5, 5.1, at_most=2).is_clear
    assert not measured(1, 5, at_most=2).is_clear
    assert measured(1, at_most=2).is_clear is None


@pytest.mark.parametrize("name", finding_names())
def test_every_finding_is_read(name):
    assert read_finding(name).runs


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"quantity": "values"}, "must be one of value, difference"),
        ({"of": {"run": "a"}}, "missing a required argument"),
        ({"of": {"run": "b", "source": LOSS}}, "there is no run b; the runs are a"),
        (
            {"quantity": "difference_ratio", "of": {"run": "a", "than": "a", "to": ["a", "c"], "source": LOSS}},
            "there is no run c",
        ),
        (
            {"of": {"run": "a", "source": {}}},
            "x: quantity=value: a source needs one of metric, evaluated, heads, table",
        ),
        ({"of": {"run": "a", "source": "loss"}}, "a source needs one of metric"),
        ({"of": {"run": "a", "source": LOSS | {"over": "mean"}}}, "unexpected keyword argument 'over'"),
        ({"of": {"run": "a", "source": {"heads": "entropy"}}}, "missing a required argument: 'over'"),
        ({"of": {"run": "a", "source": {"heads": "entropy", "over": "great"}}}, "over=great: must be one of largest"),
        ({"at_most": None}, "must have at_least or at_most"),
        ({"at_mots": 1}, "Extra inputs are not permitted"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path, change, problem):
    check = {"name": "x", "quantity": "value", "of": {"run": "a", "source": LOSS}, "at_most": 1} | change
    lines = ["title: T", "paper: {name: A 2020, arxiv: '2001.00001'}", "claim: C", "baseline: []", "runs: {a: []}"]
    lines += ["seeds: [0]", "why: W", "refuted_by: R", "cost: nothing"]
    (tmp_path / "mine.yaml").write_text("\n".join([*lines, f"checks: [{check}]".replace("None", "null")]))
    with pytest.raises(ConfigError, match=problem):
        read_finding("mine", tmp_path)


def test_an_unknown_finding_lists_the_names():
    with pytest.raises(ConfigError, match=r"Did you mean rank\? Findings: alignment, circuit,"):
        read_finding("ranks")
