"""What an analysis is given, and what it gives back."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from tinyformer.analysis.picture import Picture
from tinyformer.batch import IGNORED, Batch, tensors
from tinyformer.nn import AttentionMask, BaseAttention, Transformer

CHANGE_COLUMNS = ("loss", "change", "low", "high")
"""Of a table: the loss without something, in nats per token, and how much larger it is, with its interval."""


@dataclass(frozen=True)
class Subject:
    """A trained model and the text that it is looked at on.

    Args:
        network: in evaluation mode.
        batches: of windows of the text, of about as many each, on the network's device.
        mask: who may attend to whom in a batch.
        nats: of a network and a batch: each window's negative log-likelihood, and how many targets it has.
        encode: makes tokens of a text.
        labels: what tokens look like.
        precision: the context that forward passes run in.
        untrained: makes the network as it was before its first step.
        save_pruned: writes a checkpoint of this network with fewer heads.
        unit: what the loss is the mean over, in the singular.
        row: what a row of a batch is, in the singular.
    """

    network: Transformer
    batches: Sequence[Batch]
    mask: Callable[[Any], AttentionMask]
    nats: Callable[[Transformer, Any], tuple[Tensor, Tensor]]
    encode: Callable[[str], list[int]]
    labels: Callable[[Sequence[int]], list[str]]
    precision: Callable[[], AbstractContextManager[Any]]
    untrained: Callable[[], Transformer]
    save_pruned: Callable[[Transformer, Path], None]
    unit: str = "token"
    row: str = "window"

    @property
    def layers(self) -> list[BaseAttention]:
        """The attention of each layer."""
        return self.network.attentions()

    def losses(self) -> "Losses":
        """The loss of each window, as the network is now."""
        with torch.no_grad(), self.precision():
            pairs = [self.nats(self.network, batch) for batch in self.batches]
        nats, targets = (torch.cat(parts).double().cpu() for parts in zip(*pairs, strict=True))
        return Losses(nats, targets)


@dataclass(frozen=True)
class Losses:
    """The losses of some windows.

    Args:
        nats: negative log-likelihood of each window.
        targets: how many it is the sum of.
    """

    nats: Float[Tensor, " windows"]
    targets: Float[Tensor, " windows"]

    @property
    def mean(self) -> float:
        """Nats per token."""
        return float(self.nats.sum() / self.targets.sum())

    def change_from(self, other: "Losses", num_resamples: int, seed: int = 0) -> "Change":
        """How much larger the loss is than another of the same windows, in nats per token.

        The interval is a bootstrap's over windows (Efron 1979): what the middle 95 % of `num_resamples` draws, as many
        windows each, with replacement, say.
        """
        differences = self.nats - other.nats
        generator = torch.Generator().manual_seed(seed)
        draws = torch.randint(len(differences), (num_resamples, len(differences)), generator=generator)
        means = differences[draws].sum(dim=1) / self.targets[draws].sum(dim=1)
        low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=means.dtype)).tolist()
        return Change(float(differences.sum() / self.targets.sum()), low, high)


@dataclass(frozen=True)
class Change:
    """A change of the loss, in nats per token, with the 95 % interval that the choice of windows leaves."""

    mean: float
    low: float
    high: float

    def row(self, base: Losses) -> list[float]:
        """Its `CHANGE_COLUMNS`, given the losses that it is a change from."""
        return [base.mean + self.mean, self.mean, self.low, self.high]

    def __str__(self) -> str:
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


@dataclass
class Findings:
    """What an analysis found.

    Args:
        scalars: for `results.json`.
        lines: for the summary, by their headings.
        tables: each a `NAME.csv`: columns and rows.
        figures: each a `NAME.png`.
        files: that the analysis has written.
    """

    scalars: dict[str, float | int | None] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)
    tables: dict[str, tuple[list[str], list[list[Any]]]] = field(default_factory=dict)
    figures: dict[str, Figure | Picture] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)


@runtime_checkable
class Analysis(Protocol):
    """A choice of the `analysis` group."""

    num_windows: int
    """How many windows of the text it looks at."""

    needs_gradient: bool
    """Whether it goes backward, too."""

    def __call__(self, subject: Subject, folder: Path) -> Findings:
        """Look at a model; files go to the folder."""
        ...


def at_least_one(name: str, number: int, works: int) -> int:
    """The number of something under `analysis`, which is not to be nothing.

    Raises:
        ValueError: it is; the sentence names a number that works.
    """
    if number < 1:
        raise ValueError(f"analysis.{name}={number}: at least one, analysis.{name}={works} works.")
    return number


def head_pairs(layers: Sequence[BaseAttention]) -> list[tuple[int, int]]:
    """All heads of a model, as the index of the layer and that within the layer."""
    return [(index, head) for index, layer in enumerate(layers) for head in range(layer.num_heads)]


def by_layer(layers: Sequence[BaseAttention], values: Sequence[float]) -> list[list[float]]:
    """Values of `head_pairs`, a list for each layer."""
    remaining = iter(values)
    return [[next(remaining) for _ in range(layer.num_heads)] for layer in layers]


def fullest(batch: Batch, num_rows: int) -> Batch:
    """The rows of a batch with the most text, cut where the shortest of them ends: padding says nothing of heads.

    Args:
        batch: of windows or of examples.
        num_rows: at most so many, of which none has less than half of the longest one's text.
    """
    lengths = batch["lengths"] if "lengths" in batch else (batch["targets"] != IGNORED).sum(dim=1)
    chosen = lengths.argsort(descending=True, stable=True)[:num_rows]
    chosen = chosen[2 * lengths[chosen] >= lengths.max()]
    seq = int(lengths[chosen].min())
    return cast(Batch, {name: rows[chosen, :seq] for name, rows in tensors(batch).items() if rows.ndim > 1})
