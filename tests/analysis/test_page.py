"""What the page shows beside maps, in a real browser: the scatter, events over all the data, long texts, thousands of heads."""

import base64
import math
import re
from contextlib import ExitStack

import matplotlib as mpl
import numpy as np
import pytest
import torch
from browser import quiet_page
from matplotlib.path import Path as Polygon
from playwright.sync_api import expect

from analysis.test_atlas import ENDS, HOSTILE, assert_accessible, focused, press, random_maps
from tinyformer.analysis import Axes, write_atlas

TOKENS = [*HOSTILE[:4], "␣the", "The", "·of", "⏎", "a", "b", "c", "d", "e", "f"]
SIZE = 9  # tokens of a snippet
NUM_POINTS = 40
MEASURES = {
    "previous_token": [[0.125, 0.5, math.nan], [0.125, 0.8, 0.3]],
    "induction": [[-2.0, 3.0, 1.0], [-2.0, 0.5, 2.0]],
    "importance": [[0.001, None, 0.5], [0.002, 0.004, 0.003]],
}
ABLATED = [[False, False, False], [False, False, True]]
LABELS = [["", "previous token", ""], ["", "", ""]]


def packed(array, dtype="u1"):
    return base64.b64encode(np.asarray(array).astype(dtype).tobytes()).decode()


def roots(weights):
    return np.round(255 * np.sqrt(weights))


def random_events(kinds, maps):
    """Events as `analysis=atlas` stores them: `further` and `of_heads` of a page, for the kind of each map."""
    random = np.random.default_rng(0)

    def point():
        snippet = random.integers(0, len(TOKENS), SIZE).tolist()
        query = int(random.integers(SIZE))
        return {"snippet": snippet, "query": query, "row": f"window {random.integers(9)}", "at": query + 20}

    def event(kind, decile, strength):
        weights = random.dirichlet(np.full(SIZE, 0.5), SIZE)
        of = point()
        key = int(weights[of["query"]].argmax())
        shown = {"queries": of.pop("snippet"), **of, "key": key, "strength": strength, "decile": decile}
        shown |= {"weights": packed(roots(weights[of["query"]])), "promotes": [8, 9]}
        shown |= {"map": packed(roots(weights))} if decile is None else {}
        if decile == 3:
            shown |= {"key": None, "outside": -70}
        return shown | ({"keys": point()["snippet"]} if kind == "cross" else {})

    def projection():
        planes = random.uniform(-1, 1, (3, NUM_POINTS, 2))
        coordinates = {name: packed(32767 * of, "<i2") for name, of in zip(VECTORS, planes, strict=True)}
        return coordinates | {"explained": dict.fromkeys(VECTORS, [0.5, 0.25])}

    of_heads = [
        {
            "events": {
                "snippets": [event(kind, None, 9.0 - n) for n in range(3)] + [event(kind, n, n / 10) for n in (3, 7)],
                "histograms": [[0, 3, 0, 1], [0] * 4],
                "shares": [[0.5, 0.25], [None, None]],
                "projection": projection(),
            }
        }
        for kind in maps
    ]
    sampled = "The 3 strongest of 360 events, and one of two deciles."
    measures = [{"name": name, "low": 0.0, "high": 2.0} for name in ("entropy", "distance")]
    points = {kind: [point() for _ in range(NUM_POINTS)] for kind in kinds}
    data = {"tokens": TOKENS, "sampled": sampled, "rows": "window", "measures": measures, "points": points}
    return {"further": {"events": {**data, "classes": ["first", "previous"]}}, "of_heads": of_heads}


VECTORS = ["queries", "keys", "outputs"]
TEXT = list("ab ba cab")
OPTIONS = {"measures": MEASURES, "labels": LABELS, "ablated": ABLATED, **random_events([""], [""] * 6)}
HEADS = OPTIONS["of_heads"]


