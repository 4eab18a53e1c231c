"""Charts of heads, layers and classes, drawn with matplotlib."""

import itertools
import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from io import BytesIO
from typing import Any, TypeAlias

import matplotlib as mpl
import numpy as np
from jaxtyping import Int, UInt8
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from torch import Tensor

from tinyformer.report.picture import readable, set_fonts
from tinyformer.report.plots import cells_of, columns_of, places_of

FONT_POINTS = 8
MAX_TOLD = 8  # events that are listed below a chart
MAX_TOKENS = 24  # columns of a grid by token
MAX_DECIMALS = 5  # the largest number of decimals that fits into a cell
NAME_WIDTH = 12  # characters in a line of the name of a class

MAX_FINE_DECADES = 3
"""Range of a logarithmic axis, in powers of ten, up to which its ticks include multiples of 2 and 5."""
GREY = (0.9, 0.9, 0.9, 1.0)
HATCH_COLOUR, BASELINE_COLOUR = "0.6", "0.5"

MAP_INCHES, CURVES_INCHES = (1.35, 1.6), 2.2  # width and height of a map, and height of the curves


class Chart(Figure):
    """A figure that a notebook shows, whether or not pyplot has been imported."""

    def draw(self, renderer: RendererBase) -> None:
        set_fonts(self)
        super().draw(renderer)

    def _repr_png_(self) -> bytes:
        data = BytesIO()
        self.savefig(data, format="png")
        return data.getvalue()


def head_grid(
    values: Sequence[Sequence[float]],
    names: Sequence[Sequence[str]],
    title: str,
    diverging: bool = False,
    layers: Sequence[Sequence[str | int]] | None = None,
    label: str = "",
    ablated: Sequence[Sequence[bool]] | None = None,
) -> Figure:
    """A grid with one cell per head, layers down and heads across, showing each value as a number and a colour.

    With `diverging`, the colour scale is centred on zero, for signed changes. `layers` gives the address of each layer,
    such as ("cross", 3), by default its index; `label` is the text of the colour bar, by default the title. Ablated
    heads are hatched and have no number.
    """
    rows = [" ".join(map(str, layer)) for layer in layers or [[index] for index in range(len(values))]]
    cells, hatched = cells_of(names, values), places_of(names, ablated)
    figure, axes = _value_grid(cells, rows, columns_of(names), title, label or title, diverging, hatched)
    axes.set(xlabel="head", ylabel="layer")
    return figure


def change_grid(
    changes: Mapping[tuple[str, str], float], rows: Sequence[str], columns: Sequence[str], title: str, label: str
) -> Figure:
    """A grid of signed changes by row and column, each as a number and a colour, on a scale that is centred on zero."""
    cells = {(rows.index(row), columns.index(column)): value for (row, column), value in changes.items()}
    return _value_grid(cells, rows, columns, title, label, True)[0]


def named_grid(changes: Mapping[tuple[str, str], float], title: str, label: str) -> Figure:
    """A `change_grid` whose rows and columns have the order in which they first occur in `changes`."""
    rows, columns = (list(dict.fromkeys(place[side] for place in changes)) for side in (0, 1))
    return change_grid(changes, rows, columns, title, label)


def token_grid(changes: Mapping[tuple[str, int, str], float], title: str, label: str) -> Figure:
    """A `change_grid` with a column for each position and token: the `MAX_TOKENS` columns with the largest changes."""
    strongest = sorted(changes, key=lambda place: abs(changes[place]), reverse=True)
    tokens = [*dict.fromkeys((position, token) for _, position, token in strongest)][:MAX_TOKENS]
    columns = {token: "{}\n{}".format(*token) for token in sorted(tokens)}
    cells = {(row, columns[at, token]): value for (row, at, token), value in changes.items() if (at, token) in columns}
    return change_grid(cells, list(dict.fromkeys(row for row, _ in cells)), list(columns.values()), title, label)


