"""How much of a GPU training uses, and what attention over T tokens takes there, by each backend.

    python benchmarks/gpu.py --output benchmarks/results/gpu/gpu.json
    python benchmarks/gpu.py --table benchmarks/results/gpu

The second command prints, as Markdown, what the first and `train.py` have written into a folder. `.ci/gpu` runs both.
Neither has been run on a GPU yet.
"""

import argparse
import contextlib
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from here import commit, machine, versions, with_config
from measure import Effort, InTurn, Terminal, alternate, settings, wall_clock
from omegaconf import DictConfig
from peers import GPT, Shape
from torch import Tensor

from tinyformer.analysis.costs import count_costs
from tinyformer.config.compose import Invocation
from tinyformer.hardware import Peak, matmul_peak, measured_flops
from tinyformer.nn import BACKENDS, AttentionMask
from tinyformer.nn.score import Scoring
from tinyformer.run.loggers import closing
from tinyformer.run.pipeline import fit, set_up

TRAINED = (
    Shape("6 x 384", num_layers=6, d_model=384, num_heads=6, seq_len=256, batch_size=256),
    Shape("GPT-2 124M", num_layers=12, d_model=768, num_heads=12, seq_len=1024, batch_size=32),
)
GPT2_VOCABULARY = ["model.vocab_size=50257"]
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS = 16384
"""Of the batch over whose attention backends are compared: sequences of length T, so many that they hold these."""


def measure_gpu(quick: bool) -> dict[str, Any]:
    """All of it.

    Args:
        quick: whether to try it out only.
    """
    device = torch.device("cuda", 0)
    peak = matmul_peak(device, torch.bfloat16)  # the one that `throughput/mfu` of a run relates to, too
    shapes, lengths = (TRAINED[:1], LENGTHS[:1]) if quick else (TRAINED, LENGTHS)
    return {
        "peak": str(peak),
        "measured_flops_per_second": measured_flops(device, torch.bfloat16),
        "training": [train(shape, peak) for shape in shapes],
        "attention": [row for seq_len in lengths for row in attention(seq_len)],
    }


def train(shape: Shape, peak: Peak) -> dict[str, Any]:
    """Tokens a second by a real run at our defaults, bf16 and compiled, and how much of the peak that is."""
    effort = Effort(steps_per_block=20, rounds=10)
    vocabulary = GPT2_VOCABULARY if shape.d_model == 768 else []
    overrides = [*settings(shape, GPT, effort, "bf16-mixed"), "compile=true", *vocabulary]

    def job(config: DictConfig, folder: Path, invocation: Invocation) -> dict[str, Any]:
        torch.cuda.reset_peak_memory_stats()
        with contextlib.redirect_stdout(Terminal()):
            run = set_up(config, folder, invocation)
            in_turn = InTurn([], effort.steps_per_block, wall_clock, lambda step: 1.0)
            run.trainer.callbacks.append(in_turn)
            with closing(run.loggers):
                fit(run)
        tokens = effort.steps_per_block * shape.batch_size * shape.seq_len
        per_second = tokens / statistics.median(in_turn.times["ours"])
        return {
            "shape": f"{shape.name}: {shape}",
            "tokens_per_second": per_second,
            "mfu": per_second * count_costs(run.network).training_flops_per_token / peak.flops,
            "peak_memory_bytes": torch.cuda.max_memory_allocated(),
        }

    return with_config(job, overrides)


def attention(seq_len: int, num_heads: int = 12, head_dim: int = 64) -> list[dict[str, Any]]:
    """Forward and backward pass of causal attention in bf16, by each backend; none where memory does not suffice."""
    shape = (TOKENS // seq_len, num_heads, seq_len, head_dim)
    q, k, v, upstream = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    rows = []
    for name in ("eager", "sdpa", "flash", "flex"):

        def run(compute: Any = BACKENDS[name].compute) -> None:
            output: Tensor = compute(q, k, v, AttentionMask(causal=True), Scoring(head_dim**-0.5))
            torch.autograd.grad(output, inputs, upstream)

        torch.cuda.reset_peak_memory_stats()
        row: dict[str, Any] = {"backend": name, "seq_len": seq_len}
        try:
            row["milliseconds"] = 1000 * statistics.median(alternate({name: run}, rounds=10)[name])
        except torch.OutOfMemoryError:
            row["milliseconds"] = None
        rows.append(row | {"peak_memory_bytes": torch.cuda.max_memory_allocated()})
    return rows


def table(folder: Path) -> Iterator[str]:
    """What was measured into a folder, in lines of Markdown; what is missing there is left out."""
    path = folder / "shakespeare" / "results.json"
    if path.exists():
        run = json.loads(path.read_text())
        yield f"`experiment=shakespeare_gpu` on {run['device']}, {run['precision']}, {run['attention_kernel']}:"
        yield f"val/loss {run['val/loss']:.4f} with the last weights, best {run['best/val/loss']:.4f},"
        yield f"{run['steps']:,} steps in {run['seconds']:.0f} s, {run['throughput/tokens_per_second']:,.0f} tokens/s, "
        yield f"MFU {run['throughput/mfu']:.1%}, telemetry {run['telemetry/share']:.2%} of the time.\n"
    path = folder / "gpu.json"
    if path.exists():
        found = json.loads(path.read_text())
        yield f"{found['machine']}, {found['peak']}, measured {found['measured_flops_per_second'] / 1e12:.0f} TFLOP/s\n"
        yield "| training | tokens/s | MFU | peak memory, GB |\n|---|---|---|---|"
        for row in found["training"]:
            speed, memory = row["tokens_per_second"], row["peak_memory_bytes"] / 1e9
            yield f"| {row['shape']} | {speed:,.0f} | {row['mfu']:.1%} | {memory:.1f} |"
        backends = list(dict.fromkeys(row["backend"] for row in found["attention"]))
        yield "\n| attention over T, ms (GB) | " + " | ".join(backends) + " |\n" + "|---" * (1 + len(backends)) + "|"
        for seq_len in dict.fromkeys(row["seq_len"] for row in found["attention"]):
            cells = [cell(row) for row in found["attention"] if row["seq_len"] == seq_len]
            yield f"| {seq_len} | " + " | ".join(cells) + " |"


def cell(row: dict[str, Any]) -> str:
    """Time and memory of one backend."""
    if row["milliseconds"] is None:
        return "out of memory"
    return f"{row['milliseconds']:.2f} ({row['peak_memory_bytes'] / 1e9:.1f})"


def main() -> None:
    """Measure and write, or print what was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="print what is in a folder")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    parser.add_argument("--quick", action="store_true", help="try everything out, measuring nothing well")
    given = parser.parse_args()
    if given.table:
        print("\n".join(table(given.table)))
        return
    record = {"machine": machine("cuda"), "versions": versions(), "commit": commit(), **measure_gpu(given.quick)}
    given.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
