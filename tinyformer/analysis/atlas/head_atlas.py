"""Every head over all the data: its events, distributions, token classes and vectors, and the page that shows them."""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinyformer.analysis.atlas.events import NUM_BINS, NUM_OF_DECILE, NUM_STRONGEST, LOWEST, OCTAVES, Layer, LayerEvents, visit_layers
from tinyformer.analysis.atlas.places import CLASSES, Places, Vocabulary, places_by_kind
from tinyformer.analysis.atlas.points import VECTORS, Points, projected
from tinyformer.analysis.atlas.promoted import promoted_tokens
from tinyformer.analysis.atlas.snippets import Tokens, events_of, snippets_of
from tinyformer.analysis.atlas.tally import QUERY_MEASURES, limits_of
from tinyformer.analysis.maps import HeadMaps, of_sample
from tinyformer.analysis.subject import Findings, Subject, Trained
from tinyformer.errors import ArgumentError


class SplitEvents:
    """The `LayerEvents` of all layers, and the `Points` of each kind of attention, from one pass over a split."""

    def __init__(self, subject: Subject, seed: int = 0) -> None:
        network = subject.network
        self.layers = [
            LayerEvents(layer, kind == "cross", network.max_seq_len, seed + index)
            for index, (layer, kind) in enumerate(zip(subject.layers, subject.kinds, strict=True))
        ]
        device = subject.batches[0]["inputs"].device
        self.points = {kind: Points(seed, device) for kind in dict.fromkeys(subject.kinds)}
        self.num_rows = 0
        vocabulary = Vocabulary.of(subject.tokenizer, network.vocab_size, device)
        for batch in subject.split():
            places = places_by_kind(batch, self.num_rows, vocabulary)
            visible = defaultdict[str, dict[Hashable, Any]](dict)
            chosen = {kind: points.candidates(places[kind]) for kind, points in self.points.items()}
            entries = {kind: dict(of) for kind, (of, _) in chosen.items()}

            def visit(index: int, at: Layer) -> None:
                kind = subject.kinds[index]
                vectors = self.layers[index].add(at, places[kind], visible[kind], chosen[kind][1])
                entries[kind] |= {f"{index}/{name}": field for name, field in vectors.items()}

            with subject.precision():
                visit_layers(network, partial(subject.task.forward, network, batch), visit)
            for kind, points in self.points.items():
                points.offer(entries[kind])
            self.num_rows += len(batch["inputs"])


@dataclass(eq=False)
class HeadAtlas(HeadMaps):
    """Every head over all the data."""

    seed: int = 0
    max_heads: int = 256

    def __call__(self, model: Trained, folder: Path = Path()) -> Findings:
        subject = model.sample(self.num_windows)
        if len(subject.heads) > self.max_heads:
            reason = f"the model has {len(subject.heads):,} heads, and a page holds about 0.1 MB of each"
            raise ArgumentError("max_heads", self.max_heads, reason, {"max_heads": len(subject.heads)})
        split = SplitEvents(subject, self.seed)
        tokens = Tokens(subject.tokenizer.token_strings(range(subject.network.vocab_size)))
        name_row = partial(_row_name, subject.row)
        of_heads, points = [], {}
        for kind, sample in split.points.items():
            points[kind] = entries = sample.entries()
        for index, layer in enumerate(split.layers):
            kind, ablated = subject.kinds[index], subject.layers[index].ablated_maps()
            histograms = layer.tally.histograms.tolist() + [[[0] * 32] * layer.num_maps] * (len(QUERY_MEASURES) - len(layer.tally.histograms))
            shares = layer.tally.shares().transpose(0, 1).tolist()
            for number, entries in enumerate(events_of(layer)):
                if ablated[number]:
                    of_heads.append({})
                    continue
                promoted = promoted_tokens(subject.network, layer.layer, number // layer.layer.num_softmaxes, entries["output"])
                planes = {name: projected(points[kind][f"{index}/{name}"][:, number]) for name in VECTORS}
                of_heads.append({"events": {
                    "snippets": snippets_of(entries, tokens, name_row, promoted, kind == "cross"),
                    "histograms": [of[number] for of in histograms],
                    "shares": [[None if math.isnan(x) else x for x in pair] for pair in shares[number]],
                    "projection": {name: plane for name, (plane, _) in planes.items()} | {"explained": {name: shares for name, (_, shares) in planes.items()}},
                }})
        shown_points = {
            kind: [
                {"snippet": tokens(ids[: end - first]), "query": at - first, "row": name_row(row, document), "at": at}
                for ids, (first, end), at, row, document in zip(*(of[name].tolist() for name in ("query_tokens", "of_queries", "at", "row", "document")), strict=True)
            ]
            for kind, of in points.items()
        }
        further = {"events": {
            "tokens": tokens.shown,
            "sampled": f"the {NUM_STRONGEST} strongest events of all",
            "rows": subject.row,
            "measures": [dict(zip(("name", "low", "high"), (name, *limits_of(name, subject.network.max_seq_len)))) for name in QUERY_MEASURES],
            "classes": list(CLASSES),
            "points": shown_points,
        }}
        return self.written(subject, folder, self.shown(subject), further, of_heads)


def _row_name(what: str, row: int, document: int) -> str:
    return f"{what} {row}" + (f", document {document}" if document >= 0 else "")
