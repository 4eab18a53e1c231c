"""Maps as charts, tables and pages of a notebook."""

import re

import numpy as np
import pytest
import torch
from browser import quiet_page
from IPython.core.formatters import DisplayFormatter
from playwright.sync_api import expect

from model.models import model, translator
from tinyformer.errors import ArgumentError
from tinyformer.model import heat_map
from tinyformer.report import head_maps

READ_THE_NOTEBOOK = "() => { try { return parent.document.title; } catch (error) { return error.name; } }"


def test_a_chart_shows_the_weights_of_a_head_with_their_tokens():
    maps = model().attention("$é\n")
    figure = maps.plot(1, 2)
    axes, _ = figure.axes
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        assert [label.get_text() for label in labels] == maps.tokens == ["<eos>", "$", "\\xc3", "\\xa9", "⏎"]
    np.testing.assert_array_equal(axes.images[0].get_array(), maps[1, 2])
    numbers = {tuple(map(round, text.get_position()[::-1])): text.get_text() for text in axes.texts}
    assert numbers == {(row, key): f"{maps[1, 2][row, key]:.2f}" for row in range(5) for key in range(row + 1)}


def test_two_models_beside_each_other_and_their_difference():
    first, second = (model(ablated_heads=heads).attention("ab, c") for heads in ([], [[0, 1]]))
    difference = first - second
    change = first[1, 2] - second[1, 2]
    assert torch.equal(difference[1, 2], change)
    by_head = {(row["layer"], row["head"]): row["distance"] for row in difference.distances()}
    assert by_head[0, 1] == 0
    assert by_head[1, 2] == pytest.approx(change.clamp(min=0).sum(dim=-1).mean().item(), abs=1e-6)
    *maps, chart = [axes.images[0] for axes in difference.plot(1, 2).axes if axes.images]
    for image, weights in zip(maps, (first, second), strict=True):
        np.testing.assert_array_equal(image.get_array(), weights[1, 2])
    assert chart.norm.vmin == -chart.norm.vmax
    words = first.words() - second.words()
    torch.testing.assert_close(words[1, 2], first.words()[1, 2] - second.words()[1, 2])


def test_any_weights_are_drawn_with_their_tokens():
    maps = torch.rand(7, 6, 6, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)
    figure = heat_map(maps, "The cat sat on the mat", titles=list("abcdefg"))
    for chart, weights, title in zip((axes for axes in figure.axes if axes.images), maps, "abcdefg", strict=True):
        np.testing.assert_array_equal(chart.images[0].get_array(), weights)
        assert [label.get_text() for label in chart.get_yticklabels()] == ["The", "cat", "sat", "on", "the", "mat"]
        assert chart.get_title(loc="left") == title
    scores = heat_map(np.array([[-2.0, 0.5]]), ["a"], "b c").axes  # another library's, of other keys
    assert [label.get_text() for label in scores[0].get_xticklabels()] == ["b", "c"]
    assert (scores[0].images[0].norm.vmin, scores[1].get_ylabel()) == (-2, "Score")


@pytest.mark.parametrize(("shape", "side"), [((6, 6), "tokens"), ((3, 6), "keys")])
def test_weights_without_their_tokens_are_refused(shape, side):
    with pytest.raises(ArgumentError, match=rf"^{side}=.*: has 3 tokens, while the weights have 6 "):
        heat_map(torch.ones(shape) / 9, "The cat sat")


def test_maps_have_a_picture_for_where_no_page_is_shown():
    maps = model().attention("cats and dogs, dogs and cats")
    shown, _ = DisplayFormatter().format(maps)
    assert shown.keys() == {"text/plain", "text/html", "image/png"}
    first = [layer.weights[:, :24, :24] for layer in maps.layers]  # of 29 tokens
    assert shown["image/png"] == head_maps(first, maps.tokens[:24], "Attention maps")._repr_png_()
    maps = translator().attention("abc")
    cross = [layer.weights for layer in maps.layers if layer.kind == "cross"]
    picture = head_maps(cross, maps.axes["cross"].queries, "Cross attention maps", keys=maps.axes["cross"].keys)
    assert maps._repr_png_() == picture._repr_png_()


@pytest.mark.parametrize(
    ("notebook_theme", "scheme", "is_dark"),
    [
        ("", "dark", True),
        ('data-jp-theme-light="false"', "light", True),
        ('data-jp-theme-light="true"', "dark", False),
        ('data-vscode-theme-kind="vscode-dark"', "light", True),
    ],
)
def test_a_notebook_holds_the_atlas_in_its_theme_and_in_a_sandbox(browser, tmp_path, notebook_theme, scheme, is_dark):
    maps = translator().attention("abc").words() if notebook_theme else model().attention("The bank <b>&amp;</b>")
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><body {notebook_theme}>{maps._repr_html_()}", encoding="utf-8")
    with quiet_page(browser, scheme=scheme) as page:
        page.goto(path.as_uri())
        frame = page.frame_locator("iframe")
        last, body = frame.locator(".thumbnail").last, frame.locator("body")
        expect(last).to_be_visible()
        assert body.evaluate(READ_THE_NOTEBOOK) == "SecurityError"
        colour = body.evaluate("(body) => getComputedStyle(body).backgroundColor")
        assert (int(re.search(r"\d+", colour)[0]) < 128) == is_dark
        last.click()
        expect(frame.locator("#head-title")).to_be_visible()
        frame.get_by_role("button", name="All heads").click()
        expect(last).to_be_visible()
        assert page.evaluate("history.length") <= 2
