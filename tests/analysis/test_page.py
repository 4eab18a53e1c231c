"""The parts of the page beside maps, in a real browser: the scatter, events over all data, long texts."""

import base64
import math
import re

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.path import Path as Polygon
from playwright.sync_api import expect

from analysis.test_atlas import ENDS, HOSTILE, assert_accessible, focused, press, random_maps
from tinyformer.measures import Axes

TOKENS = [*HOSTILE[:4], "␣the", "The", "·of", "⏎", "a", "b", "c", "d", "e", "f"]
TEXT = list("ab ba cab")
SIZE, NUM_POINTS = 9, 40  # the number of tokens of a snippet, and of points of a projection
VECTORS = ("queries", "keys", "outputs")
MEASURES = {
    "previous_token": [[0.125, 0.5, math.nan], [0.125, 0.8, 0.3]],
    "induction": [[-2.0, 3.0, 1.0], [-2.0, 0.5, 2.0]],
    "importance": [[0.001, math.nan, 0.5], [0.002, 0.004, 0.003]],
    "narrow": [[0.50001, 0.50002, 0.50004], [0.50003, 0.50001, 0.50002]],
}
NAMES = [f"layer {layer} head {head}" for layer in range(2) for head in range(3)]


def packed(array, dtype="u1"):
    return base64.b64encode(np.asarray(array).astype(dtype).tobytes()).decode()


def unpacked(text, dtype="u1"):
    return np.frombuffer(base64.b64decode(text), dtype)


def random_events(kinds):
    """Events as `analysis=atlas` stores them: `further` and `of_heads` of a page, for the kind of each map."""
    random = np.random.default_rng(0)

    def point():
        query = int(random.integers(SIZE))
        snippet = random.integers(0, len(TOKENS), SIZE).tolist()
        return {"snippet": snippet, "query": query, "row": f"window {random.integers(9)}", "at": query + 20}

    def event(kind, decile, strength):
        roots, of = np.round(255 * np.sqrt(random.dirichlet(np.full(SIZE, 0.5), SIZE))), point()
        of_query = roots[of["query"]]
        of |= {"queries": of.pop("snippet"), "strength": strength, "decile": decile, "weights": packed(of_query)}
        of |= {"key": None, "outside": -70} if decile == 3 else {"key": int(of_query.argmax()), "promotes": [8, 9]}
        of |= {"keys": point()["snippet"]} if kind == "cross" else {}
        return of | ({"map": packed(roots)} if decile is None else {})

    def of_head(kind):
        planes = {name: packed(32767 * random.uniform(-1, 1, (NUM_POINTS, 2)), "<i2") for name in VECTORS}
        strongest = [event(kind, None, 9.0 - number) for number in range(3)]
        return {
            "snippets": strongest + [event(kind, number, number / 10) for number in (3, 7)],
            "histograms": [[0, 3, 0, 1], [0] * 4],
            "shares": [[0.5, 0.25], [None, None]],
            "projection": planes | {"explained": {name: [0.5, 0.25] for name in VECTORS}},
        }

    measures = [{"name": name, "low": 0.0, "high": 2.0} for name in ("entropy", "distance")]
    points = {kind: [point() for _ in range(NUM_POINTS)] for kind in kinds}
    events = {"tokens": TOKENS, "sampled": "The 3 strongest events.", "measures": measures, "points": points}
    of_heads = [{"events": of_head(kind)} for kind in kinds]
    return {"further": {"events": events | {"classes": ["first", "previous"]}}, "of_heads": of_heads}


OPTIONS = {"measures": MEASURES, **random_events([""] * 6)}
OPTIONS |= {"labels": [["", "induction", ""], [""] * 3], "ablated": [[False] * 3, [False, False, True]]}
OPTIONS["of_heads"][0]["film"] = {"values": [[0.25, 8.0, None, None]]}  # the values of a step
EVENTS = [head["events"] for head in OPTIONS["of_heads"]]
POINTS = OPTIONS["further"]["events"]["points"][""]


@pytest.fixture
def open_events(open_page):
    return lambda fragment="": open_page(random_maps([3, 3], len(TEXT)), TEXT, fragment=fragment, **OPTIONS)


