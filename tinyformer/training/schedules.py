"""The learning rate over the steps, as a factor of its highest value."""

import math
from dataclasses import dataclass


def _refuse_warmup(warmup_steps: int) -> None:
    if warmup_steps < 0:
        raise ValueError(f"schedule.warmup_steps={warmup_steps} is negative; schedule.warmup_steps=100 works.")


def _warmup(step: int, warmup_steps: int) -> float:
    return min(1.0, (step + 1) / (warmup_steps + 1))


@dataclass(frozen=True)
class WarmupCosine:
    """A linear rise, then half a cosine down to `final_factor` (Loshchilov & Hutter 2016, arXiv 1608.03983).

    Args:
        warmup_steps: length of the rise, in optimizer steps.
        final_factor: the factor that the last step leads to.

    Raises:
        ValueError: the rise is negative.
    """

    warmup_steps: int = 100
    final_factor: float = 0.1

    def __post_init__(self) -> None:
        _refuse_warmup(self.warmup_steps)

    def factor(self, step: int, total_steps: int) -> float:
        """The factor at a step, from 0."""
        progress = (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress))))
        return _warmup(step, self.warmup_steps) * (self.final_factor + (1 - self.final_factor) * cosine)


@dataclass(frozen=True)
class WarmupStableDecay:
    """A linear rise, a plateau, and a linear fall to `final_factor` (Hu et al. 2024, arXiv 2404.06395).

    Args:
        warmup_steps: length of the rise, in optimizer steps.
        decay_fraction: length of the fall, as a share of all steps.
        final_factor: the factor at the end of the fall.

    Raises:
        ValueError: the rise is negative, or the fall no share.
    """

    warmup_steps: int = 100
    decay_fraction: float = 0.2
    final_factor: float = 0.0

    def __post_init__(self) -> None:
        _refuse_warmup(self.warmup_steps)
        if not 0 <= self.decay_fraction <= 1:
            raise ValueError(
                f"schedule.decay_fraction={self.decay_fraction} is no share of all steps; "
                "schedule.decay_fraction=0.2 is."
            )

    def factor(self, step: int, total_steps: int) -> float:
        """The factor at a step, from 0."""
        left = (total_steps - step) / max(1.0, self.decay_fraction * total_steps)
        fall = self.final_factor + (1 - self.final_factor) * min(1.0, max(0.0, left))
        return _warmup(step, self.warmup_steps) * fall
