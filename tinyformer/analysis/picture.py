"""Pictures of tiles and text in one byte a pixel: 144 heads with their labels take a tenth of a second."""

from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from jaxtyping import Float, UInt8
from matplotlib import font_manager
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont

COLOURS, GREYS = 224, 32
"""How many of viridis, from 0 to 1, and how many greys after them, from black to white."""
BLACK, WHITE = COLOURS, COLOURS + GREYS - 1
BRIGHT = 0.6
"""The value from which a colour is so bright that text on it is black."""
POINTS = 7
DPI = 100
FONTS = ("DejaVu Sans Mono", "DejaVu Sans")
"""They come with matplotlib; the first that has all characters of a text writes it."""
MAX_LABEL = 10


class Label(NamedTuple):
    """A text in a picture.

    Args:
        text: what it says.
        points: size of its font.
        left: pixels from the left; so are the others.
        top: from the top.
        right: of its box.
        bottom: of its box.
    """

    text: str
    points: float
    left: int
    top: int
    right: int
    bottom: int


class Picture:
    """A white sheet for tiles and text, whose corner at the left and top is (0, 0).

    Args:
        width: in pixels.
        height: in pixels.
    """

    def __init__(self, width: int, height: int) -> None:
        self.pixels = np.full((height, width), WHITE, np.uint8)
        self.labels: list[Label] = []

    def tile(self, x: int, y: int, values: Float[np.ndarray, "rows columns"], width: int, height: int) -> None:
        """A field for each value from 0 to 1, nan left white.

        Args:
            x: of the corner.
            y: of the corner.
            values: the first row at the top.
            width: of a field, in pixels.
            height: of a field, in pixels.
        """
        shown = np.where(np.isnan(values), WHITE, np.nan_to_num(values).clip(0, 1) * (COLOURS - 1) + 0.5)
        fields = shown.astype(np.uint8).repeat(height, axis=0).repeat(width, axis=1)
        self.pixels[y : y + fields.shape[0], x : x + fields.shape[1]] = fields

    def write(
        self, x: float, y: float, text: str, align: str = "lm", points: float = POINTS, upright: bool = False
    ) -> None:
        """Write on white.

        Args:
            x: of the text's left, middle or right.
            y: of its top, middle or bottom.
            text: one line.
            align: which these are, such as "lt", "mm" or "rb".
            points: size of the font.
            upright: from below to above.
        """
        ink = _ink(text, points, upright)
        # Greys are black where there is all of the ink.
        self._put(x, y, align, Label(text, points, 0, 0, *ink.shape[::-1]), WHITE - ink // (256 // GREYS), ink > 0)

    def write_on_tile(self, x: float, y: float, text: str, value: float, points: float = POINTS) -> None:
        """Write in the middle of a field whose value is known, black on white where that is bright.

        A palette has no colours between the letter's and the field's, so the letters have no soft edges.
        """
        ink = _ink(text, points, sharp=True)
        colour = BLACK if value >= BRIGHT or np.isnan(value) else WHITE
        self._put(x, y, "mm", Label(text, points, 0, 0, *ink.shape[::-1]), np.full_like(ink, colour), ink > 0)

    def _put(self, x: float, y: float, align: str, label: Label, pixels: np.ndarray, where: np.ndarray) -> None:
        shares = {"l": 0.0, "t": 0.0, "m": 0.5, "r": 1.0, "b": 1.0}
        left, top = (round(at - shares[a] * size) for at, a, size in zip((x, y), align, label[4:], strict=True))
        box = Label(label.text, label.points, left, top, left + label.right, top + label.bottom)
        self.labels.append(box)
        np.copyto(self.pixels[top : box.bottom, left : box.right], pixels, where=where)

    def savefig(self, path: Path) -> None:
        """Write it to a file, as matplotlib's figures are written."""
        # The weakest compression: large even areas pack well, and the strongest takes twice the time for a third less.
        self.image().save(path, compress_level=1)

    def image(self) -> Image.Image:
        """The picture, its colours in a palette."""
        image = Image.frombytes("P", self.pixels.shape[::-1], self.pixels.tobytes())
        image.putpalette(palette().tobytes())
        return image


def text_width(text: str, points: float = POINTS) -> int:
    """How many pixels a text takes from left to right."""
    return _ink(text, points).shape[1]


def readable(text: str, longest: int = MAX_LABEL) -> str:
    """A text as it can be drawn: characters that no font has as their code points, and not too long."""
    shown = "".join(c if c.isprintable() and _font_of(c) else ascii(c)[1:-1] for c in text)
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"


def save_png(picture: Picture | Figure, path: Path) -> Path:
    """Write a picture at its own size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path)
    return path


@cache
def palette() -> UInt8[np.ndarray, "256 3"]:
    """The colours of the pixels' values."""
    colours = mpl.colormaps["viridis"](np.linspace(0, 1, COLOURS))[:, :3]
    greys = np.linspace(0, 1, GREYS)[:, None].repeat(3, axis=1)
    return np.round(np.concatenate([colours, greys]) * 255).astype(np.uint8)


@lru_cache(maxsize=4096)  # labels and numbers come again and again; a title does not
def _ink(text: str, points: float, upright: bool = False, sharp: bool = False) -> UInt8[np.ndarray, "height width"]:
    """How much of each pixel of a line of text is ink, from 0 to 255."""
    font = _loaded(_font_of(text) or FONTS[-1], points)
    ascent, descent = font.getmetrics()
    left, top, right, bottom = font.getbbox(text, anchor="ls")
    left, top, right, bottom = min(left, 0), min(top, -ascent), max(right, 1), max(bottom, descent)
    sheet = Image.new("L", (round(right - left), round(bottom - top)), 0)
    draw = ImageDraw.Draw(sheet)
    draw.fontmode = "1" if sharp else "L"
    draw.text((-left, -top), text, fill=255, font=font, anchor="ls")
    return np.rot90(np.asarray(sheet)) if upright else np.asarray(sheet)


@cache
def _loaded(name: str, points: float) -> ImageFont.FreeTypeFont:
    path = font_manager.findfont(name)
    return ImageFont.truetype(path, points * DPI / 72, layout_engine=ImageFont.Layout.BASIC)


@lru_cache(maxsize=4096)
def _font_of(text: str) -> str | None:
    """The first font that has all characters of a text."""
    fonts = ((name, font_manager.get_font(font_manager.findfont(name))) for name in FONTS)
    return next((name for name, font in fonts if all(font.get_char_index(ord(c)) for c in text)), None)
