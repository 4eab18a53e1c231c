"""The atlas: what its file holds, and what its page shows in a real browser, is what the tensors hold."""

import base64
import math
import random
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from playwright.sync_api import expect
from programs import ROOT

from analysis.atlas_pages import (
    HALF_STEP,
    LABELS,
    MAPS,
    MEASURES,
    NAMES,
    SHOWN,
    SORTED,
    TOKENS,
    assert_colours,
    assert_shown,
    flat,
    random_maps,
    shown_labels,
    shown_rows,
    stored,
    token,
)
from tinyformer.analysis import write_atlas

# The file.


def test_weights_are_stored_to_half_of_a_65535th(tmp_path):
    path = write_atlas(tmp_path / "new" / "folder" / "atlas.html", MAPS, TOKENS, MEASURES, NAMES)
    heads = stored(path)["heads"]
    assert [(head["layer"], head["name"]) for head in heads] == [(i, n) for i, row in enumerate(NAMES) for n in row]
    for head, weights in zip(heads, flat(MAPS), strict=True):
        levels = np.frombuffer(base64.b64decode(head["weights"]), "<u2").reshape(weights.shape)
        assert np.abs(levels / 65535 - weights.double().numpy()).max() <= HALF_STEP * 1.01


def test_half_precision_maps_are_stored(tmp_path):
    maps = [layer.bfloat16() for layer in MAPS]
    heads = stored(write_atlas(tmp_path / "atlas.html", maps, TOKENS, {}))["heads"]
    levels = np.frombuffer(base64.b64decode(heads[0]["weights"]), "<u2").reshape(maps[0][0].shape)
    assert np.abs(levels / 65535 - maps[0][0].float().numpy()).max() <= HALF_STEP * 1.01


def test_twelve_layers_of_twelve_heads_are_small_enough(tmp_path):
    path = write_atlas(tmp_path / "atlas.html", random_maps([12] * 12, 64), ["a"] * 64, {})
    assert path.stat().st_size < 5_000_000


def test_what_nobody_would_see_is_made_visible(tmp_path):
    tokens = [" ", "\n", "\t", "a b", "\x00", "\u202e", "\ud800", "", "é", "漢", "🙂", "·⏎"]
    data = stored(write_atlas(tmp_path / "atlas.html", random_maps([1], 12), tokens, {}))
    assert data["tokens"] == ["␣", "⏎", "⇥", "a␣b", r"\x00", r"\u202e", r"\ud800", "∅", "é", "漢", "🙂", "·⏎"]


WRONG = {
    "no token": ({"maps": MAPS, "tokens": []}, "a head and a token"),
    "no head": ({"maps": [MAPS[0][:0]]}, "a head and a token"),
    "too few tokens": ({"tokens": TOKENS[1:]}, r"maps\[0\] is \[2, 19, 19\]; for 18 tokens each map is \[18, 18\]"),
    "scores": ({"maps": [MAPS[0], MAPS[1] * 3, MAPS[2]]}, r"maps\[1\] holds numbers that are no attention weights"),
    "negative": ({"maps": [MAPS[0], MAPS[1] - 0.1, MAPS[2]]}, r"maps\[1\] holds numbers"),
    "NaN": ({"maps": [MAPS[0], MAPS[1] * math.nan, MAPS[2]]}, r"maps\[1\] holds numbers"),
    "a measure's heads": ({"measures": {"m": [[1.0], [1.0] * 3, [1.0]]}}, r"measures\['m'\] holds \[1, 3, 1\]"),
    "a measure's layers": ({"measures": {"m": [[1.0, 1.0]]}}, r"measures\['m'\] holds \[2\]"),
    "names": ({"names": NAMES[:2]}, r"names holds \[2, 3\] for the layers, whose maps are \[2, 3, 1\]"),
    "one name twice": ({"names": [["0", "0"], *NAMES[1:]]}, r"names\[0\]=\['0', '0'\]: two maps"),
}


@pytest.mark.parametrize(("changed", "sentence"), WRONG.values(), ids=WRONG)
def test_parts_that_do_not_fit_are_refused(tmp_path, changed, sentence):
    with pytest.raises(ValueError, match=sentence):
        write_atlas(tmp_path / "atlas.html", **{"maps": MAPS, "tokens": TOKENS, "measures": {}} | changed)
    assert not (tmp_path / "atlas.html").exists()


