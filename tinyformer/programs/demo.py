"""The demonstration: `tinyformer demo` trains a small model, shows how an induction head forms, and removes the head.

The model is `experiment=induction_cpu`, with snapshots.
"""

import argparse
import io
from collections.abc import Collection, Mapping, Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from rich.console import Console

from tinyformer.config.errors import exit_code_of
from tinyformer.errors import relative_path

if TYPE_CHECKING:  # these import torch, which takes seconds
    from tinyformer.analysis.context import AnalysisContext, Head
    from tinyformer.analysis.over_training.over_steps import SnapshotMeasures

OVERRIDES = ("experiment=induction_cpu", "callbacks.snapshots.every_n_steps=20")
NUM_WINDOWS = 64  # number of validation windows on which heads are measured and removed
ROLES = {"previous token": "a previous-token head", "induction": "an induction head"}  # see `head_roles`


def main(arguments: Sequence[str]) -> int:
    """Train a model, print six lines about its heads, and write the film; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="tinyformer demo",
        description="Train a model in a minute, see its induction head form, and what is lost without it.",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for train.py, such as seed=1")
    options = parser.parse_args(arguments)
    return exit_code_of(lambda: _demonstrate(options.overrides), "train")


def _demonstrate(overrides: Sequence[str]) -> None:
    from tinyformer.analysis import TrainingFilm
    from tinyformer.analysis.over_training.over_steps import events_of_snapshots
    from tinyformer.model.loading import train

    waiting = Console(stderr=True)
    message = "Training two layers of attention on letters that repeat: … A B … A"
    # The summary of the run is not printed.
    with waiting.status(message), redirect_stdout(io.StringIO()):
        run = train([*OVERRIDES, *overrides])
    context, accuracy = run.model.sample(NUM_WINDOWS), 100 * run.results["val/accuracy"]
    trained = f"Trained {run.results['steps']} steps in {run.results['seconds']:.0f} s"
    print(f"{trained}: {accuracy:.1f} % of the repeated letters are right.", flush=True)
    with waiting.status("Measuring the snapshots"):
        measured = events_of_snapshots(context)
        print(*describe(context, measured), sep="\n", flush=True)
    with waiting.status("Drawing the film"):
        film = TrainingFilm()(context, run.folder, measured)
    print(f"Open {relative_path(film.files[0])} in a browser, and press play.")


def describe(context: "AnalysisContext", measured: "SnapshotMeasures") -> list[str]:
    """Sentences about the heads of each role, the composition of the induction head, and the loss without heads."""
    from tinyformer.measures.events import head_roles

    roles = head_roles(measured.measures[-1].values)
    heads = {role: roles.get(role, {}) for role in ROLES}
    sentences = [formed(role, heads[role], context, measured) for role in ROLES]
    if all(heads.values()):
        sentences += [composition(context, *heads.values()), losses(context, *heads.values())]
    return sentences


def formed(role: str, heads: "Mapping[Head, float]", context: "AnalysisContext", measured: "SnapshotMeasures") -> str:
    """A sentence about the heads with a role at the last snapshot, each with the step since which it has the role."""
    from tinyformer.measures.events import TRAITS

    parts, names = [], measured.measures[-1].names
    for (layer, head), share in heads.items():
        key = (layer, names[layer][head], TRAITS[role.replace(" ", "_")].begins)
        steps = [event.step for event in measured.events if (event.layer, event.head, event.event) == key]
        since = f"at step {steps[-1]}" if steps else "before training"
        parts.append(f"{context.head_title(layer, head)} became {ROLES[role]} {since} ({share:.2f} of its attention)")
    return _sentence(parts) if parts else f"No head became {ROLES[role]}."


def composition(context: "AnalysisContext", writers: "Collection[Head]", readers: "Collection[Head]") -> str:
    """A sentence about the induction head that takes its keys most from a previous-token head (K-composition)."""
    from tinyformer.analysis.causes.weights import scores_of

    scores = scores_of(context.network, [0], context.active_heads)["K"]
    of_roles = {pair: score for pair, score in scores.items() if pair[0] in writers and pair[1] in readers}
    if not of_roles:
        return "No induction head is in a layer after a previous-token head."
    writer, reader = (context.head_title(*head) for head in max(of_roles, key=of_roles.__getitem__))
    others = max((score for pair, score in scores.items() if pair not in of_roles), default=0.0)
    strengths = f"K-composition {max(of_roles.values()):.2f}, that of other pairs at most {others:.2f}"
    return _sentence([f"{reader} reads its keys from {writer}: {strengths}"])


def losses(context: "AnalysisContext", *roles: "Collection[Head]") -> str:
    """A sentence about the loss with all heads, and without the heads of one role, of both roles, or one other head."""
    from tinyformer.analysis.removal.ablation import losses_without

    every = [head for of_role in roles for head in of_role]
    others = [[head] for head in context.active_heads if head not in every]
    whole, *without = (of.mean for of in losses_without(context, [[], *map(list, roles), every, *others]))
    names = [" and ".join(context.head_title(*head) for head in of_role) for of_role in roles]
    names.append("both" if len(every) == 2 else "all of these")
    parts = [f"{loss:.2f} without {name}" for loss, name in zip(without, names, strict=False)]
    parts += [f"at most {max(without[-len(others) :]):.2f} without any other head"] if others else []
    return _sentence([f"the loss is {whole:.2f} nats per {context.task.unit}", *parts])


def _sentence(parts: Sequence[str]) -> str:
    """Join parts into a sentence such as "A, b and c."."""
    *first, last = parts
    joined = f"{', '.join(first)} and {last}" if first else last
    return f"{joined[0].upper()}{joined[1:]}."
