"""The atlas for everyone: by keyboard, by link, on small screens, to a screen reader, on hostile text."""

import math
import re

import pytest
from browser import quiet_page
from playwright.sync_api import expect

from analysis.atlas_pages import (
    LABELS,
    MAPS,
    MEASURES,
    NAMES,
    SHOWN,
    SORTED,
    TOKENS,
    assert_accessible,
    assert_colours,
    assert_shown,
    random_maps,
    shown_labels,
    shown_rows,
    stored,
    token,
)
from tinyformer.analysis import write_atlas

# From place to place.


def focused(page):
    return page.evaluate("document.activeElement.ariaLabel ?? document.activeElement.innerText").replace("\n", " ")


def test_the_whole_tour_by_keyboard_alone(atlas):
    def press(*keys):
        for key in keys:
            atlas.keyboard.press(key)
        has_outline = atlas.evaluate("getComputedStyle(document.activeElement).outlineStyle !== 'none'")
        assert has_outline, focused(atlas)

    press("Tab", "Tab", "ArrowDown")
    expect(atlas.get_by_label("Measure", exact=True)).to_have_value("importance")
    press("Tab", "ArrowDown", "ArrowDown")
    expect(atlas.get_by_label("Order")).to_have_value("largest")
    assert shown_labels(atlas) == [LABELS[head] for head in SORTED["importance", "largest"]]
    atlas.keyboard.press("ArrowUp")
    atlas.keyboard.press("ArrowUp")
    press("Tab", "ArrowRight")
    assert focused(atlas).startswith("layer 0 head 1")
    press("ArrowDown")
    assert focused(atlas).startswith("layer 1 head 0b")
    press("ArrowDown")  # the last layer has one head only
    assert focused(atlas).startswith("layer 2 head 0")
    press("Home", "End", "ArrowUp", "ArrowRight")
    assert focused(atlas).startswith("layer 1 head 0b")
    press("Enter")
    expect(atlas.locator("#head-title")).to_be_focused()
    press("Tab", "Tab", "Tab", "Tab", "Home", "ArrowRight")
    assert focused(atlas) == f"token {token(1)}"
    expect(atlas.locator("#token-title")).to_have_text(f"Token {token(1)} is attended to by")
    press("Tab", "Home", "ArrowDown", "ArrowDown")
    assert_shown(atlas, MAPS[1][1][2], f"Token {token(2)} attends to", "keys")
    press("Tab", "ArrowUp", "ArrowRight")
    value = float(atlas.locator("#cell strong").inner_text())
    query, key = len(TOKENS) - 2, 1
    assert value == pytest.approx(MAPS[1][1][query, key].item(), abs=SHOWN)
    press("Shift+ArrowRight")
    expect(atlas.locator("#head-title")).to_have_text("Layer 1 head 1")
    value = float(atlas.locator("#cell strong").inner_text())
    assert value == pytest.approx(MAPS[1][2][query, key].item(), abs=SHOWN)
    press("Shift+ArrowLeft", "Tab", "Enter")
    assert len(shown_rows(atlas)) == len(TOKENS)
    press("Escape")
    expect(atlas.get_by_role("button", name="layer 1 head 0b")).to_be_focused()
    press("Shift+Tab")
    expect(atlas.get_by_label("Order")).to_be_focused()


def test_the_back_button_leads_to_the_thumbnail(atlas):
    atlas.locator(".thumbnail").nth(4).click()
    atlas.get_by_role("button", name="All heads").click()
    expect(atlas.locator("#head")).to_be_hidden()
    expect(atlas.get_by_role("button", name=LABELS[4])).to_be_focused()


def test_the_browsers_own_way_back_and_forth(atlas):
    atlas.locator(".thumbnail").nth(1).click()
    atlas.get_by_role("button", name="Next").click()
    expect(atlas.locator("#head-title")).to_have_text("Layer 1 head 0a")
    assert atlas.url.endswith("#layer-1-head-0a")
    atlas.go_back()
    expect(atlas.locator("#overview")).to_be_visible()
    atlas.go_forward()
    expect(atlas.locator("#head-title")).to_have_text("Layer 1 head 0a")


def test_previous_and_next_follow_the_order_of_the_overview(atlas):
    atlas.get_by_label("Order").select_option("largest")
    order = [LABELS[head].capitalize() for head in SORTED["entropy", "largest"]]
    atlas.locator(".thumbnail").first.click()
    for label in [*order, order[0]]:
        expect(atlas.locator("#head-title")).to_have_text(label)
        atlas.get_by_role("button", name="Next").click()
    atlas.get_by_role("button", name="Previous").click()
    expect(atlas.locator("#head-title")).to_have_text(order[0])


def test_a_link_opens_a_head(open_atlas):
    page = open_atlas(names=NAMES, fragment="#layer-1-head-0b")
    expect(page.locator("#head-title")).to_have_text("Layer 1 head 0b")
    assert_colours(page.locator("#map"), MAPS[1][1])
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="layer 1 head 0b")).to_be_focused()


