"""Exactness and speed of every attention variant by every backend on this machine.

`variants` is the table of what is tested, `cases` makes modules and masks from it, `exactness` and `speed` measure one
cell, `verdict` compares it with the documented table, and `machine` describes the machine. `growth`, which benchmarks
and findings use, measures time and memory by size; only it imports a package of ours other than `nn`.

Exit code: 0 if all backends do what the documented table says, 1 if one does not, 2 for a mistake on the command line.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich import progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tinyformer.files import finite
from tinyformer.programs.doctor.variants import BACKEND_NAMES, DTYPE_NAMES, MASK_NAMES, VARIANTS

if TYPE_CHECKING:
    from tinyformer.programs.doctor.verdict import Cell

KERNELS = {
    "flash": ("F", "flash"),
    "efficient": ("E", "memory-efficient"),
    "cudnn": ("C", "cuDNN"),
    "varlen": ("V", "flash, packed"),
    "triton": ("T", "Triton"),
    "fa3": ("3", "FlashAttention 3"),
    "fa4": ("4", "FlashAttention 4"),
    "math": ("M", "matrix products"),
}
"""The letter and the description of each kernel."""

WIDTH, MEMORY_WIDTH = 112, 6
"""Characters of the report, and of each backend's memory, which is shown where `--full` measures it."""


def main(arguments: Sequence[str]) -> int:
    """Examine this machine and print the results; returns the exit code."""
    parser = argparse.ArgumentParser(prog="tinyformer doctor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--full", action="store_true", help="test at 1024 tokens; always so on CUDA")
    tested = {"backends": BACKEND_NAMES, "variants": tuple(VARIANTS), "masks": MASK_NAMES, "dtypes": DTYPE_NAMES}
    for name, known in tested.items():
        some = f"some of {', '.join(known)}"
        parser.add_argument(f"--{name}", type=_names_in(known), default=list(known), metavar="A,B", help=some)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the device to examine; CUDA where there is a GPU")
    options = parser.parse_args(arguments)

    # These import torch, which takes seconds; --help does not wait for it.
    import torch

    from tinyformer.programs.doctor.machine import describe_machine, one_thread, quiet
    from tinyformer.programs.doctor.verdict import examine

    started = time.perf_counter()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    # On a GPU a small problem takes as long as a large one, and kernels would be compiled for both sizes.
    full = options.full or device.type == "cuda"
    machine = describe_machine(device, full)
    masks = [mask for name in options.variants for mask in VARIANTS[name].masks if mask in options.masks]
    terminal = Console(stderr=True)
    with quiet(), one_thread():
        rows = examine(options.backends, options.variants, options.masks, options.dtypes, device, full)
        tracked = progress.track(
            rows,
            "examining",
            total=len(masks) * len(options.dtypes),
            console=terminal,
            transient=True,
            disable=not terminal.is_terminal,
        )
        cells = [cell for row in tracked for cell in row]
    if options.json:
        plain = [{key: finite(value) for key, value in asdict(cell).items()} for cell in cells]
        print(json.dumps({"machine": machine, "cells": plain}, indent=1))
    else:
        _print_report(cells, machine, time.perf_counter() - started)
    return int(any(cell.failure for cell in cells))


