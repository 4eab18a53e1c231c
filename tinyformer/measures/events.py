"""Traits of heads, defined by thresholds: their labels, and the events in training when heads acquire or lose them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tinyformer.errors import require_choice
from tinyformer.nn.heads import Address


@dataclass(frozen=True)
class Trait:
    """A property that a head has while a measure is at or beyond a threshold."""

    measure: str  # a name in `ALL_MEASURES`
    threshold: float  # in the unit of the measure, greater than 0
    begins: str  # the event when a head acquires the trait, such as "became an induction head"
    ends: str | None  # the event when a head loses the trait; None if that is no event
    below: bool = False  # whether a head has the trait at or below the threshold, instead of at or above
    offset: str = ""  # the measure in tokens that the label shows: "next token" for 1, "offset -3" for -3
    part_of: str = ""  # the trait whose presence makes the label redundant, so that it is left out

    def is_met(self, value: float, slack: float = 0.0) -> bool:
        """Return True if a value reaches the threshold, or misses it by at most `slack` times the threshold."""
        sign = -1 if self.below else 1
        return sign * value >= sign * self.threshold * (1 - sign * slack)


@dataclass(frozen=True)
class Event:
    """The acquisition or loss of a trait by a head."""

    step: int  # number of optimizer steps before the measurement
    layer: int  # index of the layer
    head: str  # name of the head's map
    event: str  # the event in words
    measure: str  # the measure that crossed the threshold
    value: float  # the value of this measure
    kind: str = ""  # the kind of attention, where a network has several: "encoder", "decoder" or "cross"

    def __str__(self) -> str:
        head = self.head.removeprefix("0")
        return f"{self.kind} layer {self.layer} head {head} {self.event} at step {self.step}".strip()


TRAITS: dict[str, Trait] = {
    "previous_token": Trait(
        "previous_token", 0.5, "became a previous-token head", "is no longer a previous-token head"
    ),
    "first_token": Trait("first_token", 0.5, "became a first-token sink", "is no longer a first-token sink"),
    "self": Trait("self", 0.5, "came to attend to its own token", "no longer attends to its own token"),
    "vertical": Trait("vertical", 0.5, "became a vertical head", "is no longer a vertical head"),
    "segment_vertical": Trait(
        "segment_vertical", 0.6, "became vertical in segments", "is no longer vertical in segments", part_of="vertical"
    ),
    "horizontal": Trait("horizontal", 0.5, "became a horizontal head", "is no longer a horizontal head"),
    "offset": Trait("offset_share", 0.5, "became an offset head", "is no longer an offset head", offset="offset"),
    "block": Trait("block", 0.8, "became a block head", "is no longer a block head"),
    "phrases": Trait("phrases", 0.8, "became a head of phrases", "is no longer a head of phrases"),
    "induction": Trait("induction", 0.4, "became an induction head", "is no longer an induction head"),
    "uniform": Trait("entropy_share", 0.95, "became uniform", None),  # as all heads are before training
    "collapsed": Trait("entropy_share", 0.05, "collapsed in entropy", "is no longer collapsed in entropy", below=True),
    "diagonal": Trait("diagonal_distance", 0.1, "became diagonal", "is no longer diagonal", below=True),
    "source_end": Trait("source_end", 0.5, "came to rest on the source's end", "no longer rests on the source's end"),
}
"""The traits of heads, by the name of their label, with default thresholds.

