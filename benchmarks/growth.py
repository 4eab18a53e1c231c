"""The growth of time and memory with the length of a sequence, the width, the depth, the heads and the K/V heads.

    python benchmarks/growth.py

Each axis is varied alone, for each backend that can train: forward and backward pass of an encoder, one row of tokens
under a causal mask. Prints a table with the exponent of the power law that fits best, and writes
`benchmarks/results/growth.json` and `growth.png`. Memory is the peak of the tensors beside weights and input, according
to torch's allocator. What would take more than a quarter of the free memory is left out. On 2 CPU cores
it takes about 10 minutes; with a GPU it runs there, in bf16.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from tinyformer.errors import ArgumentError
from tinyformer.hardware import describe_device, free_memory
from tinyformer.programs.findings.running import measure_encoder

ROOT = Path(__file__).parent.parent
BACKENDS = ("eager", "sdpa", "flash", "flex")
BASE = {
    "cpu": {"seq": 1024, "width": 128, "depth": 1, "heads": 8, "kv_heads": 8},
    "cuda": {"seq": 2048, "width": 1024, "depth": 1, "heads": 16, "kv_heads": 16},
}
"""The values of all axes but the one that is varied."""
VALUES = {
    "seq": (512, 1024, 2048, 4096, 8192, 16384),
    "width": (64, 128, 256, 512, 1024),
    "depth": (1, 2, 4, 8),
    "heads": (1, 2, 4, 8, 16),
    "kv_heads": (1, 2, 4, 8),
}
"""The values of each axis. Heads share the width, so that more heads are narrower."""


def measure(sizes: dict[str, int], backend: str, device: str, repeats: int) -> dict[str, Any]:
    """The median seconds and the peak bytes of some passes, or why they are left out."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    weights = sizes["depth"] * sizes["heads"] * sizes["seq"] ** 2
    needed = 3 * (4 if dtype == torch.float32 else 6) * weights  # the softmax in fp32, in bf16 with a copy in that
    free = free_memory(device)
    if backend == "eager" and free is not None and needed > free / 4:
        return {"left_out": f"about {needed / 1e9:.0f} GB"}
    try:
        passes = [measure_encoder(sizes, backend, device, dtype) for _ in range(repeats)]
    except ArgumentError as error:
        return {"left_out": f"{backend} {error.reason}"}
    return {"seconds": statistics.median(each["seconds"] for each in passes), "bytes": passes[0]["bytes"]}


def exponent(values: Sequence[float], measured: Sequence[float]) -> float | None:
    """The exponent of the power law through the points, by least squares in logarithms; None for a single point."""
    if len(values) < 2:
        return None
    slope, _ = statistics.linear_regression([math.log(v) for v in values], [math.log(m) for m in measured])
    return slope


def fit(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float | None]]]:
    """The exponents, by axis, backend and kind."""
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for axis, backend in dict.fromkeys((row["axis"], row["backend"]) for row in rows):
        points = [row for row in rows if (row["axis"], row["backend"]) == (axis, backend) and "seconds" in row]
        values = [row["value"] for row in points]
        kinds = {kind: exponent(values, [row[kind] for row in points]) for kind in ("seconds", "bytes")}
        found.setdefault(axis, {})[backend] = kinds
    return found


def print_table(record: dict[str, Any]) -> None:
    """Print a line for each axis and backend: the first and the last point, and the exponents."""
    table = Table(box=box.SIMPLE_HEAD, title=f"forward and backward, {record['device']}, {record['dtype']}")
    for name in ("axis", "backend", "from", "to", "ms", "MB", "time ~", "memory ~", "left out"):
        table.add_column(name, justify="left" if name in ("axis", "backend", "left out") else "right")
    for axis, backends in record["exponents"].items():
        for backend, kinds in backends.items():
            rows = [row for row in record["rows"] if (row["axis"], row["backend"]) == (axis, backend)]
            points, left_out = [row for row in rows if "seconds" in row], [row for row in rows if "left_out" in row]
            reason = f"{left_out[0]['value']} and more: {left_out[0]['left_out']}" if left_out else ""
            if not points:
                table.add_row(axis, backend, *[""] * 6, left_out[0]["left_out"])
                continue
            first, last = points[0], points[-1]
            power = {"time": kinds["seconds"], "memory": kinds["bytes"]}
            table.add_row(
                axis,
                backend,
                f"{first['value']:,}",
                f"{last['value']:,}",
                f"{1e3 * first['seconds']:,.1f} - {1e3 * last['seconds']:,.1f}",
                f"{first['bytes'] / 1e6:,.1f} - {last['bytes'] / 1e6:,.1f}",
                *("" if p is None else f"{axis}^{p:.2f}" for p in power.values()),
                reason,
            )
    Console(width=160).print(table)


def draw(record: dict[str, Any], path: Path) -> None:
    """Plot time and memory over each axis, with logarithmic scales."""
    axes = list(record["exponents"])
    figure = Figure(figsize=(3.2 * len(axes), 6), layout="constrained")
    grid = figure.subplots(2, len(axes), squeeze=False)
    for column, axis in enumerate(axes):
        for panel, kind, unit in ((grid[0][column], "seconds", 1e-3), (grid[1][column], "bytes", 1e6)):
            for backend, kinds in record["exponents"][axis].items():
                rows = [r for r in record["rows"] if (r["axis"], r["backend"]) == (axis, backend) and kind in r]
                if len(rows) > 1:
                    label = f"{backend} ~ {kinds[kind]:.1f}"
                    panel.plot([r["value"] for r in rows], [r[kind] / unit for r in rows], "o-", label=label)
            panel.set(xscale="log", yscale="log", xlabel=axis)
            panel.set_xticks(VALUES[axis], [f"{value}" for value in VALUES[axis]], fontsize=7)
            panel.minorticks_off()
            panel.legend(fontsize=7)
    grid[0][0].set_ylabel("ms")
    grid[1][0].set_ylabel("MB")
    figure.suptitle(f"forward and backward pass, {record['device']}, {record['dtype']}; slopes behind ~")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", nargs="+", choices=VALUES, default=list(VALUES))
    parser.add_argument("--longest", type=int, default=16384, help="longest sequence")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "growth.json")
    given = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[dict[str, Any]] = []
    for axis in given.axes:
        values = [value for value in VALUES[axis] if axis != "seq" or value <= given.longest]
        rows += [
            {"axis": axis, "value": value, "backend": backend}
            | measure(BASE[device] | {axis: value}, backend, device, given.repeats)
            for value in values
            for backend in BACKENDS
        ]
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True)
    record = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "device": describe_device(device),
        "dtype": "bf16" if device == "cuda" else "fp32",
        "torch": torch.__version__,
        "commit": commit.strip(),
        "base": BASE[device],
        "rows": rows,
        "exponents": fit(rows),
    }
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    draw(record, given.output.with_suffix(".png"))
    print_table(record)


if __name__ == "__main__":
    main()
