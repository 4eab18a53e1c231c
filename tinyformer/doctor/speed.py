"""How long a backend takes: the heads alone, forward and backward, without their projections.

On CPU in the processor time of one thread, which other processes on the machine hardly change, and without the page
faults of `malloc`, which returns large blocks to the system or keeps them as its history would have it: they make
either side a third slower from process to process. On CUDA in wall time, between two synchronisations.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch.profiler import ProfilerActivity, profile

from tinyformer.doctor.exactness import Problem, arithmetic, profiled_events
from tinyformer.nn.support import Backend

WARM_UPS, MIN_ROUNDS, MAX_ROUNDS = 1, 3, 15
BUDGET_SECONDS = 0.15
"""After which a comparison stops, once it has had the least rounds."""

MAX_SLOWDOWN = 1.1
ATTEMPTS = 5
"""To find a choice within `MAX_SLOWDOWN`, each with twice the time of the one before. Another process can make a ratio
of times wrong only for a while, and chance only while the rounds are few; what truly is slower stays so."""


def _cuda_seconds() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


CLOCKS = {"cpu": time.process_time, "cuda": _cuda_seconds}


def heads_pass(problem: Problem, backend: Backend, dtype: torch.dtype, gradient: bool) -> Callable[[], None]:
    """One pass of a backend over a problem's queries, keys and values, which are projected beforehand."""
    module = problem.module
    context = problem.inputs[1] if problem.crosses else None
    with torch.no_grad(), arithmetic(problem.device, dtype):
        q, k, v = module.project(problem.inputs[0], context)
    leaves = [x.detach().requires_grad_(gradient) for x in (q, k, v)] + list(module.parameters())
    upstream = torch.randn(*q.shape[:3], v.shape[-1], device=v.device, dtype=v.dtype)

    def run() -> None:
        module.resolved = backend
        with torch.set_grad_enabled(gradient), arithmetic(problem.device, dtype):
            output = module.attend(leaves[0], leaves[1], leaves[2], problem.mask, problem.crosses)
        if gradient:
            torch.autograd.grad(output, leaves, upstream, allow_unused=True)

    return run


def median_seconds(passes: Mapping[str, Callable[[], None]], device: str, patience: int = 1) -> dict[str, float]:
    """The median times of passes, in turns, so that what slows the machine down slows all of them down.

    A pass that is compared with none is measured once.

    Args:
        passes: by name.
        device: whose clock is read.
        patience: multiplies the time and the rounds that a comparison may take.
    """
    clock, started = CLOCKS[device], time.perf_counter()
    times: dict[str, list[float]] = {name: [] for name in passes}
    for round_ in range(WARM_UPS + (patience * MAX_ROUNDS if len(passes) > 1 else 1)):
        if round_ >= WARM_UPS + MIN_ROUNDS and time.perf_counter() - started > patience * BUDGET_SECONDS:
            break
        for name in sorted(passes, reverse=bool(round_ % 2)):
            begun = clock()
            passes[name]()
            times[name].append(clock() - begun)
    return {name: statistics.median(measured[WARM_UPS:]) for name, measured in times.items()}


def compare(
    passes: Mapping[str, Callable[[], None]], chosen: str, device: str
) -> tuple[dict[str, float], float | None]:
    """The times of passes and the chosen one's over the shortest, of the attempt at which it fared best."""
    if chosen not in passes:
        return median_seconds(passes, device), None
    best: tuple[dict[str, float], float] = {}, float("inf")
    for attempt in range(ATTEMPTS):
        seconds = median_seconds(passes, device, patience=2**attempt)
        best = min(best, (seconds, seconds[chosen] / min(seconds.values())), key=lambda found: found[1])
        if best[1] <= MAX_SLOWDOWN:
            break
    return best


def peak_memory(run: Callable[[], None], device: str) -> int:
    """The most bytes that a pass holds at once beside what was held before."""
    return _peak_on_cuda(run) if device == "cuda" else _peak_on_cpu(run)


def _peak_on_cuda(run: Callable[[], None]) -> int:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


def _peak_on_cpu(run: Callable[[], None]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        run()
    events = profiled_events(watched)
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(itertools.accumulate((change for _, change in changes), initial=0))
