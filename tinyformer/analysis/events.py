"""When a head begins to do something, and when it stops: thresholds on measures, with hysteresis."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Trait:
    """What a head is while a measure is above a threshold, or below it.

    Args:
        measure: a name in `MEASURES` or `PATTERNS`.
        threshold: in the measure's unit, greater than 0; at it, the trait is there.
        begins: what is said where it comes, such as "became an induction head".
        ends: what is said where it goes.
        below: whether small values make it, not large ones.
    """

    measure: str
    threshold: float
    begins: str
    ends: str
    below: bool = False


@dataclass(frozen=True)
class Event:
    """A head that began or ceased to be something.

    Args:
        step: optimizer steps behind the weights that it was seen in.
        layer: from 0.
        head: name of its map.
        event: what happened, in words.
        measure: that crossed the threshold.
        value: of the measure then.
    """

    step: int
    layer: int
    head: str
    event: str
    measure: str
    value: float

    def __str__(self) -> str:
        """The event as a sentence."""
        head = self.head[1:] if self.head.startswith("0") else self.head
        return f"layer {self.layer} head {head} {self.event} at step {self.step}"


def head_traits(induction: float, sink: float, collapse: float) -> dict[str, Trait]:
    """What heads are watched for.

    Args:
        induction: share of attention on what followed the same token, from which a head is an induction head (Olsson
            et al. 2022, arXiv 2209.11895).
        sink: share of attention on the first token, from which a head is a sink (Xiao et al. 2023, 2309.17453).
        collapse: share of the largest possible entropy, up to which a head's has collapsed (Zhai et al. 2023,
            2303.06296).
    """
    gone = "is no longer"
    return {
        "induction": Trait("induction", induction, "became an induction head", f"{gone} an induction head"),
        "sink": Trait("first_token", sink, "became a first-token sink", f"{gone} a first-token sink"),
        "collapse": Trait(
            "entropy_share", collapse, "collapsed in entropy", f"{gone} collapsed in entropy", below=True
        ),
    }


class EventDetector:
    """Notices traits that come and go, from one measurement to the next.

    A trait comes where the measure reaches the threshold, and goes where it falls back behind it by a share of it, so
    that a head that hovers at the threshold is not reported again and again. The first measurement of a head says
    what it is, not what it became.

    Args:
        traits: by the name under which the state knows them.
        hysteresis: the share of a threshold by which a measure must fall back behind it; below 1.
    """

    def __init__(self, traits: Mapping[str, Trait], hysteresis: float) -> None:
        self.traits, self.hysteresis = traits, hysteresis
        self.events: list[Event] = []
        self._has: dict[str, bool] = {}

    def observe(
        self, step: int, names: Sequence[Sequence[str]], measures: Mapping[str, Sequence[Sequence[float]]]
    ) -> list[Event]:
        """The events since the last measurement, which `events` holds from now on, too.

        Args:
            step: optimizer steps behind the weights.
            names: of each layer's heads.
            measures: by name, the value for each head of each layer; nan says nothing.
        """
        found = []
        for trait_name, trait in self.traits.items():
            for layer, values in enumerate(measures.get(trait.measure, ())):
                for head, value in zip(names[layer], values, strict=True):
                    key = f"{trait_name} {layer} {head}"
                    had, has = self._has.get(key), self._after(trait, self._has.get(key, False), value)
                    if math.isnan(value):
                        continue
                    self._has[key] = has
                    if had is not None and had != has:
                        said = trait.begins if has else trait.ends
                        found.append(Event(step, layer, head, said, trait.measure, value))
        self.events.extend(found)
        return found

    def _after(self, trait: Trait, had: bool, value: float) -> bool:
        """Whether a head that had a trait, or not, has it now."""
        sign = -1 if trait.below else 1
        bound = trait.threshold * (1 - sign * self.hysteresis) if had else trait.threshold
        return sign * value >= sign * bound

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on from, as plain containers."""
        return {"events": [asdict(event) for event in self.events], "has": dict(self._has)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.events = [Event(**event) for event in state["events"]]
        self._has = dict(state["has"])
