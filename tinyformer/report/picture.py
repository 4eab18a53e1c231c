"""Images of tiles and text with one byte per pixel, far faster to draw than matplotlib figures."""

import contextlib
import sys
import textwrap
import unicodedata
from collections.abc import Mapping
from functools import cache, lru_cache
from io import BytesIO
from pathlib import Path
from typing import NamedTuple, cast

import matplotlib as mpl
import numpy as np
from jaxtyping import Float, UInt8
from matplotlib import font_manager
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image, ImageDraw, ImageFont

COLOURS, GREYS = 224, 32
"""Palette: number of colours of viridis, from 0 to 1, followed by a number of greys, from black to white."""
BLACK, WHITE = COLOURS, COLOURS + GREYS - 1
BRIGHT = 0.6  # the value from which a colour is bright enough for black text
HATCH = COLOURS + round(0.6 * (GREYS - 1)), COLOURS + round(0.9 * (GREYS - 1))
"""Greys of the lines of a hatch, and between them."""
HATCH_PITCH = 7  # pixels from one line of a hatch to the next
CAPTION_HEIGHT = 22  # height in pixels of the line above a picture that says where it comes from
POINTS, DPI = 7, 100
BAR_HEIGHT = 8  # pixels of a colour bar
FONTS = ("DejaVu Sans", "DejaVu Sans Mono")
"""Fonts of matplotlib; a text is written in the first that has all its characters. See `fonts_of` for others."""
MAX_LABEL = 10
CHARACTERS_PER_INCH = 16  # characters of a caption above a figure that fit into an inch of its width


class Label(NamedTuple):
    """A text in a picture, its font size in points, its bounding box in pixels, and its colour."""

    text: str
    points: float
    left: int
    top: int
    right: int
    bottom: int
    colour: str


