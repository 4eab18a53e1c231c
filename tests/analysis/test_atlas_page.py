"""The page of an atlas in a real browser: by pointer, by keyboard, in both themes, with hostile text."""

import math
import re

import pytest
import torch
from playwright.sync_api import expect

from analysis.atlas_pages import (
    HEADS,
    LABELS,
    MAPS,
    MEASURES,
    NAMES,
    PAIR_ADDRESSES,
    PAIR_KINDS,
    PAIR_MAPS,
    PAIR_MEASURES,
    ROUNDING,
    SORTED,
    TOKENS,
    assert_accessible,
    assert_colours,
    assert_shown,
    drawn_lines,
    random_maps,
    shown_labels,
    shown_rows,
    stored,
    token,
)
from tinyformer.analysis import Axes, write_atlas


def test_the_overview_shows_all_heads_in_the_chosen_order(atlas):
    assert shown_labels(atlas) == LABELS
    for index, weights in enumerate(HEADS):
        assert_colours(atlas.locator(".thumbnail canvas").nth(index), weights)
    shown = {
        "entropy": ["2.500", "0.125", "1.000", "1.000", "0.000", "3.750"],
        "importance": ["−0.500", "not defined", "4.00e−4", "not defined", "−2.000", "1.23e+4"],
    }
    for (measure, order), heads in SORTED.items():
        atlas.get_by_label("Measure", exact=True).select_option(measure)
        atlas.get_by_label("Order").select_option(order)
        assert shown_labels(atlas) == [LABELS[head] for head in heads]
        numbers = atlas.locator(".thumbnail .value").evaluate_all("all => all.map((one) => one.lastChild.textContent)")
        assert numbers == [shown[measure][head] for head in heads]
        expect(atlas.locator("#sorted")).to_have_text(re.compile(f"{measure}, {order} first"))
    atlas.get_by_label("Order").select_option("layers")
    assert shown_labels(atlas) == LABELS
    # The legend marks each weight at the place of its colour, the square root.
    box = atlas.locator("#legend").bounding_box()
    for mark in atlas.locator("#legend span").all()[1:]:
        place = mark.bounding_box()
        at = (place["x"] + place["width"] / 2 - box["x"]) / box["width"]
        assert at == pytest.approx(math.sqrt(float(mark.inner_text())), abs=0.01)


def test_a_head_shows_the_weights_at_the_pointer(atlas):
    for head, queries, keys in ((3, (2, 11, 18), (0, 9)), (5, (7,), (4,))):
        weights = HEADS[head]
        atlas.locator(".thumbnail").nth(head).click()
        expect(atlas).to_have_title(f"{LABELS[head]} · A cat")  # set when the address has changed, after the click
        for query in queries:
            atlas.locator("#queries button").nth(query).hover()
            assert_shown(atlas, weights[query], f"Token {token(query)} attends to", "keys")
        for key in keys:
            atlas.locator("#keys button").nth(key).hover()
            assert_shown(atlas, weights[:, key], f"Token {token(key)} is attended to by", "queries")
        cell = atlas.locator("#map").bounding_box()["width"] / len(TOKENS)
        for query, key in ((12, 3), (18, 18), (1, 5)):
            atlas.locator("#cells").hover(position={"x": (key + 0.5) * cell, "y": (query + 0.5) * cell})
            words, value = atlas.locator("#cell").inner_text().rsplit(" ", 1)
            assert words == f"query {token(query)} → key {token(key)}:"
            assert float(value) == pytest.approx(weights[query, key].item(), abs=ROUNDING)
        atlas.go_back()
    # The map shows the head that is open now, and the selected token stays selected from head to head.
    atlas.locator(".thumbnail").first.click()
    atlas.locator("#keys button").nth(2).hover()
    atlas.get_by_role("button", name="Next").click()
    assert_colours(atlas.locator("#map"), MAPS[0][1])  # once: browsers warn about repeated reads of a canvas
    assert_shown(atlas, MAPS[0][1][:, 2], f"Token {token(2)} is attended to by", "queries")
    # Measures with their rank among all heads.
    atlas.get_by_role("button", name="Next").click()
    atlas.locator("#measures tr", has_text="1.000").wait_for()  # the page opens a head when its address has changed
    rows = [row.inner_text().rstrip().split("\t") for row in atlas.locator("#measures tr").all()]
    assert [row[1:] for row in rows] == [["1.000", "3 of 6"], ["4.00e−4", "2 of 4"]]


