"""Charts of a metric by setting: every seed, with mean and standard deviation."""

import math
import statistics
import textwrap
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from tinyformer.report.charts import Chart
from tinyformer.report.picture import FONTS, readable

Spreads: TypeAlias = Sequence[float | None]  # the standard deviation over the seeds of each place; None for one seed

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
LABEL_WIDTH = 60  # largest number of characters in a line of a label
MAX_LABEL = 300  # largest number of characters of a label, which may be the name of an untrusted folder
SPREAD_OUT = 20  # ratio of the largest to the smallest setting from which the axis is logarithmic

SEED_COLOUR, MEAN_COLOUR, GRID_COLOUR, NONE_COLOUR = "#3f7fc1", "#1a1a1a", "#e4e4e4", "#767676"


def seeds_by_number(
    numbers: Sequence[float], values: Sequence[Sequence[float]], spreads: Spreads, setting: str, metric: str
) -> Chart:
    """The metric of every seed by a numeric setting, ascending: dots, and a line of means with standard deviations.

    The axis of the setting is logarithmic if its values are powers of two or span orders of magnitude.
    """
    figure, axes = _chart((WIDTH, HEIGHT), numbers, values, spreads, metric, setting, "y")
    base = _log_base(numbers)
    if base is not None:
        axes.set_xscale("log", base=base)
    axes.set_xlabel(_wrapped(setting), fontsize=POINTS + 1)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color=GRID_COLOUR, linewidth=0.8)
    _label_numbers(figure, axes, numbers)
    return figure


def seeds_by_setting(
    labels: Sequence[str], values: Sequence[Sequence[float]], spreads: Spreads, setting: str, metric: str
) -> Chart:
    """The metric of every seed, in a row for each label of a setting or several, with mean and standard deviation."""
    shown = [_wrapped(label) for label in labels]
    lines = [line for label in shown for line in label.splitlines()]
    most = max(label.count("\n") + 1 for label in shown)
    size = WIDTH + 0.08 * max(map(len, lines), default=0), MARGINS + ROW_HEIGHT * most * len(labels)
    figure, axes = _chart(size, range(len(labels)), values, spreads, metric, setting, "x")
    for row, seeds in enumerate(values):
        if not seeds:
            at_left = axes.get_yaxis_transform()
            axes.text(0.01, row, "none", transform=at_left, va="center", fontsize=POINTS, color=NONE_COLOUR)
    axes.set_yticks(range(len(labels)), shown, family=list(FONTS), parse_math=False)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(color=GRID_COLOUR, linewidth=0.8)
    return figure


def _chart(
    size: tuple[float, float],
    places: Sequence[float],
    values: Sequence[Sequence[float]],
    spreads: Spreads,
    metric: str,
    setting: str,
    value_axis: Literal["x", "y"],
) -> tuple[Chart, Axes]:
    """A dot for every seed, and the mean of each place with one standard deviation, which a single seed lacks."""
    figure = Chart(figsize=size, dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    subtitle = readable(f"by {setting}" if setting else "", MAX_LABEL)
    title = [_with_unit(metric), *textwrap.wrap(subtitle, int(size[0] * 10))]
    figure.suptitle("\n".join(title), x=0.01, ha="left", fontsize=POINTS + 3, parse_math=False)
    dots = [(place, value) for place, seeds in zip(places, values, strict=True) for value in seeds]
    means = [(place, statistics.fmean(seeds)) for place, seeds in zip(places, values, strict=True) if seeds]
    bars = [math.nan if bar is None else bar for bar, seeds in zip(spreads, values, strict=True) if seeds]
    (x, y), (mean_x, mean_y) = (
        np.array(points).reshape(-1, 2).T[:: 1 if value_axis == "y" else -1] for points in (dots, means)
    )
    style: dict[str, Any] = {"s": 26, "facecolors": "none", "edgecolors": SEED_COLOUR, "linewidths": 1.3, "zorder": 3}
    axes.scatter(x, y, **style, label="single runs")
    axes.errorbar(
        mean_x,
        mean_y,
        xerr=bars if value_axis == "x" else None,
        yerr=bars if value_axis == "y" else None,
        linestyle="-" if value_axis == "y" else "none",
        color=MEAN_COLOUR,
        linewidth=1.2,
        marker="o",
        markersize=4,
        capsize=3,
        zorder=2,
        label="mean ± standard deviation" + "; one seed where there is no bar" * any(map(math.isnan, bars)),
    )
    set_label = axes.set_xlabel if value_axis == "x" else axes.set_ylabel
    set_label(_with_unit(metric), fontsize=POINTS + 1)
    axes.tick_params(labelsize=POINTS)
    axes.ticklabel_format(axis=value_axis, style="plain", useOffset=False)
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=POINTS)
    return figure, axes


def _wrapped(label: str) -> str:
    return "\n".join(textwrap.wrap(readable(label, MAX_LABEL), LABEL_WIDTH, break_on_hyphens=False))


def _label_numbers(figure: Chart, axes: Axes, numbers: Sequence[float]) -> None:
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
