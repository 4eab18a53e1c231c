"""The atlas of a source and its target in a real browser: the kinds of attention, and the alignment as lines."""

import re

import pytest
import torch
from playwright.sync_api import expect

from analysis.atlas_pages import (
    PAIR_ADDRESSES,
    PAIR_KINDS,
    PAIR_MAPS,
    PAIR_MEASURES,
    ROUNDING,
    SOURCE,
    TARGET,
    drawn_lines,
    shown_labels,
    shown_rows,
    token,
)
from tinyformer.analysis import Axes

CROSS = PAIR_MAPS[3]


@pytest.fixture
def pair(open_atlas):
    return open_atlas(PAIR_MAPS, PAIR_KINDS, PAIR_MEASURES, addresses=PAIR_ADDRESSES)


def open_cross_head(page, head=1):
    page.locator(".thumbnail").nth(head).click()
    page.mouse.move(2, 2)  # a token under the pointer would show its lines alone
    expect(page.locator("#head-title")).to_have_text(f"Cross layer 0 head {head}")


def test_the_overview_shows_the_heads_of_the_chosen_kind_and_their_measures(pair):
    assert pair.locator("#texts .text").all_inner_texts() == ["12␣mai␣7<eos>", "7-5-12<eos>"]
    extent = "8 heads (4 encoder, 2 decoder, 2 cross), 9 source tokens, 7 target tokens"
    expect(pair.locator("#extent")).to_have_text(extent)
    expect(pair.get_by_role("radio", name="cross")).to_be_checked()
    heads = ["layer 0 head 0", "layer 0 head 1"]
    for kind, shown, measure, size in (
        ("cross", heads, "coverage", (9, 7)),
        ("encoder", [*heads, "layer 1 head 0", "layer 1 head 1"], "distance", (9, 9)),
        ("decoder", heads, "distance", (7, 7)),
    ):
        pair.get_by_role("radio", name=kind).check()
        assert shown_labels(pair) == shown
        assert pair.locator("#measure option").all_text_contents() == ["entropy", measure]
        canvas = pair.locator(".thumbnail canvas").first
        expect(canvas).to_have_attribute("width", str(size[0]))
        expect(canvas).to_have_attribute("height", str(size[1]))
    # A measure that both kinds have stays chosen, and so does the order.
    pair.get_by_label("Order").select_option("largest")
    values = pair.locator(".thumbnail .value").evaluate_all("all => all.map((one) => one.lastChild.textContent)")
    assert values == ["6.000", "5.000"]


def test_lines_join_the_tokens_of_the_larger_weights_and_are_as_opaque_as_the_map(pair):
    open_cross_head(pair)
    assert pair.locator("#source button").all_inner_texts() == [one.replace(" ", "␣") for one in SOURCE]
    assert pair.locator("#target button").all_inner_texts() == TARGET
    expected = {
        (query, key): float(CROSS[1][query, key]) ** 0.5
        for query in range(len(TARGET))
        for key in range(len(SOURCE))
        if CROSS[1][query, key] >= 1 / len(SOURCE)
    }
    assert drawn_lines(pair) == pytest.approx(expected, abs=1e-4)
    pair.get_by_role("button", name="Previous").click()
    expect(pair.locator("#head-title")).to_have_text("Cross layer 0 head 0")
    assert drawn_lines(pair).keys() != expected.keys()


def test_a_token_shows_its_own_lines_and_their_numbers(pair):
    open_cross_head(pair)
    pair.locator("#target button").nth(1).hover()
    weights = CROSS[1][1]
    best = int(weights.argmax())
    title = f"Target token {token(1, TARGET)} attends to"
    first = f"{title}: source token {token(best, SOURCE)} {float(weights[best]):.4f}, "
    expect(pair.locator("#aligned")).to_have_text(re.compile(re.escape(first)))
    expect(pair.locator("#token-title")).to_have_text(title)
    for index, value in shown_rows(pair).items():
        assert value == pytest.approx(float(weights[index]), abs=ROUNDING)
    expected = {(1, key): float(weight) ** 0.5 for key, weight in enumerate(weights) if weight >= 1 / 255}
    assert min(expected.values()) < len(SOURCE) ** -0.5  # its smaller weights, too, and no line of another token
    assert drawn_lines(pair) == pytest.approx(expected, abs=1e-3)
    shades = "all => all.map((one) => Number(one.style.getPropertyValue('--weight')))"
    assert pair.locator("#source button").evaluate_all(shades) == pytest.approx(weights.sqrt().tolist(), abs=1e-3)
    # A source token shows the target tokens that attend to it; without the pointer all lines are shown again.
    pair.locator("#source button").nth(4).hover()
    expect(pair.locator("#token-title")).to_have_text(f"Source token {token(4, SOURCE)} is attended to by")
    pair.mouse.move(2, 2)
    assert max(drawn_lines(pair).values()) == pytest.approx(float(CROSS[1].max()) ** 0.5, abs=1e-4)
    assert len({query for query, _ in drawn_lines(pair)}) == len(TARGET)


def test_a_line_at_the_pointer_shows_its_number(pair):
    open_cross_head(pair)
    query, key = divmod(int(CROSS[1].argmax()), len(SOURCE))
    places = [pair.locator(f"#{row} button").nth(at).bounding_box() for row, at in (("source", key), ("target", query))]
    middles = [place["x"] + place["width"] / 2 for place in places]
    box = pair.locator("#lines").bounding_box()
    pair.mouse.move(0.75 * middles[0] + 0.25 * middles[1], box["y"] + 0.25 * box["height"])
    words = f"target {token(query, TARGET)} → source {token(key, SOURCE)}: {float(CROSS[1].max()):.4f}"
    for place in ("#aligned", "#cell"):
        expect(pair.locator(place)).to_have_text(words)


