"""The measures of every head at each snapshot of a run, and the events: when heads acquired and lost traits."""

from collections.abc import Sequence
from typing import NamedTuple

from tinyformer.analysis.context import AnalysisContext
from tinyformer.analysis.texts.maps import of_sample
from tinyformer.errors import ArgumentError
from tinyformer.measures.events import TRAITS, Event, EventDetector, control_of
from tinyformer.measures.probe import HeadMeasures


class SnapshotMeasures(NamedTuple):
    """The measures of every head by step, and the events between these steps."""

    steps: Sequence[int]
    measures: Sequence[HeadMeasures]  # of each step
    events: Sequence[Event]  # in the order of their steps


def require_snapshots(context: AnalysisContext, analysis: str) -> None:
    """Refuse an analysis, given its name, of a run with fewer than two snapshots."""
    if len(context.snapshots) < 2:
        reason = f"compares snapshots, of which this run has {len(context.snapshots)}; one that is trained with "
        reason += "callbacks.snapshots.every_n_steps=100 has them"
        raise ArgumentError("analysis", analysis, reason, {"analysis": "maps"})


def events_of_snapshots(context: AnalysisContext, rows: int = 256) -> SnapshotMeasures:
    """Measure the heads of each snapshot on the context's sample, see `maps.of_sample`, one network at a time.

    An event has the step of the first snapshot after it. Traits that random maps of the sample have are left out.
    """
    measure = of_sample(context, rows)
    random = measure(context.network, 0).values
    traits = {name: trait for name, trait in TRAITS.items() if not trait.is_met(control_of(trait, random))}
    measures, detector = list[HeadMeasures](), EventDetector(traits, hysteresis=0.2)
    for step, network in context.snapshots:
        measures.append(of_step := measure(network(), None))
        detector.observe(step, of_step.names, of_step.values, of_step.addresses)
    return SnapshotMeasures([step for step, _ in context.snapshots], measures, detector.events)