def _value_grid(
    cells: Mapping[tuple[int, int], float],
    rows: Sequence[str],
    columns: Collection[str],
    title: str,
    label: str,
    diverging: bool,
    hatched: Collection[tuple[int, int]] = (),
) -> tuple[Figure, Axes]:
    """A grid of values with a colour bar; see `head_grid`."""
    margin = 0.075 * max(0, *(len(line) - 3 for row in rows for line in row.splitlines()))  # inches, for long labels
    pitch = max(0.62, *(0.075 * len(line) for column in columns for line in column.splitlines()))
    figure, axes = _canvas(margin + max(5.6, 1.8 + pitch * len(columns)), 1.5 + 0.42 * len(rows), title)
    shown = {place: value for place, value in cells.items() if place not in hatched}
    finite = [value for value in shown.values() if math.isfinite(value)] or [0.0]
    largest = max(map(abs, finite)) or 1.0
    norm = Normalize(-largest, largest) if diverging else Normalize(min(*finite, 0.0), max(finite) or 1.0)
    colours = mpl.colormaps["RdBu_r" if diverging else "viridis"]
    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": FONT_POINTS - 1}
    for (row, column), value in shown.items():
        colour = colours(norm(value)) if math.isfinite(value) else GREY
        axes.add_patch(Rectangle((column, row), 0.96, 0.94, color=colour))
        axes.text(column + 0.48, row + 0.47, _number(value, largest), color=ink_on(colour), **style)
    for row, column in hatched:
        axes.add_patch(Rectangle((column, row), 0.96, 0.94, facecolor=GREY, edgecolor=HATCH_COLOUR, hatch="////"))
        axes.text(column + 0.48, row + 0.47, "ablated", **style, bbox={"color": GREY, "pad": 1})
    axes.set(xlim=(0, len(columns)), ylim=(len(rows), 0))
    axes.set_xticks([i + 0.48 for i in range(len(columns))], columns, parse_math=False)
    axes.set_yticks([i + 0.47 for i in range(len(rows))], rows, parse_math=False)
    _add_colour_bar(figure, axes, ScalarMappable(norm, colours), label)
    return figure, axes


def ink_on(colour: Sequence[float]) -> str:
    """The colour of text on a cell, from the perceived brightness of red, green and blue (ITU-R BT.601)."""
    return "white" if np.dot(colour[:3], (0.299, 0.587, 0.114)) < 0.5 else "black"


def _add_colour_bar(figure: Figure, axes: Axes, values: ScalarMappable, label: str) -> None:
    bar = figure.colorbar(values, ax=axes, fraction=0.05, pad=0.02)
    bar.set_label(textwrap.fill(label, 40), fontsize=FONT_POINTS)
    bar.ax.tick_params(labelsize=FONT_POINTS - 1, length=2)
    bar.locator = MaxNLocator(4)
    bar.outline.set_visible(False)


def head_graph(
    heads: Mapping[Any, tuple[str, Any]], edges: Sequence[tuple[str, Any, Any, float]], title: str
) -> Figure:
    """A graph of heads in a row for each layer, the first layer at the bottom, with an arrow for each edge.

    `heads` maps each node to the title of its row and the number of the head, which is None for nodes that are no
    heads. An edge is a kind, shown as colour, the source node, the target node, and a weight, shown as width.
    """
    rows = list(dict.fromkeys(row for row, _ in heads.values()))
    numbers = sorted({number for _, number in heads.values() if number is not None}) or [0]
    columns = dict(zip(numbers, range(len(numbers)), strict=True)) | {None: (len(numbers) - 1) / 2}
    figure, axes = _canvas(max(5.6, 1.8 + 0.7 * len(numbers)), 0.8 + 1.1 * len(rows), title)
    places = {head: (columns[number], rows.index(row)) for head, (row, number) in heads.items()}
    kinds = sorted({kind for kind, *_ in edges})
    for number, kind in enumerate(kinds):
        axes.plot([], [], color=f"C{number}", linewidth=3, label=kind)
        bend = 0.12 * (number - (len(kinds) - 1) / 2)  # so that the edges of two kinds are seen side by side
        for _, source, target, weight in (edge for edge in edges if edge[0] == kind):
            width = 0.5 + 3.5 * weight / max(weight for *_, weight in edges)
            style: dict[str, Any] = {"arrowstyle": "-|>", "color": f"C{number}", "linewidth": width, "alpha": 0.7}
            style |= {"shrinkA": 10, "shrinkB": 10, "connectionstyle": f"arc3,rad={bend}"}
            axes.annotate("", places[target], places[source], arrowprops=style)
    for head, place in places.items():
        row, number = heads[head]
        label, shape = (row.split()[-1], "round") if number is None else (str(number), "circle")
        box = {"boxstyle": shape, "facecolor": "white", "edgecolor": BASELINE_COLOUR}
        axes.text(*place, label, ha="center", va="center", fontsize=FONT_POINTS, bbox=box)
    if kinds:
        figure.legend(fontsize=FONT_POINTS, frameon=False, loc="outside right center")
    axes.set(xlim=(-0.5, len(numbers) - 0.5), ylim=(-0.4, len(rows) - 0.6), xticks=[])
    axes.set_yticks(range(len(rows)), rows)
    return figure