@pytest.mark.slow
def test_an_installed_wheel_writes_it_too(tmp_path):
    source = tmp_path / "source"  # for building leaves files behind
    shutil.copytree(ROOT / "tinyformer", source / "tinyformer", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", tmp_path / "site", wheel], check=True)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "import torch, tinyformer\n"
        "from tinyformer.analysis.atlas import write_atlas\n"
        "write_atlas('atlas.html', [torch.ones(1, 1, 1)], ['a'], {})\n"
        "print(tinyformer.__file__)"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert ran.stdout.startswith(str(tmp_path / "site"))
    here = write_atlas(tmp_path / "here.html", [torch.ones(1, 1, 1)], ["a"], {})
    assert (tmp_path / "atlas.html").read_bytes() == here.read_bytes()


# The overview.


def test_every_head_has_a_thumbnail_of_its_own_map(atlas):
    assert shown_labels(atlas) == LABELS
    for index, weights in enumerate(flat(MAPS)):
        assert_colours(atlas.locator(".thumbnail canvas").nth(index), weights)
    rows = atlas.locator(".layer").all()
    assert [row.locator("button").count() for row in rows] == [2, 3, 1]
    expect(atlas.get_by_role("button", name="layer 1 head 0b entropy 1.000")).to_be_visible()
    expect(atlas.locator("#measure-description")).to_have_text("Of a row, in nats.")


def test_heads_stand_in_the_order_of_the_measure(atlas):
    words = {
        "entropy": ["2.500", "0.125", "1.000", "1.000", "0.000", "3.750"],
        "importance": ["−0.500", "not defined", "4.00e−4", "not defined", "−2.000", "1.23e+4"],
    }
    for (measure, order), heads in SORTED.items():
        atlas.get_by_label("Measure", exact=True).select_option(measure)
        atlas.get_by_label("Order").select_option(order)
        assert shown_labels(atlas) == [LABELS[head] for head in heads]
        numbers = atlas.locator(".thumbnail .value").evaluate_all("all => all.map((one) => one.lastChild.textContent)")
        assert numbers == [words[measure][head] for head in heads]
        expect(atlas.locator("#sorted")).to_have_text(re.compile(f"{measure}, {order} first"))
    atlas.get_by_label("Order").select_option("layers")
    assert shown_labels(atlas) == LABELS


def test_a_layer_may_have_lost_all_its_heads(open_atlas):
    page = open_atlas([MAPS[0], MAPS[1][:0], MAPS[2]], measures={"m": [[2.0, 3.0], [], [1.0]]})
    expect(page.locator("#extent")).to_have_text("3 layers, 3 heads, 19 tokens")
    assert shown_labels(page) == ["layer 0 head 0", "layer 0 head 1", "layer 2 head 0"]


def test_without_measures_there_is_nothing_to_sort_by(open_atlas):
    page = open_atlas(measures={})
    expect(page.get_by_label("Order")).to_be_hidden()
    assert shown_labels(page)[2] == "layer 1 head 0"
    page.locator(".thumbnail").first.click()
    expect(page.get_by_text("Measures of this head")).to_be_hidden()


# One head.


@pytest.mark.parametrize("index", [0, 3, 5])
def test_a_thumbnail_opens_its_map(atlas, index):
    atlas.locator(".thumbnail").nth(index).click()
    expect(atlas.get_by_role("heading", level=2)).to_have_text(LABELS[index].capitalize())
    assert_colours(atlas.locator("#map"), flat(MAPS)[index])
    assert atlas.title() == f"{LABELS[index]} · A cat"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_is_pointed_at_is_what_the_tensor_holds(atlas, seed):
    chance = random.Random(seed)
    head = chance.randrange(len(LABELS))
    weights = flat(MAPS)[head]
    atlas.locator(".thumbnail").nth(head).click()
    for query in chance.sample(range(2, len(TOKENS)), 3):
        atlas.locator("#queries button").nth(query).hover()
        assert_shown(atlas, weights[query], f"Token {token(query)} attends to", "keys")
    for key in chance.sample(range(len(TOKENS) - 2), 3):
        atlas.locator("#keys button").nth(key).hover()
        assert_shown(atlas, weights[:, key], f"Token {token(key)} is attended to by", "queries")
    cell = atlas.locator("#map").bounding_box()["width"] / len(TOKENS)
    for _ in range(3):
        query, key = chance.randrange(len(TOKENS)), chance.randrange(len(TOKENS))
        atlas.locator("#cells").hover(position={"x": (key + 0.5) * cell, "y": (query + 0.5) * cell})
        words, value = atlas.locator("#cell").inner_text().rsplit(" ", 1)
        assert words == f"query {token(query)} → key {token(key)}:"
        assert float(value) == pytest.approx(weights[query, key].item(), abs=SHOWN)


def test_all_weights_of_a_token_can_be_had(atlas):
    atlas.locator(".thumbnail").first.click()
    atlas.locator("#queries button").nth(3).hover()
    assert len(shown_rows(atlas)) <= 4  # a causal map has no more
    atlas.get_by_role("button", name="Show all 19").click()
    rows = shown_rows(atlas)
    assert [rows[key] for key in range(19)] == pytest.approx(MAPS[0][0][3].tolist(), abs=SHOWN)


def test_measures_of_a_head_have_a_rank(atlas):
    atlas.locator(".thumbnail").nth(2).click()
    expect(atlas.locator("#measures tr")).to_have_count(2)
    rows = [row.inner_text().rstrip().split("\t") for row in atlas.locator("#measures tr").all()]
    assert [row[1:] for row in rows] == [["1.000", "3 of 6"], ["4.00e−4", "2 of 4"]]
    assert rows[0][0].strip().split("\n") == ["entropy", "Of a row, in nats."]


def test_a_token_stays_chosen_from_head_to_head(atlas):
    atlas.locator(".thumbnail").first.click()
    atlas.locator("#keys button").nth(2).hover()
    atlas.get_by_role("button", name="Next").click()
    assert_shown(atlas, MAPS[0][1][:, 2], f"Token {token(2)} is attended to by", "queries")


# Small and large.


def test_one_head_on_one_token(open_atlas):
    page = open_atlas([torch.ones(1, 1, 1)], ["a"], {"entropy": [[0.0]]})
    expect(page.locator("#extent")).to_have_text("1 layer, 1 head, 1 token")
    page.keyboard.press("Tab")
    page.locator(".thumbnail").press("ArrowDown")
    page.locator(".thumbnail").press("Enter")
    assert shown_rows(page) == {0: 1.0}
    page.get_by_role("button", name="Next").click()
    page.keyboard.press("Escape")
    expect(page.locator(".thumbnail")).to_be_focused()


def test_a_row_without_weights_attends_to_nothing(open_atlas):
    """As where a mask hides every key, or a sink takes all."""
    page = open_atlas([torch.zeros(1, 2, 2)], ["a", "b"], {})
    page.locator(".thumbnail").click()
    expect(page.locator("#sentence")).to_have_text(f"Token {token(1, 'ab')} attends to: no token.")


def test_144_heads_open_at_once_and_follow_the_pointer(open_atlas):
    maps = random_maps([12] * 12, 64)
    page = open_atlas(
        maps, [f"t{i}" for i in range(64)], {"first": [layer[:, :, 0].mean(1).tolist() for layer in maps]}
    )
    assert page.locator(".thumbnail").count() == 144
    opened = page.evaluate("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd")
    page.locator(".thumbnail").last.scroll_into_view_if_needed()
    assert_colours(page.locator(".thumbnail canvas").last, maps[11][11])
    page.locator(".thumbnail").last.click()
    hover = page.evaluate("""() => {
        const labels = [...document.querySelectorAll(".token")];
        const start = performance.now();
        for (const label of labels) {
            label.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
            label.getBoundingClientRect(); // the layout too
        }
        return (performance.now() - start) / labels.length;
    }""")
    print(f"opened in {opened:.0f} ms, a hover takes {hover:.1f} ms")
    assert opened < 3000
    assert hover < 40
