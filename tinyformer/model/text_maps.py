"""The attention maps of one text, in all layers and heads."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from tinyformer import model as models
from tinyformer.analysis import CROSS_MEANINGS, CROSS_MEASURES, MEANINGS, MEASURES, PATTERNS, Words, words_of
from tinyformer.analysis import Axes as TokenStrings
from tinyformer.analysis.measures.capture import CapturedMaps
from tinyformer.analysis.measures.measures import measure_layers
from tinyformer.analysis.pictures.atlas import write_atlas
from tinyformer.analysis.scales import EXPLANATIONS
from tinyformer.data import TextTokenizer
from tinyformer.errors import ArgumentError
from tinyformer.model.drawing import Panel, chart_of_maps
from tinyformer.model.layer_maps import LayerMaps
from tinyformer.model.notebook import framed
from tinyformer.model.table import Table
from tinyformer.nn import AttentionMaps
from tinyformer.nn.heads import layer_title, plain_address

HeadAddress: TypeAlias = tuple[int | str, ...]
"""The address of a head: (3, 0) or ("cross", 3, 0), where "0a" and "0b" are the two softmaxes of head 0, if any."""

SELF_MEASURES = MEASURES | PATTERNS
OF_KIND = {"cross": CROSS_MEASURES}
"""The measures by kind of attention; all other kinds have `SELF_MEASURES`."""


class TokenAxis(NamedTuple):
    """The tokens of the queries or of the keys.

    Attributes:
        ids: token ids; empty for words.
        tokens: token strings, or words.
    """

    ids: Sequence[int]
    tokens: list[str]

    @classmethod
    def of(cls, ids: Sequence[int], tokenizer: TextTokenizer | None) -> "TokenAxis":
        """The tokens with these ids; without a tokenizer, their strings are the ids."""
        return cls(ids, tokenizer.token_strings(ids) if tokenizer else list(map(str, ids)))


@dataclass(frozen=True, eq=False)
class TextMaps:
    """The exact attention maps of one text, or of a source and its target; made by `Model.attention`.

        maps = model.attention("The bank by the river")
        maps[1, 3]  # queries × keys, of layer 1, head 3; maps["cross", 1, 3] of an encoder–decoder
        maps.plot(1, 3)

    A row of a map is a query, a column a key. Heads keep their numbers when others are pruned. An ablated head keeps
    its weights, although its output is replaced. In a notebook the maps show as the atlas, see `write_atlas`.

    Args:
        layers: the maps of each layer, in the order of `Network.attentions`.
        axes: the tokens of queries and keys by kind of attention; the kind is "" where there is only one.
        tokenizer: the model's tokenizer, if it has one.
        model: what the model is called in titles.
    """

    layers: Sequence[LayerMaps]
    axes: Mapping[str, tuple[TokenAxis, TokenAxis]]
    tokenizer: TextTokenizer | None
    model: str = ""

    @property
    def tokens(self) -> list[str] | dict[str, TokenStrings]:
        """The token strings; for an encoder–decoder, those of queries and keys by kind of attention.

        A query of cross-attention is labelled with the token that is predicted there, see `axes_of_pair`.
        """
        if "" in self.axes:
            return self.axes[""][0].tokens
        return {kind: TokenStrings(queries.tokens, keys.tokens) for kind, (queries, keys) in self.axes.items()}

    @cached_property
    def heads(self) -> list[HeadAddress]:
        """The address of each head."""
        return [(*layer.address, head) for layer in self.layers for head in layer.heads]

    def __getitem__(self, address: HeadAddress) -> Float[Tensor, "queries keys"]:
        """The map of a head; see `LayerMaps.of_head` for differential attention, which has two maps per head.

        Raises:
            ArgumentError: there is no such head.
        """
        return self.layer_of(address).of_head(plain_address(address)[-1])

    def layer_of(self, address: HeadAddress) -> LayerMaps:
        """The layer of a head.

        Args:
            address: (layer, head), or (kind, layer, head).

        Raises:
            ArgumentError: there is no such head.
        """
        parts = plain_address(address if isinstance(address, tuple) else (address,))
        is_plain = all(type(part) in (int, str) for part in parts)  # an array cannot be compared
        layer = next((layer for layer in self.layers if is_plain and layer.address == parts[:-1]), None)
        if layer is not None and parts[-1] in (*layer.heads, *layer.names):
            return layer
        form = "(layer, head)" if "" in self.axes else "(kind, layer, head)"
        if layer is not None:
            known = f"{layer_title(layer.address)} has heads {', '.join(map(str, layer.heads))}"
        else:
            known = f"there are {', '.join(layer_title(layer.address) for layer in self.layers)}"
        nearest = layer or self.layers[0]
        works = {"head": (*nearest.address, nearest.heads[0])}
        raise ArgumentError("head", address, f"must be the {form} of a head: {known}", works)

    def words(self) -> "TextMaps":
        """The maps of words, see `words_of` and `merge_words`.

        The weight to a word is the sum over its tokens, the weight from a word the mean over its tokens.

        Raises:
            ArgumentError: the model has no tokenizer.
        """
        if self.tokenizer is None:
            raise ArgumentError("tokenizer", None, "the model has no tokenizer, so its tokens have no words")
        if all(not axis.ids for both in self.axes.values() for axis in both):
            return self
        found: dict[str, tuple[Words, Words]] = {}
        for kind, (queries, keys) in self.axes.items():
            found[kind] = words_of(queries.ids, self.tokenizer), words_of(keys.ids, self.tokenizer)
        axes = {
            kind: (TokenAxis((), list(queries.names)), TokenAxis((), list(keys.names)))
            for kind, (queries, keys) in found.items()
        }
        layers = [layer.merged(*found[layer.kind]) for layer in self.layers]
        return TextMaps(layers, axes, self.tokenizer, self.model)

    def mean(self, *address: int | str) -> Float[Tensor, "queries keys"]:
        """The mean map over heads that are not ablated.

        Args:
            address: a layer, as in `mean(3)` or `mean("cross", 3)`, for the mean over its heads; a kind of attention,
                `mean("cross")`, for the mean over all its heads; nothing for the mean over all heads of the model.

        Raises:
            ArgumentError: there is no such layer, all of its heads are ablated, or no kind is given where there are
                several.
        """
        require_parts("layer", "mean", address)
        chosen = [layer for layer in self.layers if layer.address[: len(address)] == address]
        if len({layer.kind for layer in chosen}) != 1:
            known = ", ".join(layer_title(layer.address) for layer in self.layers)
            reason = f"must be the number of a layer, after its kind if any: {known}"
            raise ArgumentError("layer", address, reason, {"layer": self.layers[0].address})
        living = torch.cat([layer.living_heads() for layer in chosen])
        if not len(living):
            raise ArgumentError("layer", address, "has no head that is not ablated")
        return living.mean(dim=0)

    def rollout(self, kind: str | None = None) -> Float[Tensor, "queries keys"]:
        """Attention rollout (Abnar & Zuidema 2020, arXiv 2005.00928): how much of each token reaches each output.

        A = A_L · … · A_1 with A_l = |branch| (mean of the heads of layer l) + |skip| I, whose rows are normalised to
        sum to 1. The identity stands for the residual connection; the scales are those of the model's `Residual`, 1 in
        the paper. Ablated heads are left out of the mean; in a layer of ablated heads alone, A_l = I. A row of the
        result is a token of the last layer, a column a token of the input.

        Args:
            kind: None; for an encoder–decoder "encoder", whose layers read nothing but their own stack.

        Raises:
            ArgumentError: weights are negative, as in differential attention, and are no shares; or `kind` is another.
        """
        stack = "encoder" if "encoder" in self.axes else None
        if kind != stack:
            reason = "must be None for a model of one stack of layers"
            if stack:
                reason = 'must be "encoder": the decoder also reads the encoder, which a product of its maps leaves out'
            raise ArgumentError("kind", kind, reason, {"kind": stack})
        layers = [layer for layer in self.layers if layer.kind == (stack or "")]
        if any(layer.is_signed for layer in layers):
            reason = "has negative weights, which are no shares of attention; rollout is not defined"
            raise ArgumentError("attention", "differential" if layers[0].factor else "signed", reason)
        total = identity = torch.eye(len(self.axes[stack or ""][0].tokens))
        for layer in layers:
            living = layer.living_heads().float()
            mixed = abs(layer.branch) * living.sum(dim=0) / max(len(living), 1) + abs(layer.skip) * identity
            total = F.normalize(mixed, p=1, dim=-1) @ total
        return total

    def measures(self) -> Table:
        """Every measure of every map: one row each, with the columns `layer`, `head` and one for each measure.

        With several kinds of attention, the first column is `kind`. The measures are `MEASURES`, `PATTERNS` (on this
        text; None if no token repeats) and, for cross-attention, `CROSS_MEASURES`.

        Raises:
            ArgumentError: these are maps of words; measures are defined for tokens.
        """
        if any(layer.logits is None for layer in self.layers):
            raise ArgumentError(
                "maps", "words", "have no measures, which are defined for tokens; call measures() before words()"
            )
        columns = ("layer", "head") if "" in self.axes else ("kind", "layer", "head")
        rows = [
            dict(zip(columns, (*layer.address, _number(name)), strict=True))
            | {measure: _finite(values[index][head]) for measure, values in self._measured.items()}
            for index, layer in enumerate(self.layers)
            for head, name in enumerate(layer.names)
        ]
        return Table(rows, MEANINGS | CROSS_MEANINGS)

    @cached_property
    def _measured(self) -> dict[str, list[list[float]]]:
        """The measures by name, then by layer and map; empty for words."""
        if any(layer.logits is None for layer in self.layers):
            return {}
        found: dict[str, list[list[float]]] = {}
        for index, layer in enumerate(self.layers):
            assert layer.logits is not None
            captured, keys = CapturedMaps(), self.axes[layer.kind][1]
            captured.layers = [AttentionMaps(layer.weights.unsqueeze(0), layer.logits.unsqueeze(0))]
            captured.rows, captured.ablated = torch.arange(layer.weights.shape[1]), [layer.is_ablated]
            measures = OF_KIND.get(layer.kind, SELF_MEASURES)
            for name, (values,) in measure_layers(measures, captured, torch.tensor([keys.ids])).items():
                found.setdefault(name, [[math.nan] * len(other.names) for other in self.layers])[index] = values
        return found

    def plot(self, *address: int | str, axes: Axes | None = None) -> Figure:
        """The map of a head as a heat map with a colour bar; the numbers are written where they fit.

        The colour is the square root of the weight, from 0 to 1, as in the atlas; negative weights of differential
        attention have a linear scale around 0.

        Args:
            address: the address of the head, as in `plot(1, 3)` or `plot("cross", 1, 3)`.
            axes: matplotlib axes to draw on; by default those of a new figure.

        Returns:
            The figure, which a notebook shows and its method `savefig` saves.

        Raises:
            ArgumentError: there is no such head, or `axes` are no axes.
        """
        require_parts("head", "plot", address)
        if axes is not None and not isinstance(axes, Axes):
            raise ArgumentError("axes", axes, "must be axes of matplotlib, such as plt.gca()")
        panel = self.panel_of(address)
        queries, keys = self.axes[self.layer_of(address).kind]
        return chart_of_maps([panel], queries.tokens, keys.tokens, [] if axes is None else [axes])

    def panel_of(self, address: HeadAddress) -> Panel:
        """The map of a head, with its title; see `layer_of` for the address.

        Raises:
            ArgumentError: there is no such head.
        """
        layer, head = self.layer_of(address), plain_address(address)[-1]
        ablated = " (ablated)" if head in layer.ablated else ""
        title = f"{layer_title(layer.address)} head {head}{ablated}\n{self.model}".rstrip()
        return Panel(self[address], title, signed=layer.is_signed and not isinstance(head, str))

    def save(self, path: str | Path) -> Path:
        """Write the atlas of these maps, an HTML file that needs no server; see `write_atlas`.

        Args:
            path: the file; folders are created.

        Raises:
            ArgumentError: it is a folder, or not a path.
        """
        if not isinstance(path, str | os.PathLike):
            raise ArgumentError("path", path, "must be the path of a file", {"path": "atlas.html"})
        if Path(path).is_dir():
            raise ArgumentError("path", str(path), "is a folder", {"path": str(Path(path, "atlas.html"))})
        kinds = {kind: TokenStrings(*(axis.tokens for axis in both)) for kind, both in self.axes.items()}
        return write_atlas(
            path,
            [layer.weights for layer in self.layers],
            kinds,
            self._measured,
            [layer.names for layer in self.layers],
            title=" · ".join(filter(None, ["Attention", self.model])),
            descriptions=EXPLANATIONS,
            addresses=[layer.address for layer in self.layers],
            ablated=[layer.is_ablated for layer in self.layers],
        )

    def __sub__(self, other: "TextMaps") -> "models.MapsDifference":
        """The difference from the maps of another model for the same tokens.

        Raises:
            ArgumentError: the tokens differ, or no head is in both models.
        """
        return models.MapsDifference(self, other) if isinstance(other, TextMaps) else NotImplemented

    def __repr__(self) -> str:
        parts = []
        for kind, (queries, keys) in self.axes.items():
            own = [layer for layer in self.layers if layer.kind == kind]
            layers = f"{kind} {len(own)} layer{'s' * (len(own) != 1)}".strip()
            heads = sum(len(layer.heads) for layer in own)
            parts.append(f"{layers}, {heads} heads, {len(queries.tokens)} × {len(keys.tokens)} tokens")
        return f"{type(self).__name__}({'; '.join(parts)})"

    def _repr_html_(self) -> str:
        """The atlas in a frame, for notebooks."""
        with TemporaryDirectory() as folder:
            return framed(self.save(Path(folder) / "atlas.html").read_text(encoding="utf-8"))


def require_parts(argument: str, method: str, address: Sequence[Any]) -> None:
    """Refuse an address in one argument, `plot((1, 3))`, for a method that takes its parts, `plot(1, 3)`.

    Raises:
        ArgumentError: the address is one argument.
    """
    if len(address) == 1 and isinstance(address[0], tuple | list):
        parts = ", ".join(map(repr, address[0]))
        raise ArgumentError(argument, address[0], f"must be given in parts: {method}({parts})")


def _number(name: str) -> int | str:
    """The name of a map, as an integer if it is the number of a head."""
    return int(name) if name.isdecimal() else name


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
