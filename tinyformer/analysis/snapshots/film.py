"""The film of a training run: every head's map of the same text at each snapshot, its measures, events and the loss."""

import base64
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from tinyformer.analysis.maps import HeadMaps, of_sample, with_controls
from tinyformer.analysis.measures.capture import CapturedMaps, head_label
from tinyformer.analysis.measures.events import TRAITS, Event, head_labels
from tinyformer.analysis.pictures.atlas import write_atlas
from tinyformer.analysis.pictures.filmstrip import Filmstrip
from tinyformer.analysis.snapshots.events import events_of_snapshots, require_snapshots
from tinyformer.analysis.subject import Findings, Table, Trained
from tinyformer.errors import ArgumentError
from tinyformer.nn.heads import layer_title

LARGEST_PAGE = 15e6  # bytes
BYTES_OF_VALUES = 400  # about those of a head's measures at a step
NUM_HEADS, NUM_STEPS, NUM_CURVES = 3, 6, 6  # in the picture
NUM_MAPS = 24  # in the GIF
CIRCUIT = ("previous_token", "induction")  # the measures of the two heads of an induction circuit

Map: TypeAlias = UInt8[np.ndarray, "_queries _keys"]


@dataclass(eq=False)
class TrainingFilm:
    """How attention came to be: the maps of a text at every snapshot of a run (`film.html`, `film.png`, `film.csv`).

    The page is that of `HeadMaps` for the last snapshot, with a slider to the others, whose maps are `quantised`. If it
    would pass 15 MB, it has fewer snapshots, evenly chosen. Measures and losses are those of the sample, whatever text
    is shown, and events those of `events_of_snapshots`.

    Args:
        text, target, num_tokens: what is shown, see `HeadMaps`.
        gif: whether to write `film.gif`, for a slide: the maps of up to 24 heads at each snapshot, and the curves.
    """

    text: str | Sequence[str] | None = None
    target: str | None = None
    num_tokens: int | None = None
    num_windows: int = 16  # windows, examples or pairs of the sample
    rows: int = 256  # queries of each window that are measured; in a pair, all are
    gif: bool = False
    needs_gradient = False
    reads_snapshots = True

    def __post_init__(self) -> None:
        self.head_maps = HeadMaps(self.text, self.target, self.num_tokens, self.num_windows, False, self.rows)

    def __call__(self, model: Trained, folder: Path = Path()) -> Findings:
        subject = model.sample(self.num_windows)
        require_snapshots(subject, "film")
        shown, snapshots = self.head_maps.shown(subject), subject.snapshots
        last = replace(subject, network=snapshots[-1].network())
        exact = layers_of(shown.capture(last.network))
        chosen = [snapshots[index] for index in evenly_chosen(len(snapshots), exact)]
        history = events_of_snapshots(subject, self.rows)
        measures, traits, _ = with_controls(last, of_sample(subject, self.rows))
        tables = {step: of.table(traits) for step, of in zip(history.steps, history.measures, strict=True)}
        film = Film(tables[snapshots[-1].step][0], [tables[step][1] for step, _ in chosen], history.events)
        for step, load in chosen:
            network = load()
            film.steps.append(step)
            film.losses.append(replace(subject, network=network).losses().mean)
            film.maps.append(quantised(layers_of(shown.capture(network))))
        number = f"{len(chosen)} snapshots"
        if len(chosen) < len(snapshots):
            number = f"{len(chosen)} of {len(snapshots)} snapshots, evenly chosen for a page below 15 MB"
        facts = dict(subject.facts) if self.text is None else subject.facts_of_text(self.text)
        facts["step"] = f"{film.steps[0]:,} to {film.steps[-1]:,}, {number}"
        further, of_heads = film.page_data()
        page = write_atlas(
            folder / "film.html",
            exact,
            shown.axes,
            measures.values,
            [list(map(head_label, layer)) for layer in measures.names],
            "Attention as it forms",
            addresses=measures.addresses,
            facts=facts,
            labels=head_labels(measures.values, traits),
            ablated=measures.ablated,
            further=further,
            of_heads=of_heads,
        )
        return Findings(
            lines={"film": f"{number}, {shown.extent} tokens; open {page.name} in a browser"},
            tables={"film": film.table()},
            figures={"film": film.strip()},
            files=[page, *([film.save_gif(folder / "film.gif")] if self.gif else [])],
            facts=facts,
        )


