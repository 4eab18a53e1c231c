"""Charts of heads, layers, classes and seeds: their content, and whether it is legible."""

import itertools

import matplotlib as mpl
import pytest
import torch
from matplotlib.patches import Rectangle
from matplotlib.transforms import Bbox

from tinyformer.analysis import save_png, seeds_by_number, seeds_by_setting
from tinyformer.analysis.pictures.charts import confusion_grid, head_grid, lines

TITLE = "Change of the loss without the head (resample ablation), nats per token"
LONG = "Importance of each head: mean |∂ loss / ∂ gate| (of the first pairs), nats per character of the target"


def names_of(*counts):
    return [[str(head) for head in range(count)] for count in counts]


def drawn(figure):
    """All visible texts after layout; of the tick labels those within the range of their axis."""
    figure.canvas.draw()
    axes = figure.axes[0]
    texts = [*axes.texts, axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label]
    texts += axes.get_legend().get_texts() if axes.get_legend() else []
    for index, (axis, limits) in enumerate(((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim()))):
        labels = axis.get_ticklabels(which="both")
        texts += [label for label in labels if min(limits) <= label.get_position()[index] <= max(limits)]
    return [text for text in texts if text.get_text()]


def check_readable(figure):
    """Each text is large enough, within the picture, and over no other text."""
    texts = drawn(figure)
    boxes = [text.get_window_extent() for text in texts]
    assert min(text.get_fontsize() for text in texts) >= 6
    assert not any("$" in text.get_text() for text in texts)  # exponents would be smaller
    for text, box in zip(texts, boxes, strict=True):
        assert Bbox.union([box, figure.bbox]).bounds == figure.bbox.bounds, f"{text.get_text()!r} is cut off"
    for (one, a), (other, b) in itertools.combinations(zip(texts, boxes, strict=True), 2):
        assert not a.padded(-0.5).overlaps(b.padded(-0.5)), f"{one.get_text()!r} over {other.get_text()!r}"


def cells(figure):
    """The number and the colour of each cell, by layer and column."""
    axes = figure.axes[0]
    patches = {(round(p.get_y()), round(p.get_x())): p.get_facecolor() for p in axes.patches if type(p) is Rectangle}
    numbers = {(int(text.get_position()[1]), int(text.get_position()[0])): text for text in axes.texts}
    assert patches.keys() == numbers.keys()
    return {at: (numbers[at].get_text(), patches[at]) for at in patches}


def test_each_head_has_its_layer_and_column():
    values, ablated = [[0.25, -0.5, 9.0], [1.0, 0.125, -0.001]], [[False, False, True], [False] * 3]
    figure = head_grid(values, names_of(3, 3), TITLE, diverging=True, label="nats per token", ablated=ablated)
    check_readable(figure)
    colours, found = mpl.colormaps["RdBu_r"], cells(figure)
    axes, bar = figure.axes
    assert [(patch.get_y(), patch.get_x()) for patch in axes.patches if patch.get_hatch()] == [(0, 2)]
    assert [found[place][0] for place in sorted(found)] == ["0.25", "-0.50", "ablated", "1.00", "0.12", "0.00"]
    for (layer, head), (text, colour) in found.items():
        assert text == "ablated" or colour == pytest.approx(colours((values[layer][head] + 1) / 2))
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title(loc="left")) == ("head", "layer", TITLE)
    assert axes.yaxis_inverted()
    assert (bar.get_ylabel(), bar.get_ylim()) == ("nats per token", (-1, 1))  # the limits of the others


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([0.0201, -0.0000342], ["0.0201", "0.0000"]),
        ([12345.6, float("nan")], ["12346", "nan"]),
        ([1.25e-7, -1e-9], ["1.2e-07", "-1.0e-09"]),
    ],
)
def test_numbers_have_the_precision_of_the_largest(values, shown):
    figure = head_grid([values], names_of(2), "title", diverging=True)
    assert [text for text, _ in cells(figure).values()] == shown


@pytest.mark.parametrize(("heads", "scale"), [(1, 1.0), (4, 1e4), (8, 2e-3), (4, 1e-9)])
def test_a_grid_is_legible(heads, scale):
    values = [[scale * (-1) ** head * (0.9 + layer / 7) for head in range(heads)] for layer in range(heads)]
    figure = head_grid(values, names_of(*[heads] * heads), TITLE, diverging=True)
    check_readable(figure)
    axes = figure.axes[0]
    assert len(axes.texts) == heads**2
    for text, cell in zip(axes.texts, axes.patches, strict=True):
        assert text.get_window_extent().width < cell.get_window_extent().width


