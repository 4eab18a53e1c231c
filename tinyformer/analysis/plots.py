"""Pictures of attention: what each head looks at, and what each measure says of it."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from torch import Tensor

from tinyformer.analysis.picture import POINTS, Picture, readable, text_width

PIXELS_PER_TOKEN = 14
MIN_MAP_PIXELS = 100
HEADING, CAPTION, GAP = 40, 20, 12
"""Pixels: the height of the line above all, that of the line above a map, and what is between two."""
FIELD_WIDTH, FIELD_HEIGHT = 38, 20
"""Pixels of a head in the picture of measures, which hold its value."""
LANDSCAPE = 1.6
"""Width to height, about, of the picture of measures."""


def head_maps(
    maps: Sequence[Float[Tensor, "_ seq seq"]],
    tokens: Sequence[str],
    title: str,
    names: Sequence[Sequence[str]] | None = None,
) -> Picture:
    """All heads in one picture: a row for each layer, a column for each head, queries down and keys across.

    The colour is the square root of the weight, from 0 to 1 in every map, so that heads compare and a weight of 0.05
    is still seen beside one of 1.

    Args:
        maps: attention weights of each layer.
        tokens: their labels, which stand at the left of each row and below the last.
        title: the line above.
        names: of each layer's maps; their numbers unless given. Those of one name stand in one column.
    """
    labels, seq = [readable(token) for token in tokens], len(tokens)
    names = names or [[str(head) for head in range(len(layer))] for layer in maps]
    columns = _columns(names)
    cell = max(PIXELS_PER_TOKEN, -(-MIN_MAP_PIXELS // seq))
    margin = 20 + max(text_width(label) for label in labels)
    heading = f"{title}; colour: square root of the weight"
    captions = [[f"layer {layer} head {name}" for name in heads] for layer, heads in enumerate(names)]
    pitch_x = max(cell * seq, *(text_width(text, POINTS + 1) for texts in captions for text in texts)) + GAP
    pitch_y = cell * seq + GAP + CAPTION
    width = max(margin + len(columns) * pitch_x, text_width(heading, POINTS + 3) + 20)
    picture = Picture(width, HEADING + len(maps) * pitch_y + margin)
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
        for index, label in enumerate(labels):
            picture.write(margin + column * pitch_x + (index + 0.5) * cell, bottom, label, "mt", upright=True)
    return picture


def measure_maps(
    measures: Mapping[str, Sequence[Sequence[float]]],
    meanings: Mapping[str, str],
    names: Sequence[Sequence[str]],
    title: str,
) -> Picture:
    """All measures in one picture: for each a field for each head, layers down and heads across.

    The colours of each measure go from its least value to its largest; the values are written in the fields.

    Args:
        measures: by name, the value for each head of each layer, nan where there is none.
        meanings: of each, in a few words.
        names: of each layer's heads.
        title: the line above.
    """
    columns, num_layers = _columns(names), len(names)
    captions = {name: (name, meanings[name]) for name in measures}
    heading = f"{title}; colour: from the least value of a measure to its largest"
    margin = 12 + text_width(f"layer {num_layers - 1}")
    widest = max(
        text_width(text, POINTS + size) for lines in captions.values() for size, text in enumerate(lines[::-1])
    )
    width = max(margin + len(columns) * FIELD_WIDTH, margin + widest) + 2 * GAP
    height = 2 * CAPTION + num_layers * FIELD_HEIGHT + CAPTION + GAP
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
            picture.write(left - 5, top + (layer + 0.5) * FIELD_HEIGHT, f"layer {layer}", "rm")
        below = top + num_layers * FIELD_HEIGHT + CAPTION // 2
        picture.write(left - 5, below, "head", "rm")
        for head, column in columns.items():
            picture.write(left + (column + 0.5) * FIELD_WIDTH, below, head, "mm")
        _draw_grid(picture, left, top, grid)
    return picture


def _draw_grid(picture: Picture, left: int, top: int, grid: Float[np.ndarray, "layers heads"]) -> None:
    """The fields of one measure and the values in them."""
    known = grid[np.isfinite(grid)]
    least, span = (known.min(), np.ptp(known)) if known.size else (0.0, 0.0)
    shares = np.where(np.isfinite(grid), (grid - least) / (span or 1.0), np.nan)
    picture.tile(left, top, shares, FIELD_WIDTH, FIELD_HEIGHT)
    for (layer, head), value in np.ndenumerate(grid):
        if np.isfinite(value):
            x, y = left + (head + 0.5) * FIELD_WIDTH, top + (layer + 0.5) * FIELD_HEIGHT
            picture.write_on_tile(x, y, _short(value), float(shares[layer, head]))


def _short(value: float) -> str:
    """A number in at most six characters, as far as it is below 10,000."""
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 1000 else f"{value:.0f}"


def _columns(names: Sequence[Sequence[str]]) -> dict[str, int]:
    """The column of each head's name: a head that was pruned from one layer leaves its place there free."""
    found = {name for layer in names for name in layer}
    return {name: column for column, name in enumerate(sorted(found, key=lambda name: (len(name), name)))}
