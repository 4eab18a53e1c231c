"""The speed of tinyformer compared with its peers: training, generation and data, in turn in one process.

    pip install -c constraints.txt -e '.[bench]' && python benchmarks/run.py

Prints a table, and writes `benchmarks/results/peers.json` and `peers.png`. A ratio above 1 says that ours is faster; it
is the median over rounds, given with the quartiles. `measure` says what makes the comparison fair, `peers` who the
peers are. Equal precision comes first, then each side's own defaults: where the hardware has bf16, ours is
bf16-mixed, while the others' is fp32. On 2 CPU cores it takes about 10 minutes; nothing else should run there.
`--compiled` compiles both sides, in bf16, and writes `peers_compiled.json`. Other arguments are overrides of our
training run, such as data=text data.files=book.txt.
"""

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from generation import DTYPES, generate_in_turn
from here import ROOT, commit, machine, versions
from loading import BATCH_SIZE, SEQ_LEN, load_in_turn
from matplotlib.figure import Figure
from measure import CLOSE_LOSSES, LOSS_STEPS, Effort, Ratio, Trained, compare, settings, train_in_turn
from peers import GPT, LLAMA, PEERS, QUICK, SHAPES, Peer, Shape
from rich import box
from rich.console import Console
from rich.table import Table
from tokenising import ALONE, VOCAB_SIZE, tokenise_in_turn

from tinyformer.hardware import has_native_bf16, resolve_device

INSTALL = "pip install -c constraints.txt -e '.[bench]'"
DEFAULTS = "defaults: ours bf16, theirs fp32"
COMPILED = "bf16, compiled"
PRECISIONS = {"fp32": ("32-true", "32-true"), "bf16": ("bf16-mixed", "bf16-mixed"), DEFAULTS: ("bf16-mixed", "32-true")}
"""The precisions of our training and of theirs, in Lightning's terms, by the name in the table."""

QUICK_EFFORT = Effort(steps_per_block=2, rounds=2)
EFFORTS = {"small": Effort(steps_per_block=10, rounds=8), "mid": Effort(steps_per_block=1, rounds=5)}
"""The effort of training, by shape. A step of the mid shape takes seconds, so its losses are compared after 6 steps."""


@dataclass(frozen=True)
class Row:
    """One comparison.

    Args:
        bench: "training step", "generation", "loading" or "tokenising".
        shape: the shape of the model and the batch.
        peer: the name of the peer.
        precision: the precision of both sides.
        ratio: how many times longer the peer takes.
        low: the lower quartile.
        high: the upper quartile.
    """

    bench: str
    shape: str
    peer: str
    precision: str
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Found:
    """A comparison with the measurements that it rests on.

    Args:
        row: the comparison.
        ours: our milliseconds for one step, text or batch.
        theirs: those of the peer.
        checks: facts about the fairness of the comparison.
    """

    row: Row
    ours: float
    theirs: float
    checks: dict[str, Any]


def found(
    names: tuple[str, str, str, str], ours: Sequence[float], theirs: Sequence[float], each: int, **checks: Any
) -> Found:
    """The comparison of the times of blocks of `each` steps or batches."""
    ratio = Ratio(*(round(value, 4) for value in compare(ours, theirs)))
    milliseconds = [round(1000 * statistics.median(times) / each, 4) for times in (ours, theirs)]
    return Found(Row(*names, *ratio), *milliseconds, checks)


def training(plan: "Plan") -> Iterator[Found]:
    """Compare training steps."""
    for shape in plan.shapes:
        effort = plan.effort(shape)
        native = [COMPILED] if plan.compiled else list(PRECISIONS)
        for precision in native if has_native_bf16(plan.device) else ["fp32"]:
            our_precision, their_precision = PRECISIONS.get(precision, PRECISIONS["bf16"])
            for like in (GPT, LLAMA):
                peers = [p for p in plan.peers if p.like == like and (p.as_it_comes or precision != DEFAULTS)]
                overrides = [*settings(shape, like, effort, our_precision), *plan.overrides]
                options = {"plain": like == GPT, "compiled": plan.compiled}
                trained = train_in_turn(peers, overrides, shape, effort, their_precision, **options)
                for peer in trained:
                    names = ("training step", str(shape), peer.peer, precision)
                    yield found(names, peer.ours, peer.theirs, effort.steps_per_block, **checks_of(peer))