def focused(page):
    return page.evaluate("document.activeElement.ariaLabel ?? document.activeElement.innerText").replace("\n", " ")


def test_the_whole_page_works_by_keyboard(atlas):
    def press(*keys):
        for key in keys:
            atlas.keyboard.press(key)
        has_outline = atlas.evaluate("getComputedStyle(document.activeElement).outlineStyle !== 'none'")
        assert has_outline, focused(atlas)

    press("Tab", "Tab", "Tab", "ArrowDown")
    expect(atlas.get_by_label("Measure", exact=True)).to_have_value("importance")
    press("Tab", "Tab", "ArrowRight", "ArrowDown", "ArrowDown")  # the last layer has one head only
    assert focused(atlas).startswith("layer 2 head 0")
    press("Home", "End", "ArrowUp", "ArrowRight")
    assert focused(atlas).startswith("layer 1 head 0b")
    press("Enter")
    expect(atlas.locator("#head-title")).to_be_focused()
    press("ArrowUp", "ArrowRight", "ArrowRight")  # from the title into the map
    expect(atlas.locator("#cells")).to_be_focused()
    words = f"query {token(len(TOKENS) - 2)} → key {token(2)}: "
    expect(atlas.locator("#cell")).to_have_text(f"{words}{MAPS[1][1][len(TOKENS) - 2, 2]:.4f}")
    atlas.locator("#head-title").focus()
    press("Tab", "Tab", "Tab", "Tab", "Tab", "Tab", "Home", "ArrowRight")
    assert focused(atlas) == f"token {token(1)}"
    expect(atlas.locator("#token-title")).to_have_text(f"Token {token(1)} is attended to by")
    press("Tab", "Home", "ArrowDown", "ArrowDown")
    assert_shown(atlas, MAPS[1][1][2], f"Token {token(2)} attends to", "keys")
    press("Tab")
    atlas.locator("#queries button").nth(11).hover()
    expect(atlas.locator("#all-weights")).to_have_text("Show all 12")  # the mask hides the tokens that follow
    press("Tab", "Enter")
    assert sorted(shown_rows(atlas)) == list(range(12))
    press("Escape")
    expect(atlas.get_by_role("button", name="layer 1 head 0b")).to_be_focused()


def test_navigation_between_heads_and_in_the_history(atlas):
    atlas.get_by_label("Order").select_option("largest")
    order = [LABELS[head].capitalize() for head in SORTED["entropy", "largest"]]
    atlas.locator(".thumbnail").first.click()
    for label in [*order, order[0]]:  # in the order of the overview, and round
        expect(atlas.locator("#head-title")).to_have_text(label)
        atlas.get_by_role("button", name="Next").click()
    assert atlas.url.endswith("#layer-0-head-0")
    atlas.go_back()
    expect(atlas.locator("#overview")).to_be_visible()
    atlas.go_forward()
    expect(atlas.locator("#head-title")).to_have_text("Layer 0 head 0")


