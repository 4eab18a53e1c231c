"""The film of a training run: every head's map of the same text at each snapshot, its measures, events and the loss."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from tinyformer.analysis.context import Trained
from tinyformer.analysis.over_training.over_steps import SnapshotMeasures, events_of_snapshots, require_snapshots
from tinyformer.analysis.texts.maps import HeadMaps, layers_of, of_sample, with_controls
from tinyformer.files import finite
from tinyformer.measures.capture import map_title
from tinyformer.measures.events import TRAITS, Event
from tinyformer.report.charts import Map, filmstrip
from tinyformer.report.page import as_bytes, packed
from tinyformer.report.result import AnalysisResult, Table

LARGEST_PAGE = 15e6  # bytes
BYTES_OF_VALUES = 450  # approximate size of a head's measures at a step
NUM_HEADS, NUM_STEPS, NUM_CURVES = 3, 6, 6  # heads, steps and curves in the picture
CIRCUIT = ("previous_token", "induction")  # the measures of an induction circuit, whose events come before others
ACQUIRED = {trait.begins for trait in TRAITS.values() if trait.ends}  # not uniformity, which all heads begin with


@dataclass(eq=False)
class TrainingFilm:
    """The film of a run: the maps of a text at every snapshot (`film.html`, `film.png`, `film.csv`).

    The page shows the maps of the last snapshot, as `HeadMaps` does, and a slider selects other snapshots, whose maps
    are `quantised`. If the page would exceed 15 MB, it has fewer snapshots, evenly chosen. Measures and losses are
    those of the sample, even if another text is shown, and events come from `events_of_snapshots`. The page opens at
    the step at which a head first acquires a role. For `text`, `target` and `num_tokens` see `HeadMaps`.
    """

    text: str | Sequence[str] | None = None
    target: str | None = None
    num_tokens: int | None = None
    num_windows: int = 16  # windows, examples or pairs of the sample
    rows: int = 256  # queries of each window that are measured; in a pair, all are
    needs_gradient = False
    reads_snapshots = True

    def __post_init__(self) -> None:
        self.head_maps = HeadMaps(self.text, self.target, self.num_tokens, self.num_windows, False, self.rows)

    def __call__(
        self, model: Trained, folder: Path = Path(), history: SnapshotMeasures | None = None
    ) -> AnalysisResult:
        context = model.sample(self.num_windows)
        require_snapshots(context, "film")
        shown, snapshots = self.head_maps.shown(context), context.snapshots
        last = replace(context, network=snapshots[-1].network())
        captured = shown.maps(last)
        chosen = evenly_chosen(len(snapshots), layers_of(captured))
        history = history or events_of_snapshots(context, self.rows)
        measures, traits, _ = with_controls(last, of_sample(context, self.rows))
        losses, maps = [], []
        for index in chosen:
            at = replace(context, network=snapshots[index].network())
            losses.append(at.losses().mean)
            maps.append(quantised(layers_of(shown.maps(at))))
        tables = [history.measures[index].table(traits) for index in chosen]
        film = Film([snapshots[index].step for index in chosen], losses, maps, tables, history.events)
        number = f"{len(chosen)} of {len(snapshots)} snapshots"
        number += ", evenly chosen to keep the page small" * (len(chosen) < len(snapshots))
        facts = dict(context.facts) if self.text is None else context.facts_of_text(self.text)
        facts["step"] = f"{film.steps[0]:,} to {film.steps[-1]:,}, {number}"
        options = {"title": "Attention as it forms", "facts": facts, **film.page_data()}
        page = shown.write(folder / "film.html", captured, measures, traits, **options)
        rows = [[*at, *row] for *at, (_, of) in zip(film.steps, losses, tables, strict=True) for row in of]
        return AnalysisResult(
            lines={"film": f"{number}, {shown.extent} tokens; open {page.name} in a browser"},
            tables={"film": (["step", "loss", *film.columns], rows)},
            figures={"film": film.strip()},
            files=[page],
            facts=facts,
        )


@dataclass(eq=False)
class Film:
    """The snapshots that a film shows, and all events of the run."""

    steps: Sequence[int]
    losses: Sequence[float]  # in nats per target
    maps: Sequence[Sequence[Map]]  # the map of every head at each step
    tables: Sequence[Table]  # the measures at each step, see `HeadMeasures.table`
    events: Sequence[Event]

    def __post_init__(self) -> None:
        self.columns, self.rows = self.tables[0][0], [rows for _, rows in self.tables]
        self.first = first = self.columns.index("head")  # the column before the measures
        self.titles = [map_title(tuple(row[: first + 1])) for row in self.rows[0]]
        titles = [f"{event.kind} {map_title((event.layer, event.head))}".strip() for event in self.events]
        self.of_events = list(zip(map(self.titles.index, titles), self.events, strict=True))  # with the head of each
        acquired = [(head, event) for head, event in self.of_events if event.event in ACQUIRED]
        self.acquired = sorted(acquired, key=lambda item: (item[1].measure not in CIRCUIT, item[1].step))
        self.formed = [*dict.fromkeys(head for head, _ in self.acquired)]
        self.curves = {
            f"{self.titles[head]}: {of.measure.replace('_', ' ')}": [
                rows[head][self.columns.index(of.measure)] for rows in self.rows
            ]
            for head, of in self.acquired[:NUM_CURVES]
        }

    def page_data(self) -> dict[str, Any]:
        """The arguments of `atlas_html` that make its page a film."""
        events = [
            {"step": event.step, "head": head, "measure": event.measure, "text": str(event)}
            for head, event in self.of_events
        ]
        of_heads = [
            {
                "values": [row[self.first + 1 : -1] for row in rows],
                "labels": [row[-1] for row in rows],
                "maps": [packed(torch.from_numpy(maps[head])) for maps in self.maps],
            }
            for head, rows in enumerate(zip(*self.rows, strict=True))
        ]
        opening = next((at for at, event in enumerate(self.events) if event.event in ACQUIRED), None)
        film = {"steps": self.steps, "loss": [*map(finite, self.losses)], "events": events, "opening": opening}
        return {"further": {"film": film}, "of_heads": [{"film": of_head} for of_head in of_heads]}

    def strip(self) -> Figure:
        """A figure of the heads that acquired a role (if none did, the first heads), at steps around such events."""
        heads, last = (self.formed or [*range(len(self.titles))])[:NUM_HEADS], len(self.steps) - 1
        after = [bisect_left(self.steps, event.step) for head, event in self.acquired if head in heads]
        places = dict.fromkeys([0, last, *after, *(at - 1 for at in after), last // 2, 3 * last // 4])
        shown = sorted(list(places)[:NUM_STEPS])
        maps = {f"{self.titles[of]}\nstep {self.steps[at]:,}": self.maps[at][of] for of in heads for at in shown}
        return filmstrip(maps, len(shown), [self.steps[at] for at in shown], self.steps, self.losses, self.curves)


def evenly_chosen(number: int, layers: Sequence[Float[Tensor, "_maps _queries _keys"]]) -> list[int]:
    """The indices of as many evenly spaced snapshots as fit into a page, including the first and the last."""
    weights, values = sum(layer.numel() for layer in layers) * 4 / 3, sum(map(len, layers)) * BYTES_OF_VALUES
    most = max(2, int((LARGEST_PAGE - 2 * weights) / (weights + values)))  # the last is stored in 16 bits, too
    return np.linspace(0, number - 1, min(number, most)).round().astype(int).tolist()


def quantised(layers: Sequence[Float[Tensor, "_maps _queries _keys"]]) -> list[Map]:
    """The maps of all layers as 8-bit integers, see `as_bytes`."""
    return [of_head for layer in layers for of_head in as_bytes(layer).cpu().numpy()]
