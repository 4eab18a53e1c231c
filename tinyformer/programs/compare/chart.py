"""The chart of a metric by setting: every seed, with mean and standard deviation."""

import math
import statistics
import textwrap
from collections.abc import Sequence
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from tinyformer.programs.compare.comparison import Comparison
from tinyformer.report.charts import Chart
from tinyformer.report.picture import FONTS, readable

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

POINTS = 9
WIDTH, HEIGHT, MARGINS, ROW_HEIGHT = 7.5, 4.8, 1.7, 0.26  # inches
LABEL_WIDTH = 60  # largest number of characters in a line of a label
MAX_LABEL = 300  # largest number of characters of a label, which may be the name of an untrusted folder
MOST_LEVEL = 8  # settings whose labels fit next to each other
SPREAD_OUT = 20  # ratio of the largest to the smallest setting from which the axis is logarithmic

SEED_COLOUR, MEAN_COLOUR, GRID_COLOUR, NONE_COLOUR = "#3f7fc1", "#1a1a1a", "#e4e4e4", "#767676"


def chart_of_seeds(comparison: Comparison) -> Chart:
    """Draw the metric of every seed against the settings if these are numbers, else in one row for each setting.

    The axis of the settings is logarithmic if they are powers of two or span orders of magnitude.
    """
    names = " · ".join(comparison.columns)
    if comparison.numbers is not None:
        figure, axes = _canvas(comparison, names, WIDTH, HEIGHT)
        _draw(axes, comparison, comparison.numbers, "y")
        _scale(axes, comparison.numbers)
        axes.set_xlabel(_wrapped(names), fontsize=POINTS + 1)
        axes.set_ylabel(_with_unit(comparison.metric), fontsize=POINTS + 1)
    else:
        labels = [_wrapped(" · ".join(row.settings.values()) or "all runs") for row in comparison.rows]
        lines = [label.splitlines() for label in labels]
        width = WIDTH + 0.08 * max(len(line) for label in lines for line in label)
        figure, axes = _canvas(comparison, names, width, MARGINS + ROW_HEIGHT * max(map(len, lines)) * len(labels))
        _draw(axes, comparison, range(len(labels)), "x")
        for place, row in enumerate(comparison.rows):
            if not row.values:
                axes.text(0.01, place, "none", transform=axes.get_yaxis_transform(), va="center", color=NONE_COLOUR)
        axes.set_yticks(range(len(labels)), labels, family=list(FONTS), parse_math=False)
        axes.set_ylim(len(labels) - 0.4, -0.6)
        axes.set_xlabel(_with_unit(comparison.metric), fontsize=POINTS + 1)
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=POINTS)
    return figure


def _canvas(comparison: Comparison, names: str, width: float, height: float) -> tuple[Chart, Axes]:
    figure = Chart(figsize=(width, height), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=POINTS)
    subtitle = readable(f"by {names}" if names else "", MAX_LABEL)
    title = [_with_unit(comparison.metric), *textwrap.wrap(subtitle, int(width * 10))]
    figure.suptitle("\n".join(title), x=0.01, ha="left", fontsize=POINTS + 3, parse_math=False)
    return figure, axes


def _draw(axes: Axes, comparison: Comparison, places: Sequence[float], value_axis: Literal["x", "y"]) -> None:
    """Draw a dot for every seed, and the mean and standard deviation of each setting; one seed has no deviation."""
    rows = [(place, row) for place, row in zip(places, comparison.rows, strict=True) if row.values]
    dots = [(place, value) for place, row in rows for value in row.values]
    means = [(place, statistics.fmean(row.values)) for place, row in rows]
    bars = [math.nan if row.std is None else row.std for _, row in rows]
    order = 1 if value_axis == "y" else -1
    (x, y), (mean_x, mean_y) = (zip(*(point[::order] for point in points), strict=True) for points in (dots, means))
    style: dict[str, Any] = {"s": 26, "facecolors": "none", "edgecolors": SEED_COLOUR, "linewidths": 1.3, "zorder": 3}
    axes.scatter(x, y, **style, label="single runs")
    label = "mean ± standard deviation" + "; without a bar: one seed" * any(map(math.isnan, bars))
    style = {"color": MEAN_COLOUR, "linewidth": 1.2, "marker": "o", "markersize": 4, "capsize": 3, "zorder": 2}
    style |= {f"{value_axis}err": bars, "linestyle": "-" if value_axis == "y" else "none"}
    axes.errorbar(mean_x, mean_y, **style, label=label)
    axes.grid(axis="y" if value_axis == "y" else "both", color=GRID_COLOUR, linewidth=0.8)
    axes.ticklabel_format(axis=value_axis, style="plain", useOffset=False)


def _scale(axes: Axes, numbers: Sequence[float]) -> None:
    """Put a tick at every number, on a logarithmic axis if that separates them better."""
    if numbers[0] > 0 and all(math.frexp(number)[0] == 0.5 for number in numbers):
        axes.set_xscale("log", base=2)
    elif numbers[0] > 0 and numbers[-1] / numbers[0] >= SPREAD_OUT:
        axes.set_xscale("log")
    axes.set_xticks(numbers, [f"{number:g}" for number in numbers], rotation=90 * (len(numbers) > MOST_LEVEL))
    axes.xaxis.set_minor_locator(NullLocator())


def _wrapped(label: str) -> str:
    return "\n".join(textwrap.wrap(readable(label, MAX_LABEL), LABEL_WIDTH, break_on_hyphens=False))


def _with_unit(metric: str) -> str:
    unit = UNITS.get(metric.rpartition("/")[2])
    return f"{metric} ({unit})" if unit else metric
