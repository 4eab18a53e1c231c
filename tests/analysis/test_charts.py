"""Pictures of maps, and charts of heads, layers and seeds."""

import functools
import itertools

import matplotlib as mpl
import numpy as np
import pytest
import torch
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager
from matplotlib.image import imread
from matplotlib.patches import Rectangle

from tinyformer.model.notebook import heat_map
from tinyformer.programs.compare.chart import chart_of_seeds
from tinyformer.programs.compare.comparison import Comparison, Row
from tinyformer.report import head_maps, measure_maps, save_png
from tinyformer.report import picture as pictures
from tinyformer.report.charts import head_grid
from tinyformer.report.picture import HATCH


def names_of(*counts):
    return [[str(head) for head in range(count)] for count in counts]


def cells(figure):
    """The number and the colour of each cell, by layer and column."""
    axes = figure.axes[0]
    patches = {(round(p.get_y()), round(p.get_x())): p.get_facecolor() for p in axes.patches if type(p) is Rectangle}
    numbers = {(int(text.get_position()[1]), int(text.get_position()[0])): text for text in axes.texts}
    assert patches.keys() == numbers.keys()
    return {at: (numbers[at].get_text(), patches[at]) for at in patches}


def test_each_head_has_its_layer_and_column():
    values, ablated = [[0.25, -0.5, 9.0], [1.0, 0.125, -0.001]], [[False, False, True], [False] * 3]
    figure = head_grid(values, names_of(3, 3), "title", diverging=True, label="nats per token", ablated=ablated)
    colours, found = mpl.colormaps["RdBu_r"], cells(figure)
    axes, bar = figure.axes
    assert [(patch.get_y(), patch.get_x()) for patch in axes.patches if patch.get_hatch()] == [(0, 2)]
    assert [found[place][0] for place in sorted(found)] == ["0.25", "-0.50", "ablated", "1.00", "0.12", "0.00"]
    for (layer, head), (text, colour) in found.items():
        assert text == "ablated" or colour == pytest.approx(colours((values[layer][head] + 1) / 2))
    assert (bar.get_ylabel(), bar.get_ylim()) == ("nats per token", (-1, 1))  # the limits of the others


# Of settings over seeds.


def test_seeds_mean_and_standard_deviation_are_drawn():
    rows = [Row({}, [], [], values, len(values)) for values in ([1.0, 2.0, 6.0], [5.0], [])]
    figure = chart_of_seeds(Comparison("val/loss", "seed", ["model.num_heads"], [], rows, [1, 2, 4]))
    axes = figure.axes[0]
    (dots,) = [dots for dots in axes.collections if dots.get_label() == "single runs"]
    (line,) = [line for line in axes.lines if line.get_marker() == "o"]
    assert dots.get_offsets().tolist() == [[1, 1.0], [1, 2.0], [1, 6.0], [2, 5.0]]
    assert line.get_xydata().tolist() == [[1, 3.0], [2, 5.0]]
    bars = [segment for lines in axes.collections if hasattr(lines, "get_segments") for segment in lines.get_segments()]
    # The squared distances from 3 are 4, 1 and 9: 14 / 2 = 7.
    assert bars[0].tolist() == [[1, pytest.approx(3 - 7**0.5)], [1, pytest.approx(3 + 7**0.5)]]


# Of maps.


def labelled(picture, text):
    return [label for label in picture.labels if label.text == text]


def test_an_ablated_head_is_hatched_and_named():
    ablated = [[False, True, False], [False] * 3]
    picture = head_maps([torch.full((3, 5, 5), 0.2)] * 2, list("abcde"), "title", ablated=ablated)
    (caption,) = labelled(picture, "layer 0 head 1 ablated")
    area = np.asarray(picture.image)[caption.bottom + 3 : caption.bottom + 103, caption.left : caption.left + 100]
    assert set(np.unique(area)) == set(HATCH)
    picture = measure_maps({"self": [[0.25, 0.5, 0.75], [0.1] * 3]}, names_of(3, 3), "title", ablated=ablated)
    assert not labelled(picture, "0.50")  # the measure of weights that have no effect


