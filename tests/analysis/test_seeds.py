"""Charts of settings over seeds: the drawn values."""

import pytest

from tinyformer.analysis import seeds_by_number, seeds_by_setting


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
        ([1e-4, 3e-4], "log", 10),
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
