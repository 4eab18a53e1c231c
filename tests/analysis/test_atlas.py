"""The page of an atlas in a real browser: by pointer, by keyboard, in both themes, with hostile text."""

import math
import re

import matplotlib as mpl
import numpy as np
import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from analysis.contexts import stored
from tinyformer.errors import ArgumentError
from tinyformer.measures import Axes
from tinyformer.report import write_atlas

TOKENS = list("The cat sat on ⏎it.")
ROUNDING = 0.00005 + 0.5 / 65535  # of a stored weight shown with four decimals


def random_maps(heads_by_layer, seq):
    generator = torch.Generator().manual_seed(0)
    future = torch.ones(seq, seq).triu(1).bool()
    logits = [3 * torch.randn(heads, seq, seq, generator=generator) for heads in heads_by_layer]
    return [of_layer.masked_fill(future, -math.inf).softmax(-1) for of_layer in logits]


MAPS = random_maps([2, 3, 1], len(TOKENS))
HEADS = [weights for layer in MAPS for weights in layer]
NAMES = [["0", "1"], ["0a", "0b", "1"], ["0"]]
LABELS = [f"layer {layer} head {name}" for layer, names in enumerate(NAMES) for name in names]
MEASURES = {
    "entropy": [[2.5, 0.125], [1.0, 1.0, 0.0], [3.75]],
    "importance": [[-0.5, math.nan], [0.0004, None, -2.0], [12345.0]],
}
SHOWN = {
    "entropy": ["2.500", "0.125", "1.000", "1.000", "0.000", "3.750"],
    "importance": ["−0.500", "not defined", "4.00e−4", "not defined", "−2.000", "1.23e+4"],
}
SORTED = {  # indices into LABELS
    ("entropy", "smallest"): [4, 1, 2, 3, 0, 5],
    ("entropy", "largest"): [5, 0, 2, 3, 1, 4],
    ("importance", "smallest"): [4, 0, 2, 5, 1, 3],  # undefined values come last in both orders
    ("importance", "largest"): [5, 2, 0, 4, 1, 3],
}


def token(index, tokens=TOKENS):
    return f"{index} ‘\u2068{tokens[index].replace(' ', '␣')}\u2069’"


def shown_labels(page):
    return page.locator(".thumbnail .place").all_text_contents()


def shown_rows(page):
    """The table of weights, as {index of the token: weight} in its order."""
    rows = page.locator("#weights tr:has(.index)").evaluate_all(
        "rows => rows.map((row) => [row.querySelector('.index').textContent, row.cells[1].textContent])"
    )
    assert all(re.fullmatch(r"[01]\.\d{4}", value) for _, value in rows)
    return {int(index): float(value) for index, value in rows}


def assert_colours(locator, weights):
    """The pixels of a canvas have the colours of the weights."""
    expect(locator).to_have_attribute("width", str(len(weights)))  # thumbnails are drawn when they come into view
    size, data = locator.evaluate("c => [c.width, [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]]")
    expected = mpl.colormaps["viridis"](np.round(weights.sqrt().numpy() * 255).astype(int))
    # A weight between two of the 256 colours may take either.
    assert np.abs(np.array(data).reshape(size, size, 4) / 255 - expected).max() < 0.02


def assert_shown(page, weights, title, other_axis):
    """Table, sentence and bars show the weights of one token."""
    expect(page.locator("#token-title")).to_have_text(title)
    rows = shown_rows(page)
    levels = (weights * 65535).round()
    order = levels.argsort(descending=True, stable=True).tolist()
    assert list(rows) == order[: min(8, int((levels > 0).sum()))]
    for index, value in rows.items():
        assert value == pytest.approx(weights[index].item(), abs=ROUNDING)
    strongest = [f"token {token(index)} {value:.4f}" for index, value in list(rows.items())[:3]]
    expect(page.locator("#sentence")).to_have_text(f"{title}: {', '.join(strongest)}.")
    bars = page.locator(f"#{other_axis} button").evaluate_all(
        "all => all.map((one) => Number(one.style.getPropertyValue('--weight')))"
    )
    assert bars == pytest.approx((weights / weights.max()).tolist(), abs=1e-3)