def drawn_points(page):
    """Place and colour of each point, by the index of its head."""
    found = page.locator("#points circle").evaluate_all("""all => all.map((one) => {
        const [x, y] = [one.style.cx, one.style.cy].map(parseFloat);
        return [one.dataset.point, x, y, one.style.getPropertyValue("--shade")];
    })""")
    return {int(head): place for head, *place in found}


def assert_linear(page, side, values, places):
    """The places of points and of the ticks of an axis are a linear function of the values."""
    anchor, shift = ("middle", 0) if side == "x" else ("end", 4)  # from a tick to the base line of its number
    ticks = page.locator(f"#axes text:not(.axis)[text-anchor='{anchor}']").evaluate_all(
        f"all => all.map((one) => [Number(one.textContent.replace('−', '-')), Number(one.getAttribute('{side}'))])"
    )
    values, places = np.concatenate([np.array(ticks) - [0, shift], np.stack([values, places], axis=1)]).T
    assert np.abs(np.polyval(np.polyfit(values, places, 1), values) - places).max() < 0.01
    return values


def test_points_stand_at_their_values_and_are_reached_by_keyboard_and_by_pointer(open_events):
    page = open_events()
    values = {name: np.ravel(layers) for name, layers in MEASURES.items()} | {"layer": np.repeat([0, 1], 3)}
    for x in ("previous_token", "importance", "narrow", "layer"):
        page.get_by_label("Across").select_option(x)
        points = drawn_points(page)
        assert list(points) == np.isfinite(values[x]).nonzero()[0].tolist()
        missing = [name for name, value in zip(NAMES, values[x], strict=True) if math.isnan(value)]
        assert page.locator("#not-drawn button").all_inner_texts() == missing
        at_x, at_y, shades = zip(*points.values(), strict=True)
        assert_linear(page, "x", values[x][list(points)], at_x)
        assert assert_linear(page, "y", values["induction"][list(points)], at_y).max() == 8  # of another step
        for shade, value in zip(shades, values["importance"][list(points)], strict=True):
            colour = mpl.colormaps["viridis"](np.nan_to_num(np.round((value - 0.001) / 0.499 * 255)).astype(int))
            assert shade == ("none" if math.isnan(value) else mpl.colors.to_hex(colour))

    assert page.locator("#labels text").all_text_contents() == ["induction"]
    page.get_by_label("Across").select_option("previous_token")
    page.locator("#points circle").first.focus()
    press(page, "ArrowRight")  # heads 0 and 3 are at the same place
    assert focused(page) == f"{NAMES[3]}, previous_token 0.125, induction −2.000, importance 0.002"
    steps = page.locator("#points circle").evaluate_all("""all => all.flatMap((one) =>
        ["Left", "Right", "Up", "Down"].map((way) => {
            one.focus();
            one.dispatchEvent(new KeyboardEvent("keydown", { key: `Arrow${way}`, bubbles: true }));
            return [one, document.activeElement].map((node) => Number(node.dataset.point));
        }))""")
    reached = np.zeros((6, 6))
    reached[tuple(np.array(steps).T)] = 1
    assert (np.linalg.matrix_power(reached, 8)[np.ix_([0, 1, 3, 4, 5], [0, 1, 3, 4, 5])] > 0).all()
    page.locator("#points circle:not(.ablated)").last.focus()
    press(page, "ArrowLeft", "ArrowLeft", "Enter")
    expect(page.locator("#head-title")).to_have_text("Layer 1 head 2")
    press(page, "Escape")
    assert focused(page).startswith("layer 1 head 2, ablated")
    x, y, _ = drawn_points(page)[4]
    page.locator("#plot").hover(position={"x": x + 9, "y": y - 9})
    expect(page.locator("#point-label")).to_have_text(NAMES[4])
    page.locator("#plot").click(position={"x": x + 9, "y": y - 9})
    expect(page.locator("#head-title")).to_have_text("Layer 1 head 1")


