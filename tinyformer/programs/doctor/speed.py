"""The time and memory of a backend: the heads alone, forward and backward, without their projections.

On CPU this is the processor time of one thread, which other processes hardly affect, with `malloc` set to keep large
blocks: otherwise page faults make a backend up to a third slower in some processes. On CUDA it is wall time between
two synchronisations.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch.profiler import ProfilerActivity, profile

from tinyformer.nn import QKV
from tinyformer.nn.kernels.support import Backend
from tinyformer.programs.doctor.exactness import Problem, arithmetic, profiled_events

WARM_UPS, MIN_ROUNDS, MAX_ROUNDS = 1, 3, 15
BUDGET_SECONDS = 0.15  # a comparison stops after this time, but not before `MIN_ROUNDS` rounds

MAX_SLOWDOWN = 1.1
ATTEMPTS = 5
"""How often a choice slower than `MAX_SLOWDOWN` is measured, each time twice as long. Other processes and chance
distort only short measurements; a backend that is really slower stays slower."""


def seconds_on(device: str) -> float:
    """A clock: processor time on CPU, the time when all work is done on CUDA."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def heads_pass(problem: Problem, backend: Backend, dtype: torch.dtype, gradient: bool) -> Callable[[], None]:
    """One pass of a backend over a problem's queries, keys and values, which are projected in advance."""
    module = problem.module
    context = problem.inputs[1] if problem.cross else None
    with torch.no_grad(), arithmetic(problem.device, dtype):
        q, k, v = module.project(problem.inputs[0], context)
    leaves = [x.detach().requires_grad_(gradient) for x in (q, k, v)] + list(module.parameters())
    upstream = torch.randn(len(q), module.num_heads, q.shape[2], v.shape[-1], device=v.device, dtype=v.dtype)

    def run() -> None:
        module.resolved = backend
        with torch.set_grad_enabled(gradient), arithmetic(problem.device, dtype):
            output = module.attend(QKV(*leaves[:3]), problem.mask, problem.cross)
        if gradient:
            torch.autograd.grad(output, leaves, upstream, allow_unused=True)

    return run


def median_seconds(passes: Mapping[str, Callable[[], None]], device: str, patience: int = 1) -> dict[str, float]:
    """The median times of passes, run in turns so that a slow phase of the machine affects all; a single one runs once.

    `patience` multiplies the time and the rounds of a comparison.
    """
    started = time.perf_counter()
    times: dict[str, list[float]] = {name: [] for name in passes}
    for index in range(WARM_UPS + (patience * MAX_ROUNDS if len(passes) > 1 else 1)):
        if index >= WARM_UPS + MIN_ROUNDS and time.perf_counter() - started > patience * BUDGET_SECONDS:
            break
        for name in sorted(passes, reverse=bool(index % 2)):
            start = seconds_on(device)
            passes[name]()
            times[name].append(seconds_on(device) - start)
    return {name: statistics.median(measured[WARM_UPS:]) for name, measured in times.items()}


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