def drawn_lines(page):
    """The opacity of each visible line of a pair, by the target and the source token whose middles it joins."""
    target, source, lines = page.evaluate(
        """() => {
        const middle = (box) => box.left + box.width / 2;
        const middles = (side) =>
            [...document.querySelectorAll(`#${side} button`)].map((one) => middle(one.getBoundingClientRect()));
        const box = document.querySelector("#lines").getBoundingClientRect();
        return [middles("target"), middles("source"), [...document.querySelectorAll("#lines line")].map((line) => {
            const style = getComputedStyle(line);
            const opacity = style.display === "none" ? 0 : Number(style.strokeOpacity) * Number(style.opacity);
            return [...["x2", "x1"].map((name) => box.left + line[name].baseVal.value), opacity];
        })];
    }"""
    )
    (target, source) = ([pytest.approx(middle, abs=1) for middle in middles] for middles in (target, source))
    return {(target.index(begin), source.index(end)): opacity for begin, end, opacity in lines if opacity}


def opacities(weights, least):
    """The opacity of the line of each weight that is large enough, by its query and key."""
    return {(query, key): float(weights[query, key]) ** 0.5 for query, key in (weights >= least).nonzero().tolist()}


def assert_accessible(page):
    found = Axe().run(page).response
    assert len(found["passes"]) > 15
    assert [(one["id"], [node["target"] for node in one["nodes"]]) for one in found["violations"]] == []


# For an encoder of two layers of two heads and a decoder of one.
SOURCE, TARGET = [*"12 mai 7", "<eos>"], [*"7-5-12", "<eos>"]
PAIR_KINDS = {
    "encoder": Axes(SOURCE, SOURCE),
    "decoder": Axes(["<eos>", *TARGET[:-1]], ["<eos>", *TARGET[:-1]]),
    "cross": Axes(TARGET, SOURCE),
}
PAIR_ADDRESSES = [("encoder", 0), ("encoder", 1), ("decoder", 0), ("cross", 0)]
ENDS = [PAIR_ADDRESSES[0], PAIR_ADDRESSES[-1]]
PAIR_MAPS = [
    (4 * torch.randn(2, len(queries), len(keys), generator=torch.Generator().manual_seed(number))).softmax(-1)
    for number, (kind, _) in enumerate(PAIR_ADDRESSES)
    for queries, keys in [PAIR_KINDS[kind]]
]
PAIR_MEASURES = {
    "entropy": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [0.5, 0.25]],
    "distance": [[2.0, 1.0], [2.5, 1.5], [1.0, 2.0], [math.nan, math.nan]],
    "coverage": [[math.nan, math.nan]] * 3 + [[0.75, 0.5]],
}
PAIR = {"maps": PAIR_MAPS, "tokens": PAIR_KINDS, "measures": PAIR_MEASURES, "addresses": PAIR_ADDRESSES}


@pytest.fixture
def open_atlas(open_page):
    return lambda **options: open_page(**{"maps": MAPS, "tokens": TOKENS, "measures": MEASURES, **options})


@pytest.fixture
def atlas(open_atlas):
    return open_atlas(names=NAMES, title="A cat", descriptions={"entropy": "Of a row, in nats."})


def test_the_overview_shows_all_heads_in_the_chosen_order(atlas):
    assert shown_labels(atlas) == LABELS
    atlas.locator(".thumbnail").last.scroll_into_view_if_needed()
    for index, weights in enumerate(HEADS):
        assert_colours(atlas.locator(".thumbnail canvas").nth(index), weights)
    for (measure, order), heads in SORTED.items():
        atlas.get_by_label("Measure", exact=True).select_option(measure)
        atlas.get_by_label("Order").select_option(order)
        assert shown_labels(atlas) == [LABELS[head] for head in heads]
        numbers = atlas.locator(".thumbnail .value").evaluate_all("all => all.map((one) => one.lastChild.textContent)")
        assert numbers == [SHOWN[measure][head] for head in heads]
    atlas.get_by_label("Order").select_option("layers")
    assert shown_labels(atlas) == LABELS


