"""The machine that the doctor examines: its description, and a quiet, single-threaded state."""

import contextlib
import os
import platform
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tinyformer.hardware import cpu_name, keep_freed_memory, median_seconds
from tinyformer.nn import BACKENDS, LACKS, KernelRequirements, select_backend
from tinyformer.programs.doctor.exactness import (
    DTYPES,
    EXACT_SHAPE,
    FULL_SHAPE,
    MASKS,
    TIMED_SHAPE,
    Errors,
    Problem,
    Shape,
    make_module,
    watched_kernel,
)
from tinyformer.programs.doctor.variants import VARIANTS, Variant


def describe_machine(device: torch.device, full: bool) -> dict[str, Any]:
    """Hardware, versions and settings that the results depend on."""
    cpu = cpu_name()
    name, capability = cpu, torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return {
        "device": device.type,
        "name": name,
        "capability": capability,
        "cpu": cpu,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "full": full,
    }


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings that a user can do nothing about, and no others."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler writes to stderr whenever it starts and stops
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile", UserWarning)
        # Since torch 2.11. Keeping the events, as it advises, would cost 13 ms for each of a thousand profiles.
        warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
        yield


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: the processor time of several threads says little, and small matrices gain nothing."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


FACTOR = 4.0
FLOOR = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2**-8}
CEILING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.2}


@dataclass(frozen=True)
class Cell:
    """The results of one backend for one variant, mask and dtype, each by its name."""

    backend: str
    variant: str
    mask: str
    dtype: str
    status: str = "refused"  # "ran", "refused" or "crashed"
    kernel: str | None = None  # the kernel that computed attention, as the profiler saw it
    output_error: float | None = None  # max|a - b| / max|b| against eager in float64
    gradient_error: float | None = None  # the largest of inputs and parameters; None without a backward pass
    seconds: float | None = None  # of the heads, forward and, if there is one, backward
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
    """The cells of all backends, for each variant, mask and dtype in turn; `full` asks for a realistic size."""
    for variant in (VARIANTS[name] for name in variants):
        for mask in (name for name in masks if name in variant.masks):
            torch.compiler.reset()  # after eight recompilations, torch would no longer compile flex
            problem = _problem(variant, mask, FULL_SHAPE if full else EXACT_SHAPE, device)
            timed = problem if full else _problem(variant, mask, TIMED_SHAPE, device)
            for dtype in dtypes:
                empty = [Cell(name, variant.name, mask, dtype) for name in backends]
                exact = [check_exactness(problem, cell, DTYPES[dtype]) for cell in empty]
                yield _with_times(timed, exact, DTYPES[dtype])


def _problem(variant: Variant, mask: str, shape: Shape, device: torch.device) -> Problem:
    shape = replace(shape, seq=min(shape.seq, variant.max_seq or shape.seq))
    return Problem(make_module(variant, shape), MASKS[mask], shape, device, variant.cross)


def check_exactness(problem: Problem, cell: Cell, dtype: torch.dtype) -> Cell:
    """Fill in the status, the kernel and the errors of a cell; its time is measured afterwards."""
    backend = BACKENDS[cell.backend]
    training, inference = problem.case(dtype), problem.case(dtype, gradient=False)
    refusal = backend.refusal(training)
    if refusal is None:
        return _accepted(problem, cell, training, gradient=True)
    if (backend.name, training.device) in LACKS:  # else there is no kernel for the device, or it is not installed
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that it has no kernel, which is expected here
            if _called(problem, cell, dtype, gradient=True).failure is None:
                return replace(cell, reason=refusal, failure=f"refuses what it computes: {refusal}")
    if backend.refusal(inference) is None:
        reason = f"forward only: {refusal}"
        return _accepted(problem, replace(cell, reason=reason), inference, gradient=False)
    return replace(cell, reason=refusal)


def _accepted(problem: Problem, cell: Cell, case: KernelRequirements, gradient: bool) -> Cell:
    called = _called(problem, cell, case.dtype, gradient)
    lacking = " or ".join(sorted(case.features & LACKS.get((cell.backend, case.device), frozenset())))
    if called.status == "ran" and lacking:
        return replace(called, failure=f"accepts {lacking}, which support.LACKS says it lacks")
    return called


def _called(problem: Problem, cell: Cell, dtype: torch.dtype, gradient: bool) -> Cell:
    """The cell of a backend that is called, whether it accepts the case or not: it ran, right or wrong, or crashed."""
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
    """The error that is too large; None if both are within bounds."""
    pairs = {"output": (errors.output, eager.output), "gradient": (errors.counted_gradient, eager.counted_gradient)}
    for name, (error, yardstick) in pairs.items():
        allowed = min(CEILING[dtype], max(FLOOR[dtype], FACTOR * (yardstick or 0.0)))
        if error is not None and not error <= allowed:
            return f"its {name} is off by {error:.1e}; at most {allowed:.1e} is allowed"
    return None


def _with_times(problem: Problem, cells: Sequence[Cell], dtype: torch.dtype) -> list[Cell]:
    """Measure the times of the correct cells, and mark the choice of `auto`."""
    chosen = select_backend("auto", problem.case(dtype)).name
    passes = {
        cell.backend: problem.heads_pass(BACKENDS[cell.backend], dtype, cell.has_backward)
        for cell in cells
        if cell.status == "ran" and cell.failure is None
    }
    seconds = median_seconds(passes, problem.device.type)
    return [replace(cell, seconds=seconds.get(cell.backend), auto=cell.backend == chosen) for cell in cells]
