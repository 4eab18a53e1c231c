"""Cases in which another backend is faster than the one that `attention.backend=auto` chooses.

    python benchmarks/auto.py --variants mha gqa

Compares the heads of every variant, mask and dtype of `tinyformer doctor`, forward and backward. A choice that takes
more than 1.1 times as long as the fastest backend is measured five times, and the least ratio counts, since other
processes distort only some measurements. Prints those that remain; exits with 1 if there are any. On one core it takes
several minutes, with `--full` at 1024 tokens half an hour.
"""

import argparse
from dataclasses import replace

import torch

from tinyformer.hardware import Pass, median_seconds
from tinyformer.nn import BACKENDS, AttentionInputs, select_backend
from tinyformer.nn.network import heads_pass
from tinyformer.programs.doctor.exactness import (
    DTYPES,
    FULL_SHAPE,
    MASKS,
    Problem,
    Shape,
    arithmetic,
    make_module,
    one_thread,
    quiet,
)
from tinyformer.programs.doctor.variants import VARIANTS

NAMES = ("eager", "sdpa", "flash", "flex")
MAX_SLOWDOWN, ATTEMPTS = 1.1, 5


def timed_pass(problem: Problem, backend: str, dtype: torch.dtype) -> Pass:
    """One pass of a backend over the queries, keys and values, which are projected in advance."""
    with torch.no_grad(), arithmetic(problem.device, dtype):
        qkv = problem.module.project(problem.inputs[0], problem.inputs[1] if problem.cross else None)
    run = heads_pass(problem.module, AttentionInputs(qkv, problem.mask, problem.cross, 0), BACKENDS[backend])
    return arithmetic(problem.device, dtype)(run)


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--full", action="store_true", help="1024 tokens in place of 256")
    given = parser.parse_args()
    shape = FULL_SHAPE if given.full else Shape(256, 32, 2)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = [(name, mask, dtype) for name in given.variants for mask in VARIANTS[name].masks for dtype in DTYPES]
    num_slow = 0
    with quiet(), one_thread():
        for variant, mask, dtype in cases:
            torch.compiler.reset()  # after eight recompilations, torch would no longer compile flex
            own = replace(shape, seq=min(shape.seq, VARIANTS[variant].max_seq or shape.seq))
            problem = Problem(make_module(VARIANTS[variant], own), MASKS[mask], own, device, VARIANTS[variant].cross)
            case = problem.case(DTYPES[dtype])
            names = [name for name in NAMES if BACKENDS[name].refusal(case) is None]
            chosen, ratio = select_backend("auto", case).name, float("inf")
            for _ in range(ATTEMPTS):
                passes = {name: timed_pass(problem, name, DTYPES[dtype]) for name in names}
                seconds = median_seconds(passes, device.type)
                ratio = min(ratio, seconds[chosen] / min(seconds.values()))
                if ratio <= MAX_SLOWDOWN:
                    break
            else:
                num_slow += 1
                print(f"{variant} {mask} {dtype}: {chosen} takes {ratio:.2f} times as long as the fastest", flush=True)
    print(f"{num_slow} of {len(cases)} choices are slow.")
    return int(num_slow > 0)


if __name__ == "__main__":
    raise SystemExit(main())
