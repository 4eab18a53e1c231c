"""The lines and bands of a finding's figure, by hand-computed values."""

import pydantic
import pytest

from tinyformer.programs.findings.figure import draw
from tinyformer.programs.findings.files import Check, Curve
from tinyformer.programs.findings.quantities import LINES, Record
from tinyformer.programs.findings.verdicts import Measured

CELLS = [{"at": "1", "is": "a", "y": "3"}, {"at": "2", "is": "a", "y": ""}, {"at": "4", "is": "b", "y": "5"}]
RECORDS = [  # of two seeds
    {
        "one": Record({"loss": 2.0 + seed}, metrics=[{"step": "50", "loss": "3"}, {"step": "99", "loss": "2"}]),
        "two": Record({"loss": 8.0}, metrics=[{"step": "50", "loss": "4"}], tables={"cells": CELLS}),
    }
    for seed in range(2)
]


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        ({"of": {"metric": "loss"}}, {"one": [{50: 3, 99: 2}] * 2, "two": [{50: 4}] * 2}),
        ({"of": {"metric": "loss"}, "runs": ["two"]}, {"two": [{50: 4}] * 2}),
        ({"of": {"table": "cells", "x": "at", "y": "y"}, "runs": ["two"]}, {"two": [{1: 3, 4: 5}] * 2}),
        (
            {"of": {"table": "cells", "x": "at", "y": "y", "groups": "is"}, "runs": ["two"]},
            {"a": [{1: 3}] * 2, "b": [{4: 5}] * 2},
        ),
        (
            {"of": {"points": {"size": {"one": 1, "two": 4}}, "source": {"metric": "loss"}}},
            {"size": [{1: 2, 4: 8}, {1: 3, 4: 8}]},
        ),
    ],
    ids=["by_step", "of_some_runs", "by_column", "by_group", "by_run"],
)
def test_a_curve_has_a_line_for_every_label_and_seed(curve, expected):
    curve = Curve(name="x", log=["y"], **curve)
    assert curve.lines(RECORDS) == expected
    (panel,) = draw([], [curve], RECORDS).axes
    drawn = [dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in panel.lines]
    assert drawn == [line for of_seeds in expected.values() for line in of_seeds]
    assert (panel.get_xscale(), panel.get_yscale()) == ("linear", "log")
    legend = panel.get_legend()
    assert [text.get_text() for text in legend.texts] == list(expected) if legend else len(expected) == 1


@pytest.mark.parametrize(
    ("of", "problem"),
    [
        ({"tables": "cells"}, f"a curve needs one of {', '.join(LINES)}"),
        ({"metric": "loss", "table": "cells"}, "a curve needs one of"),
        ({"table": "cells", "x": "at"}, "missing a required argument: 'y'"),
        ({"points": ["one"], "source": {"metric": "loss"}}, "points: each label needs runs with a number"),
        ({"points": {"all": {"one": 1}}, "source": {"metric": "loss", "where": {}}}, "unexpected keyword argument"),
        ({"heads": "entropy", "over": "greatest"}, "over=greatest: must be one of largest"),
    ],
)
def test_mistakes_in_a_curve_are_named(of, problem):
    with pytest.raises(pydantic.ValidationError, match=problem):
        Curve(name="x", of=of)


@pytest.mark.parametrize(("values", "scale"), [((0.2, 0.3), "linear"), ((2e-16, 3e-16), "log")])
def test_a_band_ends_where_the_file_says(values, scale):
    (panel,) = draw([Measured(Check(name="x", quantity="value", of={}, at_most=0.1), values)]).axes
    (band,) = panel.patches
    assert band.get_x() + band.get_width() == pytest.approx(0.1)
    assert panel.get_xscale() == scale
    assert list(panel.lines[-1].get_xdata()) == list(values)
