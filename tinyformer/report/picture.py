"""Images of tiles and text, far faster to draw than matplotlib figures."""

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
from jaxtyping import Float
from matplotlib import font_manager
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image, ImageDraw, ImageFont

COLOURS = mpl.colormaps["viridis"].with_extremes(bad="white")
BRIGHT = 0.6  # the value from which a colour is bright enough for black text
HATCH = 153, 230  # grey levels of 255: the lines of a hatch, and the gaps between them
HATCH_PITCH = 7  # pixels from one line of a hatch to the next
CAPTION_HEIGHT = 22  # height in pixels of the line above a picture that says where it comes from
POINTS, DPI = 7, 100
BAR_HEIGHT = 8  # pixels of a colour bar
FONTS = ("DejaVu Sans", "DejaVu Sans Mono")
"""Fonts of matplotlib; a text uses the first font that has all its characters. See `fonts_of` for further fonts."""
MAX_LABEL = 10
CHARACTERS_PER_INCH = 16  # characters of a caption above a figure that fit into an inch of its width


class Label(NamedTuple):
    """A text in a picture and its bounding box in pixels."""

    text: str
    left: int
    top: int
    right: int
    bottom: int


class Picture:
    """A white image for tiles and text; all sizes are in pixels, and the origin is in the top left corner."""

    def __init__(self, width: int, height: int) -> None:
        self.image = Image.new("RGB", (width, height), "white")
        self.labels: list[Label] = []

    def tile(self, x: int, y: int, values: Float[np.ndarray, "rows columns"], width: int, height: int) -> None:
        """Draw a cell of `width` × `height` for each value from 0 to 1, the first row at the top; nan stays white."""
        cells = Image.fromarray(COLOURS(np.ma.masked_invalid(values), bytes=True)[..., :3])
        rows, columns = values.shape
        self.image.paste(cells.resize((columns * width, rows * height), Image.Resampling.NEAREST), (x, y))

    def hatch(self, x: int, y: int, width: int, height: int) -> None:
        diagonals = np.add.outer(np.arange(height), np.arange(width)) % HATCH_PITCH
        self.image.paste(Image.fromarray(np.where(diagonals < 2, *HATCH).astype(np.uint8)), (x, y))

    def captioned(self, text: str) -> "Picture":
        """A copy with a line of text above the picture, such as the name of the checkpoint."""
        text = readable(text, longest=1000)
        picture = Picture(max(self.image.width, text_width(text) + 20), CAPTION_HEIGHT + self.image.height)
        picture.image.paste(self.image, (0, CAPTION_HEIGHT))
        picture.write(10, CAPTION_HEIGHT // 2 + 4, text)
        return picture

    def colour_bar(self, x: int, y: int, width: int, ticks: Mapping[float, str]) -> None:
        """Draw all colours from left to right, with labels below; `ticks` maps positions from 0 to 1 to labels."""
        self.tile(x, y, np.linspace(0, 1, width)[None], 1, BAR_HEIGHT)
        for place, label in ticks.items():
            self.write(x + place * width, y + BAR_HEIGHT + 2, label, "mt", POINTS - 1)

    def write(
        self,
        x: float,
        y: float,
        text: str,
        align: str = "lm",
        points: float = POINTS,
        upright: bool = False,
        colour: str = "black",
    ) -> None:
        """Write a line of text, from left to right or, upright, from bottom to top.

        `align` is the point of the text at (x, y): left, middle or right, then top, middle or bottom, as in "lt".
        """
        shares, ink = {"l": 0.0, "t": 0.0, "m": 0.5, "r": 1.0, "b": 1.0}, _ink(text, points, upright)
        left, top = (round(at - shares[a] * size) for at, a, size in zip((x, y), align, ink.size, strict=True))
        self.labels.append(Label(text, left, top, left + ink.width, top + ink.height))
        self.image.paste(colour, (left, top), ink)

    def write_on_tile(self, x: float, y: float, text: str, value: float) -> None:
        """Write text centred at (x, y) on a cell of a value, in black on a bright cell and in white on a dark cell."""
        self.write(x, y, text, "mm", colour="black" if value >= BRIGHT or np.isnan(value) else "white")

    def savefig(self, path: Path) -> None:
        # The strongest compression takes twice the time and saves a third.
        self.image.save(path, compress_level=1)

    def _repr_png_(self) -> bytes:
        data = BytesIO()
        self.image.save(data, "png")
        return data.getvalue()


def text_width(text: str, points: float = POINTS) -> int:
    """The width of a line of text in pixels."""
    return _ink(text, points).width


def readable(text: str, longest: int = MAX_LABEL) -> str:
    """Escape the characters of a text that no font has, and cut the text to a maximum length."""
    shown = "".join(c if c.isprintable() and _font_of(c) else ascii(c)[1:-1] for c in text)
    if _font_of(shown) is None:  # its characters are in different fonts
        shown = "".join(c if _font_of(c) == FONTS[0] else ascii(c)[1:-1] for c in shown)
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"


def save_png(picture: Picture | Figure, path: str | Path, caption: str = "") -> Path:
    """Write a picture to a file, creating its folder; the caption is a line of text above the picture."""
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
    """Add fonts to each text of a figure, or of axes, and escape the characters that no font has."""
    for text in cast(list[Text], artist.findobj(Text)):
        text.set_text("".join(c if c.isspace() or _font_of(c) else ascii(c)[1:-1] for c in text.get_text()))
        text.set_fontfamily(list(dict.fromkeys([*text.get_fontfamily(), *fonts_of(text.get_text())])))


def fonts_of(text: str) -> list[str]:
    """The fonts for a text: those of matplotlib, and installed fonts for Chinese, Japanese and Korean characters."""
    wide = [c for c in text if unicodedata.east_asian_width(c) in "WF" and unicodedata.category(c) != "So"]  # no emoji
    samples = {"한" if unicodedata.name(c, "").startswith("HANGUL") else "中" for c in wide}
    return [*FONTS, *filter(None, map(_installed_font, sorted(samples)))]


@cache
def _installed_font(sample: str) -> str | None:
    """The first installed font that has a character; if there is none, print once which package to install."""
    for path in sorted(font_manager.findSystemFonts(), key=lambda path: ("Regular" not in path, path)):
        with contextlib.suppress(OSError, RuntimeError):  # for a file that cannot be parsed
            if (font := font_manager.get_font(path)).get_char_index(ord(sample)):
                entry = font_manager.FontEntry(fname=path, name=font.family_name, size="scalable")
                font_manager.fontManager.ttflist.append(entry)  # its own entry may be older, or have another weight
                return font.family_name
    print(f"No font has {sample}, so pictures show its code; Debian's fonts-noto-cjk may have it.", file=sys.stderr)
    return None


@lru_cache(maxsize=4096)  # labels and numbers repeat
def _ink(text: str, points: float, upright: bool = False) -> Image.Image:
    """A line of text as the coverage of each pixel, from 0 to 255."""
    font = _loaded(_font_of(text) or FONTS[-1], points)
    ascent, descent = font.getmetrics()
    left, top, right, bottom = font.getbbox(text, anchor="ls")
    left, top, right, bottom = min(left, 0), min(top, -ascent), max(right, 1), max(bottom, descent)
    sheet = Image.new("L", (round(right - left), round(bottom - top)), 0)
    ImageDraw.Draw(sheet).text((-left, -top), text, fill=255, font=font, anchor="ls")
    return sheet.transpose(Image.Transpose.ROTATE_90) if upright else sheet


@cache
def _loaded(name: str, points: float) -> ImageFont.FreeTypeFont:
    path = font_manager.findfont(name)
    return ImageFont.truetype(path, points * DPI / 72, layout_engine=ImageFont.Layout.BASIC)


@lru_cache(maxsize=4096)
def _font_of(text: str) -> str | None:
    """The first font that has all characters of a text; None if no font has them."""
    fonts = ((name, font_manager.get_font(font_manager.findfont(name))) for name in fonts_of(text))
    return next((name for name, font in fonts if all(font.get_char_index(ord(c)) for c in text)), None)
