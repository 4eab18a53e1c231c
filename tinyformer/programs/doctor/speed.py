"""The time and memory of a backend: the heads alone, forward and backward, without their projections.

On CPU this is the processor time of one thread, with `malloc` set to keep large blocks: otherwise page faults make a
backend up to a third slower in some processes.
"""

import itertools
from collections.abc import Callable, Mapping

import torch
from torch.profiler import ProfilerActivity, profile

from tinyformer.nn import AttentionInputs
from tinyformer.nn.kernels.support import Backend
from tinyformer.nn.timing import heads_pass, median_seconds
from tinyformer.programs.doctor.exactness import Problem, arithmetic, profiled_events

MAX_SLOWDOWN = 1.1
ATTEMPTS = 5
"""How often a choice slower than `MAX_SLOWDOWN` is measured, each time twice as long. Other processes and chance
distort only short measurements; a backend that is really slower stays slower."""


def problem_pass(problem: Problem, backend: Backend, dtype: torch.dtype, gradient: bool) -> Callable[[], None]:
    """One pass of a backend over a problem's queries, keys and values, which are projected in advance."""
    with torch.no_grad(), arithmetic(problem.device, dtype):
        qkv = problem.module.project(problem.inputs[0], problem.inputs[1] if problem.cross else None)
    run = heads_pass(problem.module, AttentionInputs(qkv, problem.mask, problem.cross, 0), backend, gradient)

    def run_in_dtype() -> None:
        with arithmetic(problem.device, dtype):
            run()

    return run_in_dtype


def compare(
    passes: Mapping[str, Callable[[], None]], chosen: str, device: str
) -> tuple[dict[str, float], float | None]:
    """The times of passes, and the chosen one's time relative to the shortest, in the best of several attempts."""
    if chosen not in passes:
        return median_seconds(passes, device), None
    best: tuple[dict[str, float], float] = {}, float("inf")
    for number in range(ATTEMPTS):
        seconds = median_seconds(passes, device, patience=2**number)
        best = min(best, (seconds, seconds[chosen] / min(seconds.values())), key=lambda attempt: attempt[1])
        if best[1] <= MAX_SLOWDOWN:
            break
    return best


def peak_memory(run: Callable[[], None], device: str) -> int:
    """The peak memory of a pass in bytes, beyond what is allocated before it."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        run()
    events = profiled_events(watched)
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(itertools.accumulate((change for _, change in changes), initial=0))