def test_the_alignment_works_by_keyboard(pair):
    def press(*keys):
        for key in keys:
            pair.keyboard.press(key)
            assert pair.evaluate("getComputedStyle(document.activeElement).outlineStyle !== 'none'") or key == "Enter"

    press("Tab", "Tab", "Tab", "ArrowLeft")
    expect(pair.get_by_role("radio", name="decoder")).to_be_checked()
    press("ArrowRight", "Tab", "Tab", "Tab", "ArrowRight", "Enter")
    expect(pair.locator("#head-title")).to_have_text("Cross layer 0 head 1")
    press("Tab", "Tab", "Tab", "Tab", "Tab", "Tab", "ArrowRight")
    expect(pair.locator("#aligned")).to_contain_text(f"Source token {token(1, SOURCE)} is attended to by: target token")
    press("Tab", "End", "ArrowLeft")
    expect(pair.locator("#aligned")).to_contain_text(f"Target token {token(5, TARGET)} attends to: source token")
    expect(pair.locator("#target button").nth(5)).to_be_focused()
    press("Tab")
    expect(pair.locator("#aligned")).to_contain_text("Point at a token")
    press("Tab", "Home", "Escape")
    expect(pair.get_by_role("button", name="layer 0 head 1")).to_be_focused()


@pytest.mark.parametrize(("tokens", "gap"), [(["En", "el", "principio"], True), (["En", "␣el", "␣principio"], False)])
def test_words_are_apart_where_tokens_hold_no_spaces(open_atlas, tokens, gap):
    kinds = dict.fromkeys(["encoder", "cross"], Axes(tokens, tokens))
    page = open_atlas([PAIR_MAPS[0][:, :3, :3] / 2] * 2, kinds, {}, addresses=[("encoder", 0), ("cross", 0)])
    for place in ("#texts", "#strip"):
        if place == "#strip":
            page.get_by_role("radio", name="encoder").check()
            page.locator(".thumbnail").first.click()
        boxes = [page.locator(f"{place} bdi").nth(index).bounding_box() for index in (0, 1)]
        assert (boxes[1]["x"] - boxes[0]["x"] - boxes[0]["width"] > 3) is gap


def test_an_address_opens_its_kind_and_other_kinds_have_no_alignment(open_atlas):
    options = {"addresses": PAIR_ADDRESSES, "fragment": "#encoder-layer-1-head-0"}
    page = open_atlas(PAIR_MAPS, PAIR_KINDS, PAIR_MEASURES, **options)
    expect(page.locator("#head-title")).to_have_text("Encoder layer 1 head 0")
    expect(page.locator("#alignment")).to_be_hidden()
    expect(page.locator("#strip")).to_have_text("".join(SOURCE).replace(" ", "␣"))
    page.get_by_role("button", name="Next").click()
    page.get_by_role("button", name="Next").click()  # round the heads of this kind
    expect(page.locator("#head-title")).to_have_text("Encoder layer 0 head 0")
    page.get_by_role("button", name="All heads").click()
    expect(page.get_by_role("radio", name="encoder")).to_be_checked()


def test_an_even_head_shows_all_of_its_lines_faintly(open_atlas):
    kinds = {"encoder": PAIR_KINDS["encoder"], "cross": PAIR_KINDS["cross"]}
    even = torch.full((1, len(TARGET), len(SOURCE)), 1 / len(SOURCE))
    page = open_atlas([PAIR_MAPS[0], even], kinds, {}, addresses=[("encoder", 0), ("cross", 0)])
    open_cross_head(page, 0)
    assert list(drawn_lines(page).values()) == pytest.approx([len(SOURCE) ** -0.5] * even.numel(), abs=1e-4)
    expect(page.locator("#alignment")).to_contain_text(f"at least 1 / {len(SOURCE)}, an even spread")


def test_a_chosen_token_scrolls_to_its_strongest_partner_and_stays_selected(open_atlas):
    sides = [[f"{letter}{number}" for number in range(100)] for letter in "st"]
    backwards = torch.eye(100).flip(0).unsqueeze(0)  # the first target token attends to the last source token
    kinds = {"encoder": Axes(sides[0], sides[0]), "cross": Axes(sides[1], sides[0])}
    page = open_atlas([backwards, backwards], kinds, {}, addresses=[("encoder", 0), ("cross", 0)])
    open_cross_head(page, 0)
    token_5, partner = page.locator("#target button").nth(5), page.locator("#source button").nth(94)
    token_5.hover()
    expect(partner).not_to_be_in_viewport()
    page.keyboard.press("Tab")
    token_5.click()
    expect(partner).to_be_in_viewport()
    page.mouse.move(300, page.locator("#target").bounding_box()["y"] + 8)  # over another token
    page.mouse.move(320, page.locator("#target").bounding_box()["y"] + 8)
    expect(page.locator("#token-title")).to_have_text(f"Target token {token(5, sides[1])} attends to")
    # By keyboard the token with the focus stays in view, and its partner comes into view where both have room.
    page.locator("#target button").nth(5).focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#target button").nth(6)).to_be_in_viewport()
    page.locator("#target button").nth(64).focus()
    for one in (page.locator("#target button").nth(64), page.locator("#source button").nth(35)):
        expect(one).to_be_in_viewport(ratio=1)
