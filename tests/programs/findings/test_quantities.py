"""The quantities and figures of findings by hand-computed values, and mistakes in their files."""

import csv
import json
import math

import pytest

from tinyformer.config.errors import ConfigError
from tinyformer.programs.findings.figure import draw
from tinyformer.programs.findings.files import Curve, read_finding
from tinyformer.programs.findings.quantities import QUANTITIES, number_of
from tinyformer.programs.findings.records import Record, packed, read_record, unpacked

RISING = [
    "step,val/accuracy,val/loss," + ",".join(f"attention/layer_00/head_0{head}/near" for head in range(3)),
    *("0,0.0,4.0,0.1,0.3,", "20,0.2,3.0,0.2,0.4,", "30,,,0.1,0.2,0.9", "40,0.6,2.0,0.5,0.7,", "80,1.0,2.5,0.6,0.9,"),
]
CELLS = {"cells": list(csv.DictReader(["at,is,y,none", "1,a,3,7", "2,a,12,", "4,b,5,1"]))}
RECORDS = {
    "one": Record({"loss": 2.0, "size": 3}, {"loss": 2.5}, list(csv.DictReader(RISING)), CELLS),
    "two": Record({"loss": 8.0, "root": 2.0}),
    "none": Record({"loss": 0.0}),
}
LOSS, ACCURACY = {"metric": "loss"}, {"metric": "val/accuracy"}
NEAR = {"heads": "near", "over": "largest"}
COLUMN = {"table": "cells", "column": "y"}
A = {"run": "a", "source": LOSS}


@pytest.mark.parametrize(
    ("name", "of", "expected"),
    [
        ("value", {"run": "one", "source": LOSS}, 2),
        ("value", {"run": "one", "source": NEAR}, 0.9),
        ("value", {"run": "one", "source": {"heads": "near", "over": "median"}}, 0.75),
        ("value", {"run": "one", "source": {"heads": "near", "over": "smallest"}}, 0.6),
        ("value", {"run": "one", "source": COLUMN | {"over": "mean", "where": {"is": "a"}}}, 7.5),
        ("value", {"run": "one", "source": COLUMN | {"over": "last"}}, 5),
        ("value", {"run": "one", "source": {"table": "cells", "column": "none", "over": "largest"}}, math.nan),
        ("difference", {"run": "two", "than": "one", "source": LOSS}, 6),
        ("ratio", {"run": "two", "than": "one", "source": LOSS}, 4),
        ("ratio", {"run": "two", "than": "none", "source": LOSS}, math.inf),
        ("ratio_within_run", {"run": "one", "source": {"metric": "size"}, "other": LOSS}, 1.5),
        ("log_ratio_within_run", {"run": "two", "source": LOSS, "other": {"metric": "root"}}, 3),  # 8 = 2³
        ("log_ratio_within_run", {"run": "none", "source": LOSS, "other": LOSS}, math.nan),
        ("contrast", {"points": {"two": 1, "one": -2}, "source": LOSS}, 4),
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
    ],
)
def test_quantities_by_hand(name, of, expected):
    kept = {run: unpacked(json.loads(json.dumps(packed(record.only([of]))))) for run, record in RECORDS.items()}
    for records in (RECORDS, kept):  # what is kept of the runs is what is measured
        assert QUANTITIES[name](records, **of) == pytest.approx(expected, nan_ok=True)


def test_a_series_of_heads_is_their_mean():
    of_mean_head = RECORDS["one"].series({"heads": "near"})
    assert list(of_mean_head.values()) == pytest.approx([0.2, 0.3, 0.4, 0.6, 0.75])


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ({"metric": "speed"}, "metric=speed: results.json has no such number"),
        ({"heads": "far", "over": "mean"}, "metrics.csv has no such values"),
        ({"table": "rank", "column": "y"}, "the run wrote cells"),
        ({"table": "cells", "column": "y", "where": {"is": "c"}}, "no row has"),
    ],
)
def test_what_a_run_lacks_is_named(source, problem):
    with pytest.raises(ConfigError, match=problem):
        number_of(RECORDS["one"], source)


