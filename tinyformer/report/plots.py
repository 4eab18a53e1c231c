"""Pictures of all heads: their attention maps and their measures."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from jaxtyping import Float
from torch import Tensor

from tinyformer.measures.capture import Axes, CapturedMaps
from tinyformer.measures.table import ALL_MEASURES, WHOLE
from tinyformer.report.picture import POINTS, Picture, readable, text_width

PIXELS_PER_TOKEN = 14
MIN_MAP_PIXELS = 100
HEADING, CAPTION, GAP = 40, 20, 12  # pixels: height of the title, height of the caption of a map, gap between maps
TOP, AXIS = HEADING + 28, 18  # pixels: bottom of the colour bar with its labels; height of the title of an axis
BAR_WIDTH = 240
PAGE_WIDTH = 1200  # pixels; a wider table continues in a band below
WEIGHTS = (0, 0.01, 0.1, 0.25, 0.5, 1)  # weights that the colour bar of maps marks
BAR_LABEL = "attention weight; the colour is its square root"
CELL_WIDTH, CELL_HEIGHT = 38, 20  # smallest size in pixels of the cell of a head in the picture of measures
TABLE_WIDTH, LINE, CHARACTER_WIDTH = 200, 14, 6  # pixels: least width of a grid; height of a line and width of a letter
LANDSCAPE = 1.6  # approximate aspect ratio of the picture of measures

T = TypeVar("T")
Grid = Float[np.ndarray, "layers heads"]


def head_maps(
    maps: Sequence[Float[Tensor, "_ seq k_seq"]],
    tokens: Sequence[str],
    title: str,
    names: Sequence[Sequence[str]] | None = None,
    keys: Sequence[str] | None = None,
    sides: tuple[str, str] = ("Queries", "Keys"),
    ablated: Sequence[Sequence[bool]] | None = None,
) -> Picture:
    """A picture of all attention maps: a row per layer, a column per head; queries down and keys across.

    The colour is the square root of the weight, on the same scale from 0 to 1 in every map, so that heads can be
    compared and a weight of 0.05 is visible next to a weight of 1. `tokens` label the rows; `keys`, by default the
    same, label the columns; `sides` are the titles of both axes. Maps with the same name, by default their index, share
    a column; maps of ablated heads are hatched.
    """
    down = [readable(token) for token in tokens]
    across = down if keys is None else [readable(token) for token in keys]
    names = names or [[str(head) for head in range(len(layer))] for layer in maps]
    columns, hatched = columns_of(names), places_of(names, ablated)
    captions = {
        (layer, columns[name]): f"layer {layer} head {name}{' ablated' * ((layer, columns[name]) in hatched)}"
        for layer, heads in enumerate(names)
        for name in heads
    }
    cell = max(PIXELS_PER_TOKEN, -(-MIN_MAP_PIXELS // min(len(down), len(across))))
    map_width, map_height = cell * len(across), cell * len(down)
    margin, below = (20 + AXIS + max(text_width(label) for label in side) for side in (down, across))
    pitch_x = max(map_width, *(text_width(text, POINTS + 1) for text in captions.values())) + GAP
    pitch_y = map_height + GAP + CAPTION
    width, height = margin + len(columns) * pitch_x, len(maps) * pitch_y + below
    picture = _headed(width, height, title, BAR_LABEL, {math.sqrt(weight): f"{weight:g}" for weight in WEIGHTS})
    for layer, heads in enumerate(maps):
        top = TOP + CAPTION + layer * pitch_y
        picture.write(2 + AXIS // 2, top + map_height / 2, sides[0], "mm", POINTS + 1, upright=True)
        for index, label in enumerate(down):
            picture.write(margin - 5, top + (index + 0.5) * cell, label, "rm")
        for name, weights in zip(names[layer], heads.float().cpu().numpy(), strict=True):
            place = layer, columns[name]
            left = margin + columns[name] * pitch_x
            if place in hatched:
                picture.hatch(left, top, map_width, map_height)
            else:
                picture.tile(left, top, np.sqrt(weights), cell, cell)
            picture.write(left, top - 3, captions[place], "lb", POINTS + 1)
    bottom = TOP + len(maps) * pitch_y - GAP + 5
    for column in columns.values():
        left = margin + column * pitch_x
        picture.write(left + map_width / 2, bottom + below - AXIS, sides[1], "mt", POINTS + 1)
        for index, label in enumerate(across):
            picture.write(left + (index + 0.5) * cell, bottom, label, "mt", upright=True)
    return picture


def maps_by_kind(
    captured: Mapping[str, CapturedMaps], axes: Mapping[str, Axes], title: str, num_tokens: int | None = None
) -> dict[str, Picture]:
    """A picture of the maps of each kind of attention on a text or a pair, with at most `num_tokens` on each side."""
    shown = slice(num_tokens)
    return {
        kind: head_maps(
            [weights[0][:, shown, shown] for weights in maps],
            axes[kind].queries[shown],
            f"{kind} {title}".strip().capitalize(),
            maps.names,
            axes[kind].keys[shown],
            ("Queries (target)", "Keys (source)") if kind == "cross" else ("Queries", "Keys"),
            maps.ablated,
        )
        for kind, maps in captured.items()
    }


def measure_maps(
    measures: Mapping[str, Sequence[Sequence[float]]],
    names: Sequence[Sequence[str]],
    title: str,
    layers: Sequence[str] | None = None,
    num_keys: int = 64,
    ablated: Sequence[Sequence[bool]] | None = None,
    limits: tuple[float, float] | None = None,
    meanings: Mapping[str, str] | None = None,
) -> Picture:
    """A picture of all measures: for each measure a grid with a cell per head, layers down and heads across.

    The cells show the values, and stay empty for nan; ablated heads are hatched. The limits of the colours are above
    each grid. A measure in `ALL_MEASURES` has fixed limits, some of which depend on `num_keys`, the largest number of
    keys. Fixed limits make pictures of different steps comparable, and do not exaggerate small differences. For other
    measures, the limits are the smallest and the largest value. `limits` replaces the limits of all measures, and
    `meanings` the meanings in `ALL_MEASURES`; `layers` label the rows.
    """
    columns, hatched = columns_of(names), places_of(names, ablated)
    title += "; ablated heads are hatched" * bool(hatched)
    meanings = meanings or {name: ALL_MEASURES[name].meaning for name in measures}
    labels = layers or [f"layer {layer}" for layer in range(len(names))]
    margin = 12 + max(text_width(text) for text in [*labels, "head"])
    widest = max(TABLE_WIDTH, *(text_width(name, POINTS + 1) for name in measures))
    cell = max(CELL_WIDTH, widest // len(columns))
    pitch_x, pitch_y = len(columns) * cell + 2 * GAP, len(names) * CELL_HEIGHT + 3 * LINE + GAP
    across = min(len(measures), max(1, round(math.sqrt(LANDSCAPE * len(measures) * pitch_y / pitch_x))))
    width, height = margin + across * pitch_x, -(-len(measures) // across) * pitch_y + CAPTION
    label = "colours" if limits else "colours, from the lower to the upper limit of each measure"
    ticks = {float(at): f"{limit:.3g}" for at, limit in enumerate(limits or ())}
    picture = _headed(width, height, title, label, ticks)
    for index, (name, by_layer) in enumerate(measures.items()):
        left, top = index % across * pitch_x + margin, TOP + index // across * pitch_y + 3 * LINE
        grid = np.full((len(names), len(columns)), np.nan)
        for place, value in cells_of(names, by_layer).items():
            grid[place] = math.nan if place in hatched else value
        for layer, of_layer in enumerate(labels if index % across == 0 else ()):
            picture.write(left - 5, top + (layer + 0.5) * CELL_HEIGHT, of_layer, "rm")
        known = ALL_MEASURES.get(name)
        low, high = limits or (known.limits(num_keys) if known else _range(grid))
        text = meanings[name] + ("" if limits else f"; {low:.3g}\u00a0to\u00a0{high:.3g}")
        meaning = textwrap.wrap(text, (pitch_x - GAP) // CHARACTER_WIDTH)
        for number, line in enumerate([name, *meaning[:2]]):
            picture.write(left, top - (min(len(meaning), 2) + 0.5 - number) * LINE, line, "lm", POINTS + (number == 0))
        if len(hatched) < np.isnan(grid).sum() == grid.size:
            picture.write(left, top + CELL_HEIGHT / 2, f"needs {known.needs}" if known else "not defined")
        shares = np.where(np.isfinite(grid), ((grid - low) / ((high - low) or 1.0)).clip(0, 1), np.nan)
        _draw_grid(picture, left, top, grid, shares, cell, name in WHOLE)
        for layer, column in hatched:
            picture.hatch(left + column * cell, top + layer * CELL_HEIGHT, cell, CELL_HEIGHT)
        if index + across >= len(measures):  # the last of its column
            below = top + len(names) * CELL_HEIGHT + CAPTION // 2
            for head, column in columns.items():
                picture.write(left + (column + 0.5) * cell, below, head, "mm")
            if index % across == 0:
                picture.write(left - 5, below, "head", "rm")
    return picture


def word_table(
    words: Sequence[Sequence[str]],
    values: Sequence[Sequence[float]],
    framed: Sequence[Sequence[bool]],
    rows: Sequence[str],
    ends: Mapping[str, Sequence[str]],
    title: str,
    label: str,
) -> Picture:
    """A table with a word in each cell, coloured by the cell's value from 0 to 1; wide tables continue in a band below.

    `framed` is True for cells with a frame. `rows` names the rows; `ends` maps the names of two further rows, above and
    below, to their words; `label` explains the colours.
    """
    above, below = ends
    names = [above, *rows, below]
    lines = [[readable(word) for word in line] for line in (ends[above], *words, ends[below])]
    cell = 12 + max(text_width(word) for line in lines for word in line)
    margin, total = 20 + max(map(text_width, names)), len(lines[0])
    num_bands = -(-total * cell // (PAGE_WIDTH - margin))
    across, pitch = -(-total // num_bands), len(names) * CELL_HEIGHT + GAP
    ticks = {share / 4: f"{share / 4:g}" for share in range(5)}
    picture = _headed(margin + across * cell + GAP, num_bands * pitch, title, label, ticks)
    for row, (name, line) in enumerate(zip(names, lines, strict=True)):
        for column, word in enumerate(line):
            left = margin + column % across * cell
            top = TOP + column // across * pitch + row * CELL_HEIGHT
            middle = left + cell / 2, top + CELL_HEIGHT / 2
            if column % across == 0:
                picture.write(margin - 8, middle[1], name, "rm")
            if name in ends:
                picture.write(*middle, word, "mm")
                continue
            value = values[row - 1][column]
            if framed[row - 1][column]:
                picture.image.paste("black", (left, top, left + cell - 1, top + CELL_HEIGHT - 1))
            picture.tile(left + 2, top + 2, np.array([[value]]), cell - 5, CELL_HEIGHT - 5)
            picture.write_on_tile(*middle, word, value)
    return picture


def _headed(width: int, height: int, title: str, label: str, ticks: Mapping[float, str]) -> Picture:
    """A picture with a title and a colour bar above an empty area, which begins at `TOP` and has the given height."""
    bar = 10 + text_width(label) + GAP
    picture = Picture(max(width, text_width(title, POINTS + 3) + 20, bar + BAR_WIDTH + GAP), TOP + height)
    picture.write(10, HEADING // 2, title, "lm", POINTS + 3)
    picture.write(10, HEADING, label, "lm")
    picture.colour_bar(bar, HEADING - 4, BAR_WIDTH, ticks)
    return picture


def _draw_grid(picture: Picture, left: int, top: int, grid: Grid, shares: Grid, cell: int, is_whole: bool) -> None:
    """Draw the values of one measure in cells of width `cell`; the scaled values, `shares` (0 … 1), are the colours."""
    picture.tile(left, top, shares, cell, CELL_HEIGHT)
    for (layer, head), value in np.ndenumerate(grid):
        if np.isfinite(value):
            x, y = left + (head + 0.5) * cell, top + (layer + 0.5) * CELL_HEIGHT
            picture.write_on_tile(x, y, _short(value, is_whole), float(shares[layer, head]))


def _range(grid: Grid) -> tuple[float, float]:
    finite = grid[np.isfinite(grid)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def _short(value: float, is_whole: bool) -> str:
    """A number in at most six characters if it is below 10,000."""
    return f"{value:.{0 if is_whole or abs(value) >= 1000 else 1 if abs(value) >= 10 else 2}f}"


def columns_of(names: Sequence[Sequence[str]]) -> dict[str, int]:
    """The column of each head's name; a head that is pruned from a layer leaves a gap in its row."""
    distinct = {name for layer in names for name in layer}
    return {name: column for column, name in enumerate(sorted(distinct, key=lambda name: (len(name), name)))}


def cells_of(names: Sequence[Sequence[str]], values: Sequence[Sequence[T]]) -> dict[tuple[int, int], T]:
    """The value of each head by its layer and column."""
    columns = columns_of(names)
    heads = ((layer, zip(*of_layer, strict=True)) for layer, of_layer in enumerate(zip(names, values, strict=True)))
    return {(layer, columns[name]): value for layer, of_layer in heads for name, value in of_layer}


def places_of(names: Sequence[Sequence[str]], flags: Sequence[Sequence[bool]] | None) -> list[tuple[int, int]]:
    """The layer and column of each head whose flag is True."""
    return [place for place, flag in cells_of(names, flags).items() if flag] if flags else []
