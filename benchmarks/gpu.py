"""The share of a GPU that training uses, beside that of its peers, and the time of attention there by backend.

    python benchmarks/gpu.py --output benchmarks/results/gpu/gpu.json data=text data.files=book.txt
    python benchmarks/gpu.py --table benchmarks/results/gpu

The second command prints, as Markdown, what the first and `train.py` have written into a folder. `.ci/gpu` runs both.
Ours is a real run with all its defaults, telemetry aside; a peer is compiled and trains in a loop of four lines.
"""

import argparse
import contextlib
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from here import commit, machine, versions
from measure import Effort, alternate, settings, train_in_turn
from peers import GPT, GPU_PEERS, Shape
from torch import Tensor

from tinyformer.hardware import Peak, matmul_peak, measured_flops
from tinyformer.nn import BACKENDS, AttentionMask, KernelRequirements
from tinyformer.nn.maps import running_kernel
from tinyformer.nn.score import Scoring

TRAINED = (
    (Shape("6 x 384", num_layers=6, d_model=384, num_heads=6, seq_len=256, batch_size=64), Effort(20, 8)),
    (Shape("6 x 384", num_layers=6, d_model=384, num_heads=6, seq_len=256, batch_size=256), Effort(10, 8)),
    (Shape("GPT-2 124M", num_layers=12, d_model=768, num_heads=12, seq_len=1024, batch_size=32), Effort(10, 5)),
)
GPT2_VOCABULARY = ["model.vocab_size=50257"]
LENGTHS = (1024, 4096, 16384)
TOKENS = 16384
"""Of the batch over whose attention backends are compared: sequences of length T, so many that they hold these."""


