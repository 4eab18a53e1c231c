"""The atlas: every head of a trained model on one text, in one HTML file that needs nothing else.

The file holds the weights, the page and its program. A policy in its head forbids it to load or send anything, so that
it can be mailed, stored beside a run, or logged to Weights & Biases. Its parts lie in `atlas_page`: a template, a style
sheet, and JavaScript that runs as it stands.
"""

import base64
import hashlib
import html
import json
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import matplotlib as mpl
import torch
from jaxtyping import Float
from matplotlib.colors import to_hex
from torch import Tensor

SCRIPTS = ("data.js", "overview.js", "head.js", "page.js")
"""They are put together in this order into one module."""

LEVELS = 65535
"""A weight is stored as a whole number of 1/65535, so it is off by 0.000008 at most."""

SIGNS = {"": "∅", " ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}
"""What stands for a token, or a character of one, that nobody would see."""


def write_atlas(
    path: str | Path,
    maps: Sequence[Float[Tensor, "_heads seq seq"]],
    tokens: Sequence[str],
    measures: Mapping[str, Sequence[Sequence[float | None]]],
    names: Sequence[Sequence[str]] | None = None,
    title: str = "Attention atlas",
    descriptions: Mapping[str, str] | None = None,
) -> Path:
    """Write the atlas of a model on a text.

    It opens on all heads as thumbnails, in the order of layers or of a measure; each opens a map with its tokens, in
    which a token shows what it attends to and what attends to it. The colour is the square root of the weight, from 0
    to 1 in every map, as in `head_maps`.

    Args:
        path: the file; its folder is made.
        maps: exact weights of each layer, queries down and keys across; layers may differ in how many they have.
        tokens: their labels, or the tokens themselves: white space and control characters are made visible.
        measures: numbers by name, then by layer and map; None or NaN where a measure is not defined.
        names: of each layer's maps, "0", "1", … unless given; "0a" and "0b" for a head with two softmaxes.
        title: of the page.
        descriptions: a sentence on a measure, with its unit, by the measure's name.

    Returns:
        The path.

    Raises:
        ValueError: the parts do not fit each other, or something in `maps` is no weight.
    """
    names = names or [[str(head) for head in range(len(layer))] for layer in maps]
    _require_fit(maps, tokens, measures, names)
    heads = [
        {
            "layer": layer,
            "name": names[layer][head],
            "values": [_number(values[layer][head]) for values in measures.values()],
            "weights": _packed(weights),
        }
        for layer, layer_maps in enumerate(maps)
        for head, weights in enumerate(layer_maps)
    ]
    data = {
        "title": title,
        "tokens": [_visible(token) for token in tokens],
        "measures": [{"name": name, "description": (descriptions or {}).get(name, "")} for name in measures],
        "colours": [to_hex(colour) for colour in mpl.colormaps["viridis"](range(256))],
        "layers": len(maps),
        "heads": heads,
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_page(title, data), encoding="utf-8", errors="xmlcharrefreplace")
    return path


def _page(title: str, data: dict[str, Any]) -> str:
    """The template, filled."""
    parts = files("tinyformer.analysis") / "atlas_page"
    style = (parts / "atlas.css").read_text(encoding="utf-8")
    script = "\n".join((parts / name).read_text(encoding="utf-8") for name in SCRIPTS)
    policy = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return Template((parts / "template.html").read_text(encoding="utf-8")).substitute(
        policy="; ".join(f"{name} {value}" for name, value in policy.items()),
        title=html.escape(title),
        style=style,
        # "<" could end the element; in JSON it stands in strings alone, where its code does as well.
        data=json.dumps(data, separators=(",", ":")).replace("<", r"\u003c"),
        script=script,
    )


def _hash(text: str) -> str:
    """How a Content-Security-Policy names an inline script or style that may be used."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _packed(weights: Float[Tensor, "seq seq"]) -> str:
    """A map as 16-bit little-endian whole numbers, row by row, in base64."""
    levels = (weights.detach().float().clamp(0, 1) * LEVELS).round().to("cpu", torch.int32)
    return base64.b64encode(levels.numpy().astype("<u2").tobytes()).decode()


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _visible(token: str) -> str:
    """A token whose every character is seen: a space is ␣, a newline ⏎, another without a shape its code."""
    if not token:
        return SIGNS[token]
    return "".join(SIGNS.get(c) or (c if c.isprintable() else ascii(c)[1:-1]) for c in token)


def _require_fit(
    maps: Sequence[Tensor],
    tokens: Sequence[str],
    measures: Mapping[str, Sequence[Sequence[float | None]]],
    names: Sequence[Sequence[str]],
) -> None:
    """Refuse parts that do not belong together, naming the first that does not."""
    if not tokens or not any(len(layer) for layer in maps):
        raise ValueError(
            f"An atlas wants a head and a token at least; here are {len(maps)} layers, {len(tokens)} tokens."
        )
    wanted = [len(tokens), len(tokens)]
    for index, layer in enumerate(maps):
        if list(layer.shape[1:]) != wanted:
            raise ValueError(f"maps[{index}] is {list(layer.shape)}; for {len(tokens)} tokens each map is {wanted}.")
        # A softmax may round past 1; NaN fails every comparison.
        if not bool(((layer >= 0) & (layer.float() <= 1.001)).all()):
            raise ValueError(f"maps[{index}] holds numbers that are no attention weights: each is from 0 to 1.")
    counts = [len(layer) for layer in maps]
    for name, by_layer in {"names": names, **{f"measures[{name!r}]": measures[name] for name in measures}}.items():
        given = [len(layer) for layer in by_layer]
        if given != counts:
            raise ValueError(f"{name} holds {given} for the layers, whose maps are {counts}.")
    for index, of_layer in enumerate(names):
        if len(set(of_layer)) < len(of_layer):
            raise ValueError(f"names[{index}]={list(of_layer)}: two maps of a layer have one name; ['0a', '0b'] works.")
