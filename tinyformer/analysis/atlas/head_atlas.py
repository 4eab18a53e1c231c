"""Every head over all the data: the analysis, its tables and its page."""

import math
import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyformer.analysis.atlas.events import (
    LOWEST,
    NUM_BINS,
    NUM_OF_DECILE,
    NUM_STRONGEST,
    OCTAVES,
    Layer,
    LayerEvents,
    visit_layers,
)
from tinyformer.analysis.atlas.places import Places, Vocabulary, places_by_kind
from tinyformer.analysis.atlas.reservoirs import Entries, Smallest, priorities
from tinyformer.analysis.atlas.snippets import NUM_PROMOTED, Snippets, events_of, projected, promoted_tokens
from tinyformer.analysis.atlas.tally import CLASSES, limits_of_measures
from tinyformer.analysis.maps import HeadMaps, of_sample
from tinyformer.analysis.measures.capture import head_label, map_names
from tinyformer.analysis.measures.inputs import queries_by_kind
from tinyformer.analysis.measures.probe import HeadMeasures
from tinyformer.analysis.measures.table import EXPLANATIONS
from tinyformer.analysis.pictures.charts import scatter
from tinyformer.analysis.relation_lines import read_columns
from tinyformer.analysis.subject import Findings, Subject, Trained
from tinyformer.batch import Batch, tensors
from tinyformer.errors import ArgumentError, argument_path, require_choice
from tinyformer.nn import Network

NUM_POINTS = 200  # queries of each kind of attention whose vectors are shown
NUM_WEIGHTS = {"cpu": 2**22}  # of a layer that are computed at once; 2**28 on other devices


EVENT_COLUMNS = ("decile", "row", "position", "query", "key_position", "key", "weight", "norm", "strength", "text")
EVENT_COLUMNS += tuple(f"promoted_{number}" for number in range(1, NUM_PROMOTED + 1))
DESCRIPTIONS = {
    "strength": "Mean over the queries of the strongest key's weight times the norm of what its value writes.",
    **{f"strength_{percent}": f"The strength that {percent} % of the queries stay below." for percent in (10, 50, 90)},
    **{f"share_{name.replace(' ', '_')}": f"Share of attention on keys of the class: {name}." for name in CLASSES},
    **{f"expected_{name.replace(' ', '_')}": f"Share of the class {name} that fixed offsets give." for name in CLASSES},
}


class SplitEvents:
    """One pass over a split: the `LayerEvents` of each layer, and for each kind of attention a sample of queries.

    The queries of the sample are the same for all heads; with them are kept the vectors of `LayerEvents.add`.
    """

    def __init__(self, subject: Subject, seed: int) -> None:
        network, device, kinds = subject.network, subject.batches[0]["inputs"].device, subject.kinds
        lengths = [queries_by_kind(batch) for batch in subject.batches]
        self.num_keys = max(int(of.sum(dim=1).max()) for of_kinds in lengths for of in of_kinds.values())
        self.limits = limits_of_measures(self.num_keys)
        limits = torch.tensor([*self.limits.values()], device=device)
        self.layers = [
            LayerEvents(layer, limits[:2] if kind == "cross" else limits, network.max_seq_len, seed + index)
            for index, (layer, kind) in enumerate(zip(subject.layers, kinds, strict=True))
        ]
        self.points = {kind: Smallest(1, NUM_POINTS, device) for kind in dict.fromkeys(kinds)}
        self.num_rows, vocabulary = 0, Vocabulary.of(subject.tokenizer, network.vocab_size, device)
        num_maps = max(layer.num_maps for layer in self.layers)
        for batch in subject.split():
            for part in _parts(batch, num_maps):
                self._read(subject, part, places_by_kind(part, self.num_rows, vocabulary), seed)
                self.num_rows += len(part["inputs"])

    def _read(self, subject: Subject, batch: Batch, places: Mapping[str, Places], seed: int) -> None:
        shared, chosen = defaultdict[str, dict[Hashable, Any]](dict), dict[str, tuple[Tensor, Tensor, Entries]]()
        for kind, kept in self.points.items():
            of = places[kind]
            positions = torch.arange(of.is_query.shape[1], device=of.is_query.device)
            scores = priorities(seed, of.rows.unsqueeze(1), positions).double().masked_fill(~of.is_query, torch.inf)
            last = scores.flatten().kthvalue(min(NUM_POINTS, scores.numel())).values
            rows, at = index = ((scores <= last) & (scores < kept.limits)).nonzero(as_tuple=True)
            entries = of.entries(rows, at, at.clamp(max=of.keys.tokens.shape[1] - 1))
            chosen[kind] = rows, at, entries | {"group": torch.zeros_like(at), "score": scores[index]}

        def visit(number: int, layer: Layer) -> None:
            kind = subject.kinds[number]
            rows, at, entries = chosen[kind]
            vectors = self.layers[number].add(layer, places[kind], shared[kind], rows, at)
            entries.update({f"{name} of {number}": of for name, of in vectors.items()})

        with subject.precision():
            visit_layers(subject.network, partial(subject.task.forward, subject.network, batch), visit)
        for kind, kept in self.points.items():
            kept.offer(chosen[kind][2])


