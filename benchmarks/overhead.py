"""The overhead of a training step beside its arithmetic: Lightning's loop, and what tinyformer adds to it.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --shape small --shape mid

A model of next to no arithmetic makes the same steps three ways, in turn: in a loop of three lines, by a bare Lightning
Trainer, and by `train.py`'s own run with its logging, progress bar on a terminal, checkpoints and loader (telemetry
left out, which `benchmarks/telemetry.py` measures). Prints the medians in milliseconds of processor time, which other
work of the machine hardly affects, and writes `benchmarks/results/overhead.json`; on a CPU core it takes a minute.

With `--shape`, a run of a model of that shape alternates with a loop by hand that trains its copy on the same batches,
and the ratio of their times is written to `overhead_shapes.json`: below 1 is what the run loses. On 2 cores "small"
takes 2 minutes, "mid" 5; nothing else should run there. Other arguments are overrides.
"""

import argparse
import io
import json
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from here import ROOT, commit, machine, versions, with_config
from hydra.utils import instantiate
from measure import Effort, compare, settings, train_in_turn
from omegaconf import DictConfig
from peers import GPT, SHAPES
from rich.console import Console

from tinyformer.config.launch import CommandLine
from tinyformer.hardware import has_native_bf16
from tinyformer.run.pipeline import set_up
from tinyformer.run.run import Run
from tinyformer.training import TrainingModule
from tinyformer.training.callbacks.metrics import StepProgress

SMALLEST = [
    "model.num_layers=1",
    "model.num_heads=1",
    "model.d_model=8",
    "model.max_seq_len=8",
    "attention.backend=eager",
    "tokenizer=byte",
    "data.batch_size=1",
    "callbacks.attention=null",
    "trainer=cpu",
    "trainer.precision=32-true",
    "trainer.max_steps=1000",
    "trainer.val_check_interval=5000",
    "trainer.limit_val_batches=1",
]
ROUNDS = 7
EFFORTS = {"small": Effort(steps_per_block=10, rounds=40), "mid": Effort(steps_per_block=1, rounds=20)}


class Clock(L.Callback):
    """Processor seconds per step, from the end of the first quarter of the steps to the last step."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Read the clock."""
        first, last = trainer.max_steps // 4, trainer.max_steps - 1
        if trainer.global_step == first:
            self._since = time.process_time()
        elif trainer.global_step == last:
            self.seconds = (time.process_time() - self._since) / (last - first)


def by_tinyformer(run: Run) -> float:
    """Milliseconds a step."""
    clock = Clock()
    bars = [callback for callback in run.trainer.callbacks if isinstance(callback, StepProgress)]  # type: ignore[attr-defined]
    for bar in bars:  # a terminal that nobody sees
        bar.console = Console(file=io.StringIO(), force_terminal=True)
        bar.animated = True
    run.trainer.callbacks.append(clock)  # type: ignore[attr-defined]
    run.trainer.fit(run.module, datamodule=run.data)
    return 1000 * clock.seconds


def by_lightning(run: Run) -> float:
    """Milliseconds a step."""
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=run.trainer.max_steps,
        gradient_clip_val=run.trainer.gradient_clip_val,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(TrainingModule(run.network, run.task, run.data, *recipe(run)), datamodule=run.data)
    return 1000 * clock.seconds


def by_hand(run: Run) -> float:
    """Milliseconds a step."""
    optimizer = run.module.make_optimizer(run.network)  # type: ignore[misc]
    batches = iter(run.data.train_dataloader())
    steps = run.trainer.max_steps
    for step in range(steps):
        if step == steps // 4:
            since = time.process_time()
        optimizer.zero_grad()
        run.task.loss(run.network, next(batches)).backward()
        torch.nn.utils.clip_grad_norm_(run.network.parameters(), run.trainer.gradient_clip_val)
        optimizer.step()
    return 1000 * (time.process_time() - since) / (steps - steps // 4)


def recipe(run: Run) -> tuple[Any, Any]:
    """Optimizer and schedule."""
    return run.module.make_optimizer, instantiate(run.config.schedule)


def in_turn(config: DictConfig, folder: Path, invocation: CommandLine) -> dict[str, list[float]]:
    """Milliseconds a step of each side, in each round."""
    found: dict[str, list[float]] = {name: [] for name in SIDES}
    for _ in range(ROUNDS):
        for name, side in SIDES.items():
            run = set_up(config, folder, invocation)
            found[name].append(side(run))
            shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)  # a folder holds one run
    return found


SIDES = {"a loop by hand": by_hand, "a bare Trainer": by_lightning, "train.py": by_tinyformer}


def of_smallest(overrides: Sequence[str]) -> None:
    """Measure a model of next to no arithmetic, print and write."""
    torch.set_num_threads(1)
    found = with_config(in_turn, [*SMALLEST, *overrides])
    medians = {name: statistics.median(each) for name, each in found.items()}
    write("overhead", {name: {"median": medians[name], "rounds": each} for name, each in found.items()})
    for name, median in medians.items():
        print(f"{name:16}{median:6.2f} ms a step  ({min(found[name]):.2f} to {max(found[name]):.2f})")
    print(f"ours            {medians['train.py'] - medians['a bare Trainer']:+6.2f} ms a step")


def of_shapes(names: Sequence[str], overrides: Sequence[str]) -> None:
    """Measure models of these shapes in fp32, and in bf16 where the hardware has it, print and write."""
    rows = []
    for name in names:
        shape, effort = SHAPES[name], EFFORTS[name]
        for precision in ("32-true", "bf16-mixed") if has_native_bf16("cpu") else ("32-true",):
            chosen = [*settings(shape, GPT, effort, precision), "trainer=cpu", f"trainer.precision={precision}"]
            (pair,) = train_in_turn([], [*chosen, *overrides], shape, effort, precision)
            ratio = compare(pair.ours, pair.theirs)
            ours, theirs = (
                1000 * statistics.median(each) / effort.steps_per_block for each in (pair.ours, pair.theirs)
            )
            names_of = {"shape": str(shape), "precision": precision}
            rows.append({**names_of, **ratio._asdict(), "milliseconds": ours, "milliseconds_by_hand": theirs})
            print(f"{shape}, {precision}: {ratio.ratio:.3f} ({ratio.low:.3f} to {ratio.high:.3f})", flush=True)
    write("overhead_shapes", rows)


def write(name: str, milliseconds: Any) -> None:
    """Write what was measured, with the machine, the versions and the commit."""
    record = {
        "machine": machine("cpu"),
        "versions": versions(),
        "commit": commit(),
        "milliseconds_a_step": milliseconds,
    }
    (ROOT / "benchmarks" / "results" / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape",
        action="append",
        choices=EFFORTS,
        help="a shape; without, a model of next to no arithmetic",
    )
    given, overrides = parser.parse_known_args()
    if given.shape:
        of_shapes(given.shape, overrides)
    else:
        of_smallest(overrides)


if __name__ == "__main__":
    main()