def checks_of(trained: Trained) -> dict[str, Any]:
    """Facts that show that the comparison was fair."""
    return {
        "attention_kernel": trained.kernel,
        "our_parameters": trained.our_parameters,
        "parameters": trained.parameters,
        "steps": trained.loss_steps,
        "our_loss": round(trained.our_loss, 5),
        "loss": round(trained.loss, 5),
    }


def generation(plan: "Plan") -> Iterator[Found]:
    """Compare greedy generation from one prompt, and from several together."""
    new_tokens, rounds, numbers = (8, 2, (2,)) if plan.quick else (128, 3, (1, 16))
    for shape, num_prompts in itertools.product(plan.shapes, numbers):
        for precision, dtype in DTYPES.items():
            if precision == "bf16" and not has_native_bf16(plan.device):
                continue
            name = f"{shape.num_layers} x {shape.d_model}, {num_prompts} x {new_tokens} tokens"
            times = generate_in_turn(plan.peers, rounds, shape, num_prompts, new_tokens, dtype, plan.device)
            for peer, sides in times.items():
                yield found(("generation", name, peer, precision), sides["ours"], sides["theirs"], 1)


def loading(plan: "Plan") -> Iterator[Found]:
    """Compare the loading of batches from files."""
    num_tokens, rounds, each = (100_000, 2, 2) if plan.quick else (8_000_000, 40, 10)
    with tempfile.TemporaryDirectory() as folder:
        times = load_in_turn(Path(folder), num_tokens, rounds, each)
    for peer in [name for name in times if name != "ours"]:
        names = ("loading", f"{BATCH_SIZE} x {SEQ_LEN + 1} tokens", peer, "int64")
        yield found(names, times["ours"], times[peer], each)


def tokenising(plan: "Plan") -> Iterator[Found]:
    """Compare tokenising to disk."""
    repeats, rounds = (1, 2) if plan.quick else (4, 5)
    with tempfile.TemporaryDirectory() as folder:
        characters, times = tokenise_in_turn(Path(folder), repeats, rounds)
    names = ("tokenising", f"{characters / 1e6:.1f} M characters, BPE of {VOCAB_SIZE}", ALONE, "text")
    yield found(names, times["ours"], times[ALONE], 1)


BENCHES: dict[str, Callable[["Plan"], Iterator[Found]]] = {
    "training": training,
    "generation": generation,
    "loading": loading,
    "tokenising": tokenising,
}


@dataclass(frozen=True)
class Plan:
    """The measurements to make.

    Args:
        shapes: the shapes of the models.
        peers: the peers that are installed.
        quick: whether to only try everything out.
        rounds: number of training rounds, in place of those in `EFFORTS`.
        overrides: overrides of our training run, after those that all runs have.
        device: the device type.
        compiled: whether to compile the networks of both sides.
    """

    shapes: Sequence[Shape]
    peers: Sequence[Peer]
    quick: bool
    rounds: int | None
    overrides: Sequence[str]
    device: str
    compiled: bool

    def effort(self, shape: Shape) -> Effort:
        """The effort of training."""
        effort = QUICK_EFFORT if self.quick else EFFORTS[shape.name]
        return Effort(effort.steps_per_block, self.rounds or effort.rounds)