def make_font(path, characters):
    """Write a font in which each character is a square."""
    names, pen = {ord(c): f"u{ord(c):04X}" for c in characters}, TTGlyphPen(None)
    pen.moveTo((100, 0)), pen.lineTo((100, 700)), pen.lineTo((900, 700)), pen.lineTo((900, 0)), pen.closePath()
    font, glyphs = FontBuilder(1000), [".notdef", *names.values()]
    font.setupGlyphOrder(glyphs), font.setupCharacterMap(names), font.setupGlyf(dict.fromkeys(glyphs, pen.glyph()))
    font.setupHorizontalMetrics(dict.fromkeys(glyphs, (1000, 100))), font.setupHorizontalHeader(ascent=800)
    font.setupNameTable({"familyName": "Squares", "styleName": "Regular"}), font.setupOS2(), font.setupPost()
    font.save(path)


@pytest.mark.parametrize("installed", ["", "中文a"])
def test_chinese_is_drawn_in_a_font_that_has_it_or_escaped_once_told(installed, tmp_path, monkeypatch, capsys):
    (tmp_path / "broken.ttf").write_bytes(b"\0")
    make_font(tmp_path / "squares.ttf", installed)
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [str(path) for path in tmp_path.glob("*.ttf")])
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [*font_manager.fontManager.ttflist])
    for name in ("_installed_font", "_font_of", "_ink"):  # which remember the fonts of this machine
        monkeypatch.setattr(pictures, name, getattr(pictures, name).__wrapped__)
    monkeypatch.setattr(pictures, "_installed_font", functools.cache(pictures._installed_font))
    shown = ["中", "a文", "é\\u4e2d"] if installed else ["\\u4e2d", "a\\u6587", "é\\u4e2d"]
    figure = heat_map(torch.eye(3), ["中", "a文", "é中"], titles=["标"])  # a missing glyph would be a warning
    save_png(figure, tmp_path / "figure.png", "中")
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == shown
    assert {*shown} <= {label.text for label in head_maps([torch.eye(3)[None]], ["中", "a文", "é中"], "title").labels}
    assert capsys.readouterr().err.count("No font has") == (not installed)


def test_the_colour_is_the_square_root_of_the_weight(tmp_path):
    maps = [torch.rand(3, 6, 6, generator=torch.Generator().manual_seed(layer)).bfloat16() for layer in range(2)]
    maps[1][2, 4, 1], maps[0][1, 5, 3] = 1.0, 0.0
    picture = head_maps(maps, list("abcdef"), "title")
    image = imread(save_png(picture, tmp_path / "new" / "folder" / "map.png"))[..., :3]
    for layer, head in itertools.product(range(2), range(3)):
        (caption,) = labelled(picture, f"layer {layer} head {head}")
        middles = 17 * np.arange(6) + 8  # 100 pixels for six tokens
        shown = image[np.ix_(caption.bottom + 3 + middles, caption.left + middles)]
        expected = mpl.colormaps["viridis"](maps[layer][head].float().sqrt().numpy())[..., :3]
        assert np.abs(shown - expected).max() < 0.015, (layer, head)


def test_an_undefined_measure_says_what_it_needs():
    picture = measure_maps({"offset": [[-2.0, 1.0]], "rank": [[np.nan] * 2]}, [["0", "1"]], "title")
    assert all(labelled(picture, shown) for shown in ("-2", "1", "needs more tokens"))


@pytest.mark.parametrize(
    ("measure", "shares"),
    [
        ("distance", (0.1, 0.2, 0.3, 0.5)),  # to (21 - 1) / 2
        ("rank", (0.0, 0.05, 0.1, 0.2)),  # from 1 to 21
        ("largest_logit", (0.02, 0.04, 0.06, 0.1)),  # to 50
        ("of my own", (0.0, 0.25, 0.5, 1.0)),
    ],
)
def test_the_limits_of_colours_are_those_of_the_measure(measure, shares):
    values = {measure: [[1.0, 2.0], [3.0, 5.0]]}
    picture = measure_maps(values, [["a", "b"]] * 2, "title", num_keys=21, meanings={measure: "nats"})
    labels = {label.text: label for label in picture.labels}
    drawn = [picture.image.getpixel((labels[at].left - 2, labels[at].top)) for at in ("1.00", "2.00", "3.00", "5.00")]
    assert np.array(drawn) / 255 == pytest.approx(mpl.colormaps["viridis"](shares)[..., :3], abs=0.005)