def test_a_link_to_no_head_opens_the_overview(open_atlas):
    expect(open_atlas(fragment="#layer-9-head-9").locator("#overview")).to_be_visible()


def test_it_works_in_a_sandboxed_frame(tmp_path, browser):
    """As pages that show files of others embed it."""
    write_atlas(tmp_path / "atlas.html", MAPS, TOKENS, MEASURES, NAMES)
    (tmp_path / "outer.html").write_text('<iframe width="1200" height="800" sandbox="allow-scripts"></iframe>')
    with quiet_page(browser) as page:
        page.goto((tmp_path / "outer.html").as_uri())
        page.evaluate("text => (document.querySelector('iframe').srcdoc = text)", (tmp_path / "atlas.html").read_text())
        frame = page.frame_locator("iframe")
        frame.locator(".thumbnail").nth(2).click()
        frame.get_by_role("button", name="Next").click()
        expect(frame.locator("#head-title")).to_have_text("Layer 1 head 0b")
        frame.get_by_role("button", name="All heads").click()
        expect(frame.get_by_role("button", name="layer 1 head 0b")).to_be_focused()


# For everyone, on every screen.


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(open_atlas, scheme, width):
    page = open_atlas(names=NAMES, scheme=scheme, width=width)
    assert_accessible(page)
    page.get_by_label("Order").select_option("largest")
    assert_accessible(page)
    page.locator(".thumbnail").first.click()
    page.locator("#queries button").nth(9).hover()
    page.locator("#cells").focus()
    assert_accessible(page)


def test_nothing_is_wider_than_a_small_screen(open_atlas):
    page = open_atlas(random_maps([12] * 2, 40), ["token"] * 40, {}, width=360)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.locator(".thumbnail").first.click()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.locator("#map").bounding_box()["width"] == 40 * 11


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_is_the_systems_until_it_is_switched(open_atlas, scheme):
    page = open_atlas(scheme=scheme)

    def is_dark():
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", background)[:3])) < 3 * 128

    button = page.get_by_role("button", name="Dark theme")
    for dark in (scheme == "dark", scheme != "dark", scheme == "dark"):
        assert is_dark() == dark
        assert button.get_attribute("aria-pressed") == str(dark).lower()
        button.click()


def test_the_legend_stands_where_its_colours_do(atlas):
    """0.25 stands in the middle, for its root is a half."""
    box = atlas.locator("#legend").bounding_box()
    for mark in atlas.locator("#legend span").all()[1:]:
        place = mark.bounding_box()
        at = (place["x"] + place["width"] / 2 - box["x"]) / box["width"]
        assert at == pytest.approx(math.sqrt(float(mark.inner_text())), abs=0.01)


# What may stand in a text.

HOSTILE = [
    "</script><script>document.title='broken'</script>",
    "<img src=x onerror=\"document.title='broken'\">",
    "<b>bold</b>",
    "<!--",
    "]]>",
    "\"'`$title${1+1}",
    "&lt;&amp;",
    "👩‍🚀🙂",
    "שלום",
    "سلام",
    "\u202egnorw",
    "\ud83d",
    "",
    " ",
    "\r\n",
    "internationalisation" * 4,
]


def test_no_token_can_do_harm(open_atlas, tmp_path):
    name = "</script><i>'\""
    title = "</title><script>document.title='broken'</script>"
    maps = random_maps([1], len(HOSTILE))
    page = open_atlas(maps, HOSTILE, {name: [[1.0]]}, names=[["#<b> %"]], title=title, descriptions={name: name})
    assert page.title() == title
    expect(page.get_by_role("heading", level=1)).to_have_text(title)
    expect(page.locator("#measure-description")).to_have_text(name)
    assert page.locator("b, i, img").count() == 0
    page.locator(".thumbnail").click()
    expect(page.locator("#head-title")).to_have_text("Layer 0 head #<b> %")
    page.get_by_role("button", name="Show all").click()
    tokens = stored(tmp_path / "atlas.html")["tokens"]
    assert tokens[:3] == [token.replace(" ", "␣") for token in HOSTILE[:3]]
    for place in ("#queries button", "#keys button", "#strip bdi"):
        assert page.locator(place).evaluate_all("all => all.map((one) => one.textContent)") == tokens
    rows = page.locator("#weights bdi").evaluate_all("all => all.map((one) => one.textContent)")
    assert sorted(rows) == sorted(tokens)
    assert page.title() == f"layer 0 head #<b> % · {title}"
    assert_accessible(page)
    page.reload()
    expect(page.locator("#head-title")).to_have_text("Layer 0 head #<b> %")


def test_the_policy_forbids_all_that_the_page_does_not_need(tmp_path, browser):
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
        await new Promise((resolve) => setTimeout(resolve, 100));
        return blocked.sort();
    }""")
    assert blocked == ["connect-src", "frame-src", "img-src", "script-src-elem", "style-src-elem"]
    assert page.title() == "Attention atlas"
    page.close()
