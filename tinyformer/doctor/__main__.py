"""What can this machine compute, exactly and how fast? Every attention by every backend: `python -m tinyformer.doctor`.

Exits with 0 if all backends do what the documented table says, 1 if one does not, 2 for a mistake on the command line.
"""

import argparse
import contextlib
import json
import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from tinyformer.doctor.cases import DTYPES, MASKS, VARIANTS
from tinyformer.doctor.report import print_report
from tinyformer.doctor.verdict import Cell, examine
from tinyformer.memory import keep_freed_memory
from tinyformer.nn import BACKENDS


def main(arguments: Sequence[str] | None = None, prog: str = "python -m tinyformer.doctor") -> int:
    """Examine this machine and print what was found.

    Args:
        arguments: the command line; `sys.argv[1:]` by default.
        prog: the name of the program in its help.

    Returns:
        The exit code: 0, or 1 if a cell fails.
    """
    options = _parser(prog).parse_args(arguments)
    device, started = torch.device(options.device), time.perf_counter()
    # A small problem costs a GPU as much time as a large one, and its kernels would be compiled for both.
    full = options.full or device.type == "cuda"
    machine = describe_machine(device, full)
    with quiet(), one_thread():
        rows = examine(options.backends, options.variants, options.masks, options.dtypes, device, full)
        cells = [cell for row in _with_progress(rows, options) for cell in row]
    if options.json:
        print(json.dumps({"machine": machine, "cells": [_plain(cell) for cell in cells]}, indent=1))
    else:
        print_report(cells, machine, time.perf_counter() - started)
    return int(any(cell.failure for cell in cells))


def describe_machine(device: torch.device, full: bool) -> dict[str, Any]:
    """What the results depend on."""
    is_cuda = device.type == "cuda"
    return {
        "device": device.type,
        "name": torch.cuda.get_device_name(device) if is_cuda else _cpu_name(),
        "capability": (
            ".".join(map(str, torch.cuda.get_device_capability(device)))
            if is_cuda
            else torch.backends.cpu.get_cpu_capability()
        ),
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "full": full,
    }


def _cpu_name() -> str:
    """As the kernel calls it; the architecture where it does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence what a user can do nothing about, and nothing else."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells stderr whenever it starts and stops
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile", UserWarning)
        # Of torch 2.11. To keep events, as it advises, takes 13 ms at each of a thousand looks.
        warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
        yield


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: the processor time of several says little, and small matrices gain nothing by them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _with_progress(rows: Iterable[list[Cell]], options: argparse.Namespace) -> Iterable[list[Cell]]:
    masks = [mask for name in options.variants for mask in VARIANTS[name].masks if mask in options.masks]
    console = Console(stderr=True)
    total = len(masks) * len(options.dtypes)
    return track(rows, "examining", total=total, console=console, transient=True, disable=not console.is_terminal)


def _plain(cell: Cell) -> dict[str, Any]:
    """For JSON, which knows no infinity."""
    items = asdict(cell).items()
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in items}


def _names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """A list of names with commas between them."""

    def parse(text: str) -> list[str]:
        names, choices = text.split(","), list(known)
        unknown = [name for name in names if name not in choices]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {','.join(choices)}")
        return names

    return parse


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")
    parser.add_argument("--full", action="store_true", help="at 1024 tokens; on CUDA always")
    examined: dict[str, Iterable[str]] = {
        "backends": BACKENDS,
        "variants": VARIANTS,
        "masks": MASKS,
        "dtypes": DTYPES,
    }
    for name, known in examined.items():
        parser.add_argument(
            f"--{name}", type=_names(known), default=list(known), metavar="A,B", help=f"of {', '.join(known)}"
        )
    devices = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    parser.add_argument("--device", choices=devices, default=devices[-1], help="what to examine")
    return parser


if __name__ == "__main__":
    sys.exit(main())
