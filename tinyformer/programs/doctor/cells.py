"""The doctor's cells: a backend, variant, mask and dtype, with the measured error, the kernel, and any failure."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from tinyformer.nn import BACKENDS, LACKS, KernelRequirements, select_backend
from tinyformer.programs.doctor.exactness import (
    DTYPES,
    FULL_SHAPE,
    MASKS,
    SHAPE,
    Errors,
    Problem,
    make_module,
    watched_kernel,
)
from tinyformer.programs.doctor.variants import VARIANTS

FACTOR = 4.0
FLOOR = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2**-8}
CEILING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.2}


@dataclass(frozen=True)
class Cell:
    """The results of one backend for one variant, mask and dtype, each given by its name."""

    backend: str
    variant: str
    mask: str
    dtype: str
    status: str = "refused"  # "ran", "refused" or "crashed"
    kernel: str | None = None  # the kernel that computed attention, as the profiler saw it
    output_error: float | None = None  # max|a - b| / max|b| against eager in float64
    gradient_error: float | None = None  # the largest of inputs and parameters; None without a backward pass
    auto: bool = False  # whether `auto` chooses this backend
    reason: str | None = None  # why it refuses, computes no backward pass, or crashed
    failure: str | None = None  # why the cell fails

    @property
    def has_backward(self) -> bool:
        return self.gradient_error is not None

    def __str__(self) -> str:
        return f"{self.backend} {self.variant} {self.mask} {self.dtype}"


def examine(
    backends: Sequence[str],
    variants: Sequence[str],
    masks: Sequence[str],
    dtypes: Sequence[str],
    device: torch.device,
    full: bool = False,
) -> Iterator[list[Cell]]:
    """Yield the cells of all backends for each combination of variant, mask and dtype; `full` uses `FULL_SHAPE`."""
    for variant in (VARIANTS[name] for name in variants):
        for mask in (name for name in masks if name in variant.masks):
            torch.compiler.reset()  # after eight recompilations, torch would no longer compile flex
            shape = FULL_SHAPE if full else SHAPE
            shape = replace(shape, seq=min(shape.seq, variant.max_seq or shape.seq))
            problem = Problem(make_module(variant, shape), MASKS[mask], shape, device, variant.cross)
            for dtype in dtypes:
                chosen = select_backend("auto", problem.case(DTYPES[dtype])).name
                empty = [Cell(name, variant.name, mask, dtype, auto=name == chosen) for name in backends]
                yield [check_exactness(problem, cell, DTYPES[dtype]) for cell in empty]


def check_exactness(problem: Problem, cell: Cell, dtype: torch.dtype) -> Cell:
    """Fill in the status, the kernel and the errors of a cell."""
    backend = BACKENDS[cell.backend]
    training, inference = problem.case(dtype), problem.case(dtype, gradient=False)
    refusal = backend.refusal(training)
    if refusal is None:
        return _accepted(problem, cell, training, gradient=True)
    if (backend.name, training.device) in LACKS:  # else there is no kernel for the device, or it is not installed
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that it has no kernel, which is expected here
            if _called(problem, cell, dtype, gradient=True).failure is None:
                return replace(cell, reason=refusal, failure=f"refuses a case that it computes: {refusal}")
    if backend.refusal(inference) is None:
        reason = f"forward only: {refusal}"
        return _accepted(problem, replace(cell, reason=reason), inference, gradient=False)
    return replace(cell, reason=refusal)


def _accepted(problem: Problem, cell: Cell, case: KernelRequirements, gradient: bool) -> Cell:
    called = _called(problem, cell, case.dtype, gradient)
    lacking = " or ".join(sorted(case.features & LACKS.get((cell.backend, case.device), frozenset())))
    if called.status == "ran" and lacking:
        return replace(called, failure=f"accepts {lacking}, which it lacks according to nn.LACKS")
    return called


def _called(problem: Problem, cell: Cell, dtype: torch.dtype, gradient: bool) -> Cell:
    """Call a backend, even if it refuses the case, and return the cell with its errors or its crash."""
    backend = BACKENDS[cell.backend]
    try:
        with watched_kernel() as kernel:
            solution = problem.solve(backend, dtype, gradient)
        errors = problem.errors(backend, solution, dtype)
        wrong = problem.invalid_values(solution) or _excess(errors, problem.eager_errors(dtype), dtype)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return replace(cell, status="crashed", reason=reason, failure=f"crashes: {reason.splitlines()[0]}")
    return replace(
        cell, status="ran", kernel=kernel(), output_error=errors.output, gradient_error=errors.gradient, failure=wrong
    )


def _excess(errors: Errors, eager: Errors, dtype: torch.dtype) -> str | None:
    """A sentence about an error of output or gradient that is too large; None if both are within bounds."""
    pairs = {"output": (errors.output, eager.output), "gradient": (errors.counted_gradient, eager.counted_gradient)}
    for name, (error, yardstick) in pairs.items():
        allowed = min(CEILING[dtype], max(FLOOR[dtype], FACTOR * (yardstick or 0.0)))
        if error is not None and not error <= allowed:
            return f"its {name} is off by {error:.1e}; at most {allowed:.1e} is allowed"
    return None
