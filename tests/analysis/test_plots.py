"""Pictures of all heads: size, colours, and labels of any kind."""

import itertools

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.image import imread

from tinyformer.analysis import ALL_MEASURES, head_maps, measure_maps, save_png
from tinyformer.analysis.pictures.picture import COLOURS, HATCH, WHITE


def uniform(layers, heads, seq):
    rows = torch.ones(seq, seq).tril() / torch.arange(1, seq + 1).unsqueeze(-1)
    return [rows.expand(heads, seq, seq) for _ in range(layers)]


def labelled(picture, text):
    return [label for label in picture.labels if label.text == text]


def require_readable(picture):
    """No label is smaller than 6 points, outside of the picture, or on another label."""
    height, width = picture.pixels.shape
    taken = np.zeros((height, width), bool)
    for label in picture.labels:
        assert label.points >= 6
        assert 0 <= label.left <= label.right <= width, label
        assert 0 <= label.top <= label.bottom <= height, label
        box = taken[label.top : label.bottom, label.left : label.right]
        assert not box.any(), label
        box[:] = True


@pytest.mark.parametrize(
    ("layers", "heads", "seq", "token"),
    [(1, 1, 1, "W" * 30), (2, 3, 5, "漢" * 30), (1, 2, 64, "W" * 9)],
)
def test_maps_are_large_enough_and_labels_are_legible(layers, heads, seq, token):
    picture = head_maps(uniform(layers, heads, seq), [token] * seq, "attention after 100 steps")
    height, width = picture.pixels.shape
    assert width >= heads * 100
    assert height >= layers * 100
    texts = [label.text for label in picture.labels]
    captions = [text for text in texts if text.startswith("layer")]
    assert captions == [f"layer {i} head {j}" for i in range(layers) for j in range(heads)]
    assert (texts.count("Queries"), texts.count("Keys")) == (layers, heads)
    captioned = picture.captioned("run a\nb · step 3" + " x" * 300)
    assert (captioned.pixels[-height:, :width] == picture.pixels).all()
    assert captioned.labels[-1].text.startswith(r"run a\nb · step 3")
    require_readable(captioned)


def test_an_ablated_head_is_hatched_and_named():
    maps = uniform(2, 3, 5)
    ablated = [[False, True, False], [False] * 3]
    picture = head_maps(maps, list("abcde"), "title", ablated=ablated)
    (caption,) = labelled(picture, "layer 0 head 1 ablated")
    area = picture.pixels[caption.bottom + 3 : caption.bottom + 103, caption.left : caption.left + 100]
    assert set(np.unique(area)) == set(HATCH)
    names = [["0", "1", "2"]] * 2
    picture = measure_maps({"self": [[0.25, 0.5, 0.75], [0.1] * 3]}, names, "title", ablated=ablated)
    assert not labelled(picture, "0.50")  # the measure of weights that have no effect
    (left,), (right,) = labelled(picture, "0.25"), labelled(picture, "0.75")
    assert picture.pixels[left.top, (left.left + right.right) // 2] in HATCH


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
    for text in ("0.01", "0.1", "0.25", "0.5"):  # of the colour bar
        (label,) = labelled(picture, text)
        at = picture.pixels[label.top - 4, (label.left + label.right) // 2]
        assert int(at) == pytest.approx(float(text) ** 0.5 * (COLOURS - 1), abs=3)


@pytest.mark.parametrize(
    ("measure", "shares"),
    [
        ("distance", (0.1, 0.2, 0.3, 0.5)),  # to (21 - 1) / 2
        ("rank", (0.0, 0.05, 0.1, 0.2)),  # from 1 to 21
        ("largest_logit", (0.02, 0.04, 0.06, 0.1)),  # to 50
        ("first_token", (1.0, 1.0, 1.0, 1.0)),  # to 1
        ("of my own", (0.0, 0.25, 0.5, 1.0)),
    ],
)
def test_the_limits_of_colours_are_those_of_the_measure(measure, shares):
    values = {measure: [[1.0, 2.0], [3.0, 5.0]]}
    picture = measure_maps(values, [["a", "b"]] * 2, "title", num_keys=21, meanings={measure: "nats"})
    labels = {label.text: label for label in picture.labels}
    colours = [picture.pixels[labels[at].top, labels[at].left - 2] for at in ("1.00", "2.00", "3.00", "5.00")]
    assert colours == [round(share * (COLOURS - 1) + 0.01) for share in shares]
    assert labels["1.00"].left < labels["2.00"].left
    assert labels["1.00"].top < labels["3.00"].top == labels["layer 1"].top


def test_pruned_heads_and_undefined_values_are_white_and_equal_values_have_one_colour():
    names = [["00", "02"], ["00", "01", "02"]]
    picture = measure_maps({"a": [[1.0, 2.0], [float("nan"), 3.0, 4.0]]}, names, "title", meanings={"a": "b"})
    labels = {label.text: label for label in picture.labels}
    assert labels["2.00"].left == labels["4.00"].left
    assert picture.pixels[labels["1.00"].top + 5, labels["3.00"].left] == WHITE
    assert picture.pixels[labels["3.00"].top + 5, labels["1.00"].left] == WHITE
    for values, limits in (([[0.5], [0.5]], None), ([[0.5], [0.504]], (0.0, 1.0))):
        picture = measure_maps({"a": values}, [["0"]] * 2, "title", limits=limits, meanings={"a": "b"})
        colours = {int(picture.pixels[label.top, label.left - 2]) for label in labelled(picture, "0.50")}
        assert max(colours) - min(colours) <= 1
        assert (min(colours) == 0) == (limits is None)


def test_all_measures_are_legible():
    require_readable(measure_maps({name: [[0.5, 0.5]] * 2 for name in ALL_MEASURES}, [["0", "1"]] * 2, "title"))
    assert all(low < high for low, high in (measure.limits(2) for measure in ALL_MEASURES.values()))
