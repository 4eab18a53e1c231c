"""Verdicts: the mean of a quantity over seeds, its interval, and what they say about the band and the claim."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tinyformer.programs.findings.files import Check, Finding
from tinyformer.programs.findings.quantities import QUANTITIES
from tinyformer.programs.findings.records import Records

HOLDS, FAILS, INCONCLUSIVE, NOT_TESTABLE = "holds", "fails", "inconclusive", "not testable"

SCALES: dict[str, tuple[Callable[[float], float], Callable[[float], float]]] = {
    "linear": (lambda value: value, lambda value: value),
    "log": (math.log, lambda value: math.exp(min(value, 700)) if value < math.inf else value),  # what a float holds
    "share": (lambda share: math.asin(math.sqrt(share)), lambda angle: math.sin(min(max(angle, 0), math.pi / 2)) ** 2),
}
"""To a scale on which values are averaged, and back: ratios by their logarithm, and shares, which end at 0 and 1, by
the arcsine of their root, whose variance depends little on the share (Anscombe 1948)."""


@dataclass(frozen=True)
class Measured:
    """A quantity that was measured, by its value for each seed.

    Args:
        is_exact: whether the same is measured for every seed, so that one suffices.
    """

    check: Check
    values: tuple[float, ...]
    is_exact: bool = False

    @property
    def mean(self) -> float:
        """The mean over seeds on the check's scale; infinite where a seed's value is, nan where it has no mean."""
        to, back = SCALES[self.check.scale]
        try:
            return back(statistics.fmean(map(to, self.values)))
        except ValueError:  # of what the scale does not have, such as the logarithm of 0
            return math.nan

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean over 2 to 10 seeds, see `student_interval`.

        None for one seed, and where a value or the mean is not finite.
        """
        if (len(self.values) == 1 and not self.is_exact) or not all(map(math.isfinite, (*self.values, self.mean))):
            return None
        if len({*self.values}) == 1:  # which would be rounded on the way to the scale and back
            return self.values[0], self.values[0]
        to, back = SCALES[self.check.scale]
        from tinyformer.measures.intervals import student_interval  # which needs torch

        low, high = student_interval([to(value) for value in self.values])
        return back(low), back(high)

    @property
    def verdict(self) -> str | None:
        """It holds if the whole interval lies in the band, fails if it lies beyond one end; None without a band.

        A premise holds if each seed's value lies in the band, and fails otherwise.
        """
        if not self.check.has_band:
            return None
        if self.check.premise:
            return HOLDS if all(map(self.check.contains, self.values)) else FAILS
        if self.interval is None:
            return INCONCLUSIVE
        low, high = self.interval
        if self.check.contains(low) and self.check.contains(high):
            return HOLDS
        at_least, at_most = self.check.at_least, self.check.at_most
        is_beyond = (at_least is not None and high < at_least) or (at_most is not None and low > at_most)
        return FAILS if is_beyond else INCONCLUSIVE


def measure(finding: Finding, records: Sequence[Records]) -> dict[str, Measured]:
    """The quantities of a finding, given the records of each seed."""
    return {
        key: Measured(
            check, tuple(QUANTITIES[check.quantity](of_seed, **check.of) for of_seed in records), finding.is_exact
        )
        for key, check in finding.checks.items()
    }


def verdicts(finding: Finding, measured: Mapping[str, Measured]) -> dict[str, str]:
    """The verdict on each clause of a claim."""
    return {clause: _verdict(clause, list(measured.values())) for clause in finding.clauses}


def _verdict(clause: str, measured: Sequence[Measured]) -> str:
    """A clause fails if one of its checks does, holds if all do; without a premise it is not testable."""
    premises = [one.verdict for one in measured if one.check.premise and one.check.clause in (None, clause)]
    found = [one.verdict for one in measured if not one.check.premise and one.check.clause == clause]
    if FAILS in premises:
        return NOT_TESTABLE
    if FAILS in found:
        return FAILS
    return HOLDS if {*found} == {HOLDS} else INCONCLUSIVE


def summary(of_clauses: Mapping[str, str]) -> str:
    """The verdicts in one: "holds", or "2 hold, 1 inconclusive"."""
    found = list(of_clauses.values())
    if len({*found}) == 1:
        return found[0]
    counts = {one: found.count(one) for one in (HOLDS, FAILS, INCONCLUSIVE, NOT_TESTABLE) if one in found}
    return ", ".join(f"{count} {one if count == 1 else one.removesuffix('s')}" for one, count in counts.items())
