"""Events of training: heads that become, or stop being, induction heads, sinks or collapsed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Trait:
    """A property that a head has while a measure is at or beyond a threshold.

    Args:
        measure: a name in `MEASURES` or `PATTERNS`.
        threshold: the threshold in the unit of the measure, greater than 0.
        begins: the event when a head acquires the trait, such as "became an induction head".
        ends: the event when a head loses the trait.
        below: whether the trait means values up to the threshold instead of from it.
    """

    measure: str
    threshold: float
    begins: str
    ends: str
    below: bool = False


@dataclass(frozen=True)
class Event:
    """The change of a trait of a head.

    Args:
        step: number of optimizer steps before the measurement.
        layer: index of the layer.
        head: name of the head's map.
        event: the event in words.
        measure: the measure that crossed the threshold.
        value: the value of the measure.
        kind: of the attention, where a network has several: "encoder", "decoder" or "cross".
    """

    step: int
    layer: int
    head: str
    event: str
    measure: str
    value: float
    kind: str = ""

    def __str__(self) -> str:
        """The event as a sentence."""
        head = self.head[1:] if self.head.startswith("0") else self.head
        return f"{self.kind} layer {self.layer} head {head} {self.event} at step {self.step}".strip()


def head_traits(induction: float, sink: float, collapse: float) -> dict[str, Trait]:
    """The traits that training reports.

    Args:
        induction: minimum prefix matching of an induction head (Olsson et al. 2022, arXiv 2209.11895).
        sink: minimum share of attention on the first token of a sink (Xiao et al. 2023, arXiv 2309.17453).
        collapse: maximum share of the possible entropy of a collapsed head (Zhai et al. 2023, arXiv 2303.06296).
    """
    lost = "is no longer"
    return {
        "induction": Trait("induction", induction, "became an induction head", f"{lost} an induction head"),
        "sink": Trait("first_token", sink, "became a first-token sink", f"{lost} a first-token sink"),
        "collapse": Trait(
            "entropy_share", collapse, "collapsed in entropy", f"{lost} collapsed in entropy", below=True
        ),
    }


class EventDetector:
    """Detects when heads acquire and lose traits, by comparing consecutive measurements.

    A head acquires a trait when the measure reaches the threshold, and loses it when the measure falls behind the
    threshold by the hysteresis, so that a head near the threshold is not reported repeatedly. The first measurement of
    a head causes no events.

    Args:
        traits: the traits, by the name that identifies them in a saved state.
        hysteresis: share of a threshold by which a measure must fall behind it to end a trait; below 1.
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
        places: Sequence[tuple[str, int]] | None = None,
    ) -> list[Event]:
        """Compare a measurement with the one before, and return the new events, which are also added to `events`.

        Args:
            step: number of optimizer steps before the measurement.
            names: names of each layer's heads.
            measures: by name, the value for each head of each layer; nan is ignored.
            places: kind and index of each layer, see `Event`; by default its index.
        """
        new = []
        for trait_name, trait in self.traits.items():
            for layer, values in enumerate(measures.get(trait.measure, ())):
                kind, index = places[layer] if places else ("", layer)
                for head, value in zip(names[layer], values, strict=True):
                    key = f"{trait_name} {kind}{index} {head}"
                    if math.isnan(value):
                        continue
                    had = self._has.get(key)
                    self._has[key] = has = self._has_trait(trait, bool(had), value)
                    if had is not None and had != has:
                        event = trait.begins if has else trait.ends
                        new.append(Event(step, index, head, event, trait.measure, value, kind))
        self.events.extend(new)
        return new

    def _has_trait(self, trait: Trait, had: bool, value: float) -> bool:
        """Whether a head has a trait, given whether it had it at the measurement before."""
        sign = -1 if trait.below else 1
        bound = trait.threshold * (1 - sign * self.hysteresis) if had else trait.threshold
        return sign * value >= sign * bound

    def state_dict(self) -> dict[str, Any]:
        """The state from which a resumed run continues, as plain containers."""
        return {"events": [asdict(event) for event in self.events], "has": dict(self._has)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.events = [Event(**event) for event in state["events"]]
        self._has = {trait: bool(has) for trait, has in state["has"].items()}