def test_events_show_their_text_weights_and_map_and_are_found_by_token(open_events):
    shades = "all => all.map((one) => Number(one.style.getPropertyValue('--weight')))"
    page = open_events("#layer-0-head-1")
    *strongest, third, seventh = EVENTS[1]["snippets"]
    headings = ["The strongest", "Decile 8 of 10 by strength", "Decile 4 of 10 by strength"]
    assert page.locator("#snippets h4").all_inner_texts() == headings
    for shown, event in zip(page.locator(".snippet").all(), [*strongest, seventh, third], strict=True):
        tokens, roots = shown.locator("bdi"), unpacked(event["weights"])
        assert tokens.all_text_contents() == [TOKENS[at] for at in event["queries"]]
        for mark, at in (("query", event["query"]), ("key", event["key"])):
            marked = tokens.evaluate_all(f"all => all.flatMap((one, at) => (one.matches('.{mark}') ? [at] : []))")
            assert marked == ([] if at is None else [at])
        assert tokens.evaluate_all(shades) == pytest.approx((roots / 255).tolist())
        weight = "" if event["key"] is None else f"weight {(roots[event['key']] / 255) ** 2:.2f}, "
        words = f"{weight}strength {event['strength']:.3f} · {event['row']}, token {event['at']}"
        expect(shown.locator(".muted")).to_have_text(words)
    page.locator(".snippet").first.focus()
    press(page, "ArrowDown")
    expect(page.locator("#event-sentence")).to_contain_text("The output promotes ‘\u2068a\u2069’, ‘\u2068b\u2069’.")
    grid, query = unpacked(strongest[1]["map"]).reshape(SIZE, SIZE), strongest[1]["query"]
    pixels = "c => [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]"
    colours = np.array(page.locator("#event-map canvas").evaluate(pixels)).reshape(SIZE, SIZE, 4)
    assert np.abs(colours / 255 - mpl.colormaps["viridis"](grid)).max() < 0.01
    page.locator("#event-map").focus()
    press(page, *["ArrowUp"] * query, "ArrowDown")
    assert page.locator("#event-text bdi").evaluate_all(shades) == pytest.approx((grid[1] / 255).tolist())
    # Four bins of half a unit, of which the second has three queries and the last has one.
    rows = ["entropy\t\n0\n2\n\t1.000\t0.667 to 1.000", "first\t\t50.0 %\t25.0 %"]
    assert page.locator(".over-data tbody tr").all_inner_texts() == rows
    for typed, side in ((" ", "both"), ("The", "query"), ("<", "key")):
        page.get_by_label("Where the token is").select_option(side)
        page.get_by_label("Find a token").fill(typed)
        found = {at for at, token in enumerate(TOKENS) if typed.replace(" ", "␣") in re.sub("[· ]", "␣", token)}
        sides = ("query", "key") if side == "both" else (side,)
        ids = [
            [{of["queries"][of[name]] for name in sides if of[name] is not None} for of in events["snippets"]]
            for events in EVENTS
        ]
        numbers = [sum(not found.isdisjoint(tokens) for tokens in of_head) for of_head in ids]
        order = sorted((head for head in range(6) if numbers[head]), key=lambda head, of=numbers: -of[head])
        assert page.locator("#found-heads button").all_inner_texts() == [f"{NAMES[at]} ({numbers[at]})" for at in order]
        page.locator("#found-heads button").first.click()
        expect(page.locator(".snippet")).to_have_count(numbers[order[0]])
        marked = sum(point["snippet"][point["query"]] in found for point in POINTS)
        expect(page.locator("#marks path:not(.unmatched)")).to_have_count(marked)


