"""An atlas of random maps, and readers of its page."""

import json
import math
import re

import matplotlib as mpl
import numpy as np
import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tinyformer.analysis import Axes

TOKENS = list("The cat sat on ⏎it.")
HALF_STEP = 0.5 / 65535
ROUNDING = 0.00005 + HALF_STEP  # of a stored weight shown with four decimals


def random_maps(heads_by_layer, seq, seed=0):
    generator = torch.Generator().manual_seed(seed)
    future = torch.ones(seq, seq).triu(1).bool()
    return [
        (3 * torch.randn(heads, seq, seq, generator=generator)).masked_fill(future, -math.inf).softmax(-1)
        for heads in heads_by_layer
    ]


MAPS = random_maps([2, 3, 1], len(TOKENS))
HEADS = [weights for layer in MAPS for weights in layer]
NAMES = [["0", "1"], ["0a", "0b", "1"], ["0"]]
LABELS = [f"layer {layer} head {name}" for layer, names in enumerate(NAMES) for name in names]
MEASURES = {
    "entropy": [[2.5, 0.125], [1.0, 1.0, 0.0], [3.75]],
    "importance": [[-0.5, math.nan], [0.0004, None, -2.0], [12345.0]],
}
SORTED = {  # indices into LABELS
    ("entropy", "smallest"): [4, 1, 2, 3, 0, 5],
    ("entropy", "largest"): [5, 0, 2, 3, 1, 4],
    ("importance", "smallest"): [4, 0, 2, 5, 1, 3],  # undefined values come last in both orders
    ("importance", "largest"): [5, 2, 0, 4, 1, 3],
}


def stored(path):
    """The data in the file of an atlas."""
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="atlas-data">(.*?)</script>', text, re.DOTALL)[1])


def token(index, tokens=TOKENS):
    return f"{index} ‘\u2068{tokens[index].replace(' ', '␣')}\u2069’"


def shown_labels(page):
    return page.locator(".thumbnail .place").all_text_contents()


def shown_rows(page):
    """The table of weights, as {index of the token: weight} in its order."""
    rows = page.locator("#weights tr").evaluate_all(
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


def drawn_lines(page, vertical=False):
    """The opacity of each visible line, by the target and the source token whose middles it joins.

    The lines of a text run between two columns of its tokens, those of a pair between two rows.
    """
    found = page.evaluate(
        """(vertical) => {
        const middle = (box) => (vertical ? box.top + box.height / 2 : box.left + box.width / 2);
        const middles = (side) =>
            [...document.querySelectorAll(`#${side} button`)].map((one) => middle(one.getBoundingClientRect()));
        const [source, target] = [middles("source"), middles("target")];
        const nearest = (all, place) => {
            const gaps = all.map((one) => Math.abs(one - place));
            const best = gaps.indexOf(Math.min(...gaps));
            return gaps[best] < 1 ? best : null;
        };
        const box = document.querySelector("#lines").getBoundingClientRect();
        const [origin, from, to] = vertical ? [box.top, "y1", "y2"] : [box.left, "x2", "x1"];
        return [...document.querySelectorAll("#lines line")].map((line) => {
            const style = getComputedStyle(line);
            const opacity = style.display === "none" ? 0 : Number(style.strokeOpacity) * Number(style.opacity);
            const [begin, end] = [from, to].map((name) => origin + line[name].baseVal.value);
            return [nearest(target, begin), nearest(source, end), opacity];
        });
    }""",
        vertical,
    )
    return {(target, source): opacity for target, source, opacity in found if opacity}


def assert_accessible(page):
    found = Axe().run(page).response
    assert len(found["passes"]) > 15
    assert [(one["id"], [node["target"] for node in one["nodes"]]) for one in found["violations"]] == []


# A source and its target, for an encoder of two layers of two heads and a decoder of one.

SOURCE, TARGET = [*"12 mai 7", "<eos>"], [*"7-5-12", "<eos>"]
PAIR_KINDS = {
    "encoder": Axes(SOURCE, SOURCE),
    "decoder": Axes(["<eos>", *TARGET[:-1]], ["<eos>", *TARGET[:-1]]),
    "cross": Axes(TARGET, SOURCE),
}
PAIR_ADDRESSES = [("encoder", 0), ("encoder", 1), ("decoder", 0), ("cross", 0)]
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
