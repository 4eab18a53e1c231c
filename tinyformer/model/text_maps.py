"""The attention maps of one text, in one layer or in all layers, and the difference between two models' maps."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float
from matplotlib import axes as matplotlib_axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from tinyformer.analysis.texts.maps import PICTURE_TOKENS
from tinyformer.data import TextTokenizer
from tinyformer.data.batches.windows import Batch
from tinyformer.errors import ArgumentError
from tinyformer.files import finite
from tinyformer.measures import (
    ALL_MEASURES,
    CROSS_MEASURES,
    MEASURES,
    PATTERNS,
    Axes,
    CapturedMaps,
    axes_of,
    head_label,
    map_names,
    measure_layers,
    merge_words,
    pairs_of,
    words_of,
)
from tinyformer.measures.capture import attention_calls
from tinyformer.model.notebook import Panel, Table, chart_of_maps, framed
from tinyformer.nn import AttentionMaps, BaseAttention, DifferentialAttention, EncoderDecoder, Network
from tinyformer.nn.heads import Address, layer_title, plain_address
from tinyformer.nn.network import attentions_in
from tinyformer.report import atlas_html, head_maps, write_atlas
from tinyformer.tasks import Task


@dataclass(frozen=True, eq=False)
class LayerMaps:
    """The attention maps of a layer for one text."""

    address: Address  # the address of the layer, (3,) or ("cross", 3)
    heads: tuple[int, ...]  # the numbers of its heads; pruned heads are missing, the others keep their numbers
    names: tuple[str, ...]  # the name of each map: "3" for the map of head 3, "3a" and "3b" for its two softmaxes
    weights: Float[Tensor, "maps queries keys"]  # the attention weights of each map
    logits: Float[Tensor, "maps queries keys"] | None  # scores before the softmax; None for maps of words
    factor: float | None  # λ of differential attention, the factor of the second softmax; None for other attention
    ablated: frozenset[int]  # the numbers of the heads whose output is replaced
    skip: float = 1.0  # the scale of the residual connection around the attention
    branch: float = 1.0  # the scale of the attention's output
    adds_embedding: bool = False  # whether the residual connection adds the embedding x₀

    @classmethod
    def of(cls, layer: BaseAttention, address: Address, maps: AttentionMaps, residual: nn.Module | None) -> "LayerMaps":
        """The `LayerMaps` of a layer, given `maps` (1, maps, queries, keys) and the layer's residual connection."""
        heads = tuple(layer.head_map.ids)
        factor = float(layer.factor()) if isinstance(layer, DifferentialAttention) else None
        ablated = frozenset(head for head, flag in zip(heads, layer.ablated(), strict=True) if flag)
        weights, logits = (part[0].detach().cpu() for part in maps)
        skip, branch = (float(getattr(residual, name, 1.0)) for name in ("scale", "branch"))
        names, adds = tuple(map(head_label, map_names(layer))), getattr(residual, "reads_side_inputs", False)
        return cls(address, heads, names, weights, logits, factor, ablated, skip, branch, adds)

    @property
    def kind(self) -> str:
        return str(self.address[0]) if len(self.address) > 1 else ""

    @property
    def is_signed(self) -> bool:
        return self.factor is not None or bool((self.weights < 0).any())

    @property
    def is_ablated(self) -> list[bool]:
        """For each map, True if its head is ablated."""
        return [head in self.ablated for head in self.heads for _ in range(len(self.names) // len(self.heads))]

    def of_head(self, head: int | str) -> Float[Tensor, "queries keys"]:
        """The map of a head; a name such as "3a" selects the map of one of its softmaxes.

        In differential attention the map of a head is softmax₁ - λ softmax₂, whose weights multiply the values. They
        can be negative, and each row sums to 1 - λ. In other classes with several softmaxes, select maps by name.
        """
        if isinstance(head, str):
            return self.weights[self.names.index(head)]
        per_head = len(self.names) // len(self.heads)
        first = per_head * self.heads.index(head)
        if per_head == 1:
            return self.weights[first]
        if self.factor is None:
            reason = f"has {per_head} maps, so name one of them"
            works = {"head": (*self.address, self.names[first])}
            raise ArgumentError("head", (*self.address, head), reason, works)
        return self.weights[first] - self.factor * self.weights[first + 1]

    def active_heads(self) -> Float[Tensor, "heads queries keys"]:
        """The map of each head that is not ablated, see `of_head`."""
        weights = self.weights[~torch.tensor(self.is_ablated)]
        return weights if self.factor is None else weights[0::2] - self.factor * weights[1::2]


TokenIds: TypeAlias = Mapping[str, tuple[Sequence[int], Sequence[int]]]
HeadAddress: TypeAlias = tuple[int | str, ...]
"""The address of a head: (3, 0) or ("cross", 3, 0); in differential attention, "0a" or "0b" selects a softmax."""


@dataclass(frozen=True, eq=False)
class TextMaps:
    """The exact attention maps of one text, or of a source and its target; made by `Model.attention`.

        maps = model.attention("The bank by the river")
        maps[1, 3]  # queries × keys, of layer 1, head 3; maps["cross", 1, 3] of an encoder–decoder
        maps.plot(1, 3)

    Rows of a map are queries, columns are keys. Pruning does not renumber heads. An ablated head keeps its weights,
    although its output is replaced. A notebook shows the maps as the atlas. An `ArgumentError` is raised for a head or
    layer that does not exist.
    """

    layers: Sequence[LayerMaps]  # the maps of each layer, in the order of `Network.attentions`
    axes: Mapping[str, Axes]  # the token strings by kind of attention; the kind is "" where there is only one
    ids: TokenIds  # the token ids of queries and keys, by kind of attention; empty for maps of words
    tokenizer: TextTokenizer | None  # the model's tokenizer, if it has one
    model: str = ""  # the name of the model in titles
    texts: Sequence[str | Sequence[str]] = ()  # the texts that the tokens encode; empty if they are unknown

    @property
    def tokens(self) -> Sequence[str] | dict[str, Axes]:
        """The token strings; for an encoder–decoder, the query and key tokens by kind of attention.

        A query of cross-attention is labelled with the token that the decoder predicts at its position.
        """
        return self.axes[""].queries if "" in self.axes else dict(self.axes)

    @cached_property
    def heads(self) -> list[HeadAddress]:
        return [(*layer.address, head) for layer in self.layers for head in layer.heads]

    def __getitem__(self, address: HeadAddress) -> Float[Tensor, "queries keys"]:
        """The map of a head; see `LayerMaps.of_head` for differential attention, which has two maps per head."""
        return self.layer_of(address).of_head(plain_address(address)[-1])

    def layer_of(self, address: HeadAddress) -> LayerMaps:
        parts = plain_address(address if isinstance(address, tuple) else (address,))
        layer = next((layer for layer in self.layers if layer.address == parts[:-1]), None)
        if layer is not None and parts[-1] in (*layer.heads, *layer.names):
            return layer
        form = "(layer, head)" if "" in self.axes else "(kind, layer, head)"
        raise ArgumentError("head", address, f"must be the {form} of a head", {"head": self.heads[0]})

    def words(self) -> "TextMaps":
        """The maps of words, see `words_of` and `merge_words`.

        The weight to a word is the sum over its tokens, the weight from a word the mean over its tokens.
        """
        if self.tokenizer is None:
            raise ArgumentError("tokenizer", None, "the model has no tokenizer, so its tokens have no words")
        if not self.ids:
            return self
        words = {kind: [words_of(ids, self.tokenizer, self.texts) for ids in sides] for kind, sides in self.ids.items()}
        axes = {kind: Axes(list(queries.names), list(keys.names)) for kind, (queries, keys) in words.items()}
        layers = [
            replace(layer, weights=merge_words(layer.weights, *words[layer.kind]), logits=None) for layer in self.layers
        ]
        return TextMaps(layers, axes, {}, self.tokenizer, self.model)

    def mean(self, *address: int | str) -> Float[Tensor, "queries keys"]:
        """The mean map over heads that are not ablated.

        Args:
            address: the layer whose heads are averaged, as in `mean(3)` or `mean("cross", 3)`, or the kind of
                attention, as in `mean("cross")`; by default, all heads, if the model has one kind of attention.
        """
        chosen = [layer for layer in self.layers if layer.address[: len(address)] == address]
        if len({layer.kind for layer in chosen}) != 1:
            reason = "must be (layer,), or (kind, layer) where there are several kinds"
            raise ArgumentError("layer", address, reason, {"layer": self.layers[0].address})
        active = torch.cat([layer.active_heads() for layer in chosen])
        if not len(active):
            raise ArgumentError("layer", address, "has no head that is not ablated")
        return active.mean(dim=0)

    def rollout(self) -> Float[Tensor, "queries keys"]:
        """Attention rollout (Abnar & Zuidema 2020, arXiv 2005.00928): how much of each token reaches each output.

        A = A_L · … · A_1 with A_l = |branch| (mean of the heads of layer l) + |skip| I, whose rows are normalised to
        sum to 1. I represents the residual connection, and `branch` and `skip` are its scales, see `Residual`; both are
        1 in the paper. The mean excludes ablated heads; if all heads of a layer are ablated, A_l = I. Rows of the
        result are tokens of the last layer, columns are input tokens. Rollout is not defined for negative weights, as
        in differential attention. For an encoder–decoder, the result is the rollout of the encoder's self-attention.
        """
        stack = "encoder" if "encoder" in self.axes else ""
        layers = [layer for layer in self.layers if layer.kind == stack]
        if any(layer.is_signed for layer in layers):
            reason = "has negative weights, for which attention rollout is not defined"
            raise ArgumentError("attention", "differential" if layers[0].factor else "signed", reason)
        if any(layer.adds_embedding for layer in layers):
            reason = "adds the embedding to each layer, for which attention rollout is not defined"
            raise ArgumentError("attention_residual.embedding", True, reason, {"attention_residual.embedding": False})
        total = identity = torch.eye(len(self.axes[stack].queries))
        for layer in layers:
            active = layer.active_heads().float()
            mixed = abs(layer.branch) * active.sum(dim=0) / max(len(active), 1) + abs(layer.skip) * identity
            total = F.normalize(mixed, p=1, dim=-1) @ total
        return total

    def measures(self) -> Table:
        """All measures of all maps: a row for each map, with the columns `layer`, `head` and one for each measure.

        With several kinds of attention, the first column is `kind`. The measures are `MEASURES`, `PATTERNS` (on this
        text; None if no token repeats) and, for cross-attention, `CROSS_MEASURES`. Maps of words have no measures.
        """
        rows: list[dict[str, Any]] = []
        for index, layer in enumerate(self.layers):
            for number, name in enumerate(layer.names):
                values = {measure: finite(by_layer[index][number]) for measure, by_layer in self._measured.items()}
                rows.append(_columns((*layer.address, int(name) if name.isdecimal() else name)) | values)
        return Table(rows, {name: measure.meaning for name, measure in ALL_MEASURES.items()})

    @cached_property
    def _measured(self) -> dict[str, list[list[float]]]:
        """The values of each measure by its name, then by layer and map; empty for maps of words."""
        measured: dict[str, list[list[float]]] = {}
        for index, layer in enumerate(self.layers if self.ids else ()):
            assert layer.logits is not None
            captured = CapturedMaps()
            captured.layers = [AttentionMaps(layer.weights.unsqueeze(0), layer.logits.unsqueeze(0))]
            captured.rows, captured.ablated = torch.arange(layer.weights.shape[1]), [layer.is_ablated]
            measures = CROSS_MEASURES if layer.kind == "cross" else MEASURES | PATTERNS
            for name, (values,) in measure_layers(measures, captured, torch.tensor([self.ids[layer.kind][1]])).items():
                measured.setdefault(name, [[math.nan] * len(other.names) for other in self.layers])[index] = values
        return measured

    def plot(self, *address: int | str, axes: matplotlib_axes.Axes | None = None) -> Figure:
        """The map of a head as a heat map with a colour bar; cells show the weights as numbers where these fit.

        The colour is the square root of the weight, from 0 to 1, as in the atlas; negative weights of differential
        attention have a linear scale around 0.

        Args:
            address: the address of the head, as in `plot(1, 3)` or `plot("cross", 1, 3)`.
            axes: the matplotlib axes to draw on; by default, the axes of a new figure.
        """
        sides = self.axes[self.layer_of(address).kind]
        return chart_of_maps([self.panel_of(address)], *sides, [] if axes is None else [axes])

    def panel_of(self, address: HeadAddress) -> Panel:
        """The map of a head, with its title; see `layer_of`."""
        layer, head = self.layer_of(address), plain_address(address)[-1]
        ablated = " (ablated)" if head in layer.ablated else ""
        title = f"{layer_title(layer.address)} head {head}{ablated}\n{self.model}".rstrip()
        return Panel(self[address], title, signed=layer.is_signed and not isinstance(head, str))

    def save(self, path: str | Path) -> Path:
        """Write the atlas of these maps, an HTML file that needs no server; folders are created."""
        return write_atlas(path, **self._page())

    def _page(self) -> dict[str, Any]:
        """The arguments of `atlas_html` for these maps."""
        return {
            "maps": [layer.weights for layer in self.layers],
            "tokens": self.axes,
            "measures": self._measured,
            "names": [layer.names for layer in self.layers],
            "title": " · ".join(filter(None, ["Attention", self.model])),
            "addresses": [layer.address for layer in self.layers],
            "ablated": [layer.is_ablated for layer in self.layers],
        }

    def _repr_html_(self) -> str:
        return framed(atlas_html(**self._page()))

    def _repr_png_(self) -> bytes:
        """A picture of all maps (of several kinds of attention, only cross-attention), for pages that run no script."""
        kind, shown = ("" if "" in self.axes else "cross"), slice(PICTURE_TOKENS)
        layers, (queries, keys) = [layer for layer in self.layers if layer.kind == kind], self.axes[kind]
        maps, names = zip(*((layer.weights[:, shown, shown], layer.names) for layer in layers), strict=True)
        title, ablated = f"{kind} attention maps".strip().capitalize(), [layer.is_ablated for layer in layers]
        return head_maps(maps, queries[shown], title, names, keys[shown], ablated=ablated)._repr_png_()

    def __sub__(self, other: "TextMaps") -> "MapsDifference":
        return MapsDifference(self, other) if isinstance(other, TextMaps) else NotImplemented

    def __repr__(self) -> str:
        parts = []
        for kind, (queries, keys) in self.axes.items():
            of_kind = [layer for layer in self.layers if layer.kind == kind]
            layers = f"{kind} {len(of_kind)} layer{'s' * (len(of_kind) != 1)}".strip()
            heads = sum(len(layer.heads) for layer in of_kind)
            parts.append(f"{layers}, {heads} heads, {len(queries)} × {len(keys)} tokens")
        return f"{type(self).__name__}({'; '.join(parts)})"


class MapsDifference:
    """The attention maps of one model minus those of another, for the same tokens; made by `maps - other`.

        difference = after.attention(text) - before.attention(text)
        difference[1, 3]  # queries × keys, of layer 1, head 3
        difference.plot(1, 3)  # both maps, and the difference

    Only heads that both models have are included. A notebook shows the table of `distances`.
    """

    def __init__(self, first: TextMaps, second: TextMaps) -> None:
        if first.tokens != second.tokens:
            reason = "must equal the tokens of the other maps"
            raise ArgumentError("maps.tokens", second.tokens, reason)
        self.first, self.second = first, second
        self.heads = [address for address in first.heads if address in second.heads]

    def __getitem__(self, address: HeadAddress) -> Float[Tensor, "queries keys"]:
        return self.first[address] - self.second[address]

    def distances(self) -> Table:
        """The distance of the two maps of each head: half the sum of |difference| over keys, averaged over queries.

        This is the total variation distance: 0 for equal maps, 1 for maps that have no key in common.
        """
        distances = {address: float(self[address].abs().sum(dim=-1).mean() / 2) for address in self.heads}
        rows = [_columns(address) | {"distance": distance} for address, distance in distances.items()]
        return Table(rows, {"distance": "total variation distance, mean over queries"})

    def plot(self, *address: int | str) -> Figure:
        """The maps of a head in both models, and their difference in colours around 0; see `TextMaps.plot`."""
        panels = [maps.panel_of(address) for maps in (self.first, self.second)]
        panels.append(Panel(self[address], "first minus second", signed=True, label="Difference of attention weights"))
        return chart_of_maps(panels, *self.first.axes[self.first.layer_of(address).kind])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.first!r}, {self.second!r})"

    def _repr_html_(self) -> str:
        return self.distances()._repr_html_()


