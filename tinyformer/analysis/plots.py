"""Pictures of attention."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from jaxtyping import Float
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

PIXELS_PER_TOKEN = 14
MIN_MAP_PIXELS = 100
LABEL_POINTS = 7
MAX_LABEL = 10
DPI = 100
FONTS = ("DejaVu Sans Mono", "DejaVu Sans")
"""They come with matplotlib."""


def head_maps(
    maps: Sequence[Float[Tensor, "_heads seq seq"]],
    tokens: Sequence[str],
    title: str,
    names: Sequence[Sequence[str]] | None = None,
) -> Figure:
    """All heads in one picture: a row for each layer, a column for each head, queries down and keys across.

    The maps are tiled into one image: a hundred axes would take seconds. The colour is the square root of the weight,
    from 0 to 1 in every map, so that heads compare and a weight of 0.05 is still seen beside one of 1.

    Args:
        maps: attention weights of each layer.
        tokens: their labels, which stand at the left of each row and below the last.
        title: the line above.
        names: of each layer's maps; their numbers unless given.
    """
    names = names or [[str(head) for head in range(len(layer))] for layer in maps]
    tokens = [_label(token) for token in tokens]
    num_layers, num_heads, seq = len(maps), max(map(len, maps)), len(tokens)
    cell = max(PIXELS_PER_TOKEN, -(-MIN_MAP_PIXELS // seq))
    map_pixels, gap, caption = cell * seq, 12, 20
    left = 24 + max(len(token) for token in tokens) * 6
    pitch_x, pitch_y = map_pixels + gap, map_pixels + gap + caption
    width, height = left + num_heads * pitch_x, 40 + num_layers * pitch_y + left
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(0, width), ylim=(height, 0))

    colours = mpl.colormaps["viridis"]
    image = np.ones((height, width, 3))
    # A token may be "$", which is no formula.
    text: dict[str, Any] = {"fontsize": LABEL_POINTS, "family": list(FONTS), "parse_math": False}
    for layer, heads in enumerate(maps):
        top = 40 + caption + layer * pitch_y
        for head, weights in enumerate(heads.float().cpu().numpy()):
            x = left + head * pitch_x
            pixels = np.kron(np.sqrt(weights), np.ones((cell, cell)))
            image[top : top + map_pixels, x : x + map_pixels] = colours(pixels)[..., :3]
            axes.text(x, top - 5, f"layer {layer} head {names[layer][head]}", fontsize=LABEL_POINTS + 1)
        for index, token in enumerate(tokens):
            axes.text(left - 5, top + (index + 0.5) * cell, token, ha="right", va="center", **text)
    bottom = 40 + caption + (num_layers - 1) * pitch_y + map_pixels + 5
    for head in range(num_heads):
        for index, token in enumerate(tokens):
            centre = left + head * pitch_x + (index + 0.5) * cell
            axes.text(centre, bottom, token, ha="center", va="top", rotation=90, **text)
    axes.imshow(image, extent=(0, width, height, 0), interpolation="nearest", aspect="auto")
    heading = f"{title}; colour: square root of the weight"
    axes.text(10, 22, heading, fontsize=LABEL_POINTS + 3, parse_math=False)
    return figure


def _label(token: str) -> str:
    """A token as it can be drawn: characters that no font has as their code points, and not too long."""
    shown = "".join(c if c.isprintable() and _has_glyph(c) else ascii(c)[1:-1] for c in token)
    return shown if len(shown) <= MAX_LABEL else f"{shown[: MAX_LABEL - 1]}…"


@cache
def _has_glyph(character: str) -> bool:
    fonts = (font_manager.get_font(font_manager.findfont(name)) for name in FONTS)
    return any(font.get_char_index(ord(character)) for font in fonts)


def save_png(figure: Figure, path: Path) -> Path:
    """Write a figure at its own size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    return path
