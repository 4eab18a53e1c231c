"""Cases in which another backend is faster than the one that `attention.backend=auto` chooses.

    python benchmarks/auto.py --variants mha gqa

Compares the heads of every variant, mask and dtype of `tinyformer doctor`, forward and backward. A choice that takes
more than 1.1 times as long as the fastest backend is measured five times, and the least ratio counts, since other
processes distort only some measurements. Prints those that remain; exits with 1 if there are any. On one core it takes
several minutes, with `--full` at 1024 tokens half an hour.
"""

import argparse
from collections.abc import Sequence

import torch

from tinyformer.programs.doctor.exactness import DTYPES
from tinyformer.programs.doctor.variants import VARIANTS
from tinyformer.programs.doctor.verdict import Cell, examine, one_thread, quiet

BACKENDS = ("eager", "sdpa", "flash", "flex")
MAX_SLOWDOWN, ATTEMPTS = 1.1, 5


def slowdown(row: Sequence[Cell]) -> float:
    """The time of the choice of `auto` relative to the shortest of the backends that train."""
    seconds = {cell.backend: cell.seconds for cell in row if cell.has_backward and cell.seconds is not None}
    chosen = [seconds[cell.backend] for cell in row if cell.auto and cell.backend in seconds]
    return chosen[0] / min(seconds.values()) if chosen else 1.0


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--full", action="store_true", help="1024 tokens in place of 256")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = [(name, mask, dtype) for name in given.variants for mask in VARIANTS[name].masks for dtype in DTYPES]
    num_slow = 0
    with quiet(), one_thread():
        for variant, mask, dtype in cases:
            ratio = float("inf")
            for _ in range(ATTEMPTS):
                (row,) = examine(BACKENDS, [variant], [mask], [dtype], device, given.full)
                ratio = min(ratio, slowdown(row))
                if ratio <= MAX_SLOWDOWN:
                    break
            else:
                num_slow += 1
                chosen = next(cell.backend for cell in row if cell.auto)
                print(f"{variant} {mask} {dtype}: {chosen} takes {ratio:.2f} times as long as the fastest", flush=True)
    print(f"{num_slow} of {len(cases)} choices are slow.")
    return int(num_slow > 0)


if __name__ == "__main__":
    raise SystemExit(main())