class Picture:
    """A white image for tiles and text; all sizes are in pixels, and the origin is in the top left corner."""

    def __init__(self, width: int, height: int) -> None:
        self.pixels = np.full((height, width), WHITE, np.uint8)
        self.labels: list[Label] = []
        self.on_tiles: list[Label] = []  # those whose colours are between that of a cell and black or white

    def tile(self, x: int, y: int, values: Float[np.ndarray, "rows columns"], width: int, height: int) -> None:
        """Draw a cell of a width and a height for each value from 0 to 1, the first row at the top; nan stays white."""
        indices = np.where(np.isnan(values), WHITE, np.nan_to_num(values).clip(0, 1) * (COLOURS - 1) + 0.5)
        cells = indices.astype(np.uint8).repeat(height, axis=0).repeat(width, axis=1)
        self.pixels[y : y + cells.shape[0], x : x + cells.shape[1]] = cells

    def hatch(self, x: int, y: int, width: int, height: int) -> None:
        area = self.pixels[y : y + height, x : x + width]
        diagonals = np.add.outer(np.arange(area.shape[0]), np.arange(area.shape[1])) % HATCH_PITCH
        area[:] = np.where(diagonals < 2, *HATCH)

    def captioned(self, text: str) -> "Picture":
        """A copy with a line of text above it, such as the checkpoint that it shows."""
        height, width = self.pixels.shape
        text = readable(text, longest=1000)
        picture = Picture(max(width, text_width(text) + 20), CAPTION_HEIGHT + height)
        picture.pixels[CAPTION_HEIGHT:, :width] = self.pixels
        for labels, lower in ((self.labels, picture.labels), (self.on_tiles, picture.on_tiles)):
            for label in labels:
                lower.append(label._replace(top=label.top + CAPTION_HEIGHT, bottom=label.bottom + CAPTION_HEIGHT))
        picture.write(10, CAPTION_HEIGHT // 2 + 4, text)
        return picture

    def colour_bar(self, x: int, y: int, width: int, ticks: Mapping[float, str]) -> None:
        """Draw all colours from left to right, with labels below, which `ticks` holds by their place from 0 to 1."""
        self.tile(x, y, np.linspace(0, 1, width)[None], 1, BAR_HEIGHT)
        for place, label in ticks.items():
            self.write(x + place * width, y + BAR_HEIGHT + 2, label, "mt", POINTS - 1)

    def write(
        self, x: float, y: float, text: str, align: str = "lm", points: float = POINTS, upright: bool = False
    ) -> None:
        """Write a line of text on white, from left to right or, upright, from bottom to top.

        `align` says where in the text x and y are: horizontally (l, m, r) and vertically (t, m, b), such as "lt".
        """
        ink = _ink(text, points, upright)
        box = self._place(x, y, align, text, points, ink, "black")
        # Antialiased: full coverage is black.
        area = self.pixels[box.top : box.bottom, box.left : box.right]
        np.copyto(area, WHITE - ink // (256 // GREYS), where=ink > 0)

    def write_on_tile(self, x: float, y: float, text: str, value: float) -> None:
        """Write text centred on a cell of the given value, black if the cell is bright and white otherwise."""
        colour = "black" if value >= BRIGHT or np.isnan(value) else "white"
        self.on_tiles.append(self._place(x, y, "mm", text, POINTS, _ink(text, POINTS), colour))

    def _place(self, x: float, y: float, align: str, text: str, points: float, ink: np.ndarray, colour: str) -> Label:
        shares = {"l": 0.0, "t": 0.0, "m": 0.5, "r": 1.0, "b": 1.0}
        height, width = ink.shape
        left, top = (round(at - shares[a] * size) for at, a, size in zip((x, y), align, (width, height), strict=True))
        self.labels.append(Label(text, points, left, top, left + width, top + height, colour))
        return self.labels[-1]

    def savefig(self, path: Path) -> None:
        # The strongest compression takes twice the time and saves a third.
        self.image().save(path, compress_level=1)

    def _repr_png_(self) -> bytes:
        data = BytesIO()
        self.image().save(data, "png")
        return data.getvalue()

    def __repr__(self) -> str:
        height, width = self.pixels.shape
        return f"<{type(self).__name__} of {width} × {height} pixels>"

    def image(self) -> Image.Image:
        image = Image.frombytes("P", self.pixels.shape[::-1], self.pixels.tobytes())
        image.putpalette(palette().tobytes())
        image = image.convert("RGB") if self.on_tiles else image
        for label in self.on_tiles:
            image.paste(label.colour, label[2:6], Image.fromarray(_ink(label.text, label.points)))
        return image


def text_width(text: str, points: float = POINTS) -> int:
    """The width of a line of text in pixels."""
    return _ink(text, points).shape[1]


def readable(text: str, longest: int = MAX_LABEL) -> str:
    """A text that can be drawn: characters that no font has as escapes, cut to a maximum length."""
    shown = "".join(c if c.isprintable() and _font_of(c) else ascii(c)[1:-1] for c in text)
    if _font_of(shown) is None:  # its characters are in different fonts
        shown = "".join(c if _font_of(c) == FONTS[0] else ascii(c)[1:-1] for c in shown)
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"


def save_png(picture: Picture | Figure, path: str | Path, caption: str = "") -> Path:
    """Write a picture to a file, creating its folder; the caption, in a line above it, says where it comes from."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if caption and isinstance(picture, Picture):
        picture = picture.captioned(caption)
    elif caption and isinstance(picture, Figure):
        width = int(picture.get_figwidth() * CHARACTERS_PER_INCH)
        lines = textwrap.wrap(readable(caption, longest=1000), width)
        picture.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=POINTS, family=list(FONTS), parse_math=False)
    picture.savefig(path)
    return path


def set_fonts(artist: Artist) -> None:
    """Give each text of a figure, or of axes, further fonts, and escapes for the characters that no font has."""
    for text in cast(list[Text], artist.findobj(Text)):
        text.set_text("".join(c if c.isspace() or _font_of(c) else ascii(c)[1:-1] for c in text.get_text()))
        text.set_fontfamily(list(dict.fromkeys([*text.get_fontfamily(), *fonts_of(text.get_text())])))


def fonts_of(text: str) -> list[str]:
    """The fonts for a text: matplotlib's, and installed ones for its Chinese, Japanese and Korean characters."""
    wide = [c for c in text if unicodedata.east_asian_width(c) in "WF" and unicodedata.category(c) != "So"]  # no emoji
    samples = {"한" if unicodedata.name(c, "").startswith("HANGUL") else "中" for c in wide}
    return [*FONTS, *filter(None, map(_installed_font, sorted(samples)))]


@cache
def _installed_font(sample: str) -> str | None:
    """The first installed font that has a character; without one, say once which package has some."""
    for path in sorted(font_manager.findSystemFonts(), key=lambda path: ("Regular" not in path, path)):
        with contextlib.suppress(OSError, RuntimeError):  # of a file that cannot be read
            if (font := font_manager.get_font(path)).get_char_index(ord(sample)):
                entry = font_manager.FontEntry(fname=path, name=font.family_name, size="scalable")
                font_manager.fontManager.ttflist.append(entry)  # which may be older, or give it another weight
                return font.family_name
    print(f"Pictures escape {sample}: no font has it. Debian's package fonts-noto-cjk has one.", file=sys.stderr)
    return None


@cache
def palette() -> UInt8[np.ndarray, "256 3"]:
    """The RGB colours of the pixel values."""
    colours = mpl.colormaps["viridis"](np.linspace(0, 1, COLOURS))[:, :3]
    greys = np.linspace(0, 1, GREYS)[:, None].repeat(3, axis=1)
    return np.round(np.concatenate([colours, greys]) * 255).astype(np.uint8)


@lru_cache(maxsize=4096)  # labels and numbers repeat
def _ink(text: str, points: float, upright: bool = False) -> UInt8[np.ndarray, "height width"]:
    """The coverage of each pixel of a line of text, from 0 to 255."""
    font = _loaded(_font_of(text) or FONTS[-1], points)
    ascent, descent = font.getmetrics()
    left, top, right, bottom = font.getbbox(text, anchor="ls")
    left, top, right, bottom = min(left, 0), min(top, -ascent), max(right, 1), max(bottom, descent)
    sheet = Image.new("L", (round(right - left), round(bottom - top)), 0)
    draw = ImageDraw.Draw(sheet)
    draw.text((-left, -top), text, fill=255, font=font, anchor="ls")
    return np.rot90(np.asarray(sheet)) if upright else np.asarray(sheet)


@cache
def _loaded(name: str, points: float) -> ImageFont.FreeTypeFont:
    path = font_manager.findfont(name)
    return ImageFont.truetype(path, points * DPI / 72, layout_engine=ImageFont.Layout.BASIC)


@lru_cache(maxsize=4096)
def _font_of(text: str) -> str | None:
    """The first font that has all characters of a text, if any."""
    fonts = ((name, font_manager.get_font(font_manager.findfont(name))) for name in fonts_of(text))
    return next((name for name, font in fonts if all(font.get_char_index(ord(c)) for c in text)), None)