def _columns(address: HeadAddress) -> dict[str, Any]:
    return dict(zip(("kind", "layer", "head")[-len(address) :], address, strict=True))


@torch.no_grad()
def maps_of_batch(
    network: Network, task: Task, tokenizer: TextTokenizer | None, batch: Batch, model: str = ""
) -> list[TextMaps]:
    """The attention maps of each row of a batch, in evaluation mode; without a tokenizer, a token is shown by its id.

    A source and its target have maps of each kind of attention. `model` is the name of the model in titles.
    """
    residuals = {part: residual for module, residual in network.attention_sublayers() for part in attentions_in(module)}
    found = []
    for inputs, ids in _inputs_by_row(network, task, batch):
        captured = CapturedMaps()
        captured.add(attention_calls(network, *inputs))
        layers = zip(network.attentions(), network.layer_addresses(), captured.layers, strict=True)
        maps = [LayerMaps.of(layer, address, of_layer, residuals[layer]) for layer, address, of_layer in layers]
        found.append(TextMaps(maps, axes_of(ids, tokenizer), ids, tokenizer, model))
    return found


def _inputs_by_row(network: Network, task: Task, batch: Batch) -> Iterator[tuple[tuple[Any, ...], TokenIds]]:
    """For each row of a batch, the inputs of the network and the token ids of queries and keys."""
    if isinstance(network, EncoderDecoder):
        yield from (((pair.source, pair.target), pair.ids_by_kind()) for pair in pairs_of(batch))
        return
    for row, length in zip(batch["inputs"].split(1), batch["lengths"].tolist(), strict=True):
        inputs, ids = row[:, :length], row[0, :length].tolist()
        yield (inputs, task.mask({"inputs": inputs})), {"": (ids, ids)}
