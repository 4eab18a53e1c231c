"""The figure of a finding: its curves, and each quantity with its band."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.image import imread

from tinyformer.programs.findings.files import Curve
from tinyformer.programs.findings.records import Records
from tinyformer.programs.findings.verdicts import Measured
from tinyformer.report.charts import Chart

CAPTION = "band green, seeds as points and lines, mean and 95 % t-interval black"

WIDTH = 8  # width of the figure in inches
MANY_POINTS = 12  # lines with fewer points mark each


def draw(
    measured: Sequence[Measured],
    curves: Sequence[Curve] = (),
    records: Sequence[Records] = (),
    picture: tuple[str, Path] | None = None,
) -> Chart:
    """Draw the picture (title and file), below it the curves of each seed's records, and last the quantities."""
    heights = [2.2] * len(curves) + [0.85] * len(measured)
    image = imread(picture[1]) if picture else None
    if image is not None:
        heights.insert(0, WIDTH * image.shape[0] / image.shape[1])
    figure = Chart(figsize=(WIDTH, 0.9 + sum(heights)), layout="constrained")
    panels = list(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])
    if picture and image is not None:
        panels[0].imshow(image)
        panels[0].set_axis_off()
        panels.pop(0).set_title(picture[0], fontsize=8, loc="left")
    for panel, curve in zip(panels, curves, strict=False):
        _draw_curve(panel, curve, records)
    for panel, quantity in zip(panels[len(curves) :], measured, strict=True):
        _draw_quantity(panel, quantity)
    return figure


def _draw_curve(panel: Axes, curve: Curve, records: Sequence[Records]) -> None:
    lines = curve.lines(records)
    for number, (label, of_seeds) in enumerate(lines.items()):
        for seed, line in enumerate(of_seeds):
            panel.plot(
                list(line),
                list(line.values()),
                color=f"C{number}",
                linewidth=1,
                alpha=0.8,
                marker="." if len(line) < MANY_POINTS else None,
                label=None if seed else label.replace("_", " "),
            )
    for axis in curve.log:
        panel.set(**{f"{axis}scale": "log"})
    measured_at = sorted({x for of_seeds in lines.values() for line in of_seeds for x in line})
    if "x" in curve.log and len(measured_at) < MANY_POINTS:
        panel.set_xticks(measured_at, [f"{x:g}" for x in measured_at])
        panel.set_xticks([], minor=True)
    panel.set_xlabel(curve.along, fontsize=7)
    if len(lines) > 1:
        panel.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    _finish(panel, curve.name, ["top", "right"])


def _draw_quantity(panel: Axes, quantity: Measured) -> None:
    start, end = quantity.check.at_least, quantity.check.at_most
    ends = [at for at in (start, end) if at is not None]
    finite = [value for value in quantity.values if math.isfinite(value)]
    points, interval = [*finite, *ends], list(quantity.interval or ())
    low, high = min([*points, *interval], default=0.0), max([*points, *interval], default=1.0)
    if quantity.check.scale == "log" and low > 0:
        panel.set_xscale("log")
        if high < 100 * low:  # powers of ten alone would give too few ticks
            panel.xaxis.set_major_formatter("{x:g}")
            panel.xaxis.set_minor_formatter("{x:g}")
        low, high = low / 1.5, high * 1.5
    else:
        room = 0.15 * (high - low) or 0.1 * abs(high) or 1.0
        low, high = low - room, high + room
    panel.set(xlim=(low, high), ylim=(-1, 1), yticks=[])
    if ends:
        panel.axvspan(low if start is None else start, high if end is None else end, color="#d9ead3")
        for at in ends:
            panel.axvline(at, color="#6aa84f", linewidth=1)
    if interval:
        panel.plot(interval, [0, 0], color="#1a1a1a", linewidth=1.2)
        panel.plot([quantity.mean], [0], "|", color="#1a1a1a", markersize=14)
    panel.plot(finite, [0] * len(finite), "o", markerfacecolor="none", color="#3f7fc1")
    never = quantity.values.count(math.inf)
    _finish(panel, quantity.check.name + (f" ({never} never)" if never else ""), ["top", "right", "left"])


def _finish(panel: Axes, title: str, hidden_spines: list[str]) -> None:
    panel.set_title(title, fontsize=8, loc="left")
    panel.tick_params(which="both", labelsize=7)
    for axis in (panel.xaxis, panel.yaxis):
        axis.get_offset_text().set_fontsize(7)
    panel.spines[hidden_spines].set_visible(False)