@pytest.mark.parametrize(
    "draw",
    [
        lambda: head_grid([[0.5] * 4] * 2, names_of(4, 4), LONG, layers=[("encoder", 0), ("cross", 10)]),
        lambda: lines({"one": ([0, 1, 2], [3e-4, 2.0, 4.0])}, LONG, "layers", "distance", "log"),
    ],
    ids=["grid", "lines"],
)
def test_a_title_wider_than_the_chart_stays_within_it_and_a_caption_is_above_it(draw, tmp_path):
    figure = draw()
    check_readable(figure)
    assert figure.axes[0].get_title(loc="left") == LONG
    save_png(figure, tmp_path / "a.png", "checkpoint a$b$/last.ckpt · " + "data text " * 20)
    figure.canvas.draw()
    box, title = figure._suptitle.get_window_extent(), figure.axes[0]._left_title.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.x1
    assert box.y0 >= title.y1
    assert figure._suptitle.get_text().startswith("checkpoint a$b$/last.ckpt · data text data")


@pytest.mark.parametrize("names", [["no", "yes"], [f"class number {i}" for i in range(12)]], ids=["2", "12"])
def test_a_confusion_matrix_has_the_true_class_down(names):
    confusion = 12_345 * torch.eye(len(names), dtype=torch.long)
    confusion[0, 1] = 7
    figure = confusion_grid(confusion, names)
    check_readable(figure)
    axes = figure.axes[0]
    numbers = {tuple(map(int, text.get_position())): text.get_text() for text in axes.texts}
    assert (numbers[1, 0], numbers[0, 1], numbers[1, 1]) == ("7", "0", "12345")  # x is the predicted class
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted class", "true class")
    assert [label.get_text() for label in axes.get_yticklabels()] == names


def test_lines_have_the_values_and_names():
    series = {"one": ([0, 1, 2], [3.0, 2.0, 4.0]), "two": ([0, 2], [1.0, 5.0])}
    figure = lines(series, "title", "depth", "nats")
    check_readable(figure)
    axes = figure.axes[0]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines] == list(series.values())
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["one", "two"]
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_yscale()) == ("depth", "nats", "linear")


# Of settings over seeds.


def seeds(figure):
    (dots,) = [dots for dots in figure.axes[0].collections if dots.get_label() == "single runs"]
    return [tuple(point) for point in dots.get_offsets().tolist()]


def bars(figure):
    """The ends of the error bars."""
    lines = [lines for lines in figure.axes[0].collections if hasattr(lines, "get_segments")]
    return [segment.tolist() for collection in lines for segment in collection.get_segments()]


def means(figure):
    (line,) = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    return list(zip(line.get_xdata().tolist(), line.get_ydata().tolist(), strict=True))


def test_seeds_mean_and_standard_deviation_are_drawn():
    figure = seeds_by_number([1, 2, 4], [[1.0, 2.0, 6.0], [5.0], []], "model.num_heads", "val/loss")
    assert seeds(figure) == [(1, 1.0), (1, 2.0), (1, 6.0), (2, 5.0)]
    assert means(figure) == [(1, 3.0), (2, 5.0)]
    # The squared distances from 3 are 4, 1 and 9: 14 / 2 = 7.
    assert bars(figure)[0] == [[1, pytest.approx(3 - 7**0.5)], [1, pytest.approx(3 + 7**0.5)]]
    assert figure.axes[0].get_ylabel() == "val/loss (nats)"
    assert figure.get_suptitle() == "val/loss (nats)\nby model.num_heads"


@pytest.mark.parametrize(
    ("numbers", "scale", "base"),
    [
        ([1, 2, 4, 8], "log", 2),
        ([1e-4, 3e-4, 1e-2], "log", 10),
        ([2, 3, 4], "linear", None),
        ([-2, 64], "linear", None),
    ],
)
def test_the_axis_of_the_setting(numbers, scale, base):
    axes = seeds_by_number(numbers, [[1.0]] * len(numbers), "key", "val/loss").axes[0]
    assert axes.get_xscale() == scale
    assert getattr(axes.xaxis.get_transform(), "base", None) == base
    assert [label.get_text() for label in axes.get_xticklabels()] == [f"{number:g}" for number in numbers]


def test_rows_run_from_top_to_bottom_with_whole_labels():
    keys = "block.attention_residual.skip · block.feed_forward_residual.branch · attention.ablated_heads"
    labels = [f"[1,1,1,1] · [1,0,1,0] · {[[layer, 0] for layer in range(8)]} · {n}" for n in (1, 2)]
    figure = seeds_by_setting(labels, [[1.0, 2.0, 6.0], [5.0]], keys, "val/loss")
    assert seeds(figure) == [(1.0, 0), (2.0, 0), (6.0, 0), (5.0, 1)]
    assert means(figure) == [(3.0, 0), (5.0, 1)]
    bottom, top = figure.axes[0].get_ylim()
    assert bottom > top
    shown = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert [text.replace("\n", " ") for text in shown] == labels
    assert keys in figure.get_suptitle().replace("\n", " ")
    figure.canvas.draw()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert min(box.x0 for box in boxes) >= 0
    assert not boxes[0].overlaps(boxes[1])