@pytest.fixture
def open_page(tmp_path, browser):
    with ExitStack() as pages:

        def write_and_open(fragment="", width=1280, scheme="light", maps=None, tokens=TEXT, **options):
            maps = random_maps([3, 3], len(tokens)) if maps is None else maps
            path = write_atlas(tmp_path / "atlas.html", maps, tokens, **(options or OPTIONS))
            page = pages.enter_context(quiet_page(browser, width, scheme))
            page.emulate_media(reduced_motion="reduce", color_scheme=scheme)
            page.goto(path.as_uri() + fragment)
            return page

        yield write_and_open


# The scatter.


def drawn_points(page):
    """Place and colour of each point, by the index of its head."""
    found = page.locator("#points circle").evaluate_all("""all => all.map((one) => {
        const style = getComputedStyle(one);
        return [one.dataset.point, parseFloat(style.cx), parseFloat(style.cy), style.getPropertyValue("--shade")];
    })""")
    return {int(head): place for head, *place in found}


def axis_values(page, axis):
    """The value at a place of an axis, from two of its ticks."""
    anchor, side = ("middle", "x") if axis == "x" else ("end", "y")
    ticks = page.locator(f"#axes text:not(.axis)[text-anchor='{anchor}']").evaluate_all(
        f"all => all.map((one) => [Number(one.getAttribute('{side}')), Number(one.textContent.replace('−', '-'))])"
    )
    (first, low), (last, high) = ticks[0], ticks[-1]
    shift = 4 if axis == "y" else 0  # from the base line of a number to its line
    return lambda place: low + (place + shift - first) / (last - first) * (high - low)


@pytest.mark.parametrize("x", ["previous_token", "importance", "layer"])
def test_points_stand_at_the_values_of_their_heads(open_page, x):
    page = open_page()
    page.get_by_label("Across").select_option(x)
    page.get_by_label("Colour", exact=True).select_option("importance")
    values = {name: [value for layer in layers for value in layer] for name, layers in MEASURES.items()}
    values["layer"] = [0, 0, 0, 1, 1, 1]
    is_defined = [value is not None and math.isfinite(value) for value in values[x]]
    points = drawn_points(page)
    assert sorted(points) == [head for head in range(6) if is_defined[head]]
    at_x, at_y = axis_values(page, "x"), axis_values(page, "y")
    for head, (cx, cy, shade) in points.items():
        assert at_x(cx) == pytest.approx(values[x][head], abs=2e-3)
        assert at_y(cy) == pytest.approx(values["induction"][head], abs=2e-3)
        colour = values["importance"][head]
        expected = colour and mpl.colormaps["viridis"](round((colour - 0.001) / 0.499 * 255))
        assert shade == (mpl.colors.to_hex(expected) if colour else "none")
    missing = [f"layer {head // 3} head {head % 3}" for head in range(6) if not is_defined[head]]
    assert page.locator("#not-drawn button").all_inner_texts() == missing


def test_every_point_is_reached_and_opened_by_keyboard_and_by_pointer(open_page):
    page = open_page()
    expect(page.locator("circle.ablated[data-point='5']")).to_have_css("stroke-dasharray", "2px, 1.5px")
    assert page.locator("#labels").all_text_contents() == ["previous token"]
    page.locator("#points circle").first.focus()
    press(page, "ArrowRight")  # heads 0 and 3 are at the same place
    assert focused(page) == "layer 1 head 0, previous_token 0.125, induction −2.000, importance 0.002"
    steps = page.locator("#points circle").evaluate_all("""all => all.flatMap((one) =>
        ["Left", "Right", "Up", "Down"].map((way) => {
            one.focus();
            one.dispatchEvent(new KeyboardEvent("keydown", { key: `Arrow${way}`, bubbles: true }));
            return [one, document.activeElement].map((node) => Number(node.dataset.point));
        }))""")
    for start in {start for start, _ in steps}:
        reached = {start}
        for _ in steps:
            reached |= {end for begin, end in steps if begin in reached}
        assert reached == {0, 1, 3, 4, 5}
    page.locator("circle[data-point='4']").focus()
    press(page, "ArrowLeft", "Enter")
    expect(page.locator("#head-title")).to_have_text("Layer 1 head 2")
    press(page, "Escape")
    assert focused(page).startswith("layer 1 head 2, ablated")
    x, y, _ = drawn_points(page)[4]
    page.locator("#plot").hover(position={"x": x + 9, "y": y - 9})
    expect(page.locator("#point-label")).to_have_text("layer 1 head 1")
    page.locator("#plot").click(position={"x": x + 9, "y": y - 9})
    expect(page.locator("#head-title")).to_have_text("Layer 1 head 1")