def confusion_grid(confusion: Int[Tensor, "classes classes"], names: Sequence[str]) -> Figure:
    """A confusion matrix: number of examples by true class (down) and predicted class (across)."""
    shown = [textwrap.fill(readable(name, longest=40), NAME_WIDTH) for name in names]
    cells = {(row, at): number for row, numbers in enumerate(confusion.tolist()) for at, number in enumerate(numbers)}
    figure, axes = _value_grid(cells, shown, shown, "Confusion matrix", "number of examples", False)
    axes.set(xlabel="predicted class", ylabel="true class")
    return figure


def lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    title: str,
    xlabel: str,
    ylabel: str,
    yscale: str = "linear",
    baselines: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
    marked: tuple[float, float, str] | None = None,
    by_step: bool = False,
) -> Figure:
    """A line chart of named series (x, y); the legend of several lines leaves out names that begin with "_".

    `baselines` are grey lines for comparison; `marked` is a point to mark: x, y and label. With `by_step`, x is on a
    logarithmic axis that begins at 0.
    """
    figure, axes = _canvas(6.0, 3.6, title)
    for (name, (x, y)), style in zip((baselines or {}).items(), itertools.cycle((":", "--", "-."))):
        axes.plot(x, y, linestyle=style, color=BASELINE_COLOUR, label=name)
    for name, (x, y) in series.items():
        axes.plot(x, y, marker=".", label=name)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    if yscale == "log":
        _set_log_scale(axes, [value for _, y in series.values() for value in y])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if by_step:
        _set_steps(axes)
    if marked:
        left, value, words = marked
        axes.plot([left], [value], marker="o", markersize=9, fillstyle="none", color="black", linestyle="", label=words)
    if len(series) + len(baselines or {}) > 1 or marked:
        axes.legend(fontsize=FONT_POINTS, frameon=False)
    axes.grid(alpha=0.3)
    return figure


