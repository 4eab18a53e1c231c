"""What a CUDA device adds: how much of it training uses, attention over T, and peak memory.

It has not been run on a GPU yet.
"""

import contextlib
import statistics
from pathlib import Path
from typing import Any

import torch
from here import with_config
from measure import Effort, InTurn, Terminal, alternate, settings, wall_clock
from omegaconf import DictConfig
from peers import GPT, Shape
from torch import Tensor

from tinyformer.analysis.costs import count_costs
from tinyformer.app.config import Invocation
from tinyformer.app.loggers import closing
from tinyformer.app.training_run import fit, set_up
from tinyformer.nn import BACKENDS, AttentionMask
from tinyformer.nn.score import Scoring

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
    peak = matmul_flops()
    shapes, lengths = (TRAINED[:1], LENGTHS[:1]) if quick else (TRAINED, LENGTHS)
    return {
        "bf16_matmul_flops_per_second": peak,
        "training": [train(shape, peak) for shape in shapes],
        "attention": [row for seq_len in lengths for row in attention(seq_len)],
    }


def matmul_flops(size: int = 8192) -> float:
    """FLOP/s that one large bf16 product reaches: the device's peak, as it can be had."""
    a, b = torch.randn(2, size, size, device="cuda", dtype=torch.bfloat16)
    return 2 * size**3 / statistics.median(alternate({"matmul": lambda: a @ b}, rounds=20)["matmul"])


def train(shape: Shape, peak: float) -> dict[str, Any]:
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
            "mfu": per_second * count_costs(run.network).training_flops_per_token / peak,
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
        compute = BACKENDS[name].compute
        if name == "flex":  # a slow reference until it is compiled
            compute = torch.compile(compute)

        def run(compute: Any = compute) -> None:
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