# Events.


def shades(locator):
    return locator.evaluate_all("all => all.map((one) => Number(one.style.getPropertyValue('--weight')))")


def test_events_show_their_text_weights_and_map(open_page):
    page = open_page("#layer-0-head-1")
    first, second, _, third, seventh = HEADS[1]["events"]["snippets"]
    assert page.locator("#snippets h4").all_inner_texts() == ["The strongest", *(f"Decile {n} of 10 by strength" for n in (8, 4))]
    for shown, event in zip(page.locator(".snippet").all(), [first, second, _, seventh, third], strict=True):
        tokens = shown.locator("bdi")
        assert tokens.evaluate_all("all => all.map((one) => one.textContent)") == [TOKENS[at] for at in event["queries"]]
        for mark, at in (("query", event["query"]), ("key", event["key"])):
            marked = tokens.evaluate_all(f"all => all.flatMap((one, at) => (one.matches('.{mark}') ? [at] : []))")
            assert marked == ([] if at is None else [at])
        expected = list(base64.b64decode(event["weights"]))
        assert shades(tokens) == pytest.approx([root / 255 for root in expected])
        weight = "" if event["key"] is None else f"weight {(expected[event['key']] / 255) ** 2:.2f}, "
        words = f"{weight}strength {event['strength']:.3f} · {event['row']}, token {event['at']}"
        expect(shown.locator(".muted")).to_have_text(words)
    page.locator(".snippet").first.focus()
    press(page, "ArrowDown")
    expect(page.locator("#event-sentence")).to_contain_text("The output promotes ‘\u2068a\u2069’, ‘\u2068b\u2069’.")
    grid = np.frombuffer(base64.b64decode(second["map"]), np.uint8).reshape(SIZE, SIZE)
    colours = page.locator("#event-map canvas").evaluate(
        "c => [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]"
    )
    assert np.abs(np.array(colours).reshape(SIZE, SIZE, 4) / 255 - mpl.colormaps["viridis"](grid)).max() < 0.01
    page.locator("#event-map").focus()
    query = second["query"] + (1 if second["query"] < SIZE - 1 else -1)
    press(page, "ArrowDown" if query > second["query"] else "ArrowUp")
    assert shades(page.locator("#event-text bdi")) == pytest.approx((grid[query] / 255).tolist())
    # Four bins of half a unit, of which the second has three queries and the last has one.
    assert page.locator("#distributions tr").all_inner_texts() == ["entropy\t\n0\n2\n\t1.000\t0.667 to 1.000"]
    assert page.locator("#shares tr").all_inner_texts() == ["first\t\t50.0 %\t25.0 %"]
    expect(page.locator("#sampled")).to_have_text("The 3 strongest of 360 events, and one of two deciles.")


def listed_places(page):
    return [re.sub(r".*(window \d+, token \d+)$", r"\1", text, flags=re.DOTALL) for text in page.locator("#inside li").all_inner_texts()]