def test_a_head_shows_the_weights_at_the_pointer(atlas):
    weights = HEADS[3]
    atlas.locator(".thumbnail").nth(3).click()
    expect(atlas).to_have_title(f"{LABELS[3]} · A cat")  # set when the address has changed, after the click
    for query in (2, 18):
        atlas.locator("#queries button").nth(query).hover()
        assert_shown(atlas, weights[query], f"Token {token(query)} attends to", "keys")
    cell = atlas.locator("#map").bounding_box()["width"] / len(TOKENS)
    for query, key in ((12, 3), (1, 5)):
        atlas.locator("#cells").hover(position={"x": (key + 0.5) * cell, "y": (query + 0.5) * cell})
        words = f"query {token(query)} → key {token(key)}: {weights[query, key]:.4f}"
        expect(atlas.locator("#cell")).to_have_text(words)
    # The selected token stays selected from head to head.
    atlas.locator("#keys button").nth(2).hover()
    atlas.get_by_role("button", name="Previous").click()
    expect(atlas).to_have_title(f"{LABELS[2]} · A cat")
    assert_colours(atlas.locator("#map"), HEADS[2])  # once: browsers warn about repeated reads of a canvas
    assert_shown(atlas, HEADS[2][:, 2], f"Token {token(2)} is attended to by", "queries")
    # Measures with their rank among all heads.
    rows = [row.inner_text().rstrip().split("\t") for row in atlas.locator("#measures tr").all()]
    assert [row[1:] for row in rows] == [["1.000", "3 of 6"], ["4.00e−4", "2 of 4"]]


def focused(page):
    return page.evaluate("document.activeElement.ariaLabel ?? document.activeElement.innerText").replace("\n", " ")


def press(page, *keys):
    for key in keys:
        page.keyboard.press(key)
        has_outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle !== 'none'")
        assert has_outline or key == "Enter", focused(page)


def test_the_whole_page_works_by_keyboard(atlas):
    atlas.get_by_label("Order").focus()
    press(atlas, "Shift+Tab", "ArrowDown")
    expect(atlas.get_by_label("Measure", exact=True)).to_have_value("importance")
    press(atlas, "Tab", "Tab", "ArrowRight", "ArrowDown", "ArrowDown")  # the last layer has one head only
    assert focused(atlas).startswith("layer 2 head 0")
    press(atlas, "Home", "End", "ArrowUp", "ArrowRight")
    assert focused(atlas).startswith("layer 1 head 0b")
    press(atlas, "Enter")
    expect(atlas.locator("#head-title")).to_be_focused()
    press(atlas, "ArrowUp", "ArrowRight", "ArrowRight")  # from the title into the map
    expect(atlas.locator("#cells")).to_be_focused()
    words = f"query {token(len(TOKENS) - 2)} → key {token(2)}: "
    expect(atlas.locator("#cell")).to_have_text(f"{words}{MAPS[1][1][len(TOKENS) - 2, 2]:.4f}")
    atlas.locator("#head-title").focus()
    press(atlas, "Tab", "Tab", "Tab", "Tab", "Tab", "Tab", "Home", "ArrowRight")
    assert focused(atlas) == f"token {token(1)}"
    expect(atlas.locator("#token-title")).to_have_text(f"Token {token(1)} is attended to by")
    press(atlas, "Tab", "Home", "ArrowDown", "ArrowDown")
    assert_shown(atlas, MAPS[1][1][2], f"Token {token(2)} attends to", "keys")
    press(atlas, "Tab")
    atlas.locator("#queries button").nth(11).hover()
    expect(atlas.locator("#all-weights")).to_have_text("Show all 12")  # the mask hides the tokens that follow
    press(atlas, "Tab", "Enter")
    assert sorted(shown_rows(atlas)) == list(range(12))
    press(atlas, "Escape")
    expect(atlas.locator(".thumbnail").nth(3)).to_be_focused()


