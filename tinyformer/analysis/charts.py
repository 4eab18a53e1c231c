"""Numbers of heads and layers, drawn."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from torch import Tensor

FONT_POINTS = 8
MAX_DECIMALS = 5
"""As many as fit into a cell."""

MAX_FINE_DECADES = 3
"""Powers of ten between which 2 and 5 are marked, too."""
GREY = (0.9, 0.9, 0.9, 1.0)
LUMA = (0.299, 0.587, 0.114)
"""How bright red, green and blue look (ITU-R BT.601)."""


def head_grid(
    values: Sequence[Sequence[float]], names: Sequence[Sequence[str]], title: str, diverging: bool = False
) -> Figure:
    """A cell for each head: layers down, heads across, the number in it and as its colour.

    Args:
        values: of each layer's heads.
        names: of the heads, likewise.
        title: with the unit.
        diverging: whether zero is the middle of the colours, so that a change's sign is seen.
    """
    # Heads stand in the column of their number, so that those which were pruned leave a gap.
    columns = sorted({name for row in names for name in row}, key=lambda name: (len(name), name))
    figure, axes = _canvas(max(5.0, 1.2 + 0.62 * len(columns)), 1.3 + 0.42 * len(values))
    finite = [value for row in values for value in row if math.isfinite(value)] or [0.0]
    largest = max(map(abs, finite)) or 1.0
    norm = Normalize(-largest, largest) if diverging else Normalize(min(*finite, 0.0), max(finite) or 1.0)
    colours = mpl.colormaps["RdBu_r" if diverging else "viridis"]
    for layer, row in enumerate(values):
        for name, value in zip(names[layer], row, strict=True):
            x, colour = columns.index(name), colours(norm(value)) if math.isfinite(value) else GREY
            axes.add_patch(Rectangle((x, layer), 0.96, 0.94, color=colour))
            is_dark = np.dot(colour[:3], LUMA) < 0.5
            place: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": FONT_POINTS - 1}
            axes.text(x + 0.48, layer + 0.47, _number(value, largest), color="white" if is_dark else "black", **place)
    axes.set(xlim=(0, len(columns)), ylim=(len(values), 0), xlabel="head", ylabel="layer")
    axes.set_xticks([i + 0.48 for i in range(len(columns))], columns)
    axes.set_yticks([i + 0.47 for i in range(len(values))], [str(i) for i in range(len(values))])
    axes.set_title(title, fontsize=FONT_POINTS + 1, loc="left")
    _plain(axes)
    return figure


def confusion_grid(confusion: Int[Tensor, "classes classes"], names: Sequence[str]) -> Figure:
    """How many examples of each class (down) were taken for each class (across).

    Args:
        confusion: these numbers.
        names: of the classes.
    """
    # A cell holds five digits, and the names at both sides of the grid need room.
    side, name_inches = 0.36 * len(names), 0.075 * max(map(len, names))
    figure, axes = _canvas(max(4.0, 1.4 + side + name_inches), max(3.0, 1.2 + side + name_inches))
    axes.imshow(confusion.numpy(), cmap="viridis")
    for row, numbers in enumerate(confusion.tolist()):
        for column, number in enumerate(numbers):
            colour = "white" if 2 * number < confusion.max() else "black"
            axes.text(column, row, str(number), ha="center", va="center", fontsize=FONT_POINTS - 1, color=colour)
    axes.set(xlabel="taken for", ylabel="class")
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(names)), names)
    axes.set_title("examples of the split", fontsize=FONT_POINTS + 1, loc="left")
    _plain(axes)
    axes.tick_params(axis="x", labelrotation=90 if max(map(len, names)) > 3 else 0)
    axes.tick_params(axis="y", labelrotation=0)
    return figure


def lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    title: str,
    xlabel: str,
    ylabel: str,
    yscale: str = "linear",
) -> Figure:
    """Lines over the same axis; a legend names them where there are several.

    Args:
        series: x and y of each, by name.
        title: above.
        xlabel: with the unit.
        ylabel: likewise.
        yscale: `linear` or `log`.
    """
    figure, axes = _canvas(6.0, 3.6)
    for name, (x, y) in series.items():
        axes.plot(x, y, marker=".", label=name)
    axes.set(xlabel=xlabel, ylabel=ylabel, yscale=yscale)
    if yscale == "log":
        _mark_logarithm(axes, [value for _, y in series.values() for value in y if value > 0])
    axes.set_title(title, fontsize=FONT_POINTS + 1, loc="left")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(series) > 1:
        axes.legend(fontsize=FONT_POINTS, frameon=False)
    axes.grid(alpha=0.3)
    _plain(axes)
    return figure


def _mark_logarithm(axes: Axes, values: Sequence[float]) -> None:
    """Several marks, however few powers of ten there are; "0.1", since an exponent is too small to read."""
    decades = math.log10(max(values) / min(values)) if values else 0.0
    many = LogLocator(subs=(1, 2, 5) if decades < MAX_FINE_DECADES else (1,))
    axes.yaxis.set_major_locator(many if decades > 1 else MaxNLocator(5))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def _number(value: float, largest: float) -> str:
    """A number as it stands beside a larger one, which has three digits; by its power of ten where both are tiny."""
    decimals = max(0, 2 - math.floor(math.log10(largest)))
    return f"{value:z.{decimals}f}" if decimals <= MAX_DECIMALS else f"{value:.1e}"


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _plain(axes: Axes) -> None:
    axes.tick_params(labelsize=FONT_POINTS, length=0)
    axes.xaxis.label.set_fontsize(FONT_POINTS)
    axes.yaxis.label.set_fontsize(FONT_POINTS)
    for spine in axes.spines.values():
        spine.set_visible(False)