def curves_by_step(
    panels: Mapping[str, Sequence[tuple[str, Mapping[int, float]]]], ylabel: str, yscale: str, events: Mapping[str, int]
) -> Figure:
    """Named panels of curves, one curve per layer, over the steps of training; dotted lines mark events."""
    across, told = 2 if len(panels) == 4 else min(len(panels), 3), ["step", *first_told([*events])]
    down, handles = -(-len(panels) // across), {}
    figure = Chart(figsize=(1.2 + 3.3 * across, 0.5 + 2.5 * down + 0.15 * len(told)), dpi=150, layout="constrained")
    layers = list(dict.fromkeys(layer for curves in panels.values() for layer, _ in curves))
    colours = dict(zip(layers, mpl.colormaps["viridis"](np.linspace(0, 0.9, len(layers))), strict=True))
    are_shares = not any(of > 1.01 for curves in panels.values() for _, values in curves for of in values.values())
    for place, (name, curves) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(down, across, place, sharey=figure.axes[0] if figure.axes and are_shares else None)
        simplify(axes)
        for layer, values in curves:
            (handles[layer],) = axes.plot(*zip(*values.items(), strict=True), ".-", lw=1, ms=4, color=colours[layer])
        for step in set(events.values()):
            axes.axvline(step, color=BASELINE_COLOUR, linewidth=0.8, linestyle=":", zorder=0)
        _set_steps(axes, 1.3 * max(step for _, values in curves for step in values))
        if yscale == "log":
            _set_log_scale(axes, [value for _, values in curves for value in values.values()])
        axes.set_title(name, fontsize=FONT_POINTS, loc="left")
        axes.grid(alpha=0.3)
        figure.supylabel(ylabel, fontsize=FONT_POINTS)
    figure.supxlabel("\n".join(told), fontsize=FONT_POINTS, x=0.01, ha="left")
    figure.legend(handles.values(), handles, fontsize=FONT_POINTS, frameon=False, loc="outside right center")
    return figure


def first_told(events: Sequence[Any]) -> list[str]:
    """The first `MAX_TOLD` events as strings, and the number of further events."""
    return [*map(str, events[:MAX_TOLD]), *[f"and {len(events) - MAX_TOLD} more"] * (len(events) > MAX_TOLD)]


def scatter(points: Mapping[str, tuple[float, float]], title: str, xlabel: str, ylabel: str) -> Figure:
    """A scatter of named points."""
    figure, axes = _canvas(6.0, 4.2, title)
    for name, place in points.items():
        axes.plot(*place, marker="o", color="C0", alpha=0.7)
        style: dict[str, Any] = {"xytext": (4, 3), "textcoords": "offset points", "fontsize": FONT_POINTS - 2}
        axes.annotate(name, place, **style)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    return figure


def _set_steps(axes: Axes, last: float | None = None) -> None:
    """Put steps of training on a logarithmic axis that begins at step 0."""
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(-0.2, last)
    axes.xaxis.set_major_formatter("{x:,g}")


def _set_log_scale(axes: Axes, values: Sequence[float]) -> None:
    """Make the vertical axis logarithmic, with several ticks and labels such as "0.1"; exponents would be too small."""
    axes.set_yscale("log", nonpositive="mask")  # by default, a line would drop to the axis where a value is 0
    positive = [value for value in values if value > 0]
    decades = math.log10(max(positive) / min(positive)) if positive else 0.0
    fine = LogLocator(subs=(1, 2, 5) if decades < MAX_FINE_DECADES else (1,))
    axes.yaxis.set_major_locator(fine if decades > 1 else MaxNLocator(5))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def _number(value: float, largest: float) -> str:
    """A number with as many decimals as give `largest` three digits; if these exceed `MAX_DECIMALS`, as "1.2e-08"."""
    if isinstance(value, int):
        return str(value)
    decimals = max(0, 2 - math.floor(math.log10(largest)))
    return f"{value:z.{decimals}f}" if decimals <= MAX_DECIMALS else f"{value:.1e}"


def _canvas(width: float, height: float, title: str) -> tuple[Figure, Axes]:
    """A chart with a title, and its axes; width and height are in inches."""
    figure = Chart(figsize=(width, height), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    simplify(axes)
    axes.set_title(title, fontsize=FONT_POINTS + 1, loc="left", wrap=True)
    return figure, axes


def simplify(axes: Axes) -> None:
    """Give axes the small labels of all charts, and no frame."""
    axes.tick_params(labelsize=FONT_POINTS, length=0)
    axes.xaxis.label.set_fontsize(FONT_POINTS)
    axes.yaxis.label.set_fontsize(FONT_POINTS)
    axes.spines[:].set_visible(False)


Map: TypeAlias = UInt8[np.ndarray, "_queries _keys"]


def filmstrip(
    maps: Mapping[str, Map],
    columns: int,
    marked: Sequence[int],
    steps: Sequence[int],
    losses: Sequence[float],
    curves: Mapping[str, Sequence[float | None]],
) -> Figure:
    """Titled maps of values up to 255; below them, losses and curves (0 to 1) by step, with lines at `marked`."""
    rows, (width, height) = -(-len(maps) // columns), MAP_INCHES
    size = max(6.4, width * columns), height * rows + CURVES_INCHES
    figure = Chart(figsize=size, dpi=130, layout="constrained")
    grid = figure.add_gridspec(rows + 1, columns, height_ratios=[height] * rows + [CURVES_INCHES])
    for index, (title, values) in enumerate(maps.items()):
        axes = figure.add_subplot(grid[divmod(index, columns)])
        axes.set_title(title, fontsize=FONT_POINTS, y=1.0, pad=3)
        axes.set_axis_off()
        axes.imshow(values, vmin=0, vmax=255, aspect="auto")
    axes = figure.add_subplot(grid[-1, :], xlim=(steps[0], steps[-1]), ylim=(-0.03, 1.03))
    for name, curve in curves.items():
        axes.plot(steps, np.array(curve, float), label=name)
    for step in marked:
        axes.axvline(step, color="0.4", linewidth=1)
    axes.set_xlabel("optimizer steps")
    axes.grid(alpha=0.3)
    of_loss = axes.twinx()
    of_loss.plot(steps, losses, color=BASELINE_COLOUR, linestyle="--", label="loss, nats per target (right)")
    for side in (axes, of_loss):
        simplify(side)
    figure.legend(fontsize=FONT_POINTS, frameon=False, ncols=2, loc="outside lower center")
    return figure
