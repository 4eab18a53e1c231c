"""Displays in a notebook: attention maps as heat maps, tables of heads, and pages."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import matplotlib as mpl
import numpy as np
import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure
from torch import Tensor

from tinyformer.errors import ArgumentError
from tinyformer.report.charts import Chart, ink_on
from tinyformer.report.picture import readable, set_fonts

CELL, SIDE = 0.34, 9.0
"""Inches: the side of a cell that holds a number, and the longest side of a map; in larger maps, cells are smaller."""

MAX_ACROSS = 5  # maps side by side; others are below them
MAX_LARGE, SIDE_OF_MANY = 3, 3.0  # most maps that are drawn at full size, and the longest side of a map of more maps
LABEL_POINTS, NUMBER_POINTS = 7.5, 6.5
LABEL_PITCH = 0.13  # smallest distance in inches between labels; if tokens are closer, only some of them are labelled
WEIGHT_TICKS = (0, 0.02, 0.1, 0.2, 0.4, 0.6, 0.8, 1)  # ticks of the colour bar, on which small weights are spread out
LEAST_SPAN = 0.1  # the smallest end of a signed colour scale, so that rounding errors do not look like differences
PAGE_HEIGHT = 720  # height of the frame of a page in pixels; dragging its corner changes it
LARGEST_PAGE = 24_000_000  # largest number of characters of a page in a notebook, whose file stores each page


@dataclass(frozen=True)
class Panel:
    """An attention map to draw, and its title; the colour scale is linear around 0 if the map is `signed`."""

    weights: Float[Tensor, "queries keys"]
    title: str
    signed: bool = False
    label: str = "Attention weight"


def chart_of_maps(
    panels: Sequence[Panel], queries: Sequence[str], keys: Sequence[str], axes: Sequence[Axes] = ()
) -> Figure:
    """Draw maps of the same tokens side by side, each on one of the given matplotlib axes, or all in a new `Chart`."""
    if not axes:
        cell = min(CELL, (SIDE if len(panels) <= MAX_LARGE else SIDE_OF_MANY) / max(len(queries), len(keys)))
        width, height = max(2.2, cell * len(keys)) + 1.8, max(1.2, cell * len(queries)) + 1.5
        down, across = math.ceil(len(panels) / MAX_ACROSS), min(len(panels), MAX_ACROSS)
        chart = Chart(figsize=(width * across, height * down), dpi=130, layout="constrained")
        axes = [chart.add_subplot(down, across, place) for place in range(1, len(panels) + 1)]
    for panel, axes_of_panel in zip(panels, axes, strict=True):
        _draw(axes_of_panel, panel, queries, keys)
        set_fonts(axes_of_panel)
    return cast(Figure, axes[0].get_figure(root=True))


def heat_map(
    weights: Float[Tensor, "*maps queries keys"] | Float[np.ndarray, "*maps queries keys"],
    tokens: str | Sequence[str],
    keys: str | Sequence[str] | None = None,
    titles: Sequence[str] = (),
) -> Figure:
    """Draw any weights with their tokens as heat maps side by side, in the style of `TextMaps.plot`.

        heat_map(weights, "The cat sat on the mat").savefig("cat.png")

    The colour is the square root of the weight, from 0 to 1; if a value is below 0 or above 1, the scale is linear
    around 0. An `ArgumentError` is raised if the numbers of weights and tokens differ.

    Args:
        weights: one or several maps of the same tokens, such as the weights that `torch.nn.MultiheadAttention` returns.
        tokens: the tokens of the queries; a string is split at spaces.
        keys: the tokens of the keys; by default, the tokens of the queries.
        titles: a title for each map; by default, maps have no titles.
    """
    maps = torch.as_tensor(weights).detach().float()
    sides = [side.split() if isinstance(side, str) else list(map(str, side)) for side in (tokens, keys or tokens)]
    axes = ("tokens", "rows (queries)"), ("keys", "columns (keys)")
    for (name, what), side, size in zip(axes, sides, maps.shape[-2:], strict=True):
        if len(side) != size:
            raise ArgumentError(name, side, f"has {len(side)} tokens, while the weights have {size} {what}")
    maps = maps.reshape(-1, *maps.shape[-2:])
    signed = bool((maps < 0).any() or (maps > 1 + 1e-3).any())
    label = "Score" if signed else Panel.label
    titled = zip(maps, titles or [""] * len(maps), strict=True)
    return chart_of_maps([Panel(each, title, signed, label) for each, title in titled], sides[0], sides[1])


def _draw(axes: Axes, panel: Panel, queries: Sequence[str], keys: Sequence[str]) -> None:
    values = panel.weights.detach().float().cpu().numpy()
    largest = max(LEAST_SPAN, float(np.abs(values).max()))
    norm = Normalize(-largest, largest) if panel.signed else PowerNorm(0.5, 0, 1)
    colours = mpl.colormaps["RdBu_r" if panel.signed else "viridis"]
    image = axes.imshow(values, cmap=colours, norm=norm, interpolation="nearest")
    figure = axes.get_figure(root=True)
    assert figure is not None
    width, height = axes.get_window_extent().size
    cell = min(width / len(keys), height / len(queries)) / figure.dpi
    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": NUMBER_POINTS}
    for row, column in np.argwhere(values != 0) if cell >= 0.8 * CELL else ():  # cells of masked keys stay empty
        value = values[row, column]
        axes.text(column, row, f"{value:z.2f}", color=ink_on(colours(norm(value))), **style)
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


class Table(list[dict[str, Any]]):
    """Rows as dictionaries with the same keys, which `pandas.DataFrame` accepts; None where a value is not defined.

    A terminal prints the rows as a table; a notebook shows a table whose tooltips give the meanings of columns.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], meanings: Mapping[str, str] | None = None) -> None:
        super().__init__(map(dict, rows))
        self.meanings = dict(meanings or {})

    @property
    def columns(self) -> list[str]:
        return list(self[0]) if self else []

    def __repr__(self) -> str:
        cells = [self.columns, *([_shown(value) for value in row.values()] for row in self)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        head, *rows = ("  ".join(map(str.rjust, line, widths)) for line in cells)
        return "\n".join([head, "─" * len(head), *rows])

    def _repr_html_(self) -> str:
        def cell(tag: str, text: str, title: str = "") -> str:
            hint = f' title="{html.escape(title)}"' if title else ""
            return f'<{tag}{hint} style="text-align:right">{html.escape(text)}</{tag}>'

        head = "".join(cell("th", column, self.meanings.get(column, "")) for column in self.columns)
        rows = ("".join(cell("td", _shown(value)) for value in row.values()) for row in self)
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f'<div style="overflow-x:auto"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _shown(value: Any) -> str:
    """A value as shown in a cell: floats with three decimals, integers with thousands separators."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


THEME = """\
(() => {
  const root = document.documentElement, body = document.body, frame = document.currentScript.previousElementSibling;
  const named = `${body.dataset.vscodeThemeKind ?? root.getAttribute("theme") ?? ""}`;
  const isDark = body.dataset.jpThemeLight === "false" || /dark$|contrast$/.test(named);
  if (!isDark && !named && !body.dataset.jpThemeLight) return;
  const themed = frame.cloneNode(true);  // Chromium may not paint a frame whose page changes while it loads
  themed.srcdoc = frame.srcdoc.replace("<html", `<html data-theme="${isDark ? "dark" : "light"}"`);
  frame.replaceWith(themed);
})()"""
"""Script that gives the page the theme of JupyterLab, VS Code or Colab, which may differ from the system's."""


def framed(page: str) -> str:
    """An HTML page in a frame that needs no server, for JupyterLab, VS Code and Colab.

    The frame holds the whole page (`srcdoc`) and is sandboxed: the page's scripts run, but cannot access the notebook.
    The attribute `data-theme` sets the page's theme. An untrusted notebook shows a sentence instead of the page.
    """
    if len(page) > LARGEST_PAGE:
        size = f"{len(page) / 1e6:,.0f} MB"
        return f"<p>The page has {size}, too much for a notebook: use <code>maps.save('atlas.html')</code>.</p>"
    style = f"display:block;width:100%;height:{PAGE_HEIGHT}px;border:0;resize:vertical;overflow:auto"
    frame = f'<iframe srcdoc="{html.escape(page)}" sandbox="allow-scripts" style="{style}" title="Attention atlas">'
    return f"<div>{frame}Trust this notebook to see the attention maps.</iframe><script>{THEME}</script></div>"
