"""Test the exactness of every attention variant with every backend on this machine.

`variants` lists the tested variants; `exactness` makes their modules and masks and measures the error of a backend;
`cells` compares backends, kernels and errors with the documented table.

Exit code: 0 if all backends do what the documented table says, 1 if one does not, 2 for a mistake on the command line.
"""

import argparse
import json
import time
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
    from tinyformer.programs.doctor.cells import Cell

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

WIDTH = 108
"""Characters of the report: a narrower terminal wraps its lines, and no column is cut off."""


def main(arguments: Sequence[str]) -> int:
    """Examine this machine and print the results; returns the exit code."""
    parser = argparse.ArgumentParser(prog="tinyformer doctor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--full", action="store_true", help="test at 1024 tokens, as always on CUDA")
    tested = {"backends": BACKEND_NAMES, "variants": tuple(VARIANTS), "masks": MASK_NAMES, "dtypes": DTYPE_NAMES}
    for name, known in tested.items():
        some = f"some of {', '.join(known)}"
        parser.add_argument(f"--{name}", type=_names_in(known), default=list(known), metavar="A,B", help=some)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the device to test (default: a GPU, else the CPU)")
    options = parser.parse_args(arguments)

    # These import torch, which takes seconds; --help does not wait for it.
    import torch

    from tinyformer.programs.doctor.cells import examine
    from tinyformer.programs.doctor.exactness import describe_machine, one_thread, quiet

    started = time.perf_counter()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    # On a GPU a small problem takes as long as a large one, and kernels would be compiled for both sizes.
    full = options.full or device.type == "cuda"
    machine = describe_machine(device, full)
    num_rows = sum(mask in VARIANTS[name].masks for name in options.variants for mask in options.masks)
    terminal = Console(stderr=True)
    with quiet(), one_thread():
        rows = examine(options.backends, options.variants, options.masks, options.dtypes, device, full)
        total, hidden = num_rows * len(options.dtypes), not terminal.is_terminal
        tracked = progress.track(rows, "examining", total, console=terminal, transient=True, disable=hidden)
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
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: must be among {','.join(known)}")
        return names

    return parse


def _print_report(cells: Sequence["Cell"], machine: dict[str, Any], seconds: float) -> None:
    """Print one row per variant and dtype, with one letter per mask; below, the legend, refusals and failures."""
    console = Console(highlight=False, markup=False)
    console.width = max(console.width, WIDTH)
    about = f"{machine['name']} ({machine['device']}), torch {machine['torch']}, Python {machine['python']}"
    console.print(about, style="bold")
    masks = [mask for mask in MASK_NAMES if any(cell.mask == mask for cell in cells)]
    console.print(_table(cells, masks))
    kernels = ", ".join(" ".join(KERNELS[kernel]) for kernel in _unique(cell.kernel for cell in cells if cell.kernel))
    console.print(
        f"\nOne letter per mask ({', '.join(masks)}): the kernel that ran ({kernels}); lower case: forward only; "
        "·: refused; ✗: failed. "
        "output, gradient: the largest error of all backends and masks, max|a - b| / max|b|; b is eager in float64."
        "\n"
    )
    for (backend, reason), variants in _refusals(cells).items():
        which = "all" if len(variants) == len(_unique(cell.variant for cell in cells)) else ", ".join(variants)
        console.print(f"{backend} {reason}: {which}", style="dim")
    failed = [cell for cell in cells if cell.failure]
    for cell in failed:
        console.print(f"✗ {cell}: {cell.failure}", style="red")
    ran = [cell for cell in cells if cell.status == "ran"]
    forward_only = sum(not cell.has_backward for cell in ran)
    refused = sum(cell.status == "refused" for cell in cells)
    counts = f"{len(cells)} cells in {seconds:.0f} s: {len(ran)} ran ({forward_only} forward only), {refused} refused. "
    verdict = (f"{len(failed)} failed.", "bold red") if failed else ("All are as documented.", "bold green")
    console.print(Text.assemble("\n", counts, verdict))


def _table(cells: Sequence["Cell"], masks: Sequence[str]) -> Table:
    """The table with a row for each variant and dtype: kernels of all backends, auto's choices and largest errors."""
    # A backend that refuses everything has no column.
    backends = _unique(cell.backend for cell in cells if cell.status != "refused" or cell.failure)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("attention", "dtype", *backends, "auto"):
        table.add_column(name, no_wrap=True)
    for name in ("output", "gradient"):
        table.add_column(name, justify="right", no_wrap=True)
    for variant, dtype in _unique((cell.variant, cell.dtype) for cell in cells):
        row = [cell for cell in cells if (cell.variant, cell.dtype) == (variant, dtype)]
        found = {(cell.backend, cell.mask): cell for cell in row}
        entries = [Text.assemble(*(_letter(found.get((name, mask))) for mask in masks)) for name in backends]
        choices = ", ".join(_unique(cell.backend for cell in row if cell.auto))
        errors = _largest(cell.output_error for cell in row), _largest(cell.gradient_error for cell in row)
        table.add_row(variant, dtype, *entries, choices, *errors)
    return table


def _letter(cell: "Cell | None") -> tuple[str, str]:
    if cell is None:
        return " ", ""
    if cell.failure is not None:
        return "✗", "bold red"
    if cell.kernel is None:
        return "·", "dim"
    letter, _ = KERNELS[cell.kernel]
    return (letter if cell.has_backward else letter.lower()), ("bold green" if cell.auto else "")


def _largest(errors: Iterable[float | None]) -> str:
    known = [error for error in errors if error is not None]
    return f"{max(known):.0e}" if known else ""


def _refusals(cells: Sequence["Cell"]) -> dict[tuple[str, str], list[str]]:
    """The variants that a backend refuses, or computes without a backward pass, by the backend and the reason."""
    refused = sorted((cell for cell in cells if cell.reason and not cell.failure), key=lambda cell: cell.backend)
    keys = _unique((cell.backend, cell.reason) for cell in refused)
    return {key: _unique(cell.variant for cell in refused if (cell.backend, cell.reason) == key) for key in keys}


def _unique(items: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(items))
