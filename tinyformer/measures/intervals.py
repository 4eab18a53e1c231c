"""95 % intervals of one or several changes by the bootstrap over windows, and of a mean over seeds by Student's t."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

CHANGE_COLUMNS = ("loss", "change", "low", "high")
"""Columns of a table: the loss after an ablation, and its change with the bounds of the 95 % interval."""

STATES_COLUMNS = ("change_of_states", "low", "high")
"""Columns of a table: the relative change of the final states by an ablation, with the bounds of the interval."""

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5 % quantile of Student's t distribution, for 1 to 9 degrees of freedom."""


def bootstrap(
    num_windows: int, num_resamples: int, generator: torch.Generator
) -> Int[Tensor, "{num_resamples} windows"]:
    """The indices of the windows in each bootstrap resample, drawn with replacement (Efron 1979)."""
    return torch.randint(num_windows, (num_resamples, num_windows), generator=generator)


@dataclass(frozen=True)
class Losses:
    """For each window, the summed negative log-likelihood in nats, and the number of targets.

    The class also serves for other means, given a sum and a count for each window.
    """

    nats: Float[Tensor, " windows"]
    targets: Float[Tensor, " windows"]

    @property
    def mean(self) -> float:
        return float(self.nats.sum() / self.targets.sum())

    def resampled_means(self, num_resamples: int) -> Float[Tensor, " {num_resamples}"]:
        """The mean in each bootstrap resample; losses with the same number of windows have the same resamples."""
        draws = bootstrap(len(self.nats), num_resamples, torch.Generator().manual_seed(0))
        return self.nats[draws].sum(dim=1) / self.targets[draws].sum(dim=1)

    def with_interval(self, num_resamples: int) -> "Change":
        """The mean with its 95 % bootstrap interval over the choice of windows."""
        means = self.resampled_means(num_resamples)
        low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=means.dtype)).tolist()
        return Change(self.mean, low, high)

    def minus(self, base: "Losses") -> "Losses":
        return Losses(self.nats - base.nats, self.targets)

    def change_from(self, base: "Losses", num_resamples: int) -> "Change":
        """The increase over the losses `base` of the same windows, in nats per target; see `with_interval`."""
        return replace(self.minus(base).with_interval(num_resamples), mean=self.mean - base.mean)


@dataclass(frozen=True)
class Change:
    """A change of the loss in nats per target, with its 95 % interval over the choice of windows."""

    mean: float
    low: float
    high: float

    def row(self, base: Losses) -> list[float]:
        """The values of `CHANGE_COLUMNS` for a change from the losses `base`."""
        return [base.mean + self.mean, self.mean, self.low, self.high]

    def __format__(self, form: str) -> str:
        """The mean, by default with four decimals, and the interval, which is left out for a single window."""
        form = form or "+.4f"
        return f"{self.mean:{form}}" + (f" [{self.low:{form}}, {self.high:{form}}]" if self.low < self.high else "")

    def __str__(self) -> str:
        return format(self)


def simultaneous(after: Sequence[Losses], before: Sequence[Losses], num_resamples: int) -> list[Change]:
    """Changes of the loss with 95 % intervals that are valid for all changes at once, whatever their number.

    They are mean ± c s, where s is the standard deviation over bootstrap resamples of the windows, and c is the 95 %
    quantile, over the resamples, of the largest |deviation| / s of all changes (max-T, Westfall & Young 1993).
    """
    pairs = list(zip(after, before, strict=True))
    means = torch.tensor([late.mean - early.mean for late, early in pairs], dtype=torch.float64)
    resampled = torch.stack([late.minus(early).resampled_means(num_resamples) for late, early in pairs])
    deviations, spread = resampled - means.unsqueeze(1), resampled.std(dim=1).clamp(min=1e-12)
    width = (deviations.abs() / spread.unsqueeze(1)).amax(dim=0).quantile(0.95) * spread
    return [Change(*bounds) for bounds in torch.stack([means, means - width, means + width], dim=1).tolist()]


def student_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of 2 to 10 values, by Student's t distribution, which assumes normal values."""
    centre = statistics.fmean(values)
    half = STUDENT[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return centre - half, centre + half