def _names_in(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: must be among {','.join(known)}")
        return names

    return parse


def _print_report(cells: Sequence["Cell"], machine: dict[str, Any], seconds: float) -> None:
    """Print one row per variant and dtype, with one letter per mask; below, the legend, refusals and failures."""
    console = Console(highlight=False)
    # A terminal that is narrower than the table wraps its lines; no column is cut off.
    with_memory = bool(machine["full"])
    console.width = max(console.width, WIDTH + (4 * MEMORY_WIDTH if with_memory else 0))
    about = f"{machine['name']} ({machine['device']}), torch {machine['torch']}, Python {machine['python']}"
    console.print(Text(about, "bold"))
    masks = [mask for mask in MASK_NAMES if any(cell.mask == mask for cell in cells)]
    console.print(_table(cells, masks, with_memory))
    kernels = ", ".join(" ".join(KERNELS[kernel]) for kernel in _unique(cell.kernel for cell in cells if cell.kernel))
    memory = ", and the MiB held at once" if with_memory else ""
    console.print(
        Text(
            f"\nOne letter per mask ({', '.join(masks)}): the kernel that ran ({kernels}); lower case: forward only; "
            "·: refused; ✗: failed. Then the milliseconds of the heads for the median mask, forward and "
            f"backward{memory}. ×: auto's time relative to the fastest backend's, at most. output, gradient: the "
            "largest error of all backends and masks, max|a - b| / max|b| against eager in float64."
        )
    )
    _print_refusals(cells, console)
    for cell in cells:
        if cell.failure:
            console.print(Text(f"✗ {cell}: {cell.failure}", "red"))
    ran = [cell for cell in cells if cell.status == "ran"]
    forward_only = sum(not cell.has_backward for cell in ran)
    refused = sum(cell.status == "refused" for cell in cells)
    failed = sum(cell.failure is not None for cell in cells)
    counts = f"{len(cells)} cells in {seconds:.0f} s: {len(ran)} ran ({forward_only} forward only), {refused} refused. "
    verdict = f"{failed} failed." if failed else "All do what the table says."
    console.print(Text.assemble("\n", counts, (verdict, "bold red" if failed else "bold green")))


def _table(cells: Sequence["Cell"], masks: Sequence[str], with_memory: bool) -> Table:
    """The row of each variant and dtype: all backends, auto's choices, its largest slowdown and the largest errors."""
    # A backend that refuses everything has no column.
    backends = _unique(cell.backend for cell in cells if cell.status != "refused" or cell.failure)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("attention", "dtype", *backends, "auto"):
        table.add_column(name, no_wrap=True)
    for name in ("×", "output", "gradient"):
        table.add_column(name, justify="right", no_wrap=True)
    for variant, dtype in _unique((cell.variant, cell.dtype) for cell in cells):
        row = [cell for cell in cells if (cell.variant, cell.dtype) == (variant, dtype)]
        entries = (
            _backend_entry([cell for cell in row if cell.backend == name], masks, with_memory) for name in backends
        )
        choices = ", ".join(_unique(cell.backend for cell in row if cell.auto))
        worst = (
            _largest("{:.2f}", [cell.slowdown for cell in row]),
            _largest("{:.0e}", [cell.output_error for cell in row]),
            _largest("{:.0e}", [cell.gradient_error for cell in row]),
        )
        table.add_row(variant, dtype, *entries, choices, *worst)
    return table


def _backend_entry(cells: Sequence["Cell"], masks: Sequence[str], with_memory: bool) -> Text:
    """The letters of the masks, the milliseconds of the median mask, and the MiB."""
    by_mask = {cell.mask: cell for cell in cells}
    times = [cell.seconds for cell in cells if cell.seconds is not None]
    peaks = [cell.peak_memory / 2**20 for cell in cells if cell.peak_memory is not None]
    entry = Text.assemble(*(_letter(by_mask.get(mask)) for mask in masks))
    entry.append(f" {1e3 * statistics.median(times):5.1f}" if times else "", "dim")
    return entry.append(f" {statistics.median(peaks):4.0f}M" if peaks and with_memory else "", "dim")


def _letter(cell: "Cell | None") -> tuple[str, str]:
    if cell is None:
        return " ", ""
    if cell.failure is not None:
        return "✗", "bold red"
    if cell.kernel is None:
        return "·", "dim"
    letter, _ = KERNELS[cell.kernel]
    return (letter if cell.has_backward else letter.lower()), ("bold green" if cell.auto else "")


def _largest(form: str, values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return form.format(max(known)) if known else ""


def _print_refusals(cells: Sequence["Cell"], console: Console) -> None:
    """Print the reasons of each backend, each with the variants that it applies to."""
    variants_by_reason: dict[str, dict[str, list[str]]] = {cell.backend: defaultdict(list) for cell in cells}
    for cell in cells:
        if cell.reason and cell.failure is None:
            variants_by_reason[cell.backend][cell.reason].append(cell.variant)
    num_variants = len(_unique(cell.variant for cell in cells))
    if any(variants_by_reason.values()):
        console.print()
    for backend, reasons in variants_by_reason.items():
        for reason, variants in reasons.items():
            names = _unique(variants)
            which = "all" if len(names) == num_variants else ", ".join(names)
            console.print(Text(f"{backend} {reason}: {which}", "dim"))


def _unique(items: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(items))
