"""The training loss of one run by several attention backends, step by step: each computes the same function.

    python benchmarks/curves.py --backends eager,flash
    python benchmarks/curves.py --output curves.json experiment=shakespeare_gpu trainer=gpu

The runs differ in `attention.backend` alone: the same seed gives them the same weights and batches. Overrides follow
the options. Prints the largest difference from the first backend's loss, and writes
`benchmarks/results/curves.json` and `curves.png`. Correct kernels differ by rounding errors, which the second panel
shows; a wrong one differs from the first steps on. Each backend takes about a minute on 2 CPU cores.
"""

import argparse
import contextlib
import csv
import io
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from here import ROOT, commit, machine, versions
from matplotlib.figure import Figure

import tinyformer

FIXED = [
    "trainer.log_every_n_steps=1",
    "trainer.limit_val_batches=1",
    "trainer.enable_progress_bar=false",
    "callbacks.attention=null",
    "generate.num_tokens=1",
]
"""Overrides of every run: each loss is logged, and what is not compared takes little time."""


def losses(overrides: Sequence[str]) -> list[float]:
    """The training loss of each step, in nats per token."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        run = tinyformer.train([*overrides, *FIXED, f"hydra.run.dir={folder}/run"])
        with (run.folder / "metrics.csv").open(encoding="utf-8") as file:
            return [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]


def differences(curves: dict[str, list[float]]) -> dict[str, list[float]]:
    """The absolute difference of each other backend's loss from that of the first, by step."""
    (_, first), *others = curves.items()
    return {name: [abs(a - b) for a, b in zip(curve, first, strict=True)] for name, curve in others}


def draw(record: dict[str, Any], path: Path) -> None:
    """The losses, and below them the differences from the first backend."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    reference, *_ = record["losses"]
    for number, (name, curve) in enumerate(record["losses"].items()):
        width = 3.0 / (1 + number)  # the curves lie on each other: those drawn first are wider
        upper.plot(range(1, 1 + len(curve)), curve, label=name, color=f"C{number}", linewidth=width)
    for number, (name, curve) in enumerate(differences(record["losses"]).items(), 1):
        lower.plot(range(1, 1 + len(curve)), curve, ".", label=name, color=f"C{number}", markersize=6 / number)
    upper.set(ylabel="training loss, nats per token")
    lower.set(xlabel="step", ylabel=f"|difference from {reference}|")
    for panel in (upper, lower):
        panel.legend(loc="upper right")
    figure.suptitle(f"{' '.join(record['overrides'])}, {record['machine']}", fontsize=9)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="eager,sdpa,flash", help="the first is the one that others differ from")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "curves.json")
    given, overrides = parser.parse_known_args()
    names = [f"{key}={Path(value).name}" for key, _, value in (word.partition("=") for word in overrides)]
    backends, shared = given.backends.split(","), [*overrides, f"trainer.max_steps={given.steps}"]
    record = {
        "machine": machine("cuda" if torch.cuda.is_available() else "cpu"),
        "versions": versions(),
        "commit": commit(),
        "overrides": names,
        "losses": {name: losses([*shared, f"attention.backend={name}"]) for name in backends},
    }
    given.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    draw(record, given.output.with_suffix(".png"))
    for name, apart in differences(record["losses"]).items():
        print(f"{name} - {backends[0]}: {apart[0]:.1e} at step 1, at most {max(apart):.1e} nats per token")


if __name__ == "__main__":
    main()