def table(results: Sequence[Found]) -> Table:
    """The rows as a table to print."""
    shown = Table(box=box.SIMPLE_HEAD)
    for heading in ("bench", "shape", "peer", "precision", "ratio", "quartiles", "ours, ms", "theirs, ms", "loss"):
        shown.add_column(heading, justify="left" if heading in ("bench", "shape", "peer", "precision") else "right")
    for result in results:
        row, checks = result.row, result.checks
        loss = f"{checks['our_loss']:.3f} {checks['loss']:.3f}" if checks else ""
        names = (row.bench, row.shape, row.peer, row.precision)
        quartiles = f"{row.low:.2f} to {row.high:.2f}"
        shown.add_row(*names, f"{row.ratio:.2f}", quartiles, f"{result.ours:.2f}", f"{result.theirs:.2f}", loss)
    return shown


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the ratios between their quartiles, and a line where both sides are equally fast."""
    figure = Figure(figsize=(10, 1.5 + 0.24 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for bench in dict.fromkeys(row.bench for row in rows):
        places = [place for place, row in enumerate(rows) if row.bench == bench]
        ratios = [rows[place].ratio for place in places]
        below = [rows[place].ratio - rows[place].low for place in places]
        above = [rows[place].high - rows[place].ratio for place in places]
        axes.errorbar(ratios, places, xerr=(below, above), fmt="o", capsize=3, label=bench)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(rows)), [f"{row.peer}  ·  {row.shape}  ·  {row.precision}" for row in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xscale("log")
    ticks = [tick for tick in (0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50) if tick <= 1.1 * max(row.high for row in rows)]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("time of the peer / time of ours")
    axes.legend(loc="upper right")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)


def unequal_losses(results: Sequence[Found]) -> list[str]:
    """The peers whose loss after `LOSS_STEPS` steps differs from ours by more than `CLOSE_LOSSES`."""
    compared = [result for result in results if result.checks.get("steps") == LOSS_STEPS]
    return [
        f"{result.row.peer}, {result.row.shape}, {result.row.precision}: {result.checks}"
        for result in compared
        if abs(result.checks["loss"] / result.checks["our_loss"] - 1) > CLOSE_LOSSES
    ]


def main() -> None:
    """Measure, print, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", nargs="+", choices=BENCHES, default=list(BENCHES), help="which; all by default")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES), help="which; all by default")
    parser.add_argument("--rounds", type=int, help="of training; 49 compare the mid shape's losses after 50 steps")
    parser.add_argument("--quick", action="store_true", help="try everything out, measuring nothing well")
    parser.add_argument("--compiled", action="store_true", help="training alone, both sides compiled, in bf16")
    parser.add_argument("--output", type=Path, help="benchmarks/results/peers.json, or peers_compiled.json")
    given, overrides = parser.parse_known_args()
    for peer in PEERS:
        if not peer.is_installed:
            print(f"{peer.name} is left out: {INSTALL} installs it.")
    device = resolve_device("auto")
    plan = Plan(
        [QUICK] if given.quick else [SHAPES[name] for name in given.shape],
        [peer for peer in PEERS if peer.is_installed],
        given.quick,
        given.rounds,
        [*overrides, "compile=true"] if given.compiled else overrides,
        device,
        given.compiled,
    )
    results: list[Found] = []
    for bench in ["training"] if given.compiled else given.bench:
        for result in BENCHES[bench](plan):
            print(f"{result.row.bench}, {result.row.peer}, {result.row.precision}: {result.row.ratio:.2f}", flush=True)
            results.append(result)
    record: dict[str, Any] = {
        "machine": machine(device),
        "versions": versions(),
        "commit": commit(),
        "rows": [asdict(result.row) for result in results],
        "evidence": [
            {**asdict(result.row), "our_milliseconds": result.ours, "milliseconds": result.theirs, **result.checks}
            for result in results
        ],
    }
    output = given.output or ROOT / "benchmarks" / "results" / f"peers{'_compiled' * given.compiled}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    plot([result.row for result in results], output.with_suffix(".png"))
    Console(width=160, markup=False, highlight=False).print(table(results))
    if unequal := unequal_losses(results):
        raise SystemExit("Losses differ by more than 2 %:\n" + "\n".join(unequal))


if __name__ == "__main__":
    main()
