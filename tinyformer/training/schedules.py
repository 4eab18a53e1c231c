"""Learning-rate schedules: a factor of the peak learning rate for each step."""

import math
from dataclasses import dataclass

from tinyformer.errors import ArgumentError, require_at_least


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up; what follows, a subclass defines."""

    warmup_steps: int = 100  # optimizer steps

    def __post_init__(self) -> None:
        require_at_least(0, {"warmup_steps": 100}, warmup_steps=self.warmup_steps)

    def factor(self, step: int, total_steps: int | None) -> float:
        """The factor at a step, counted from 0; if `total_steps` is not known, it does not decay."""
        raise NotImplementedError

    def _warmup(self, step: int) -> float:
        return min(1.0, (step + 1) / (self.warmup_steps + 1))


@dataclass(frozen=True)
class WarmupCosine(Schedule):
    """Linear warm-up, then cosine decay to `final_factor` (Loshchilov & Hutter 2016, arXiv 1608.03983)."""

    final_factor: float = 0.1

    def factor(self, step: int, total_steps: int | None) -> float:
        total = math.inf if total_steps is None else total_steps
        progress = (step - self.warmup_steps) / max(1, total - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress))))
        return self._warmup(step) * (self.final_factor + (1 - self.final_factor) * cosine)


@dataclass(frozen=True)
class WarmupStableDecay(Schedule):
    """Linear warm-up, a constant phase, then linear decay to `final_factor` (Hu et al. 2024, arXiv 2404.06395)."""

    decay_fraction: float = 0.2  # of all steps
    final_factor: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.decay_fraction <= 1:
            raise ArgumentError("decay_fraction", self.decay_fraction, "must be from 0 to 1", {"decay_fraction": 0.2})

    def factor(self, step: int, total_steps: int | None) -> float:
        if total_steps is None:
            return self._warmup(step)
        left = (total_steps - step) / max(1.0, self.decay_fraction * total_steps)
        decay = self.final_factor + (1 - self.final_factor) * min(1.0, max(0.0, left))
        return self._warmup(step) * decay


@dataclass(frozen=True)
class InverseSquareRoot(Schedule):
    """Linear warm-up, then the inverse square root of the step (Vaswani et al. 2017, arXiv 1706.03762, §5.3)."""

    def factor(self, step: int, total_steps: int | None) -> float:
        return min(self._warmup(step), math.sqrt((self.warmup_steps + 1) / (step + 1)))