def test_a_lasso_and_a_rectangle_list_the_points_inside(open_events):
    def assert_listed(are_inside):
        assert 3 < are_inside.sum() < NUM_POINTS - 3
        expect(page.locator("#inside-title")).to_have_text(f"{are_inside.sum()} of {NUM_POINTS} points")
        listed = np.array(POINTS)[are_inside]
        assert page.locator("#inside .muted").all_text_contents() == [f"{of['row']}, token {of['at']}" for of in listed]

    page = open_events("#layer-1-head-0")
    page.get_by_role("radio", name="outputs").check()
    places = unpacked(EVENTS[3]["projection"]["outputs"], "<i2").reshape(-1, 2) / 32767 * [1, -1]
    page.locator("#plane").hover()
    box = page.locator("#plane").bounding_box()
    corners = np.array([(-0.9, -0.8), (0.7, -0.9), (0.0, 0.0), (0.9, 0.7), (-0.6, 0.8)])  # not convex
    first, *others = ((corners / 1.1 + 1) / 2 * box["width"] + [box["x"], box["y"]]).tolist()
    page.mouse.move(*first)
    page.mouse.down()
    for corner in others:
        page.mouse.move(*corner)
    page.mouse.up()
    assert_listed(Polygon([*corners, corners[0]]).contains_points(places))
    press(page, "Shift+ArrowRight", *["ArrowLeft"] * 5, *["Shift+ArrowDown"] * 7)  # the keys of the page rest
    is_near = (abs(places - [-0.25, 0]) <= [0.3, 0.6]).all(axis=1)
    assert_listed(is_near)
    press(page, "Escape")
    expect(page.locator("#inside-title")).to_have_text("No points chosen")


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_kinds_of_attention_and_hostile_tokens_in_both_themes(open_page, scheme, width):
    kinds = {"encoder": Axes(TEXT, TEXT), "cross": Axes(TEXT[:4], TEXT)}
    maps = [torch.full((2, len(kind.queries), len(kind.keys)), 1 / len(kind.keys)) for kind in kinds.values()]
    options = {"measures": {"coverage": [[0.5, 0.25], [math.nan, 0.75]]}, "addresses": ENDS, "scheme": scheme}
    page = open_page(maps, kinds, width=width, **options, **random_events(["encoder", "encoder", "cross", "cross"]))
    assert_accessible(page)
    page.get_by_label("Find a token").fill("<")
    for kind in ("cross", "encoder"):
        page.get_by_role("radio", name=kind).check()
        expect(page.locator("#points circle")).to_have_count(2 if kind == "encoder" else 1)
        page.locator("#points circle").last.click()
        expect(page.locator("#head-title")).to_have_text(f"{kind.capitalize()} layer 0 head 1")
        assert page.locator(".snippet").first.locator(".running").count() == 1 + (kind == "cross")
        page.locator("#plane").focus()
        press(page, "ArrowRight", *["Shift+ArrowDown"] * 9)
        assert_accessible(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.get_by_role("button", name="All heads").click()
    assert page.locator("bdi b, bdi script, bdi img").count() == 0


@pytest.mark.slow
def test_a_long_text_is_shown_in_parts_with_exact_weights_beside_thousands_of_heads(open_page):
    weights = torch.rand(1, 300, 10_000, generator=torch.Generator().manual_seed(0)) ** 5000  # few large ones
    weights /= weights.sum(-1, keepdim=True)
    kinds = {"encoder": Axes(TEXT, TEXT), "cross": Axes(["q"] * 300, [f"k{at}" for at in range(10_000)])}
    maps, addresses = [*random_maps([96] * 30, len(TEXT)), weights], [("encoder", layer) for layer in range(30)]
    measures = {"entropy": [[layer + head for head in range(96)] for layer in range(30)] + [[0.0]]}
    page = open_page(maps, kinds, measures, "#cross-layer-0-head-0", addresses=[*addresses, ENDS[1]])
    page.get_by_label("First key").fill("9000")
    page.get_by_label("First query").fill("20")
    page.get_by_label("First key").focus()
    assert page.locator("#keys button").all_text_contents() == [f"k{at}" for at in range(9000, 9256)]
    page.locator("#queries button").nth(5).focus()
    largest = weights[0, 25].topk(8).indices.tolist()
    assert page.locator("#weights .index").all_text_contents() == [str(key) for key in largest]
    page.locator("#cells").focus()
    key = int(weights[0, 255, 9000:9256].argmax())
    press(page, *["ArrowRight"] * key)
    expect(page.locator("#cell strong")).to_have_text(f"{weights[0, 255, 9000 + key]:.4f}")