Traits of attention to one key have a threshold of half of the attention: to the previous token (Clark et al. 2019,
arXiv 1906.04341, section 3.1), to the first token (Xiao et al. 2023, arXiv 2309.17453), to the own token, to any other
single token ("vertical"; Kovaleva et al. 2019, arXiv 1908.08593) and at any other single offset. Block heads (Kovaleva
et al. 2019) and uniform heads (Clark et al. 2019) attend almost evenly. Induction heads are found by prefix matching
(Olsson et al. 2022, arXiv 2209.11895), collapsed heads by low entropy (Zhai et al. 2023, arXiv 2303.06296). All
thresholds are beyond what random maps of 24 tokens or more reach. The last two traits are only for heads of
cross-attention.
"""


def head_traits(thresholds: Mapping[str, float] | None = None) -> dict[str, Trait]:
    """`TRAITS` with the given thresholds in place of the defaults."""
    thresholds = thresholds or {}
    for name in thresholds:
        require_choice("thresholds", name, TRAITS)
    return {name: replace(trait, threshold=thresholds.get(name, trait.threshold)) for name, trait in TRAITS.items()}


def head_labels(
    measures: Mapping[str, Sequence[Sequence[float]]], traits: Mapping[str, Trait] = TRAITS
) -> list[list[str]]:
    """The label of each head of each layer: its roles, such as "self + collapsed"; empty for a head without roles."""
    labels: list[list[list[str]]] = [[[] for _ in layer] for layer in next(iter(measures.values()))]
    for role, heads in head_roles(measures, traits).items():
        for layer, head in heads:
            labels[layer][head].append(role)
    return [list(map(" + ".join, layer)) for layer in labels]


def head_roles(
    measures: Mapping[str, Sequence[Sequence[float]]], traits: Mapping[str, Trait] = TRAITS
) -> dict[str, dict[tuple[int, int], float]]:
    """By role, such as "previous token", the heads with this role, as a dict from (layer, head) to the measured value.

    Heads are sorted: the head whose value is furthest beyond the threshold comes first. `measures` are indexed by name,
    layer and head; no head has a trait whose measure is missing or nan.
    """
    roles: dict[str, dict[tuple[int, int], float]] = {}
    for name, trait in traits.items():
        values = {
            (layer, head): value
            for layer, heads in enumerate(measures.get(trait.measure, ()))
            for head, value in enumerate(heads)
            if trait.is_met(value)
        }
        for layer, head in sorted(values, key=values.__getitem__, reverse=not trait.below):
            if (layer, head) not in roles.get(trait.part_of, {}):
                role = offset_label(measures[trait.offset][layer][head]) if trait.offset else name.replace("_", " ")
                roles.setdefault(role, {})[layer, head] = values[layer, head]
    return roles


def control_of(trait: Trait, measures: Mapping[str, Sequence[Sequence[float]]]) -> float:
    """The largest value of a trait's measure, or the smallest value if `trait.below`; nan if no head has a value."""
    values = [value for layer in measures.get(trait.measure, ()) for value in layer if not math.isnan(value)]
    return (min if trait.below else max)(values, default=math.nan)


def offset_label(tokens: float) -> str:
    """An offset in words: "next token", or "offset -3" for the third token before the query."""
    return "next token" if tokens == 1 else f"offset {tokens:+.0f}"


class EventDetector:
    """Detects when heads acquire and lose traits, by comparing consecutive measurements.

    A head acquires a trait when the measure reaches the threshold. It loses the trait when the measure falls short of
    the threshold by more than `hysteresis` times the threshold, so that a head near the threshold is not reported again
    and again. The first measurement of a head causes no events. A saved state identifies traits by their names.
    """

    def __init__(self, traits: Mapping[str, Trait], hysteresis: float) -> None:
        self.traits, self.hysteresis = traits, hysteresis
        self.events: list[Event] = []
        self._has: dict[str, bool] = {}

    def observe(
        self,
        step: int,
        names: Sequence[Sequence[str]],
        measures: Mapping[str, Sequence[Sequence[float]]],
        addresses: Sequence[Address] | None = None,
    ) -> list[Event]:
        """Compare a measurement with the previous one and return the new events, which are also added to `events`.

        `measures` are indexed by name, layer and head; nan is ignored. The default address of a layer is its index.
        """
        addresses, new = addresses or [(layer,) for layer in range(len(names))], []
        for trait_name, trait in self.traits.items():
            for layer, values in enumerate(measures.get(trait.measure, ())):
                kind, index = "".join(map(str, addresses[layer][:-1])), int(addresses[layer][-1])
                for head, value in zip(names[layer], values, strict=True):
                    key = f"{trait_name} {kind}{index} {head}"
                    if math.isnan(value):
                        continue
                    had = self._has.get(key)
                    self._has[key] = has = trait.is_met(value, self.hysteresis if had else 0.0)
                    event = trait.begins if has else trait.ends
                    if had is not None and had != has and event is not None:
                        new.append(Event(step, index, head, event, trait.measure, value, kind))
        self.events.extend(new)
        return new

    def state_dict(self) -> dict[str, Any]:
        return {"events": [asdict(event) for event in self.events], "has": dict(self._has)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.events = [Event(**event) for event in state["events"]]
        self._has = {trait: bool(has) for trait, has in state["has"].items()}
