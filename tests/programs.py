"""Running the programs in tests."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent

SMALL = (
    "model.num_layers=2 model.num_heads=2 model.d_model=16 model.max_seq_len=16 data.batch_size=4 "
    "trainer.max_steps=4 generate.num_tokens=3 callbacks.attention.num_tokens=6 trainer.precision=32-true"
)
"""Overrides that make a run take about a second."""


@dataclass(frozen=True)
class Ended:
    """A program that has ended."""

    code: int
    out: str
    err: str


Program = Callable[..., Ended]
