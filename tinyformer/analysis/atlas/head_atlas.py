"""Every head over all the data: the pass over a split, and the analysis with its tables and its page."""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyformer.analysis.atlas import events as of_layers
from tinyformer.analysis.atlas.events import LayerEvents, watched
from tinyformer.analysis.atlas.places import Vocabulary, places_by_kind
from tinyformer.analysis.atlas.reservoirs import Entries, Smallest, priorities
from tinyformer.analysis.atlas.snippets import COLUMNS, Snippets, events_of, projected, promoted_tokens
from tinyformer.analysis.atlas.tally import CLASSES, limits_of_measures
from tinyformer.analysis.context import AnalysisContext, Trained
from tinyformer.analysis.texts.maps import HeadMaps, of_sample
from tinyformer.analysis.texts.relation_lines import read_columns
from tinyformer.batch import Batch, tensors
from tinyformer.errors import ArgumentError, argument_path, require_choice
from tinyformer.files import finite
from tinyformer.measures.capture import head_label, map_names
from tinyformer.measures.inputs import queries_by_kind
from tinyformer.measures.probe import HeadMeasures
from tinyformer.measures.table import EXPLANATIONS
from tinyformer.nn import AttentionInputs, Network
from tinyformer.report.charts import scatter
from tinyformer.report.result import AnalysisResult

NUM_POINTS = 200  # queries of each kind of attention whose vectors are shown
NUM_WEIGHTS = {"cpu": 2**23}  # of a layer that are computed at once; 2²⁸ on other devices
VECTORS = ("queries", "keys", "outputs")
DESCRIPTIONS = {
    "strength": "Mean over the queries of the strongest key's weight times the norm of what its value writes.",
    **{f"strength_{percent}": f"The strength that {percent} % of the queries stay below." for percent in (10, 50, 90)},
    **{f"share_{name}": f"Share of attention on keys of the class {name}." for name in CLASSES},
    **{f"expected_{name}": f"The share of the class {name} that fixed offsets would give." for name in CLASSES},
}


class SplitEvents:
    """One pass over a split: the `LayerEvents` of each layer, and for each kind of attention a sample of queries.

    The queries of the sample are the same for all heads; with them are kept the vectors of `LayerEvents.add`.
    """

    def __init__(self, context: AnalysisContext, seed: int) -> None:
        network, device = context.network, context.batches[0]["inputs"].device
        self._kinds, self.num_rows = context.kinds, 0
        are_queries = [of for batch in context.batches for of in queries_by_kind(batch).values()]
        self.limits = limits_of_measures(max(int(of.sum(dim=1).max()) for of in are_queries))
        limits = torch.tensor([*self.limits.values()], device=device)
        self.layers = [
            LayerEvents(layer, limits[:2] if kind == "cross" else limits, network.max_seq_len, seed + index)
            for index, (layer, kind) in enumerate(zip(context.layers, self._kinds, strict=True))
        ]
        self.points = {kind: Smallest(1, NUM_POINTS, device) for kind in dict.fromkeys(self._kinds)}
        vocabulary = Vocabulary.of(context.tokenizer, network.vocab_size, device)
        with watched(network, self._begin, self._end) as run:
            for batch in _resized(context.split(), max(layer.num_maps for layer in self.layers)):
                self._places = places_by_kind(batch, self.num_rows, vocabulary)
                self._shared, self._chosen = defaultdict[str, dict[Hashable, Any]](dict), self._choose(seed)
                with context.precision():
                    run(partial(context.task.forward, network, batch))
                for kind, kept in self.points.items():
                    kept.offer(self._chosen[kind][2])
                self.num_rows += len(batch["inputs"])

    def _choose(self, seed: int) -> dict[str, tuple[Tensor, Tensor, Entries]]:
        """By kind, the rows and positions of the queries of a batch that may be kept, and what is shown of them."""
        chosen = dict[str, tuple[Tensor, Tensor, Entries]]()
        for kind, kept in self.points.items():
            of = self._places[kind]
            positions = torch.arange(of.is_query.shape[1], device=of.is_query.device)
            scores = priorities(seed, of.rows.unsqueeze(1), positions).double().masked_fill(~of.is_query, torch.inf)
            last = scores.flatten().kthvalue(min(NUM_POINTS, scores.numel())).values
            rows, at = index = ((scores <= last) & (scores < kept.limits)).nonzero(as_tuple=True)
            entries = of.entries(rows, at, at.clamp(max=of.keys.tokens.shape[1] - 1))
            chosen[kind] = rows, at, entries | {"group": torch.zeros_like(at), "score": scores[index]}
        return chosen

    def _begin(self, number: int, call: AttentionInputs) -> Tensor:
        kind = self._kinds[number]
        return self.layers[number].begin(call, self._places[kind], self._shared[kind])

    def _end(self, number: int, call: AttentionInputs, outputs: Tensor) -> None:
        rows, at, entries = self._chosen[kind := self._kinds[number]]
        vectors = self.layers[number].end(call, outputs, self._places[kind], rows, at)
        entries.update({f"{name} of {number}": of for name, of in zip(VECTORS, vectors, strict=True)})


