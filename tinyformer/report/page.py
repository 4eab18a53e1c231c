"""The atlas: an interactive page with the attention maps of all heads of a model on one text, or on a pair of texts.

The page is a single HTML file that holds the weights and its scripts. Its Content-Security-Policy forbids it to load or
send anything, so that it can be sent, stored next to a run, or logged to Weights & Biases. The folder `page_files`
holds its parts: a template, a style sheet, and JavaScript that needs no build step.
"""

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import matplotlib as mpl
import torch
from jaxtyping import Float, UInt8
from matplotlib.colors import to_hex
from torch import Tensor

from tinyformer.errors import ArgumentError
from tinyformer.files import finite
from tinyformer.measures.capture import Axes
from tinyformer.measures.table import EXPLANATIONS, WHOLE
from tinyformer.nn.heads import Address

SCRIPTS = ["data.js", "overview.js", "scatter.js", "head.js", "parts.js", "compare.js", "lines.js"]
SCRIPTS += ["events.js", "projection.js", "search.js", "film.js", "page.js"]
"""The scripts, concatenated in this order into one module."""

MOST_WEIGHTS = 100_000_000  # weights in a page, of 267 MB, which browsers open
LEVELS = 65535  # weights are stored as integer multiples of 1/65535, with an error of at most 0.000008
SIGNS = {"": "∅", " ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}  # visible signs for the empty token and for white space


def write_atlas(path: str | Path, *arguments: Any, **options: Any) -> Path:
    """Write the page of `atlas_html` to a file, whose folder is created; all other arguments go to `atlas_html`."""
    page, path = atlas_html(*arguments, **options), Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def atlas_html(
    maps: Sequence[Float[Tensor, "_heads _queries _keys"]],
    tokens: Sequence[str] | Mapping[str, Axes],
    measures: Mapping[str, Sequence[Sequence[float | None]]],
    names: Sequence[Sequence[str]] | None = None,
    title: str = "Attention atlas",
    descriptions: Mapping[str, str] | None = None,
    addresses: Sequence[Address] | None = None,
    facts: Mapping[str, str] | None = None,
    labels: Sequence[Sequence[str]] | None = None,
    ablated: Sequence[Sequence[bool]] | None = None,
    further: Mapping[str, Any] | None = None,
    of_heads: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The atlas of a model on a text, or of an encoder–decoder on a source and its target, as one HTML page.

    The page first shows a scatter of all heads by any two measures, and thumbnails of their maps, ordered by layer or
    by a measure; for an encoder–decoder, one kind of attention is shown at a time. A head opens as a map with its
    tokens, as lines between tokens, or as both, with at most 256 tokens at a time; a second head can be shown next to
    it. Selecting a token shows which tokens it attends to, or which tokens attend to it. The colour, and the opacity of
    a line, is the square root of the weight, from 0 to 1 in every map, as in `head_maps`. The page works in a frame,
    too: `<iframe srcdoc="…">` with the page escaped as HTML.

    Args:
        maps: exact attention weights of each layer, queries down and keys across.
        tokens: the token strings, in which white space and control characters are made visible; for an encoder–decoder,
            the query and key tokens of each kind of attention.
        measures: values by measure, then by layer and map; None or nan where a measure is not defined.
        names: names of each layer's maps, such as "0a" and "0b" for a head with two softmaxes; by default their
            indices.
        title: title of the page.
        descriptions: a sentence about each measure, with its unit; by default those of `EXPLANATIONS`.
        addresses: see `Network.layer_addresses`; by default the indices of the layers.
        facts: the origin of the maps, by name, such as {"checkpoint": "run/last.ckpt", "step": "2,000"}.
        labels: the label of each layer's maps, such as "previous token"; empty for none.
        ablated: for each layer's maps, True if the map's head is ablated; by default, no head is ablated.
        further: JSON values by name for the views that only `analysis=atlas` and `analysis=film` add to the page.
        of_heads: JSON values by name for each map, for the same views.
    """
    names = names or [[str(head) for head in range(len(layer))] for layer in maps]
    labels = labels or [[""] * len(layer) for layer in maps]
    ablated = ablated or [[False] * len(layer) for layer in maps]
    addresses = addresses or [(index,) for index in range(len(maps))]
    descriptions = EXPLANATIONS if descriptions is None else descriptions
    kinds = tokens if isinstance(tokens, Mapping) else {"": Axes(tokens, tokens)}
    shown = {_kind(address) for layer, address in zip(maps, addresses, strict=True) if len(layer)}
    kinds = {kind: axes for kind, axes in kinds.items() if kind in shown}
    _require_fit(maps, kinds, addresses)
    heads = [
        {
            "kind": list(kinds).index(_kind(address)),
            "layer": address[-1],
            "name": name,
            "label": labels[layer][head],
            "ablated": ablated[layer][head],
            "values": [finite(values[layer][head]) for values in measures.values()],
            "weights": packed((weights.detach().float().clamp(0, 1) * LEVELS).round().to(torch.uint16)),
        }
        for layer, address in enumerate(addresses)
        for head, (name, weights) in enumerate(zip(names[layer], maps[layer], strict=True))
    ]
    heads = [{**head, **own} for head, own in zip(heads, of_heads or [{}] * len(heads), strict=True)]
    data = {
        **(further or {}),
        "title": title,
        "facts": dict(facts or {}),
        "kinds": [
            {"name": kind, "queries": list(map(_visible, axes.queries)), "keys": list(map(_visible, axes.keys))}
            for kind, axes in kinds.items()
        ],
        "measures": [
            {"name": name, "description": descriptions.get(name, ""), "isWhole": name in WHOLE} for name in measures
        ],
        "colours": [to_hex(colour) for colour in mpl.colormaps["viridis"](range(256))],
        "heads": heads,
    }
    # Half of a surrogate pair cannot be encoded as UTF-8.
    return _page(title, data).encode("utf-8", "xmlcharrefreplace").decode()


def _kind(address: Address) -> str:
    return str(address[0]) if len(address) > 1 else ""


def _page(title: str, data: dict[str, Any]) -> str:
    parts = files("tinyformer.report") / "page_files"
    style = (parts / "atlas.css").read_text(encoding="utf-8")
    script = "\n".join((parts / name).read_text(encoding="utf-8") for name in SCRIPTS)
    policy = f"script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    return Template((parts / "template.html").read_text(encoding="utf-8")).substitute(
        policy=f"default-src 'none'; {policy}",
        title=html.escape(title),
        style=style,
        # "<" could end the element. In JSON it occurs only within strings, where an escape is allowed.
        data=json.dumps(data, separators=(",", ":")).replace("<", r"\u003c"),
        script=script,
    )


def _hash(text: str) -> str:
    """The hash by which a Content-Security-Policy admits an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def as_bytes(weights: Float[Tensor, "..."]) -> UInt8[Tensor, "..."]:
    """Weights as 8-bit integers round(255 √w), which keep small weights apart; the error is at most √w / 255."""
    return (weights.float().clamp(0, 1).sqrt() * 255).round().to(torch.uint8)


def packed(numbers: Tensor) -> str:
    """Numbers in base64, row by row, each with its least significant byte first."""
    return base64.b64encode(numbers.cpu().contiguous().numpy().tobytes()).decode()


def _visible(token: str) -> str:
    """A token string in which every character is visible: ␣ for a space, ⏎ for a newline, escape codes for others."""
    if not token:
        return SIGNS[token]
    return "".join(SIGNS.get(c) or (c if c.isprintable() else ascii(c)[1:-1]) for c in token)


def _require_fit(maps: Sequence[Tensor], kinds: Mapping[str, Axes], addresses: Sequence[Address]) -> None:
    """Raise an `ArgumentError` if a browser cannot open so many weights, or if the sizes of maps and tokens differ."""
    if (size := sum(layer.numel() for layer in maps)) > MOST_WEIGHTS:
        reason = f"must be at most {MOST_WEIGHTS:,}, the most that browsers open: show fewer tokens"
        raise ArgumentError("maps", f"{size:,} weights", reason)
    for index, (layer, address) in enumerate(zip(maps, addresses, strict=True)):
        if len(layer) and list(layer.shape[1:]) != (sides := [len(side) for side in kinds[_kind(address)]]):
            raise ArgumentError(f"maps[{index}]", list(layer.shape), f"must be maps of {sides} for its `tokens`")
