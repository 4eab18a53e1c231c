"""Losses of windows, and the bootstrap intervals of their changes."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

CHANGE_COLUMNS = ("loss", "change", "low", "high")
"""Columns of a table: the loss after an ablation, and its change with the bounds of the 95 % interval."""


@dataclass(frozen=True)
class Losses:
    """The negative log-likelihood and the number of targets of each of several windows."""

    nats: Float[Tensor, " windows"]
    targets: Float[Tensor, " windows"]

    @property
    def mean(self) -> float:
        return float(self.nats.sum() / self.targets.sum())

    def resampled_changes(self, base: "Losses", num_resamples: int, seed: int = 0) -> Float[Tensor, " {num_resamples}"]:
        """The increase over `base` in bootstrap resamples of the windows (Efron 1979), the same for the same seed."""
        differences = self.nats - base.nats
        generator = torch.Generator().manual_seed(seed)
        draws = torch.randint(len(differences), (num_resamples, len(differences)), generator=generator)
        return differences[draws].sum(dim=1) / self.targets[draws].sum(dim=1)

    def change_from(self, base: "Losses", num_resamples: int, seed: int = 0) -> "Change":
        """The increase over the losses `base` of the same windows, in nats per target.

        The interval holds the middle 95 % of `num_resamples` bootstrap resamples of the windows.
        """
        means = self.resampled_changes(base, num_resamples, seed)
        low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=means.dtype)).tolist()
        return Change(self.mean - base.mean, low, high)


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
        """The mean, by default with four decimals, and the interval unless it is that of a single window."""
        form = form or "+.4f"
        return f"{self.mean:{form}}" + (f" [{self.low:{form}}, {self.high:{form}}]" if self.low < self.high else "")

    def __str__(self) -> str:
        return format(self)
