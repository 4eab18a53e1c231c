"""The picture of all heads: its size, its colours, and labels of any kind."""

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.image import imread

from tinyformer.analysis import head_maps, save_png
from tinyformer.data import ByteTokenizer

UNUSUAL = {
    "dollars": ["$", "$$", "a$b$c", "$\\frac{", "\\$"],
    "underscores": ["_", "__init__", "a_{b}", "^", "{", "}"],
    "newlines": ["⏎", "\n", "\r\n", "\t", "a\nb"],
    "controls": ["\x00", "\x1b", "\x7f", "\\x00", "\x85"],
    "greek": ["μῆνιν", "Ἀχιλῆος"],
    "chinese": ["漢", "字", "日本語"],
    "arabic": ["سلام", "שלום"],
    "emoji": ["🙂", "👩‍🚀", "\U0001f1ec\U0001f1f7"],
    "lone": ["\ufffd", "\u200b", "\ue000", "\u0301"],
    "empty": ["", " "],
}


def uniform(layers, heads, seq):
    rows = torch.ones(seq, seq).tril() / torch.arange(1, seq + 1).unsqueeze(-1)
    return [rows.expand(heads, seq, seq) for _ in range(layers)]


def pixels(figure):
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[..., :3] / 255


def texts(figure):
    return figure.axes[0].texts


@pytest.mark.parametrize(("layers", "heads", "seq"), [(1, 1, 1), (2, 3, 5), (3, 4, 24), (1, 2, 64)])
def test_every_map_has_at_least_100_pixels(layers, heads, seq):
    figure = head_maps(uniform(layers, heads, seq), ["a"] * seq, "title")
    height, width, _ = pixels(figure).shape
    assert width >= heads * 100
    assert height >= layers * 100
    captions = [text.get_text() for text in texts(figure) if text.get_text().startswith("layer")]
    assert captions == [f"layer {i} head {j}" for i in range(layers) for j in range(heads)]
    assert len(texts(figure)) == layers * heads + layers * seq + heads * seq + 1


def test_layers_may_have_fewer_maps_with_names_of_their_own():
    maps = [*uniform(1, 2, 8), *uniform(1, 3, 8)]
    figure = head_maps(maps, ["a"] * 8, "title", [["00", "02"], ["00", "01", "02"]])
    captions = [text.get_text() for text in texts(figure) if text.get_text().startswith("layer")]
    assert captions == [f"layer {layer} head {name}" for layer, name in ((0, "00"), (0, "02"))] + [
        f"layer 1 head {name}" for name in ("00", "01", "02")
    ]
    assert pixels(figure).shape[1] >= 300


def test_labels_can_be_read():
    figure = head_maps(uniform(2, 2, 24), ["token"] * 24, "title")
    assert min(text.get_fontsize() for text in texts(figure)) >= 6


def test_the_colour_is_the_root_of_the_weight():
    seq, generator = 6, torch.Generator().manual_seed(0)
    maps = [torch.rand(3, seq, seq, generator=generator).softmax(-1) for _ in range(2)]
    maps[1][2, 4, 1] = 1.0
    maps[0][1, 5, 3] = 0.0
    figure = head_maps(maps, list("abcdef"), "title")
    image = pixels(figure)
    colours = mpl.colormaps["viridis"]
    places = {t.get_text(): t.get_position() for t in texts(figure) if t.get_text().startswith("layer")}
    (x, top), (x_next, _) = places["layer 0 head 0"], places["layer 0 head 1"]
    cell = 17  # 100 pixels for six tokens
    assert x_next - x > cell * seq
    for layer in range(2):
        for head in range(3):
            x, top = places[f"layer {layer} head {head}"]
            for row in range(seq):
                for column in range(seq):
                    y_pixel = int(top) + 5 + row * cell + cell // 2
                    pixel = image[y_pixel, int(x) + column * cell + cell // 2]
                    expected = colours(maps[layer][head, row, column].sqrt().item())[:3]
                    assert np.abs(pixel - expected).max() < 0.012, (layer, head, row, column)


def test_labels_stand_at_their_rows_and_columns():
    figure = head_maps(uniform(1, 1, 3), ["x", "y", "z"], "title")
    left, below = ([t for t in texts(figure) if t.get_text() in "xyz"][i : i + 3] for i in (0, 3))
    assert [t.get_text() for t in left] == [t.get_text() for t in below] == ["x", "y", "z"]
    (x, top) = next(t.get_position() for t in texts(figure) if t.get_text().startswith("layer"))
    cell = 34  # 100 pixels for three tokens
    assert [t.get_position()[1] for t in left] == pytest.approx([top + 5 + (i + 0.5) * cell for i in range(3)])
    assert [t.get_position()[0] for t in below] == pytest.approx([x + (i + 0.5) * cell for i in range(3)])


def test_long_labels_are_cut_short():
    figure = head_maps(uniform(1, 1, 3), ["a", "internationalisation", "ten__chars"], "title")
    labels = {text.get_text() for text in texts(figure)}
    assert {"internati…", "ten__chars"} <= labels
    assert not any("international" in label for label in labels)


def test_no_label_is_outside_of_the_picture():
    figure = head_maps(uniform(2, 1, 2), ["W" * 30, "漢" * 30], "t")
    pixels(figure)
    height = figure.canvas.get_width_height()[1]
    for text in texts(figure)[:-1]:
        box = text.get_window_extent()
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.y1 <= height, text


@pytest.mark.parametrize("tokens", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_tokens_are_drawn_without_a_complaint(tmp_path, tokens):
    """Warnings are errors here."""
    figure = head_maps(uniform(1, 2, len(tokens)), tokens, "after $5 a_b")
    assert imread(save_png(figure, tmp_path / "map.png")).ndim == 3


def test_all_byte_tokens_are_drawn(tmp_path):
    tokenizer = ByteTokenizer().build([])
    labels = tokenizer.labels(range(tokenizer.vocab_size))
    for start in range(0, len(labels), 64):
        some = labels[start : start + 64]
        save_png(head_maps(uniform(1, 1, len(some)), some, "bytes"), tmp_path / "map.png")


def test_the_file_has_the_figures_own_size(tmp_path):
    figure = head_maps(uniform(2, 3, 4), list("abcd"), "title")
    path = save_png(figure, tmp_path / "new" / "folder" / "map.png")
    assert imread(path).shape[:2] == pixels(figure).shape[:2]


def test_half_precision_maps_are_drawn():
    pixels(head_maps([layer.bfloat16() for layer in uniform(1, 1, 3)], list("abc"), "title"))
