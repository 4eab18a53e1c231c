"""The time and memory of a pass, measured, and which backend is the fastest on the machine at hand.

The passes of one comparison run in turns, so that a slow phase of the machine affects all.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch.profiler import ProfilerActivity, profile

from tinyformer.nn.attention import BaseAttention
from tinyformer.nn.kernels.choose import Backend
from tinyformer.nn.maps import QKV, AttentionInputs

WARM_UPS, MIN_ROUNDS, MAX_ROUNDS = 1, 3, 15
BUDGET_SECONDS = 0.15  # a comparison stops after this time, but not before `MIN_ROUNDS` rounds

CANDIDATES = ("eager", "sdpa")
"""The backends among which `auto` chooses on a CPU."""

MIN_SPEEDUP, REPEATS = 1.1, 4
"""The noise margin, how many times as fast as the usual choice another backend has to be, and how many times as long as
usual they are compared."""

Pass: TypeAlias = Callable[[], object]


def seconds_on(device: str) -> float:
    """A clock: on CUDA the time when all work is done; on CPU, if it is one thread, the processor time.

    Other processes hardly affect that, but several threads spend it waiting for one another.
    """
    if device == "cpu" and torch.get_num_threads() == 1:
        return time.process_time()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def median_seconds(passes: Mapping[str, Pass], device: str, patience: int = 1) -> dict[str, float]:
    """The median times of passes after a warm-up; a single one is timed once.

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


def faster(usual: str, passes: Mapping[str, Pass], device: str) -> str:
    """The name of the fastest pass, or the usual one unless that takes `MIN_SPEEDUP` times as long."""
    seconds = median_seconds(passes, device, REPEATS)
    fastest = min(seconds, key=seconds.__getitem__)
    return fastest if seconds[usual] > MIN_SPEEDUP * seconds[fastest] else usual


def heads_pass(layer: BaseAttention, call: AttentionInputs, backend: Backend, gradient: bool = True) -> Pass:
    """One pass of a layer's heads by a backend, without their projections, and backward if there is a gradient."""
    qkv = [x.detach().requires_grad_(gradient) for x in call.qkv]
    leaves = [*qkv, *(weight for weight in layer.parameters() if weight.requires_grad)]
    (batch, _, q_seq, _), v = call.qkv.q.shape, call.qkv.v
    upstream = torch.randn(batch, layer.num_heads, q_seq, v.shape[-1], device=v.device, dtype=v.dtype)

    def run() -> None:
        layer.resolved = backend
        with torch.set_grad_enabled(gradient):
            output = layer.attend(QKV(*qkv), call.mask, call.is_cross)
        if gradient:
            torch.autograd.grad(output, leaves, upstream, allow_unused=True)

    return run


def peak_bytes(run: Pass, device: str) -> int:
    """The most bytes that the tensors of a pass hold at once, beyond what is allocated before it."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        run()
    changes = sorted((e.start_ns(), e.nbytes()) for e in profiled_events(watched) if e.name() == "[memory]")
    return max(itertools.accumulate((change for _, change in changes), initial=0))


def profiled_events(watched: profile) -> list[Any]:
    """The profiler's raw events; building the tree of `watched.events()` takes longer than the pass itself."""
    assert watched.profiler is not None
    assert watched.profiler.kineto_results is not None
    return watched.profiler.kineto_results.events()