def _parts(batch: Batch, num_maps: int) -> Iterator[Batch]:
    """The rows of a batch in parts whose maps, of one layer at a time, have about `NUM_WEIGHTS` weights."""
    num_keys = max(of.shape[1] for of in tensors(batch).values() if of.ndim > 1)
    size = max(1, NUM_WEIGHTS.get(batch["inputs"].device.type, 2**28) // (num_maps * num_keys**2))
    parts = {name: of.split(size) for name, of in tensors(batch).items() if name != "document_starts"}
    return (cast(Batch, dict(zip(parts, of, strict=True))) for of in zip(*parts.values(), strict=True))


@dataclass(eq=False)
class HeadAtlas(HeadMaps):
    """Every head over all the data: which tokens it connects most strongly, and what else it does there.

    In one pass over the evaluated split, each query with its strongest key is an event, see `LayerEvents`. For each
    head the page (`atlas.html`) shows the strongest events, and some of each decile of strengths, drawn at random; the
    distribution of its measures over all queries; its attention by class of token beside that of fixed offsets, see
    `Tally`; which tokens its output promotes; and its vectors on a sample of queries, projected to a plane. It also
    holds the maps and measures of `HeadMaps`, whose arguments it takes.

    Args:
        seed: of the samples.
        max_heads: the most heads; a page holds about 0.1 MB for each.
        x, y: the measures on the axes of the picture.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    max_heads: int = 256
    x: str = "entropy_share"
    y: str = "strength"

    def __call__(self, model: Trained, folder: Path = Path()) -> Findings:
        subject = model.sample(self.num_windows)
        if (number := len(subject.heads)) > self.max_heads:
            reason = f"the model has {number:,} heads, of which a page would have about {number // 10:,} MB"
            raise ArgumentError("max_heads", self.max_heads, reason, {"max_heads": number})
        split = SplitEvents(subject, self.seed)
        snippets = Snippets(subject.tokenizer.token_strings(range(subject.network.vocab_size)), subject.row)
        points = {kind: kept.kept() for kind, kept in split.points.items()}
        classes, events, of_heads = list[list[Any]](), list[list[Any]](), list[dict[str, Any]]()
        for number, layer in enumerate(split.layers):
            kind, shares = subject.kinds[number], layer.tally.shares().transpose(0, 1).tolist()
            counted = F.pad(layer.tally.histograms, (0, 0, 0, 0, 0, len(split.limits) - len(layer.tally.histograms)))
            shares = [[[None if math.isnan(x) else x for x in pair] for pair in of_map] for of_map in shares]
            for index, entries in enumerate(events_of(layer)):
                if layer.layer.ablated_maps()[index]:
                    of_heads.append({})
                    continue
                address = [*subject.addresses[number], map_names(layer.layer)[index]]
                head = index // layer.layer.num_softmaxes
                shown = snippets.events(entries, promoted_tokens(subject.network, layer.layer, head, entries["output"]))
                classes += [[*address, name, *pair] for name, pair in zip(CLASSES, shares[index], strict=True)]
                events += [[*address, *row] for row in snippets.rows(shown, entries)]
                vectors = {
                    name: points[kind][f"{name} of {number}"][:, index] for name in ("queries", "keys", "outputs")
                }
                planes = {name: projected(of) for name, of in vectors.items()}
                of_events = {"snippets": shown, "histograms": counted[:, index].tolist(), "shares": shares[index]}
                explained = {name: of for name, (_, of) in planes.items()}
                projection = {name: plane for name, (plane, _) in planes.items()} | {"explained": explained}
                of_heads.append({"events": of_events | {"projection": projection}})
        num_queries = [f"{of:,}" for of in dict.fromkeys(layer.tally.num_queries for layer in split.layers)]
        sampled = (
            f"{' and '.join(num_queries)} queries of {split.num_rows:,} {subject.row}s; of each head, the {NUM_STRONGEST} "
            f"strongest events of all and {NUM_OF_DECILE} of each decile of strengths, drawn with seed {self.seed}"
        )
        further = {
            "tokens": snippets.shown,
            "sampled": sampled,
            "rows": subject.row,
            "measures": [{"name": name, "low": low, "high": high} for name, (low, high) in split.limits.items()],
            "classes": CLASSES,
            "points": {kind: snippets.points(entries) for kind, entries in points.items()},
        }
        values = measures_of(split.layers) | self._read_columns(subject)
        measured = of_sample(subject, self.rows)

        def measure(network: Network, random: int | None) -> HeadMeasures:
            found, is_control = measured(network, random), network is not subject.network or random is not None
            return found if is_control else replace(found, values={**found.values, **values})

        shown = self.shown(subject)._replace(measure=measure)
        page = {"further": {"events": further}, "of_heads": of_heads, "descriptions": EXPLANATIONS | DESCRIPTIONS}
        findings = self.written(subject, folder, shown, **page)
        names, rows = findings.tables["atlas"] = findings.tables.pop("maps")
        axes = [names.index(require_choice(axis, getattr(self, axis), names) or getattr(self, axis)) for axis in "xy"]
        titles = {" ".join(map(str, row[: names.index("head") + 1])): row for row in rows}
        places = {
            title: (row[axes[0]], row[axes[1]])
            for title, row in titles.items()
            if None not in (row[axes[0]], row[axes[1]])
        }
        findings.tables |= {
            "events": ([*names[: names.index("head") + 1], *EVENT_COLUMNS], events),
            "classes": ([*names[: names.index("head") + 1], "class", "share", "expected"], classes),
        }
        findings.figures["atlas"] = scatter(places, f"Heads over {sampled.partition(';')[0]}", self.x, self.y)
        findings.lines = {"events": sampled, **findings.lines}
        return findings

    def _read_columns(self, subject: Subject) -> dict[str, list[list[float]]]:
        """The values of `columns` for each map of each layer; nan for heads that a file does not have."""
        found = {}
        for name, file in self.columns.items():
            with argument_path(passed={"file": f"columns.{name}"}):
                rows = read_columns(file, [*subject.address_columns, "head", name])
            of_head = {tuple(re.sub(r"^0(?=\d)", "", str(part)) for part in head): value for *head, value in rows}
            found[name] = [
                [
                    float(of_head.get((*map(str, address), head_label(map_name)), "") or "nan")
                    for map_name in map_names(layer)
                ]
                for address, layer in zip(subject.addresses, subject.layers, strict=True)
            ]
        return found


def measures_of(layers: Sequence[LayerEvents]) -> dict[str, list[list[float]]]:
    """For each map of each layer, the mean and quantiles of the strengths, and the shares by class."""
    values = defaultdict[str, list[list[float]]](list)
    for layer in layers:
        ablated = torch.tensor(layer.layer.ablated_maps(), device=layer.counts.device)
        of_layer = {"strength": layer.strength / layer.tally.num_queries}
        for percent in (10, 50, 90):
            bins = (layer.counts.cumsum(dim=1) < layer.tally.num_queries * percent / 100).sum(dim=1)
            of_layer[f"strength_{percent}"] = 2.0 ** (LOWEST + (bins + 0.5) * OCTAVES / NUM_BINS)
        for name, pair in zip(CLASSES, layer.tally.shares(), strict=True):
            of_layer |= {
                f"{side}_{name.replace(' ', '_')}": pair[:, at] for at, side in enumerate(("share", "expected"))
            }
        for name, of_maps in of_layer.items():
            values[name].append(of_maps.masked_fill(ablated, math.nan).tolist())
    return values
