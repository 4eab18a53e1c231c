"""Pictures of all heads: their attention maps and their measures."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from torch import Tensor

from tinyformer.analysis.picture import POINTS, Picture, readable, text_width

PIXELS_PER_TOKEN = 14
MIN_MAP_PIXELS = 100
HEADING, CAPTION, GAP = 40, 20, 12
"""Pixels: height of the title, height of the caption of a map, gap between maps."""
CELL_WIDTH, CELL_HEIGHT = 38, 20
"""Pixels of the cell of a head in the picture of measures."""
LANDSCAPE = 1.6
"""Approximate aspect ratio of the picture of measures."""


def head_maps(
    maps: Sequence[Float[Tensor, "_ seq k_seq"]],
    tokens: Sequence[str],
    title: str,
    names: Sequence[Sequence[str]] | None = None,
    keys: Sequence[str] | None = None,
) -> Picture:
    """A picture of all attention maps: a row per layer, a column per head; queries down and keys across.

    The colour is the square root of the weight, on the same scale from 0 to 1 in every map, so that heads can be
    compared and a weight of 0.05 is visible beside a weight of 1.

    Args:
        maps: attention weights of each layer.
        tokens: token strings, which label the rows and columns.
        title: title of the picture.
        names: names of each layer's maps, by default their indices. Maps with the same name share a column.
        keys: token strings of the columns, where they are those of another sequence.
    """
    labels = [readable(token) for token in tokens]
    across = labels if keys is None else [readable(token) for token in keys]
    names = names or [[str(head) for head in range(len(layer))] for layer in maps]
    columns = _columns(names)
    cell = max(PIXELS_PER_TOKEN, -(-MIN_MAP_PIXELS // min(len(labels), len(across))))
    margin, below = (20 + max(text_width(label) for label in side) for side in (labels, across))
    heading = f"{title}; colour: square root of the weight"
    captions = [[f"layer {layer} head {name}" for name in heads] for layer, heads in enumerate(names)]
    pitch_x = max(cell * len(across), *(text_width(text, POINTS + 1) for texts in captions for text in texts)) + GAP
    pitch_y = cell * len(labels) + GAP + CAPTION
    width = max(margin + len(columns) * pitch_x, text_width(heading, POINTS + 3) + 20)
    picture = Picture(width, HEADING + len(maps) * pitch_y + below)
    picture.write(10, HEADING // 2, heading, "lm", POINTS + 3)
    for layer, heads in enumerate(maps):
        top = HEADING + CAPTION + layer * pitch_y
        for index, label in enumerate(labels):
            picture.write(margin - 5, top + (index + 0.5) * cell, label, "rm")
        for weights, name, caption in zip(heads.float().cpu().numpy(), names[layer], captions[layer], strict=True):
            left = margin + columns[name] * pitch_x
            picture.tile(left, top, np.sqrt(weights), cell, cell)
            picture.write(left, top - 3, caption, "lb", POINTS + 1)
    bottom = HEADING + len(maps) * pitch_y - GAP + 5
    for column in columns.values():
        for index, label in enumerate(across):
            picture.write(margin + column * pitch_x + (index + 0.5) * cell, bottom, label, "mt", upright=True)
    return picture


def measure_maps(
    measures: Mapping[str, Sequence[Sequence[float]]],
    meanings: Mapping[str, str],
    names: Sequence[Sequence[str]],
    title: str,
    layer_labels: Sequence[str] | None = None,
) -> Picture:
    """A picture of all measures: for each a grid with a cell per head, layers down and heads across.

    The colour scale of each measure runs from its minimum to its maximum; the cells show the values.

    Args:
        measures: by name, the value for each head of each layer, nan where it is not defined.
        meanings: the meaning of each measure.
        names: names of each layer's heads.
        title: title of the picture.
        layer_labels: label of each layer; by default "layer 0", "layer 1", and so on.
    """
    columns, num_layers = _columns(names), len(names)
    captions = {name: (name, meanings[name]) for name in measures}
    heading = f"{title}; colour: from the minimum to the maximum of each measure"
    labels = layer_labels or [f"layer {layer}" for layer in range(num_layers)]
    margin = 12 + max(map(text_width, labels))
    widest = max(
        text_width(text, POINTS + size) for lines in captions.values() for size, text in enumerate(lines[::-1])
    )
    width = max(margin + len(columns) * CELL_WIDTH, margin + widest) + 2 * GAP
    height = 2 * CAPTION + num_layers * CELL_HEIGHT + CAPTION + GAP
    across = min(
        range(1, len(measures) + 1),
        key=lambda n: abs(math.log(n * width / (HEADING + -(-len(measures) // n) * height) / LANDSCAPE)),
    )
    down = -(-len(measures) // across)
    picture = Picture(max(across * width, text_width(heading, POINTS + 3) + 20), HEADING + down * height)
    picture.write(10, HEADING // 2, heading, "lm", POINTS + 3)
    for index, (name, layers) in enumerate(measures.items()):
        x, y = index % across * width, HEADING + index // across * height
        left, top = x + margin, y + 2 * CAPTION
        for line, (text, points) in enumerate(zip(captions[name], (POINTS + 1, POINTS), strict=True)):
            picture.write(left, y + (line + 0.5) * CAPTION, text, "lm", points)
        grid = np.full((num_layers, len(columns)), np.nan)
        for layer, values in enumerate(layers):
            grid[layer, [columns[head] for head in names[layer]]] = values
            picture.write(left - 5, top + (layer + 0.5) * CELL_HEIGHT, labels[layer], "rm")
        below = top + num_layers * CELL_HEIGHT + CAPTION // 2
        picture.write(left - 5, below, "head", "rm")
        for head, column in columns.items():
            picture.write(left + (column + 0.5) * CELL_WIDTH, below, head, "mm")
        _draw_grid(picture, left, top, grid)
    return picture


def _draw_grid(picture: Picture, left: int, top: int, grid: Float[np.ndarray, "layers heads"]) -> None:
    """Draw the grid of one measure with its values."""
    finite = grid[np.isfinite(grid)]
    minimum, span = (finite.min(), np.ptp(finite)) if finite.size else (0.0, 0.0)
    shares = np.where(np.isfinite(grid), (grid - minimum) / (span or 1.0), np.nan)
    picture.tile(left, top, shares, CELL_WIDTH, CELL_HEIGHT)
    for (layer, head), value in np.ndenumerate(grid):
        if np.isfinite(value):
            x, y = left + (head + 0.5) * CELL_WIDTH, top + (layer + 0.5) * CELL_HEIGHT
            picture.write_on_tile(x, y, _short(value), float(shares[layer, head]))


def _short(value: float) -> str:
    """A number in at most six characters if it is below 10,000."""
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 1000 else f"{value:.0f}"


def _columns(names: Sequence[Sequence[str]]) -> dict[str, int]:
    """The column of each head's name; a head pruned from a layer leaves a gap there."""
    distinct = {name for layer in names for name in layer}
    return {name: column for column, name in enumerate(sorted(distinct, key=lambda name: (len(name), name)))}
