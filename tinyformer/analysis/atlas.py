"""The atlas: an interactive page with the attention maps of all heads of a model on one text.

The page is a single HTML file that holds the weights and its scripts. Its Content-Security-Policy forbids it to load or
send anything, so that it can be mailed, stored beside a run, or logged to Weights & Biases. The folder `atlas_page`
holds its parts: a template, a style sheet, and JavaScript that needs no build step.
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

from tinyformer.errors import ArgumentError

SCRIPTS = ("data.js", "overview.js", "head.js", "page.js")
"""The scripts, concatenated in this order into one module."""

LEVELS = 65535
"""Weights are stored as integer multiples of 1/65535, with an error of at most 0.000008."""

SIGNS = {"": "∅", " ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}
"""Visible signs for the empty token and for white space."""


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

    The page opens on thumbnails of all heads, ordered by layer or by a measure. A head opens as a map with its tokens;
    selecting a token shows which tokens it attends to, or which attend to it. The colour is the square root of the
    weight, from 0 to 1 in every map, as in `head_maps`.

    Args:
        path: the file; its folder is created.
        maps: exact attention weights of each layer, queries down and keys across.
        tokens: the token strings, in which white space and control characters are made visible.
        measures: values by measure, then by layer and map; None or nan where a measure is not defined.
        names: names of each layer's maps, such as "0a" and "0b" for a head with two softmaxes; by default their
            indices.
        title: title of the page.
        descriptions: the meaning of each measure, with its unit.

    Returns:
        The path.

    Raises:
        ArgumentError: the sizes of the arguments differ, or `maps` holds numbers outside of 0 to 1.
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
    """The page: the template with data, style and scripts filled in."""
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
        # "<" could end the element. In JSON it occurs only within strings, where an escape is allowed.
        data=json.dumps(data, separators=(",", ":")).replace("<", r"\u003c"),
        script=script,
    )


def _hash(text: str) -> str:
    """The hash by which a Content-Security-Policy admits an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _packed(weights: Float[Tensor, "seq seq"]) -> str:
    """A map as base64 of 16-bit little-endian integers, row by row."""
    levels = (weights.detach().float().clamp(0, 1) * LEVELS).round().to("cpu", torch.int32)
    return base64.b64encode(levels.numpy().astype("<u2").tobytes()).decode()


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _visible(token: str) -> str:
    """A token string in which every character is visible: ␣ for a space, ⏎ for a newline, codes for other controls."""
    if not token:
        return SIGNS[token]
    return "".join(SIGNS.get(c) or (c if c.isprintable() else ascii(c)[1:-1]) for c in token)


def _require_fit(
    maps: Sequence[Tensor],
    tokens: Sequence[str],
    measures: Mapping[str, Sequence[Sequence[float | None]]],
    names: Sequence[Sequence[str]],
) -> None:
    """Refuse arguments of write_atlas whose sizes differ."""
    if not tokens:
        raise ArgumentError("tokens", [], "must hold at least one token")
    if not any(len(layer) for layer in maps):
        raise ArgumentError("maps", [list(layer.shape) for layer in maps], "must hold the map of at least one head")
    size = [len(tokens), len(tokens)]
    for index, layer in enumerate(maps):
        if list(layer.shape[1:]) != size:
            reason = f"must be maps of {size} for {len(tokens)} `tokens`"
            raise ArgumentError(f"maps[{index}]", list(layer.shape), reason)
        # A softmax may round to slightly more than 1; nan fails every comparison.
        if not bool(((layer >= 0) & (layer.float() <= 1.001)).all()):
            raise ArgumentError(f"maps[{index}]", list(layer.shape), "must hold attention weights from 0 to 1")
    counts = [len(layer) for layer in maps]
    for name, by_layer in {"names": names, **{f"measures[{name!r}]": measures[name] for name in measures}}.items():
        sizes = [len(layer) for layer in by_layer]
        if sizes != counts:
            raise ArgumentError(name, sizes, f"must have as many entries per layer as `maps`, {counts}")
    for index, layer_names in enumerate(names):
        if len(set(layer_names)) < len(layer_names):
            raise ArgumentError(f"names[{index}]", list(layer_names), "must be unique within a layer")