def test_a_lasso_and_a_rectangle_list_the_points_inside(open_page):
    page = open_page("#layer-1-head-0")
    page.get_by_role("radio", name="outputs").check()
    events, points = HEADS[3]["events"], OPTIONS["further"]["events"]["points"][""]
    places = np.frombuffer(base64.b64decode(events["projection"]["outputs"]), "<i2").reshape(-1, 2) / 32767 * [1, -1]
    places_of = [f"{point['row']}, token {point['at']}" for point in points]
    page.locator("#plane").scroll_into_view_if_needed()
    box = page.locator("#plane").bounding_box()
    corners = [(-0.9, -0.8), (0.7, -0.9), (0.0, 0.0), (0.9, 0.7), (-0.6, 0.8)]  # not convex
    at = [(box["x"] + (x / 1.1 + 1) / 2 * box["width"], box["y"] + (y / 1.1 + 1) / 2 * box["height"]) for x, y in corners]
    page.mouse.move(*at[0])
    page.mouse.down()
    for corner in at[1:]:
        page.mouse.move(*corner)
    page.mouse.up()
    inside = Polygon([*corners, corners[0]]).contains_points(places)
    assert 5 < inside.sum() < 35
    expect(page.locator("#inside-title")).to_have_text(f"{inside.sum()} of {NUM_POINTS} points")
    chosen = [place for place, is_inside in zip(places_of, inside, strict=True) if is_inside]
    assert listed_places(page) == chosen
    press(page, "Shift+ArrowRight")  # the page's own keys rest
    press(page, *["ArrowLeft"] * 5, *["Shift+ArrowDown"] * 7)
    is_near = (abs(places - [-0.25, 0]) <= [0.3, 0.6]).all(axis=1)
    assert listed_places(page) == [place for place, near in zip(places_of, is_near, strict=True) if near]
    page.get_by_role("radio", name="position").check()  # the points stay chosen
    shown = page.locator("#marks path.inside").count()
    assert shown == is_near.sum() > 3
    page.locator("#plane").focus()
    press(page, "Escape")
    expect(page.locator("#inside-title")).to_have_text("No points chosen")