@pytest.mark.parametrize(
    ("pair", "scheme", "width"), [(False, "dark", 400), (True, "light", 390), (True, "dark", 1280)]
)
def test_the_page_is_accessible_in_both_themes(open_atlas, pair, scheme, width):
    maps = (PAIR_MAPS, PAIR_KINDS, PAIR_MEASURES) if pair else ()
    page = open_atlas(
        *maps, **({"addresses": PAIR_ADDRESSES} if pair else {"names": NAMES}), scheme=scheme, width=width
    )
    page.get_by_label("Order").select_option("largest")
    assert_accessible(page)
    for dark in (scheme == "dark", scheme != "dark", scheme == "dark"):
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 3 * 128) == dark
        page.get_by_role("button", name=f"Switch to {'light' if dark else 'dark'} theme").click()
    page.locator(".thumbnail").first.click()
    if pair:
        page.locator("#target button").nth(1).hover()
    else:
        page.get_by_label("Compare with").select_option("layer 0 head 1")
        page.get_by_label("Hide the first token").check()
        page.get_by_role("radio", name="map and lines").check()
        page.locator("#queries button").nth(9).hover()
        page.locator("#cells").focus()
    assert_accessible(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if not pair:
        expect(page.locator("#scrolls")).to_be_visible()


def test_the_first_token_is_left_out_on_demand(atlas):
    """Each row keeps its sum."""
    atlas.locator(".thumbnail").first.click()
    expect(atlas.locator("#hidden-first")).to_be_hidden()
    atlas.get_by_label("Hide the first token").check()
    expect(atlas.locator("#hidden-first")).to_contain_text("The weights on the first key are left out.")
    without = [torch.cat([torch.zeros(len(TOKENS), 1), weights[:, 1:]], 1) for weights in HEADS[:2]]
    without = [rest * (1 / rest.sum(-1, keepdim=True).clamp(min=1e-9)) for rest in without]
    for query in (7, 0):  # the first query sees no other key
        atlas.locator("#queries button").nth(query).hover()
        assert 0 not in shown_rows(atlas)
        for key, value in shown_rows(atlas).items():
            assert value == pytest.approx(float(without[0][query, key]), abs=1e-3)
    assert_colours(atlas.locator("#map"), without[0])
    atlas.get_by_role("button", name="All heads").click()
    assert_colours(atlas.locator(".thumbnail canvas").nth(1), without[1])


def test_a_second_head_is_shown_beside_the_first(atlas):
    atlas.locator(".thumbnail").nth(2).click()
    expect(atlas.locator("#other-map")).to_be_hidden()
    atlas.get_by_label("Compare with").select_option("layer 1 head 1")
    assert_colours(atlas.locator("#other-map"), HEADS[4])
    one, other = (atlas.locator(place).bounding_box() for place in ("#map", "#other-map"))
    assert [one[key] for key in ("y", "width", "height")] == [other[key] for key in ("y", "width", "height")]
    cell = one["width"] / len(TOKENS)
    atlas.locator("#other-cells").hover(position={"x": 3.5 * cell, "y": 12.5 * cell})
    values = [f"{HEADS[head][12, 3]:.4f}" for head in (2, 4)]
    words = f"query {token(12)} → key {token(3)}: {values[0]}, layer 1 head 1: {values[1]}"
    expect(atlas.locator("#cell")).to_have_text(words)
    atlas.locator("#queries button").nth(12).hover()
    for row in atlas.locator("#weights tr").all():
        key, value = int(row.locator(".index").inner_text()), row.locator(".other").inner_text()
        assert float(value) == pytest.approx(float(HEADS[4][12, key]), abs=ROUNDING)
    assert atlas.locator("#measures .other").all_inner_texts() == ["0.000", "−2.000"]
    # It stays beside the next head.
    atlas.get_by_role("button", name="Next").click()
    expect(atlas.locator("#map-title")).to_have_text("Layer 1 head 0b")
    expect(atlas.locator("#other-title")).to_have_text("Layer 1 head 1")
    atlas.get_by_label("Compare with").select_option("no head")
    expect(atlas.locator("#other-map")).to_be_hidden()


def test_lines_join_queries_on_the_left_with_keys_on_the_right(atlas):
    atlas.locator(".thumbnail").nth(1).click()
    atlas.get_by_role("radio", name="lines", exact=True).check()
    expect(atlas.locator("#map")).to_be_hidden()
    strong = (HEADS[1] >= 1 / len(TOKENS)).sum()
    assert atlas.locator("#lines line").count() == int(strong)
    # The arrow keys lead from the title to the tokens, whose own lines are shown.
    atlas.locator("#head-title").focus()
    atlas.keyboard.press("ArrowUp")
    query = len(TOKENS) - 2
    expect(atlas.locator("#target button").nth(query)).to_be_focused()
    expected = {(query, key): float(weight) ** 0.5 for key, weight in enumerate(HEADS[1][query]) if weight >= 1 / 255}
    assert drawn_lines(atlas, vertical=True) == pytest.approx(expected, abs=1e-3)
    # The lines of a second head have another colour.
    atlas.get_by_label("Compare with").focus()
    atlas.get_by_label("Compare with").select_option("layer 0 head 0")
    both = int((HEADS[0] >= 1 / len(TOKENS)).sum()) + int(strong)
    expect(atlas.locator("#lines line")).to_have_count(both)
    colours = atlas.locator("#lines line").evaluate_all("all => all.map((one) => getComputedStyle(one).stroke)")
    assert len(set(colours)) == 2


def test_the_page_says_what_it_shows(open_atlas):
    facts = {"checkpoint": "run/<b>last</b>.ckpt", "step": "2,000"}
    ablated = [[name == "0b" for name in layer] for layer in NAMES]
    labels = [["previous token" if name == "1" else "" for name in layer] for layer in NAMES]
    page = open_atlas(names=NAMES, facts=facts, ablated=ablated, labels=labels)
    expect(page.locator("#facts")).to_have_text("checkpoint run/<b>last</b>.ckptstep 2,000")
    notes = page.locator(".thumbnail").evaluate_all("all => all.map((one) => one.querySelector('.note')?.textContent)")
    assert notes == [None, "previous token", None, "ablated", "previous token", None]
    page.locator(".thumbnail").nth(3).click()
    expect(page.locator("#head-notes")).to_have_text("ablated: its output is replaced")
    page.get_by_role("button", name="Next").click()
    expect(page.locator("#head-notes")).to_have_text("previous token")


HOSTILE = ["</script><script>document.title='broken'</script>", "<b>bold</b>", "<!--", "\"'`$title${1+1}", "&lt;&amp;"]
HOSTILE += ["<img src=x onerror=\"document.title='broken'\">", "👩‍🚀🙂", "שלום", "\u202egnorw", "\ud83d", "", "\r\n"]


@pytest.mark.parametrize("pair", [False, True])
def test_hostile_tokens_names_and_titles_are_shown_as_text(open_atlas, tmp_path, pair):
    name = "</script><i>'\""
    title = "</title><script>document.title='broken'</script>"
    maps = random_maps([1], len(HOSTILE))
    tokens, places, head = HOSTILE, ("queries", "keys", "strip"), "Layer 0"
    options = {"names": [["#<b> %"]], "title": title, "descriptions": {name: name}}
    if pair:
        maps, tokens = maps * 2, dict.fromkeys(["encoder", "cross"], Axes(HOSTILE, HOSTILE))
        places, head = ("queries", "keys", "source", "target"), "Cross layer 0"
        options |= {"names": [["#<b> %"]] * 2, "addresses": [("encoder", 0), ("cross", 0)]}
    page = open_atlas(maps, tokens, {name: [[1.0]] * len(maps)}, **options)
    assert page.title() == title
    assert page.locator("b, i, img").count() == 0
    page.locator(".thumbnail").click()
    expect(page.locator("#head-title")).to_have_text(f"{head} head #<b> %")
    shown = stored(tmp_path / "atlas.html")["kinds"][0]["keys"]
    for place in places:
        cells = page.locator(f"#{place} {'bdi' if place == 'strip' else 'button'}")
        assert cells.evaluate_all("all => all.map((one) => one.textContent)") == shown
    page.reload()
    expect(page.locator("#head-title")).to_have_text(f"{head} head #<b> %")


def test_the_policy_forbids_everything_that_the_page_does_not_need(tmp_path, browser):
    path = write_atlas(tmp_path / "atlas.html", MAPS, TOKENS, MEASURES)
    page = browser.new_page()
    page.goto(path.as_uri())
    blocked = page.evaluate("""async () => {
        const blocked = [];
        addEventListener("securitypolicyviolation", (event) => blocked.push(event.effectiveDirective));
        const add = (tag, attributes) => document.body.append(Object.assign(document.createElement(tag), attributes));
        await fetch("http://127.0.0.1:9/").catch(() => {});
        add("img", { src: "http://127.0.0.1:9/a.png" });
        add("script", { textContent: "document.title = 'broken'" });
        add("style", { textContent: "body { display: none }" });
        add("iframe", { src: "http://127.0.0.1:9/" });
        const rest = () => new Promise((resolve) => setTimeout(resolve, 100));
        for (let waited = 0; blocked.length < 5 && waited < 30; waited++) await rest(); // a busy machine takes longer
        await rest();
        return blocked.sort();
    }""")
    assert blocked == ["connect-src", "frame-src", "img-src", "script-src-elem", "style-src-elem"]
    assert page.title() == "Attention atlas"
    page.close()