def _resized(batches: Iterable[Batch], num_maps: int) -> Iterator[Batch]:
    """The rows of some batches in others whose maps, of one layer at a time, have about `NUM_WEIGHTS` weights."""
    waiting = dict[str, Tensor]()
    for batch in batches:
        rows = {name: of for name, of in tensors(batch).items() if name != "document_starts"}
        if waiting and any(of.shape[1:] != waiting[name].shape[1:] for name, of in rows.items()):
            yield cast(Batch, waiting)
            waiting = {}
        waiting = {name: torch.cat([waiting[name], of]) if waiting else of for name, of in rows.items()}
        num_keys = max(of.shape[1] for of in rows.values() if of.ndim > 1)
        size = max(1, NUM_WEIGHTS.get(batch["inputs"].device.type, 2**28) // (num_maps * num_keys**2))
        while len(waiting["inputs"]) >= size:
            yield cast(Batch, {name: of[:size] for name, of in waiting.items()})
            waiting = {name: of[size:] for name, of in waiting.items()}
    if len(waiting.get("inputs", ())):
        yield cast(Batch, waiting)


@dataclass(eq=False)
class HeadAtlas(HeadMaps):
    """Every head over all the data: which tokens it connects most strongly, and what else it does.

    In one pass over the evaluated split, each query with its strongest key is an event, see `LayerEvents`. For each
    head, the page (`atlas.html`) shows its strongest events, and some of each decile of strengths, drawn at random; the
    distribution of measures over all queries; attention by class of token next to that of fixed offsets, see `Tally`;
    which tokens its output promotes; and its vectors on a sample of queries, projected to a plane. It also holds what
    `HeadMaps` shows, whose arguments it takes.

    Args:
        columns: further measures of heads: the name of the column that has them in a .csv file, such as "change" in the
            `ablation.csv` of `HeadAblation`, and its path.
        seed: of the samples.
        max_heads: the most heads that a page is written for.
        x: the measure on the horizontal axis of the picture.
        y: the measure on the vertical axis.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    max_heads: int = 256
    x: str = "entropy_share"
    y: str = "strength"

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        if (number := len(context.heads)) > self.max_heads:
            reason = f"the model has {number:,} heads, of which a page would have about {number // 10:,} MB"
            raise ArgumentError("max_heads", self.max_heads, reason, {"max_heads": number})
        further_measures = self._read_columns(context)
        split = SplitEvents(context, self.seed)
        strings = context.tokenizer.token_strings(range(context.network.vocab_size))
        snippets, points = Snippets(strings, context.row), {kind: kept.kept() for kind, kept in split.points.items()}
        classes, events, of_heads = list[list[Any]](), list[list[Any]](), list[dict[str, Any]]()
        for number, (of, kind) in enumerate(zip(split.layers, context.kinds, strict=True)):
            counted = F.pad(of.tally.histograms, (0, 0, 0, 0, 0, len(split.limits) - len(of.tally.histograms)))
            shares = [[[*map(finite, pair)] for pair in pairs] for pairs in of.tally.shares().transpose(0, 1).tolist()]
            for index, entries in enumerate(events_of(of)):
                if of.layer.ablated_maps()[index]:
                    of_heads.append({})
                    continue
                address = [*context.addresses[number], map_names(of.layer)[index]]
                head = index // of.layer.num_softmaxes
                shown = snippets.events(entries, promoted_tokens(context.network, of.layer, head, entries["output"]))
                events += [[*address, *row] for row in snippets.rows(shown, entries)]
                classes += [[*address, name, *pair] for name, pair in zip(CLASSES, shares[index], strict=True)]
                planes = [projected(points[kind][f"{name} of {number}"][:, index]) for name in VECTORS]
                explained = {name: share for name, (_, share) in zip(VECTORS, planes, strict=True)}
                projection = {name: plane for name, (plane, _) in zip(VECTORS, planes, strict=True)}
                of_map = {"snippets": shown, "histograms": counted[:, index].tolist(), "shares": shares[index]}
                of_heads.append({"events": of_map | {"projection": projection | {"explained": explained}}})
        numbers = " and ".join(f"{of:,}" for of in dict.fromkeys(of.tally.num_queries for of in split.layers))
        read = f"{numbers} queries of {split.num_rows:,} {context.row}s"
        sampled = f"{read}; of each head, the {of_layers.NUM_STRONGEST} strongest events of all, and "
        sampled += f"{of_layers.NUM_OF_DECILE} of each decile of strengths, drawn with seed {self.seed}"
        further = {
            "points": {kind: snippets.points(entries) for kind, entries in points.items()},
            "tokens": snippets.shown,
            "sampled": sampled,
            "rows": context.row,
            "measures": [{"name": name, "low": low, "high": high} for name, (low, high) in split.limits.items()],
            "classes": CLASSES,
        }
        measure, values = of_sample(context, self.rows), measures_of(split.layers) | further_measures

        def with_values(network: Network, random: int | None) -> HeadMeasures:
            found, is_control = measure(network, random), network is not context.network or random is not None
            return found if is_control else replace(found, values={**found.values, **values})

        page = {"further": {"events": further}, "of_heads": of_heads, "descriptions": EXPLANATIONS | DESCRIPTIONS}
        findings = self.written(context, folder, self.shown(context)._replace(measure=with_values), **page)
        names, rows = findings.tables["atlas"] = findings.tables.pop("maps")
        place = names[: names.index("head") + 1]
        findings.tables["events"] = [*place, *COLUMNS], events
        findings.tables["classes"] = [*place, "class", "share", "expected"], classes
        for axis in ("x", "y"):
            require_choice(axis, getattr(self, axis), names[len(place) : -1])
        x, y, drawn = names.index(self.x), names.index(self.y), {}
        for row in rows:
            *of_kind, layer, name = row[: len(place)]
            if None not in (row[x], row[y]):
                drawn[" ".join([*of_kind, f"{layer}.{head_label(name)}"])] = row[x], row[y]
        findings.figures["atlas"] = scatter(drawn, f"Heads over {read}", self.x, self.y)
        findings.lines = {"events": sampled, **findings.lines}
        return findings

    def _read_columns(self, context: AnalysisContext) -> dict[str, list[list[float]]]:
        """The values of `columns` for each map of each layer; nan for heads that a file does not have."""
        values = dict[str, list[list[float]]]()
        for name, file in self.columns.items():
            with argument_path(passed={"file": f"columns.{name}"}):
                rows = read_columns(file, [*context.address_columns, "head", name])
            of_head = {(*map(str, layer), _padded(str(head))): value for *layer, head, value in rows}
            values[name] = [
                [float(of_head.get((*map(str, address), head), "") or "nan") for head in map_names(layer)]
                for address, layer in zip(context.addresses, context.layers, strict=True)
            ]
        return values


def _padded(head: str) -> str:
    """The name of a head in a table as `map_names` has it: "03" for "3", "03a" for "3a"."""
    return head.zfill(2 + head[-1:].isalpha())


def measures_of(layers: Sequence[LayerEvents]) -> dict[str, list[list[float]]]:
    """The mean and quantiles of strengths, and the shares by class, of each map of each layer; nan if it is ablated."""
    values = defaultdict[str, list[list[float]]](list)
    for of in layers:
        of_layer = {"strength": of.strength / of.tally.num_queries}
        for percent in (10, 50, 90):
            bins = (of.counts.cumsum(dim=1) < of.tally.num_queries * percent / 100).sum(dim=1)
            width = of_layers.OCTAVES / of_layers.NUM_BINS
            of_layer[f"strength_{percent}"] = 2.0 ** (of_layers.LOWEST + (bins + 0.5) * width)
        for name, pairs in zip(CLASSES, of.tally.shares(), strict=True):
            of_layer |= {f"share_{name}": pairs[:, 0], f"expected_{name}": pairs[:, 1]}
        ablated = torch.tensor(of.layer.ablated_maps(), device=of.counts.device)
        for name, of_maps in of_layer.items():
            values[name].append(of_maps.masked_fill(ablated, math.nan).tolist())
    return values