def test_a_record_has_the_numbers_of_run_and_evaluation(tmp_path):
    for folder, loss in ((tmp_path, 2.0), (tmp_path / "evaluated", 3.0)):
        folder.mkdir(exist_ok=True)
        (folder / "results.json").write_text(f'{{"loss": {loss}}}')
        (folder / "metrics.csv").write_text(f"step,loss\n1,{loss}\n")
    (tmp_path / "evaluated" / "ablation.csv").write_text("head,loss\n0,4\n")
    record = read_record(tmp_path, tmp_path / "evaluated")
    assert [number_of(record, {kind: "loss"}) for kind in ("metric", "evaluated")] == [2, 3]
    assert record.series({"metric": "loss"}) == {1: 2}
    assert number_of(record, {"table": "ablation", "column": "loss"}) == 4
    assert not read_record(tmp_path).evaluated
    assert record.only([{"run": "x", "source": {"evaluated": "loss"}}]) == Record(evaluated={"loss": 3})


def with_check(**change):
    return {"checks": {"x": {"name": "x", "quantity": "value", "clause": "c", "of": A, "at_most": 1} | change}}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (with_check(quantity="values"), "must be one of value, difference"),
        (with_check(of=A | {"run": "b"}), "there is no run b; the runs are a"),
        (with_check(quantity="exponent", of={"points": {"c": 1}, "source": LOSS}), "there is no run c"),
        (with_check(of=A | {"source": {}}), "checks.x: quantity=value: a source needs one of metric, evaluated, heads"),
        (with_check(of=A | {"source": {"heads": "entropy", "over": "great"}}), "over=great: must be one of largest"),
        (with_check(at_most=None), "checks.x: decides a clause, or is a premise, and needs at_least or at_most"),
        (with_check(clause="d"), "checks.x.clause=d: must be one of c"),
        (with_check(premise=True), "clauses.c: needs a check that names it and is no premise"),
        ({"question": "why"}, "question=why: must be one of cost, learn"),
        ({"picture": {"run": "b", "file": "x.png", "name": "x"}}, "picture: there is no run b"),
        ({"picture": {"run": "a", "file": "../x.png", "name": "x"}}, "picture.file: String should match pattern"),
        ({"seeds": [0, 0]}, "seeds: must differ"),
        ({"program": "kernels", "seeds": [0, 1]}, "program=kernels has one"),
        ({"curves": [{"name": "x", "of": LOSS | {"table": "cells"}}]}, "a curve needs one of metric, heads, series"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path, change, problem):
    values = dict.fromkeys(("title", "why", "cost"), "words") | with_check() | {"clauses": {"c": "words"}}
    values |= {"paper": {"name": "A 2020", "arxiv": "2001.00001"}, "baseline": [], "runs": {"a": []}, "seeds": [0]}
    (tmp_path / "mine.yaml").write_text(json.dumps(values | change))
    with pytest.raises(ConfigError, match=problem):
        read_finding("mine", tmp_path)


TIMED = [{"step": "50", "loss": "3", "time": "0.5"}, {"step": "99", "loss": "2", "time": "0.9"}]
CURVES = [  # of two seeds
    {
        "one": Record({"loss": 2.0 + seed}, metrics=TIMED),
        "two": Record({"loss": 8.0}, metrics=[{"step": "50", "loss": "4"}], tables=CELLS),
    }
    for seed in range(2)
]


BY_COLUMN = {"table": "cells", "x": "at", "y": "none"}
BY_RUN = {"points": {"size": {"one": 1, "two": 4}}, "source": LOSS}


@pytest.mark.parametrize(
    ("of", "runs", "expected"),
    [
        (LOSS, None, {"one": [{50: 3, 99: 2}] * 2, "two": [{50: 4}] * 2}),
        (LOSS, ["two"], {"two": [{50: 4}] * 2}),
        (BY_COLUMN, ["two"], {"two": [{1: 7, 4: 1}] * 2}),
        (BY_COLUMN | {"groups": "is"}, ["two"], {"a": [{1: 7}] * 2, "b": [{4: 1}] * 2}),
        ({"series": LOSS, "against": {"metric": "time"}}, ["one"], {"one": [{0.5: 3, 0.9: 2}] * 2}),
        (BY_RUN, None, {"size": [{1: 2, 4: 8}, {1: 3, 4: 8}]}),
    ],
)
def test_a_curve_has_a_line_for_every_label_and_seed(of, runs, expected):
    curve = Curve(name="x", of=of, runs=runs)
    assert curve.lines(CURVES) == expected
    (panel,) = draw([], [curve], CURVES).axes
    drawn = [dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in panel.lines]
    assert drawn == [line for of_seeds in expected.values() for line in of_seeds]
