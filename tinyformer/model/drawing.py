"""Attention maps as heat maps, drawn with matplotlib."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, cast

import matplotlib as mpl
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure
from torch import Tensor

from tinyformer.analysis.pictures.picture import readable

CELL, SIDE = 0.34, 9.0
"""Inches: the side of a cell that holds a number, and the longest side of a map; in larger maps, cells are smaller."""

LABEL_POINTS, NUMBER_POINTS = 7.5, 6.5
LABEL_PITCH = 0.13
"""Smallest distance in inches between labels; if tokens are closer, only some of them are labelled."""

WEIGHT_TICKS = (0, 0.02, 0.1, 0.2, 0.4, 0.6, 0.8, 1)
"""Ticks of the colour bar, on which small weights are spread out."""

LEAST_SPAN = 0.1
"""The smallest end of a signed colour scale, so that rounding errors do not look like differences."""

LUMA = (0.299, 0.587, 0.114)
"""Perceived brightness of red, green and blue (ITU-R BT.601)."""


class Chart(Figure):
    """A figure that a notebook shows, whether or not pyplot has been imported."""

    def _repr_png_(self) -> bytes:
        data = BytesIO()
        self.savefig(data, format="png")
        return data.getvalue()


@dataclass(frozen=True)
class Panel:
    """A map to be drawn.

    Attributes:
        weights: the map.
        title: the lines above it.
        signed: whether weights can be negative; then the scale is linear around 0.
        label: what the colour bar shows.
    """

    weights: Float[Tensor, "queries keys"]
    title: str
    signed: bool = False
    label: str = "Attention weight"


def chart_of_maps(
    panels: Sequence[Panel], queries: Sequence[str], keys: Sequence[str], axes: Sequence[Axes] = ()
) -> Figure:
    """Maps of the same tokens side by side.

    Args:
        panels: the maps.
        queries: the tokens of the rows.
        keys: the tokens of the columns.
        axes: matplotlib axes to draw on, one for each map; by default, those of a new `Chart`.
    """
    if not axes:
        cell = min(CELL, SIDE / max(len(queries), len(keys)))
        width, height = max(2.2, cell * len(keys)) + 1.8, max(1.2, cell * len(queries)) + 1.5
        chart = Chart(figsize=(width * len(panels), height), dpi=130, layout="constrained")
        FigureCanvasAgg(chart)
        axes = chart.subplots(1, len(panels), squeeze=False)[0].tolist()
    for panel, own in zip(panels, axes, strict=True):
        _draw(own, panel, queries, keys)
    return cast(Figure, axes[0].get_figure(root=True))


def _draw(axes: Axes, panel: Panel, queries: Sequence[str], keys: Sequence[str]) -> None:
    """Draw a map with its tokens and its colour bar."""
    values = panel.weights.detach().float().cpu().numpy()
    largest = max(LEAST_SPAN, float(np.abs(values).max()))
    norm = Normalize(-largest, largest) if panel.signed else PowerNorm(0.5, 0, 1)
    colours = mpl.colormaps["RdBu_r" if panel.signed else "viridis"]
    image = axes.imshow(values, cmap=colours, norm=norm, interpolation="nearest")
    figure = axes.get_figure(root=True)
    assert figure is not None
    width, height = axes.get_window_extent().size
    cell = min(width / len(keys), height / len(queries)) / figure.dpi
    for row, column in np.argwhere(values != 0) if cell >= 0.8 * CELL else ():  # cells of masked keys stay empty
        is_dark = np.dot(colours(norm(values[row, column]))[:3], LUMA) < 0.5
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": NUMBER_POINTS}
        axes.text(column, row, f"{values[row, column]:z.2f}", color="white" if is_dark else "black", **style)
    step = math.ceil(LABEL_PITCH / cell)
    for axis, tokens in (("x", keys), ("y", queries)):
        places = range(0, len(tokens), step)
        labels = [readable(tokens[place], longest=24) for place in places]
        rotation = 90 if axis == "x" and max(map(len, labels)) > 2 else 0
        getattr(axes, f"set_{axis}ticks")(places, labels, parse_math=False, fontsize=LABEL_POINTS, rotation=rotation)
    axes.set_xlabel("Keys (attended to)", fontsize=LABEL_POINTS + 1)
    axes.set_ylabel("Queries (from)", fontsize=LABEL_POINTS + 1)
    axes.set_title(panel.title, fontsize=LABEL_POINTS + 1.5, loc="left", parse_math=False)
    axes.tick_params(length=0)
    bar = figure.colorbar(image, ax=axes, fraction=0.05, pad=0.03)
    if not panel.signed:
        bar.set_ticks(WEIGHT_TICKS, labels=[f"{tick:g}" for tick in WEIGHT_TICKS])
    bar.set_label(panel.label, fontsize=LABEL_POINTS)
    bar.ax.tick_params(labelsize=LABEL_POINTS)
