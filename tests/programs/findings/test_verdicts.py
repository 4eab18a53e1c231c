"""Verdicts by hand-computed intervals, and those of the shipped findings, computed again from their records."""

import math

import pytest
from commands import ROOT

from tinyformer.programs.findings.files import Check, finding_names, read_finding
from tinyformer.programs.findings.outcomes import is_current, kept_records, page, read_outcomes
from tinyformer.programs.findings.verdicts import FAILS, HOLDS, INCONCLUSIVE, Measured, measure, summary, verdicts

RESULTS = ROOT / "docs/pages/findings"
FINDINGS = {name: read_finding(name) for name in finding_names()}
OUTCOMES = read_outcomes(RESULTS, FINDINGS)


def measured(*values, is_exact=False, **given):
    check = Check(name="x", quantity="value", of={}, **({"clause": "c"} | given))
    return Measured(check, tuple(map(float, values)), is_exact)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        # The 95 % interval of 0 and 3 is 1.5 ± 19, that of 1 and 1.1 is 1.05 ± 0.64.
        (measured(1, 1.1, at_most=2), HOLDS),
        (measured(1, 1.1, at_most=1.5), INCONCLUSIVE),
        (measured(1, 1.1, at_most=0.4), FAILS),
        (measured(1, 1.1, at_least=1.7), FAILS),
        (measured(1, 1.1, at_least=0.4, at_most=1.7), HOLDS),
        (measured(0, 3, at_least=1, at_most=2), INCONCLUSIVE),
        (measured(1, at_most=2), INCONCLUSIVE),  # one seed
        (measured(1, at_most=2, is_exact=True), HOLDS),
        (measured(3, at_most=2, is_exact=True), FAILS),
        (measured(1, 1, math.inf, at_most=5), INCONCLUSIVE),  # a seed that never got there
        (measured(1, 1, math.nan, at_most=5), INCONCLUSIVE),
        # The logarithms of 10 and 1,000 to base 10 are 2 ± 12.7, those of 10, 100 and 1,000 are 2 ± 2.48.
        (measured(10, 1000, at_least=1e-11, scale="log"), HOLDS),
        (measured(10, 100, 1000, at_least=0.3, scale="log"), HOLDS),
        (measured(10, 100, 1000, at_least=0.3), INCONCLUSIVE),
        (measured(0, 1, at_least=0.3, scale="log"), INCONCLUSIVE),
        # A share above 1 cannot be.
        (measured(0.99, 1, 1, at_most=1, scale="share"), HOLDS),
        (measured(0.99, 1, 1, at_most=1), INCONCLUSIVE),
        (measured(1, 1, 3, at_most=2, premise=True), FAILS),  # each seed decides
        (measured(1, 1, 2, at_most=2, premise=True), HOLDS),
        (measured(1, 1, clause=None), None),
    ],
)
def test_a_check_is_decided_by_its_whole_interval(one, expected):
    assert one.verdict == expected


def test_the_intervals_are_students():
    # Mean 2, standard deviation 1: 4.303 / √3 on either side.
    assert measured(1, 2, 3).interval == pytest.approx((2 - 2.4843, 2 + 2.4843), abs=1e-3)
    of_ratio = measured(10, 100, 1000, scale="log")
    assert of_ratio.mean == pytest.approx(100)
    assert measured(10, math.inf, scale="log").mean == math.inf  # never, not a large number
    assert of_ratio.interval == pytest.approx((10 ** (2 - 2.4843), 10 ** (2 + 2.4843)), rel=1e-3)
    of_share = measured(0.5, 1, scale="share")  # π/4 and π/2: 3π/8 ± 12.706 π/8
    assert of_share.mean == pytest.approx(math.sin(3 * math.pi / 8) ** 2)
    assert of_share.interval == pytest.approx((0, 1))
    assert measured(0.8, 0.81, 0.82, scale="share").interval == pytest.approx((0.7843, 0.8341), abs=1e-3)


A, B, C = measured(1, 1, at_most=2), measured(3, 3, at_most=2), measured(0, 3, at_most=2)


@pytest.mark.parametrize(
    ("several", "expected"),
    [
        ([A, A], "holds"),
        ([A, B], "fails"),
        ([A, C], "inconclusive"),
        ([B, C], "fails"),
        ([A, measured(0, 3, at_most=2, premise=True, clause=None)], "not testable"),
        ([B, measured(0, 3, at_most=2, premise=True)], "not testable"),
        ([A, measured(3, 3, clause=None)], "holds"),
        ([A, measured(3, 3, at_most=2, clause="d"), C], "1 fails, 1 inconclusive"),
        ([A, measured(0, 3, at_most=2, premise=True, clause="d")], "holds"),
    ],
)
def test_a_clause_is_decided_by_its_checks(several, expected):
    clauses = dict.fromkeys(one.check.clause for one in several if one.check.clause and not one.check.premise)
    finding = FINDINGS["cost"].model_copy(update={"clauses": clauses})
    assert summary(verdicts(finding, {str(number): one for number, one in enumerate(several)})) == expected


@pytest.mark.parametrize("name", OUTCOMES)
def test_what_is_shipped_is_computed_again(name):
    finding, last = FINDINGS[name], OUTCOMES[name][-1]
    if not is_current(finding, last):
        assert "changed after this measurement" in page([finding], OUTCOMES, "findings")
        return
    found = measure(finding, kept_records(RESULTS, name, last))
    assert {key: list(one.values) for key, one in found.items()} == {
        key: list(map(float, check["values"])) for key, check in last["checks"].items()
    }
    assert verdicts(finding, found) == last["verdicts"]


def test_what_is_published_is_the_last_measurement():
    for name, (*_, last) in OUTCOMES.items():
        made = max((run.get("analysis", run) for run in last["runs"]), key=lambda made: made["time"])
        published = f"{made['time'][:10]}, commit {made['commit']}"
        assert (FINDINGS[name].concluded, FINDINGS[name].published) == (last["verdicts"], published)
