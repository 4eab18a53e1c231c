"""The demonstration: `tinyformer demo` trains a small model, shows how its induction head forms, and removes it.

The model is `experiment=induction_cpu`, with snapshots. `sentences` measures what is printed.
"""

import argparse
import io
from collections.abc import Sequence
from contextlib import redirect_stdout

from rich.console import Console

from tinyformer.config.errors import exit_code_of

OVERRIDES = ("experiment=induction_cpu", "callbacks.snapshots.every_n_steps=20")
NUM_WINDOWS = 64  # of the validation split, on which heads are measured and removed


def main(arguments: Sequence[str]) -> int:
    """Train, print six lines about what happened, and write the film; returns the exit code."""
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
    from tinyformer.errors import relative_path
    from tinyformer.model.loading import train
    from tinyformer.programs.demo.sentences import describe

    waiting = Console(stderr=True)
    message = "Training two layers of attention on letters that repeat: … A B … A"
    # Without the summary of the run, whose figures `results.json` has, too.
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
