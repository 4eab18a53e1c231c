"""What this machine computes, how exactly and how fast: every attention variant by every backend.

Exit code: 0 if all backends do what the documented table says, 1 if one does not, 2 for a mistake on the command line.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tinyformer.programs.doctor.variants import BACKEND_NAMES, DTYPE_NAMES, MASK_NAMES, VARIANTS

if TYPE_CHECKING:
    from tinyformer.programs.doctor.verdict import Cell


def main(arguments: Sequence[str] | None = None, prog: str = "python -m tinyformer doctor") -> int:
    """Examine this machine and print the results.

    Args:
        arguments: the command line; `sys.argv[1:]` by default.
        prog: the name of the program in its help.

    Returns:
        The exit code: 0 if no cell fails, else 1.
    """
    options = _parser(prog).parse_args(arguments)
    # These import torch, which takes seconds; --help does not wait for it.
    import torch

    from tinyformer.programs.doctor.machine import describe_machine, one_thread, quiet
    from tinyformer.programs.doctor.report import print_report, track
    from tinyformer.programs.doctor.verdict import examine

    started = time.perf_counter()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    # On a GPU a small problem takes as long as a large one, and kernels would be compiled for both sizes.
    full = options.full or device.type == "cuda"
    machine = describe_machine(device, full)
    with quiet(), one_thread():
        rows = examine(options.backends, options.variants, options.masks, options.dtypes, device, full)
        cells = [cell for row in track(rows, _num_rows(options)) for cell in row]
    if options.json:
        print(json.dumps({"machine": machine, "cells": [_plain(cell) for cell in cells]}, indent=1))
    else:
        print_report(cells, machine, time.perf_counter() - started)
    return int(any(cell.failure for cell in cells))


def _num_rows(options: argparse.Namespace) -> int:
    masks = [mask for name in options.variants for mask in VARIANTS[name].masks if mask in options.masks]
    return len(masks) * len(options.dtypes)


def _plain(cell: "Cell") -> dict[str, Any]:
    """A cell for JSON, which has no infinity."""
    items = asdict(cell).items()
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in items}


def _names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """A parser of names separated by commas."""

    def parse(text: str) -> list[str]:
        names, choices = text.split(","), list(known)
        unknown = [name for name in names if name not in choices]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: must be among {','.join(choices)}")
        return names

    return parse


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--full", action="store_true", help="test at 1024 tokens; always so on CUDA")
    for name, known in {
        "backends": BACKEND_NAMES,
        "variants": tuple(VARIANTS),
        "masks": MASK_NAMES,
        "dtypes": DTYPE_NAMES,
    }.items():
        parser.add_argument(
            f"--{name}", type=_names(known), default=list(known), metavar="A,B", help=f"some of {', '.join(known)}"
        )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the device to examine; CUDA where there is a GPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())