@pytest.mark.parametrize(("typed", "side"), [(" ", "both"), ("<b>", "query"), ("The", "key"), ("⏎", "both")])
def test_the_search_finds_events_by_token(open_page, typed, side):
    page = open_page()
    page.get_by_label("Where the token is").select_option(side)
    page.get_by_label("Find a token").press_sequentially(typed)
    shown = [re.sub("[· ]", "␣", token) for token in TOKENS]

    def matches(event):
        ids = {"query": event["queries"][event["query"]]}
        ids |= {} if event["key"] is None else {"key": event["queries"][event["key"]]}
        return any(typed.replace(" ", "␣") in shown[at] for of, at in ids.items() if side in ("both", of))

    numbers = [sum(map(matches, head["events"]["snippets"])) for head in HEADS]
    order = sorted((head for head in range(6) if numbers[head]), key=lambda head: -numbers[head])
    names = [f"layer {head // 3} head {head % 3} ({numbers[head]})" for head in order]
    assert page.locator("#found-heads button").all_inner_texts() == names
    assert names
    page.locator("#found-heads button").first.click()
    expect(page.locator(".snippet")).to_have_count(numbers[order[0]])
    points = OPTIONS["further"]["events"]["points"][""]
    is_found = [typed.replace(" ", "␣") in shown[point["snippet"][point["query"]]] for point in points]
    expect(page.locator("#marks path:not(.unmatched)")).to_have_count(sum(is_found))


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_kinds_of_attention_and_hostile_tokens_in_both_themes(open_page, scheme, width):
    kinds = {"encoder": Axes(TEXT, TEXT), "cross": Axes(TEXT[:4], TEXT)}
    maps = [torch.full((2, len(kind.queries), len(kind.keys)), 1 / len(kind.keys)) for kind in kinds.values()]
    measures = {name: [[0.5, 0.25], [math.nan, 0.75]] for name in ("coverage", "monotonicity")}
    of_kinds = random_events(kinds, ["encoder", "encoder", "cross", "cross"])
    page = open_page("", width, scheme, maps, kinds, measures=measures, addresses=ENDS, **of_kinds)
    assert_accessible(page)
    page.get_by_label("Find a token").fill("<")
    for kind, head in (("cross", 1), ("encoder", 0)):
        page.get_by_role("radio", name=kind).check()
        assert page.locator("#points circle").count() == 1 + (kind == "encoder")
        page.locator("#points circle").last.focus() if kind == "cross" else page.locator("#points circle").first.focus()
        press(page, "Enter")
        expect(page.locator("#head-title")).to_have_text(f"{kind.capitalize()} layer 0 head {head}")
        for number in (1, 2):
            texts = page.locator(f".snippet .running:nth-of-type({number})").count()
            assert (texts > 0) == (number == 1 or kind == "cross")
        page.locator("#plane").focus()
        press(page, "ArrowRight", *["Shift+ArrowDown"] * 9)
        assert page.locator("#inside bdi.query").count() > 0
        assert_accessible(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.get_by_role("button", name="All heads").click()
    assert page.locator("bdi b, bdi script, bdi img").count() == 0


# Long texts and many heads.


@pytest.mark.slow
def test_a_long_text_is_shown_in_parts_with_exact_weights(open_page):
    size = 10_000
    weights = torch.rand(1, 300, size, generator=torch.Generator().manual_seed(0)) ** 5000  # few large ones
    weights /= weights.sum(-1, keepdim=True)
    kinds = {"encoder": Axes(TEXT, TEXT), "cross": Axes(["q"] * 300, [f"k{at}" for at in range(size)])}
    maps = [*random_maps([1], len(TEXT)), weights]
    page = open_page("#cross-layer-0-head-0", maps=maps, tokens=kinds, measures={}, addresses=ENDS)
    page.get_by_label("First key").fill("9000")
    page.get_by_label("First query").fill("20")
    page.get_by_label("First key").press("Tab")
    for side, first in (("queries", 20), ("keys", 9000)):
        tokens = page.locator(f"#{side} button").evaluate_all("all => all.map((one) => Number(one.dataset.token))")
        assert tokens == list(range(first, first + 256))
    page.locator("#queries button").nth(5).focus()
    largest = weights[0, 25].topk(8)
    rows = page.locator("#weights tr").evaluate_all("rows => rows.map((row) => [...row.cells].slice(0, 2).map((one) => one.textContent))")
    assert [int(index.split()[0]) for index, _ in rows] == largest.indices.tolist()
    assert [float(value) for _, value in rows] == pytest.approx(largest.values.tolist(), abs=1e-4)
    page.locator("#keys button").nth(3).focus()
    best = int(weights[0, :, 9003].argmax())
    expect(page.locator("#sentence")).to_contain_text(f"attended to by: target token {best} ")
    page.locator("#cells").focus()
    key = int(weights[0, 255, 9000:9256].argmax())
    press(page, *["ArrowRight"] * key)
    expect(page.locator("#cell strong")).to_have_text(f"{weights[0, 255, 9000 + key]:.4f}")
    page.locator("#whole").click(position={"x": 1, "y": 1})
    expect(page.get_by_label("First key")).to_have_value("0")


@pytest.mark.slow
def test_thousands_of_heads_are_laid_out_near_the_window_only(open_page):
    maps = [torch.full((96, 4, 4), 0.25)] * 24
    page = open_page(maps=maps, tokens=list("abcd"), measures={"entropy": torch.rand(24, 96).tolist()})
    assert page.locator("#points circle").count() == 24 * 96
    drawn = "all => all.filter((one) => one.width > 1).length"
    expect(page.locator(".thumbnail canvas").first).to_have_attribute("width", "4")
    assert 20 < page.locator(".thumbnail canvas").evaluate_all(drawn) < 800
    skipped = page.locator(".layer").evaluate_all(
        "all => all.filter((one) => !one.lastChild.checkVisibility({ contentVisibilityAuto: true })).length"
    )
    assert skipped > 10
