"""Charts of heads, layers and classes, drawn with matplotlib."""

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

from tinyformer.analysis.picture import readable

FONT_POINTS = 8
MAX_DECIMALS = 5
"""The largest number of decimals that fits into a cell."""

MAX_FINE_DECADES = 3
"""Range of a logarithmic axis, in powers of ten, up to which its ticks include multiples of 2 and 5."""
GREY = (0.9, 0.9, 0.9, 1.0)
LUMA = (0.299, 0.587, 0.114)
"""Perceived brightness of red, green and blue (ITU-R BT.601)."""


def head_grid(
    values: Sequence[Sequence[float]],
    names: Sequence[Sequence[str]],
    title: str,
    diverging: bool = False,
    layers: Sequence[Sequence[str | int]] | None = None,
) -> Figure:
    """A grid with one cell per head, layers down and heads across, showing each value as a number and a colour.

    Args:
        values: values of each layer's heads.
        names: names of each layer's heads.
        title: title of the chart, with the unit.
        diverging: whether the colour scale is centred on zero, for signed changes.
        layers: labels of the layers, in parts, such as ("cross", 3); by default their indices.
    """
    # Each head has the column of its name, so that pruned heads leave a gap.
    columns = sorted({name for row in names for name in row}, key=lambda name: (len(name), name))
    labels = [" ".join(map(str, layer)) for layer in layers or [[index] for index in range(len(values))]]
    margin = 0.075 * max(0, *(len(label) - 3 for label in labels))  # inches, of labels with a kind of attention
    figure, axes = _canvas(margin + max(5.0, 1.2 + 0.62 * len(columns)), 1.3 + 0.42 * len(values))
    finite = [value for row in values for value in row if math.isfinite(value)] or [0.0]
    largest = max(map(abs, finite)) or 1.0
    norm = Normalize(-largest, largest) if diverging else Normalize(min(*finite, 0.0), max(finite) or 1.0)
    colours = mpl.colormaps["RdBu_r" if diverging else "viridis"]
    for layer, row in enumerate(values):
        for name, value in zip(names[layer], row, strict=True):
            x, colour = columns.index(name), colours(norm(value)) if math.isfinite(value) else GREY
            axes.add_patch(Rectangle((x, layer), 0.96, 0.94, color=colour))
            is_dark = np.dot(colour[:3], LUMA) < 0.5
            style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": FONT_POINTS - 1}
            axes.text(x + 0.48, layer + 0.47, _number(value, largest), color="white" if is_dark else "black", **style)
    axes.set(xlim=(0, len(columns)), ylim=(len(values), 0), xlabel="head", ylabel="layer")
    axes.set_xticks([i + 0.48 for i in range(len(columns))], columns)
    axes.set_yticks([i + 0.47 for i in range(len(values))], labels)
    axes.set_title(title, fontsize=FONT_POINTS + 1, loc="left", wrap=True)
    _simplify(axes)
    return figure


def confusion_grid(confusion: Int[Tensor, "classes classes"], names: Sequence[str]) -> Figure:
    """A confusion matrix: number of examples by true class (down) and predicted class (across).

    Args:
        confusion: the confusion matrix.
        names: the class labels.
    """
    names = [readable(name, longest=40) for name in names]
    # A cell holds five digits, and the labels on both axes need space.
    side, name_inches = 0.36 * len(names), 0.075 * max(map(len, names))
    figure, axes = _canvas(max(4.0, 1.4 + side + name_inches), max(3.0, 1.2 + side + name_inches))
    axes.imshow(confusion.numpy(), cmap="viridis")
    for row, numbers in enumerate(confusion.tolist()):
        for column, number in enumerate(numbers):
            colour = "white" if 2 * number < confusion.max() else "black"
            axes.text(column, row, str(number), ha="center", va="center", fontsize=FONT_POINTS - 1, color=colour)
    axes.set(xlabel="predicted class", ylabel="true class")
    axes.set_xticks(range(len(names)), names, parse_math=False)
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.set_title("number of examples", fontsize=FONT_POINTS + 1, loc="left")
    _simplify(axes)
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
    """A line chart, with a legend if it has several lines.

    Args:
        series: x and y of each line, by name.
        title: title of the chart.
        xlabel: label of the x axis, with the unit.
        ylabel: label of the y axis, with the unit.
        yscale: `linear` or `log`.
    """
    figure, axes = _canvas(6.0, 3.6)
    for name, (x, y) in series.items():
        axes.plot(x, y, marker=".", label=name)
    axes.set(xlabel=xlabel, ylabel=ylabel, yscale=yscale)
    if yscale == "log":
        _set_log_ticks(axes, [value for _, y in series.values() for value in y if value > 0])
    axes.set_title(title, fontsize=FONT_POINTS + 1, loc="left", wrap=True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(series) > 1:
        axes.legend(fontsize=FONT_POINTS, frameon=False)
    axes.grid(alpha=0.3)
    _simplify(axes)
    return figure


def _set_log_ticks(axes: Axes, values: Sequence[float]) -> None:
    """Choose ticks of a logarithmic axis: several for any range, labelled "0.1", as exponents are too small to read."""
    decades = math.log10(max(values) / min(values)) if values else 0.0
    fine = LogLocator(subs=(1, 2, 5) if decades < MAX_FINE_DECADES else (1,))
    axes.yaxis.set_major_locator(fine if decades > 1 else MaxNLocator(5))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def _number(value: float, largest: float) -> str:
    """A number with the precision at which the largest has three digits, in scientific notation if that is tiny."""
    decimals = max(0, 2 - math.floor(math.log10(largest)))
    return f"{value:z.{decimals}f}" if decimals <= MAX_DECIMALS else f"{value:.1e}"


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _simplify(axes: Axes) -> None:
    axes.tick_params(labelsize=FONT_POINTS, length=0)
    axes.xaxis.label.set_fontsize(FONT_POINTS)
    axes.yaxis.label.set_fontsize(FONT_POINTS)
    for spine in axes.spines.values():
        spine.set_visible(False)
