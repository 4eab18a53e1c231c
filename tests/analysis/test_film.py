"""The film of a run: its frames are the snapshots', and the page shows them, by pointer and by keyboard."""

import base64
import json
import math
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from browser import quiet_page
from nn.model_cases import make_transformer
from playwright.sync_api import expect

from analysis.contexts import (
    CAUSAL,
    columns_of,
    loud_transformer,
    make_context,
    stored,
)
from analysis.test_atlas import assert_accessible, assert_colours, focused, press
from tinyformer.analysis import TrainingFilm
from tinyformer.analysis.context import Snapshot
from tinyformer.analysis.over_training import film
from tinyformer.analysis.texts.maps import of_sample
from tinyformer.measures import capture_weights
from tinyformer.measures.events import TRAITS, Event
from tinyformer.report import atlas_html

STEPS = (0, 8, 400)  # at the second, all heads are uniform
NETWORKS = [loud_transformer(seed=3), make_transformer().eval(), loud_transformer(seed=4)]


def with_snapshots(context, networks=NETWORKS, steps=STEPS):
    snapshots = [Snapshot(step, lambda network=network: network) for step, network in zip(steps, networks, strict=True)]
    return replace(context, network=networks[-1], snapshots=snapshots)


def assert_frames(page, exact):
    """The stored maps are those of each step within quantisation; the last is stored as in an atlas, too."""
    for head, of_steps in zip(page["heads"], zip(*exact, strict=True), strict=True):
        for stored_map, weights in zip(head["film"]["maps"], of_steps, strict=True):
            roots = np.frombuffer(base64.b64decode(stored_map), np.uint8).reshape(weights.shape) / 255
            assert (abs(roots**2 - weights.numpy()) <= weights.sqrt().numpy() / 255 + 1e-5).all()
        last = np.frombuffer(base64.b64decode(head["weights"]), "<u2").reshape(weights.shape)
        np.testing.assert_allclose(last / 65535, weights, atol=1e-5)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The film of the networks on the first of six windows: the context, the exact maps at each step, and the film."""
    context, folder = with_snapshots(make_context(NETWORKS[-1])), tmp_path_factory.mktemp("film")
    window = context.batches[0]["inputs"][:1]
    exact = [[head for layer in capture_weights(of, window, CAUSAL) for head in layer[0]] for of in NETWORKS]
    return context, exact, TrainingFilm()(context, folder), folder / "film.html"


def test_the_frames_are_those_of_each_snapshot(made):
    context, exact, found, path = made
    page, table = stored(path), columns_of(found.tables["film"])
    assert page["film"]["steps"] == list(STEPS)
    assert_frames(page, exact)
    inputs, targets = (torch.cat([batch[name] for batch in context.batches]) for name in ("inputs", "targets"))
    for at, (step, network) in enumerate(zip(STEPS, NETWORKS, strict=True)):
        with torch.no_grad():
            loss = F.cross_entropy(network(inputs, CAUSAL).flatten(0, 1), targets.flatten())
        rows = slice(8 * at, 8 * at + 8)
        assert table["step"][rows] == (step,) * 8
        assert (page["film"]["loss"][at],) * 8 == table["loss"][rows] == (pytest.approx(loss.item(), rel=1e-5),) * 8
        measures = of_sample(context)(network, None).values
        for number, (name, layers) in enumerate(measures.items()):
            values = [pytest.approx(v) if math.isfinite(v) else None for layer in layers for v in layer]
            assert list(table[name][rows]) == values, name
            assert [head["film"]["values"][at][number] for head in page["heads"]] == values, name
    assert all(["uniform" in of for of in head["film"]["labels"]] == [False, True, False] for head in page["heads"])
    titles = [f"layer {layer} head {head}" for layer in range(2) for head in range(4)]
    events = [event for event in page["film"]["events"] if event["measure"] == "entropy_share"]
    assert [(event["step"], titles[event["head"]]) for event in events] == [(8, title) for title in titles]


def of_events(*parts):
    """A film of two heads at three steps, given the step, the head and the measure of each event, and what happened."""
    table = ["layer", "head", "entropy_share", "induction", "label"], [[0, head, 0.5, 0.5, ""] for head in ("00", "01")]
    events = [Event(step, 0, head, event, measure, 0.5) for step, head, measure, event in parts]
    return film.Film(STEPS, [3.0, 2.0, 1.0], [[np.zeros((4, 4), np.uint8)] * 2] * 3, [table] * 3, events)


UNIFORM = 8, "00", "entropy_share", TRAITS["uniform"].begins
INDUCTION = 8, "01", "induction", TRAITS["induction"].begins


def test_a_page_that_would_be_too_large_has_fewer_snapshots(tmp_path, monkeypatch):
    monkeypatch.setattr(film, "LARGEST_PAGE", 20e3)
    context = with_snapshots(make_context(NETWORKS[0]), [*NETWORKS] * 3, range(0, 900, 100))
    TrainingFilm()(context, tmp_path)
    page = stored(tmp_path / "film.html")
    assert page["film"]["steps"] == [0, 300, 500, 800]
    assert len(json.dumps([[head["film"], head["weights"]] for head in page["heads"]])) < 20e3
    assert page["facts"]["step"] == "0 to 800, 4 of 9 snapshots, evenly chosen to keep the page small"


@pytest.fixture
def open_film(made, browser):
    """Open the film; the test fails if a page reports an error."""
    with ExitStack() as pages:

        def opened(path=made[3], **options):
            page = pages.enter_context(quiet_page(browser, **options))
            page.goto(path.as_uri())
            return page

        yield opened


def test_each_step_has_its_own_maps_and_numbers(made, open_film):
    data = stored(made[3])
    at = next(at for at, measure in enumerate(data["measures"]) if measure["name"] == "distance")
    for frame, keys in enumerate([["Home"], ["Home", "ArrowRight"], []]):
        page, exact = open_film(), made[1][frame]
        page.get_by_label("Measure", exact=True).select_option("distance")
        page.locator(".thumbnail").nth(5).click()
        page.locator("#frame").focus()
        press(page, *keys)
        expect(page.locator("#place")).to_have_text(f"step {STEPS[frame]}, loss {data['film']['loss'][frame]:.3f}")
        values = [f"{head['film']['values'][frame][at]:.3f}" for head in data["heads"]]
        assert page.locator("#measures tr").nth(at).locator("td").first.inner_text().strip() == values[5]
        assert_colours(page.locator("#map"), exact[5])
        largest = exact[5][7].max() if frame == 2 else (exact[5][7].max().sqrt() * 255).round().div(255) ** 2
        expect(page.locator("#weights tr").first.locator("td").first).to_have_text(f"{largest:.4f}")
        press(page, "Escape")
        shown = "all => all.map((one) => one.lastChild.textContent)"
        assert page.locator(".thumbnail .value").evaluate_all(shown) == values
        assert ("uniform" in page.locator(".thumbnail").first.inner_text()) == (frame == 1)
        for index, weights in enumerate(exact):
            assert_colours(page.locator(".thumbnail canvas").nth(index), weights)


def test_the_page_opens_at_the_first_role_and_plays_from_the_first_snapshot(tmp_path, open_film):
    maps, values = [torch.full((2, 4, 4), 0.25)], {"entropy_share": [[0.5] * 2], "induction": [[0.5] * 2]}
    for events, step, told in [((UNIFORM, INDUCTION), 8, "Layer 0 head 0"), ((), 400, "No head acquired")]:
        made = of_events(*events).page_data()
        (tmp_path / "film.html").write_text(atlas_html(maps, list("abcd"), values, [["0", "1"]], **made))
        page = open_film(tmp_path / "film.html")
        expect(page.locator("#place")).to_contain_text(f"step {step}, ")
        expect(page.locator("#happened")).to_contain_text(told)
        assert page.locator("#measure").input_value() == ("induction" if events else "entropy_share")
        page.locator("#play").click()
        expect(page.locator("#place")).to_contain_text("step 0, ")


def test_every_control_works_by_keyboard(open_film):
    page = open_film(width=390)
    place = lambda: page.locator("#place").inner_text().split(",")[0]  # noqa: E731
    press(page, "Tab", "Tab", "Tab")  # the theme, the first token
    assert focused(page) == "Play"
    press(page, "Tab")
    assert focused(page).startswith("Layer 0 head 0 became uniform at step 8; layer 0 head 1 became ")
    press(page, "Enter")
    assert place() == "step 8"
    press(page, "Tab", "Home")
    expect(page.locator("#happened")).to_have_text("")
    press(page, "Shift+Tab")
    expect(page.locator("#happened")).to_have_text(focused(page))
    press(page, "Tab")
    for key, step in [("", 0), ("ArrowRight", 8), ("End", 400), (",", 8), (",", 0), (",", 0), (".", 8)]:
        press(page, *filter(None, [key]))
        assert place() == f"step {step}", key
    assert page.locator("#frame").get_attribute("aria-valuetext").startswith("step 8, loss ")
    press(page, " ")  # from here to the end, where it stops
    expect(page.locator("#play")).to_have_text("Play")
    assert place() == "step 400"
    page.locator("#play").focus()
    press(page, " ", " ")  # begins again, and pauses
    expect(page.locator("#play")).to_have_text("Play")
    assert place() in ("step 0", "step 8")
    assert_accessible(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