def _lengths(rows: int, seq_len: int) -> Tensor:
    return torch.linspace(seq_len // 2, seq_len, rows, device="cuda").long()


def _four_documents(rows: int, seq_len: int) -> AttentionMask:
    size = seq_len // 4
    documents = (torch.arange(seq_len, device="cuda") // size).expand(rows, seq_len)
    starts = torch.arange(0, rows * seq_len + 1, size, device="cuda", dtype=torch.int32)
    return AttentionMask(causal=True, documents=documents, document_starts=starts)


MASKS = {
    "causal": lambda rows, seq_len: AttentionMask(causal=True),
    "padded": lambda rows, seq_len: AttentionMask(lengths=_lengths(rows, seq_len)),
    "causal+padded": lambda rows, seq_len: AttentionMask(causal=True, lengths=_lengths(rows, seq_len)),
    "documents": _four_documents,
}


def measure_gpu(quick: bool, overrides: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Part after part.

    Args:
        quick: whether to try it out only.
        overrides: of our runs, such as other data.
    """
    device = torch.device("cuda", 0)
    peak = matmul_peak(device, torch.bfloat16)  # the one that `throughput/mfu` of a run relates to, too
    yield {"peak": str(peak), "measured_flops_per_second": measured_flops(device, torch.bfloat16)}
    shapes, lengths = (TRAINED[:1], (512,)) if quick else (TRAINED, LENGTHS)
    rows: list[dict[str, Any]] = []
    for shape, effort in shapes:
        rows += train(shape, effort, peak, overrides)
        yield {"training": rows}
    cases = [(length, "causal") for length in lengths] + [(lengths[0], mask) for mask in MASKS if mask != "causal"]
    yield {"attention": [row for seq_len, mask in cases for row in attention(seq_len, mask)]}


def train(shape: Shape, effort: Effort, peak: Peak, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Tokens a second by ours and by each peer in turn, in bf16 and compiled, and how much of the peak that is."""
    vocabulary = GPT2_VOCABULARY if shape.d_model == 768 else []
    own = [*settings(shape, GPT, effort, "bf16-mixed"), "compile=true", *vocabulary, *overrides]
    trained = train_in_turn(GPU_PEERS, own, shape, effort, "bf16-mixed", plain=False, compiled=True)
    tokens = effort.steps_per_block * shape.batch_size * shape.seq_len
    first = trained[0]
    rows = [("tinyformer", first.ours, first.our_loss), *((peer.peer, peer.theirs, peer.loss) for peer in trained)]
    return [
        {
            "shape": f"{shape.name}, T {shape.seq_len}, B {shape.batch_size}",
            "name": name,
            "tokens_per_second": tokens / statistics.median(seconds),
            "mfu": tokens / statistics.median(seconds) * first.our_flops_per_token / peak.flops,
            "milliseconds": [1000 * each / effort.steps_per_block for each in seconds],
            "loss": loss,
            "peak_memory_bytes": first.our_peak_memory if name == "tinyformer" else None,
        }
        for name, seconds, loss in rows
    ]


def attention(seq_len: int, mask: str, num_heads: int = 12, head_dim: int = 64) -> list[dict[str, Any]]:
    """Forward and backward pass of attention in bf16 by each backend; no time where it refuses or lacks memory."""
    rows = TOKENS // seq_len
    shape, described = (rows, num_heads, seq_len, head_dim), MASKS[mask](rows, seq_len)
    q, k, v, upstream = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    case = KernelRequirements.of(q, k, v, described, Scoring(), dropout=0.0, gradient=True)
    found = []
    for name in ("eager", "sdpa", "flash", "flex"):

        def run(compute: Any = BACKENDS[name].compute) -> None:
            output: Tensor = compute(q, k, v, described, Scoring(head_dim**-0.5))
            torch.autograd.grad(output, inputs, upstream)

        row: dict[str, Any] = {"backend": name, "seq_len": seq_len, "mask": mask, "milliseconds": None}
        torch.cuda.reset_peak_memory_stats()
        if BACKENDS[name].refusal(case) is None:
            with contextlib.suppress(torch.OutOfMemoryError):
                row["milliseconds"] = 1000 * statistics.median(alternate({name: run}, rounds=10)[name])
                row["kernel"] = "triton" if name == "flex" else running_kernel(run)
        found.append(row | {"peak_memory_bytes": torch.cuda.max_memory_allocated()})
    return found


def table(folder: Path) -> Iterator[str]:
    """The measurements of a folder as lines of Markdown; those that are missing there are left out."""
    path = folder / "shakespeare" / "results.json"
    if path.exists():
        run = json.loads(path.read_text(encoding="utf-8"))
        yield f"`experiment=shakespeare_gpu` on {run['device']}, {run['precision']}, {run['attention_kernel']}:"
        yield f"val/loss {run['val/loss']:.4f} with the last weights, best {run['best/val/loss']:.4f},"
        yield f"{run['steps']:,} steps in {run['seconds']:.0f} s, {run['throughput/tokens_per_second']:,.0f} tokens/s, "
        yield f"MFU {run['throughput/mfu']:.1%}, telemetry {run['telemetry/share']:.2%} of the time.\n"
    path = folder / "gpu.json"
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        yield f"{found['machine']}, {found['peak']}, measured {found['measured_flops_per_second'] / 1e12:.0f} TFLOP/s\n"
        yield "| training, bf16, compiled | | tokens/s | MFU | peak memory, GB |\n|---|---|---|---|---|"
        for row in found["training"]:
            memory = f"{row['peak_memory_bytes'] / 1e9:.1f}" if row["peak_memory_bytes"] else ""
            yield f"| {row['shape']} | {row['name']} | {row['tokens_per_second']:,.0f} | {row['mfu']:.1%} | {memory} |"
    if path.exists() and "attention" in found:
        backends = list(dict.fromkeys(row["backend"] for row in found["attention"]))
        yield "\n| attention, ms (GB) | " + " | ".join(backends) + " |\n" + "|---" * (1 + len(backends)) + "|"
        cases: dict[str, list[dict[str, Any]]] = {}
        for row in found["attention"]:
            cases.setdefault(f"T {row['seq_len']}, {row['mask']}", []).append(row)
        for name, cells in cases.items():
            yield f"| {name} | " + " | ".join(cell(row) for row in cells) + " |"


def cell(row: dict[str, Any]) -> str:
    """Time and memory of one backend."""
    if row["milliseconds"] is None:
        return "–"
    return f"{row['milliseconds']:.2f} ({row['peak_memory_bytes'] / 1e9:.1f})"


def main() -> None:
    """Measure and write, or print what was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="print what is in a folder")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    parser.add_argument("--quick", action="store_true", help="try everything out, measuring nothing well")
    given, overrides = parser.parse_known_args()
    if given.table:
        print("\n".join(table(given.table)))
        return
    record = {"machine": machine("cuda"), "versions": versions(), "commit": commit()}
    for part in measure_gpu(given.quick, overrides):
        record |= part
        given.output.write_text(
            json.dumps(record, indent=1) + "\n", encoding="utf-8"
        )  # now, so that an interruption loses one part


if __name__ == "__main__":
    main()
