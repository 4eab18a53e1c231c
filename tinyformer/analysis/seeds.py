"""Charts of a metric by setting: every seed, with mean and standard deviation."""

import math
import statistics
import textwrap
from collections.abc import Sequence
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from tinyformer.analysis.pictures.picture import FONTS, readable

UNITS = {
    "loss": "nats",
    "bits_per_byte": "bits per byte",
    "accuracy": "fraction correct",
    "accuracy_top5": "fraction in the top five",
    "tokens_per_second": "tokens/s",
    "seconds": "s",
    "num_tokens": "tokens",
    "num_bytes": "bytes",
}
"""Units of metrics, by the last part of the name."""

DPI = 150
POINTS = 9
WIDTH, HEIGHT, MARGINS, ROW_HEIGHT = 7.5, 4.8, 1.7, 0.26  # inches
LABEL_WIDTH = 60
"""Largest number of characters in a line of a label."""

MAX_LABEL = 300
"""Largest number of characters of a label, which may be the name of an untrusted folder."""

SPREAD_OUT = 20
"""Ratio of the largest to the smallest setting from which the axis is logarithmic."""

SEED_COLOUR, MEAN_COLOUR, GRID_COLOUR, NONE_COLOUR = "#3f7fc1", "#1a1a1a", "#e4e4e4", "#767676"


def seeds_by_number(numbers: Sequence[float], values: Sequence[Sequence[float]], setting: str, metric: str) -> Figure:
    """A line over a numeric setting: a dot for every seed, and the mean with an error bar of one standard deviation.

    The axis of the setting is logarithmic if its values are powers of two or span orders of magnitude.

    Args:
        numbers: values of the setting, ascending.
        values: for each of them, the metric of every seed.
        setting: name of the setting.
        metric: name of the metric.
    """
    figure, axes = _empty(WIDTH, HEIGHT, metric, f"by {setting}")
    pairs = [(number, value) for number, seeds in zip(numbers, values, strict=True) for value in seeds]
    _draw_seeds(axes, [x for x, _ in pairs], [y for _, y in pairs])
    scored = [(number, seeds) for number, seeds in zip(numbers, values, strict=True) if seeds]
    means, spreads = _means([seeds for _, seeds in scored])
    _draw_means(axes, [x for x, _ in scored], means, yerr=spreads, linestyle="-")
    base = _log_base(numbers)
    if base is not None:
        axes.set_xscale("log", base=base)
    axes.set_xlabel(_wrapped(setting), fontsize=POINTS + 1)
    axes.set_ylabel(_with_unit(metric), fontsize=POINTS + 1)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color=GRID_COLOUR, linewidth=0.8)
    _finish(figure, axes, "y")
    _label_numbers(figure, axes, numbers)
    return figure


def seeds_by_setting(labels: Sequence[str], values: Sequence[Sequence[float]], setting: str, metric: str) -> Figure:
    """A row for each setting, the first on top: a dot for every seed, and the mean with one standard deviation.

    Args:
        labels: the settings.
        values: for each of them, the metric of every seed.
        setting: name of the setting, or names of several.
        metric: name of the metric.
    """
    shown = [_wrapped(label) for label in labels]
    lines = [line for label in shown for line in label.splitlines()]
    most = max(label.count("\n") + 1 for label in shown)
    size = WIDTH + 0.08 * max(map(len, lines), default=0), MARGINS + ROW_HEIGHT * most * len(labels)
    figure, axes = _empty(*size, metric, f"by {setting}" if setting else "")
    pairs = [(value, row) for row, seeds in enumerate(values) for value in seeds]
    _draw_seeds(axes, [x for x, _ in pairs], [y for _, y in pairs])
    scored = [(row, seeds) for row, seeds in enumerate(values) if seeds]
    means, spreads = _means([seeds for _, seeds in scored])
    _draw_means(axes, means, [row for row, _ in scored], xerr=spreads, linestyle="none")
    for row, seeds in enumerate(values):
        if not seeds:
            at_left = axes.get_yaxis_transform()
            axes.text(0.01, row, "none", transform=at_left, va="center", fontsize=POINTS, color=NONE_COLOUR)
    axes.set_yticks(range(len(labels)), shown, family=list(FONTS), parse_math=False)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_xlabel(_with_unit(metric), fontsize=POINTS + 1)
    axes.grid(color=GRID_COLOUR, linewidth=0.8)
    _finish(figure, axes, "x")
    return figure


def _empty(width: float, height: float, metric: str, subtitle: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    lines = [_with_unit(metric), *textwrap.wrap(readable(subtitle, MAX_LABEL), int(width * 10))]
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=POINTS + 3, parse_math=False)
    return figure, axes


def _wrapped(label: str) -> str:
    """A label, wrapped into lines."""
    return "\n".join(textwrap.wrap(readable(label, MAX_LABEL), LABEL_WIDTH, break_on_hyphens=False))


def _draw_seeds(axes: Axes, x: Sequence[float], y: Sequence[float]) -> None:
    axes.scatter(x, y, s=26, facecolors="none", edgecolors=SEED_COLOUR, linewidths=1.3, zorder=3, label="single runs")


def _draw_means(axes: Axes, x: Sequence[float], y: Sequence[float], **style: Any) -> None:
    axes.errorbar(
        x,
        y,
        **style,
        color=MEAN_COLOUR,
        linewidth=1.2,
        marker="o",
        markersize=4,
        capsize=3,
        zorder=2,
        label="mean ± standard deviation",
    )


def _means(values: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Mean and sample standard deviation of each setting; nan for a single seed."""
    spreads = [statistics.stdev(seeds) if len(seeds) > 1 else math.nan for seeds in values]
    return [statistics.fmean(seeds) for seeds in values], spreads


def _finish(figure: Figure, axes: Axes, value_axis: Literal["x", "y"]) -> None:
    axes.tick_params(labelsize=POINTS)
    axes.ticklabel_format(axis=value_axis, style="plain", useOffset=False)
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=POINTS)


def _label_numbers(figure: Figure, axes: Axes, numbers: Sequence[float]) -> None:
    """Put a tick at every setting, and a label where it does not touch the previous one."""
    axes.set_xticks(numbers, [f"{number:g}" for number in numbers])
    figure.draw_without_rendering()
    ends = -math.inf
    for label in axes.get_xticklabels():
        box = label.get_window_extent()
        label.set_visible(box.x0 > ends + POINTS)
        ends = box.x1 if label.get_visible() else ends


def _log_base(numbers: Sequence[float]) -> int | None:
    if numbers[0] <= 0:
        return None
    if all(math.frexp(number)[0] == 0.5 for number in numbers):
        return 2
    return 10 if numbers[-1] / numbers[0] >= SPREAD_OUT else None


def _with_unit(metric: str) -> str:
    unit = UNITS.get(metric.rpartition("/")[2])
    return f"{metric} ({unit})" if unit else metric
