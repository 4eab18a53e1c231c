"""Verdicts: the mean of a quantity over seeds, its interval, and whether it lies in the band."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tinyformer.programs.findings.files import Check, Finding
from tinyformer.programs.findings.quantities import QUANTITIES, Records

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5 % quantile of Student's t distribution, for 1 to 9 degrees of freedom."""

HOLDS, FAILS, NOT_TESTABLE = "holds", "fails", "not testable here"


@dataclass(frozen=True)
class Measured:
    """A quantity that was measured, by its value for each seed."""

    check: Check
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean over seeds; infinite where a seed's value is, as of a level that is never reached."""
        return statistics.fmean(self.values)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean by Student's t distribution, which takes 2 to 10 seeds to be normal.

        None for one seed, and where a value is not finite.
        """
        if len(self.values) < 2 or not all(map(math.isfinite, self.values)):
            return None
        quantile = STUDENT[len(self.values) - 2]
        half = quantile * statistics.stdev(self.values) / math.sqrt(len(self.values))
        return self.mean - half, self.mean + half

    @property
    def holds(self) -> bool | None:
        """Whether the mean lies in the band; None without a band."""
        return self.check.contains(self.mean) if self.check.decides else None

    @property
    def is_clear(self) -> bool | None:
        """Whether the whole interval lies on the mean's side of the band's ends; None without band or interval."""
        if self.holds is None or self.interval is None:
            return None
        low, high = self.interval
        if self.holds:
            return self.check.contains(low) and self.check.contains(high)
        at_least, at_most = self.check.at_least, self.check.at_most
        return (at_least is not None and high < at_least) or (at_most is not None and low > at_most)


def measure(finding: Finding, records: Sequence[Records]) -> list[Measured]:
    """The quantities of a finding, given the records of each seed."""
    return [
        Measured(check, tuple(QUANTITIES[check.quantity](of_seed, **check.of) for of_seed in records))
        for check in finding.checks
    ]


def verdict(measured: Sequence[Measured]) -> str:
    """The verdict: it holds if the mean of every quantity lies in its band; without a premise it is not testable."""
    failing = [quantity for quantity in measured if quantity.holds is False]
    if any(quantity.check.premise for quantity in failing):
        return NOT_TESTABLE
    return FAILS if failing else HOLDS