@pytest.mark.parametrize(("pair", "scheme", "width"), [(False, "dark", 400), (True, "light", 390)])
def test_the_page_is_accessible_in_both_themes(open_atlas, pair, scheme, width):
    page = open_atlas(**PAIR if pair else {"names": NAMES}, scheme=scheme, width=width)
    assert_accessible(page)
    for dark in (scheme == "dark", scheme != "dark"):
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 3 * 128) == dark
        page.get_by_role("button", name=f"Switch to {'light' if dark else 'dark'} theme").click()
    page.locator(".thumbnail").first.click()
    if not pair:
        page.get_by_label("Compare with").select_option("layer 0 head 1")
        page.get_by_label("Hide the first token").check()
        page.get_by_role("radio", name="map and lines").check()
    page.locator("#target button").nth(1).hover()
    assert_accessible(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_first_token_is_left_out_on_demand(atlas):
    """Each row keeps its sum."""
    atlas.locator(".thumbnail").first.click()
    atlas.get_by_label("Hide the first token").check()
    expect(atlas.locator("#hidden-first")).to_contain_text("The weights on the first key are left out.")
    without = torch.cat([torch.zeros(len(TOKENS), 1), HEADS[0][:, 1:]], 1)
    without *= 1 / without.sum(-1, keepdim=True).clamp(min=1e-9)
    for query in (7, 0):  # the first query sees no other key
        atlas.locator("#queries button").nth(query).hover()
        assert 0 not in shown_rows(atlas)
        for key, value in shown_rows(atlas).items():
            assert value == pytest.approx(float(without[query, key]), abs=1e-3)
    assert_colours(atlas.locator("#map"), without)


def test_a_second_head_is_shown_beside_the_first(atlas):
    atlas.locator(".thumbnail").nth(2).click()
    atlas.get_by_label("Compare with").select_option("layer 1 head 1")
    assert_colours(atlas.locator("#other-map"), HEADS[4])
    cell = atlas.locator("#map").bounding_box()["width"] / len(TOKENS)
    atlas.locator("#other-cells").hover(position={"x": 3.5 * cell, "y": 12.5 * cell})
    values = [f"{HEADS[head][12, 3]:.4f}" for head in (2, 4)]
    words = f"query {token(12)} → key {token(3)}: {values[0]}, layer 1 head 1: {values[1]}"
    expect(atlas.locator("#cell")).to_have_text(words)
    assert atlas.locator("#measures .other").all_inner_texts() == ["0.000", "−2.000"]
    atlas.get_by_role("button", name="Next").click()  # it stays beside the next head
    expect(atlas.locator("#map-title")).to_have_text("Layer 1 head 0b")
    expect(atlas.locator("#other-title")).to_have_text("Layer 1 head 1")


HOSTILE = ["</script><script>document.title='broken'</script>", "<b>bold</b>", "<!--", "\"'`$title${1+1}", "&lt;&amp;"]
HOSTILE += ["<img src=x onerror=\"document.title='broken'\">", "👩‍🚀🙂", "שלום", "\u202egnorw", "\ud83d", "", "\r\n"]


def test_hostile_tokens_names_and_titles_are_shown_as_text(open_atlas, tmp_path):
    name, title = "</script><i>'\"", "</title><script>document.title='broken'</script>"
    kinds = dict.fromkeys(["encoder", "cross"], Axes(HOSTILE, HOSTILE))
    options = {"names": [["#<b> %"]] * 2, "title": title, "descriptions": {name: name}, "addresses": ENDS}
    page = open_atlas(maps=random_maps([1, 1], len(HOSTILE)), tokens=kinds, measures={name: [[1.0]] * 2}, **options)
    assert page.title() == title
    shown = stored(tmp_path / "atlas.html")["kinds"][0]["keys"]
    for kind, others in (("encoder", ["#strip bdi"]), ("cross", ["#source button", "#target button"])):
        page.get_by_role("radio", name=kind).check()
        page.locator(".thumbnail").click()
        for _ in range(2):
            expect(page.locator("#head-title")).to_have_text(f"{kind.capitalize()} layer 0 head #<b> %")
            for place in ("#queries button", "#keys button", *others):
                assert page.locator(place).evaluate_all("all => all.map((one) => one.textContent)") == shown
            page.reload()
        assert page.locator("b, i, img").count() == 0
        page.get_by_role("button", name="All heads").click()


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


# A source and its target.

CROSS = PAIR_MAPS[3]


def test_an_address_opens_its_kind_and_the_overview_shows_the_heads_of_the_chosen_kind(open_atlas):
    page = open_atlas(**PAIR, fragment="#encoder-layer-1-head-0")
    expect(page.locator("#head-title")).to_have_text("Encoder layer 1 head 0")
    expect(page.locator("#alignment")).to_be_hidden()
    page.get_by_role("button", name="All heads").click()
    expect(page.get_by_role("radio", name="encoder")).to_be_checked()
    assert page.locator("#texts .text").all_inner_texts() == ["12␣mai␣7<eos>", "7-5-12<eos>"]
    heads = ["layer 0 head 0", "layer 0 head 1"]
    for kind, shown, measure, size in (
        ("encoder", [*heads, "layer 1 head 0", "layer 1 head 1"], "distance", (9, 9)),
        ("cross", heads, "coverage", (9, 7)),
    ):
        page.get_by_role("radio", name=kind).check()
        assert shown_labels(page) == shown
        assert page.locator("#measure option").all_text_contents() == ["entropy", measure]
        canvas = page.locator(".thumbnail canvas").first
        expect(canvas).to_have_attribute("width", str(size[0]))
        expect(canvas).to_have_attribute("height", str(size[1]))


def test_lines_join_tokens_as_opaque_as_the_map_and_show_their_numbers(open_atlas):
    pair = open_atlas(**PAIR)
    pair.locator(".thumbnail").nth(1).click()
    pair.mouse.move(2, 2)  # a token under the pointer would show its lines alone
    expect(pair.locator("#head-title")).to_have_text("Cross layer 0 head 1")
    assert pair.locator("#target button").all_inner_texts() == TARGET
    expected = opacities(CROSS[1], 1 / len(SOURCE))
    assert drawn_lines(pair) == pytest.approx(expected, abs=1e-4)
    # The line at the pointer.
    query, key = divmod(int(CROSS[1].argmax()), len(SOURCE))
    places = [pair.locator(f"#{row} button").nth(at).bounding_box() for row, at in (("source", key), ("target", query))]
    middles = [place["x"] + place["width"] / 2 for place in places]
    box = pair.locator("#lines").bounding_box()
    pair.mouse.move(0.75 * middles[0] + 0.25 * middles[1], box["y"] + 0.25 * box["height"])
    words = f"target {token(query, TARGET)} → source {token(key, SOURCE)}: {float(CROSS[1].max()):.4f}"
    expect(pair.locator("#aligned")).to_have_text(words)
    # A token shows its smaller weights, too, and no line of another token.
    pair.locator("#target button").nth(1).hover()
    weights = CROSS[1][1]
    best = int(weights.argmax())
    first = f"Target token {token(1, TARGET)} attends to: source token {token(best, SOURCE)} {weights[best]:.4f}, "
    expect(pair.locator("#aligned")).to_contain_text(first)
    of_token = {(1, key): opacity for (_, key), opacity in opacities(weights[None], 1 / 255).items()}
    assert min(of_token.values()) < len(SOURCE) ** -0.5
    assert drawn_lines(pair) == pytest.approx(of_token, abs=1e-3)
    # A source token shows the target tokens that attend to it; without the pointer all lines are shown again.
    pair.locator("#source button").nth(4).hover()
    expect(pair.locator("#token-title")).to_have_text(f"Source token {token(4, SOURCE)} is attended to by")
    pair.mouse.move(2, 2)
    assert drawn_lines(pair).keys() == expected.keys()


# The file.


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": TOKENS[1:]}, r"maps\[0\]=.*: must be maps of \[18, 18\]"),
        ({"maps": [torch.zeros(1).expand(2, 8000, 8000)]}, "maps='128,000,000 weights': must be at most 100,000,000"),
    ],
)
def test_arguments_of_different_sizes_are_refused(tmp_path, changed, message):
    with pytest.raises(ArgumentError, match=message):
        write_atlas(tmp_path / "atlas.html", **{"maps": MAPS, "tokens": TOKENS, "measures": {}} | changed)
    assert not list(tmp_path.iterdir())