class Film:
    """The snapshots of a film, with their tables of measures, see `HeadMeasures.table`."""

    def __init__(self, columns: list[str], rows: Sequence[Sequence[list[Any]]], events: Sequence[Event]) -> None:
        self.columns, self.rows, self.events = columns, rows, events
        self.steps, self.losses, self.maps = list[int](), list[float](), list[list[Map]]()
        self.first = columns.index("head") + 1  # the column after the address of a head
        addresses = [row[: self.first] for row in rows[-1]]
        self.heads = [addresses.index([*filter(None, [event.kind]), event.layer, event.head]) for event in events]
        self.titles = [f"{layer_title(tuple(layer))} head {head_label(name)}" for *layer, name in addresses]

    def table(self) -> Table:
        """A row for each head at each step."""
        of_steps = zip(self.steps, self.losses, self.rows, strict=True)
        return ["step", "loss", *self.columns], [[step, loss, *row] for step, loss, rows in of_steps for row in rows]

    def page_data(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The data of `atlas_html` in which the film differs from an atlas: those of the page, and of each head."""
        events = [
            {"step": event.step, "head": head, "measure": event.measure, "text": str(event)}
            for event, head in zip(self.events, self.heads, strict=True)
        ]
        losses = [loss if math.isfinite(loss) else None for loss in self.losses]
        of_heads = [
            {
                "values": [row[self.first : -1] for row in rows],
                "labels": [row[-1] for row in rows],
                "maps": [base64.b64encode(maps[head].tobytes()).decode() for maps in self.maps],
            }
            for head, rows in enumerate(zip(*self.rows, strict=True))
        ]
        return {"film": {"steps": self.steps, "loss": losses, "events": events}}, [{"film": of} for of in of_heads]

    @cached_property
    def formed(self) -> list[tuple[int, Event]]:
        """The heads that acquired a trait for good, each with the event, those of an induction circuit first."""
        begins = {trait.begins for trait in TRAITS.values()}
        last = {(head, event.measure): event for head, event in zip(self.heads, self.events, strict=True)}
        lasting = [(head, event) for (head, _), event in last.items() if event.event in begins]
        return sorted(lasting, key=lambda item: (item[1].measure not in CIRCUIT, item[1].step))

    def strip(self) -> Filmstrip:
        """A few heads at the first, the middle and the last step, and where they formed, above the curves."""
        heads, last = self._of_interest(NUM_HEADS), len(self.steps) - 1
        formed = [bisect_left(self.steps, event.step) for head, event in self.formed if head in heads]
        shown = sorted([*dict.fromkeys([0, last, *formed, last // 2])][:NUM_STEPS])
        maps = {f"{self.titles[head]}\nstep {self.steps[at]:,}": self.maps[at][head] for head in heads for at in shown}
        return self._drawn(maps, len(shown), [self.steps[at] for at in shown])

    def save_gif(self, path: Path) -> Path:
        """A picture of up to 24 heads for each step, above the curves."""
        heads = sorted(self._of_interest(NUM_MAPS))
        columns = min(len(heads), 4 if len(heads) <= 16 else 6)
        moving = self._drawn({self.titles[head]: self.maps[0][head] for head in heads}, columns, self.steps[:1])
        titles = [f"step {step:,}, loss {loss:.3f}" for step, loss in zip(self.steps, self.losses, strict=True)]
        return moving.save_gif(path, [[maps[head] for head in heads] for maps in self.maps], self.steps, titles)

    def _of_interest(self, number: int) -> list[int]:
        return list(dict.fromkeys([*(head for head, _ in self.formed), *range(len(self.titles))]))[:number]

    def _drawn(self, maps: Mapping[str, Map], columns: int, marked: Sequence[int]) -> Filmstrip:
        curves = {
            f"{self.titles[head]}: {event.measure.replace('_', ' ')}": [
                rows[head][self.columns.index(event.measure)] for rows in self.rows
            ]
            for head, event in self.formed[:NUM_CURVES]
        }
        return Filmstrip(maps, columns, self.steps, self.losses, curves, marked)


def evenly_chosen(number: int, maps: Sequence[Float[Tensor, "_maps _queries _keys"]]) -> list[int]:
    """The indices of the snapshots that a page has room for, the first and the last among them.

    Raises:
        ArgumentError: if it has none for two.
    """
    weights, values = sum(layer.numel() for layer in maps) * 4 / 3, sum(map(len, maps)) * BYTES_OF_VALUES
    most = int((LARGEST_PAGE - 2 * weights) / (weights + values))  # the last also has its exact maps, in 16 bits
    if most < 2:
        tokens = max(max(layer.shape[1:]) for layer in maps)
        fewer = int(tokens * math.sqrt(LARGEST_PAGE / (12 * weights)))
        raise ArgumentError("num_tokens", tokens, "makes a page above 15 MB", {"num_tokens": fewer})
    return np.linspace(0, number - 1, min(number, most)).round().astype(int).tolist()


def layers_of(captured: Mapping[str, CapturedMaps]) -> list[Float[Tensor, "_maps _queries _keys"]]:
    """The maps of the layers of all kinds of attention."""
    return [layer[0] for maps in captured.values() for layer in maps]


def quantised(layers: Sequence[Float[Tensor, "_maps _queries _keys"]]) -> list[Map]:
    """The maps of all layers in 8 bits: round(255 √w) for a weight w, from which w is at most √w / 255 away."""
    levels = [(layer.float().clamp(0, 1).sqrt() * 255).round().to("cpu", torch.uint8).numpy() for layer in layers]
    return [head for layer in levels for head in layer]
