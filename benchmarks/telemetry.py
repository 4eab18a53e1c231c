"""The cost of measuring every head: training with and without telemetry, in turn, and the share that a run reports.

    python benchmarks/telemetry.py data=text data.files=tinyshakespeare.txt

First, one network trains in one process in blocks of steps; in every other block, telemetry is on and measures once.
Then `train.py` makes a run of the same config, whose `results.json` reports the time that telemetry took, including
pictures and tables. Arguments are overrides, after `experiment=shakespeare_cpu`. Processor time is measured beside wall
time, since other work of the machine hardly affects it. Writes `benchmarks/results/telemetry.json`; on 2 CPU cores it
takes about 5 minutes.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from here import ROOT, commit, with_config
from omegaconf import DictConfig

from tinyformer.config.launch import CommandLine
from tinyformer.run.pipeline import set_up
from tinyformer.run.run import fit
from tinyformer.run.trainer import closing
from tinyformer.training import AttentionTelemetry

EXPERIMENT = "experiment=shakespeare_cpu"


class InTurn(L.Callback):
    """Runs telemetry in the middle of every other block of steps, and times each block.

    Args:
        telemetry: which measures every `every_n_steps` steps, as long as a block is.
    """

    def __init__(self, telemetry: AttentionTelemetry) -> None:
        self.telemetry, self.block = telemetry, telemetry.every_n_steps
        self.blocks: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
        self.measuring: list[float] = []
        self.drawing: list[float] = []
        self._since: tuple[float, float] | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Set up telemetry."""
        self.telemetry.setup(trainer, pl_module, stage)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Pass the batch on to telemetry, or not; read the clock at the end of a block."""
        number, place = divmod(trainer.global_step + self.block // 2, self.block)
        if number % 2 and place == self.block // 2:
            before = self.telemetry.seconds
            self.telemetry.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            self.measuring.append(self.telemetry.seconds - before)
        if place == 0:
            if pl_module.device.type == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter(), time.process_time()
            if self._since is not None:
                spent = (now[0] - self._since[0], now[1] - self._since[1])
                self.blocks["without" if number % 2 else "with"].append(spent)
            self._since = now

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw and write tables a few times, too."""
        for _ in range(5):
            before = self.telemetry.seconds
            self.telemetry.on_validation_end(trainer, pl_module)
            self.drawing.append(self.telemetry.seconds - before)


def train_in_turn(config: DictConfig, folder: Path, invocation: CommandLine, num_blocks: int) -> dict[str, Any]:
    """The seconds of blocks of steps with and without telemetry."""
    telemetry_config = config.callbacks.attention
    config.trainer.max_steps = telemetry_config.every_n_steps * (num_blocks + 1)
    config.trainer.val_check_interval = 10 * config.trainer.max_steps
    run = set_up(config, folder, invocation)
    (telemetry,) = run.telemetry
    in_turn = InTurn(telemetry)
    callbacks: list[L.Callback] = run.trainer.callbacks
    callbacks[callbacks.index(telemetry)] = in_turn
    with closing(run.loggers):
        fit(run)
    kinds: dict[str, Any] = {}
    for index, kind in enumerate(("seconds", "processor_seconds")):
        seconds = {name: [block[index] for block in blocks] for name, blocks in in_turn.blocks.items()}
        medians = {name: statistics.median(each) for name, each in seconds.items()}
        kinds[kind] = {"blocks": seconds, "medians": medians, "ratio": medians["with"] / medians["without"]}
    return {
        "steps_per_block": in_turn.block,
        **kinds,
        "median_seconds_of_measuring": statistics.median(in_turn.measuring),
        "median_seconds_of_drawing": statistics.median(in_turn.drawing),
        "parameters": run.network.num_parameters(),
    }


def train_whole(overrides: list[str], folder: Path) -> dict[str, Any]:
    """The time that telemetry took in a run of `train.py`, as the run reports it."""
    command = [sys.executable, str(ROOT / "train.py"), *overrides, f"hydra.run.dir={folder}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    kept = ("telemetry/seconds", "telemetry/share", "steps", "seconds", "throughput/tokens_per_second", "val/loss")
    return {key: results[key] for key in (*kept, "device", "precision", "attention_kernel")}


def main() -> None:
    """Run both, print the figures, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=24, help="of every_n_steps steps, half of them with telemetry")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "telemetry.json")
    given, rest = parser.parse_known_args()
    overrides = [EXPERIMENT, *rest]
    in_turn = with_config(lambda *job: train_in_turn(*job, given.blocks), overrides)
    with tempfile.TemporaryDirectory() as folder:
        whole = train_whole(overrides, Path(folder) / "whole")
    names = [f"{key}={Path(value).name}" if value else key for key, _, value in (word.partition("=") for word in rest)]
    record = {
        "command": ["python", "benchmarks/telemetry.py", *names],
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
        "in_turn": in_turn,
        "whole_run": whole,
    }
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(
        f"\nin turn     {100 * (in_turn['seconds']['ratio'] - 1):+.2f} % of time, "
        f"{100 * (in_turn['processor_seconds']['ratio'] - 1):+.2f} % of processor time "
        f"({1000 * in_turn['median_seconds_of_measuring']:.1f} ms a measurement, "
        f"{1000 * in_turn['median_seconds_of_drawing']:.1f} ms for pictures and tables)\n"
        f"whole run   {100 * whole['telemetry/share']:.2f} % ({whole['telemetry/seconds']:.2f} s)"
    )


if __name__ == "__main__":
    main()
