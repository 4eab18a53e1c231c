"""The machine: devices, precisions, memory, the peak speed of matrix products, and the time and memory of a pass.

Passes whose times are compared run alternately, so that a slow phase of the machine affects all of them.
"""

import contextlib
import ctypes
import functools
import itertools
import platform
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.profiler import ProfilerActivity, profile

from tinyformer.errors import ArgumentError, require_choice

TFLOPS: dict[str, tuple[float, float | None, float]] = {
    # half precision, TF32 and FP32
    r"B200": (2250, 1125, 75),
    r"H200 NVL": (835.5, 417.5, 60),
    r"H200": (989.5, 494.5, 67),
    r"H100 PCIe": (756, 378, 51),
    r"H100 NVL": (835.5, 417.5, 60),
    r"H100 80GB HBM3": (989.5, 494.5, 67),
    r"A100": (312, 156, 19.5),
    r"A40": (149.7, 74.8, 37.4),
    r"A30": (165, 82, 10.3),
    r"A10": (125, 62.5, 31.2),
    r"L40S": (362, 183, 91.6),
    r"L40": (181, 90.5, 90.5),
    r"L4": (121, 60, 30.3),
    r"RTX A6000": (154.8, 77.4, 38.7),
    r"RTX 4090$": (165.2, 82.6, 82.6),
    r"RTX 3090$": (71, 35.6, 35.6),
    r"V100S-PCIE": (130, None, 16.4),
    r"V100-PCIE": (112, None, 14),
    r"V100-SXM2": (125, None, 15.7),
    r"T4": (65, None, 8.1),
}
"""Peak TFLOP/s, by a regular expression for CUDA's name of the GPU; the first match is used.

For dense products accumulated in fp32, as torch computes them: half of the sparse figures. Sources: NVIDIA's
datasheets; for GeForce and the RTX A6000 the whitepapers of their architectures (GA102, Ada). Lightning's table
(`lightning.fabric.utilities.throughput`) has sparse figures for some GPUs, and lacks tensor cores for others.
"""

MEASURED_SECONDS = 0.2
"""The time in seconds after which `measured_flops` measures no further product."""

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # glibc's malloc.h

WARM_UPS, MIN_ROUNDS, MAX_ROUNDS = 1, 3, 15
BUDGET_SECONDS = 0.15  # a comparison stops after this time, but not before `MIN_ROUNDS` rounds

Pass: TypeAlias = Callable[[], object]


def has_native_bf16(device: str) -> bool:
    """Return True if a device type multiplies bf16 in hardware: CPUs with AVX512-BF16 or AMX, GPUs since Ampere."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device == "cpu":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return False


@functools.cache
def can_compile() -> bool:
    """Try `torch.compile`, which needs a C++ compiler and Python's headers, on this CPU; return True if it works."""
    new = time.time()  # a graph that is in no cache
    try:
        torch.compile(lambda x: x.sin() + new)(torch.zeros(8))
    except RuntimeError:
        return False
    return True


def resolve_device(accelerator: str) -> str:
    """The device type that Lightning's `accelerator` stands for on this machine.

    Raises:
        ArgumentError: the accelerator is unknown, or this machine does not have it.
    """
    require_choice("accelerator", accelerator, ("auto", "cpu", "gpu", "cuda", "mps"))
    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    available = {"cuda": has_cuda, "mps": has_mps, "gpu": has_cuda or has_mps}
    if not available.get(accelerator, True):
        raise ArgumentError("accelerator", accelerator, "this machine does not have it", {"accelerator": "cpu"})
    if accelerator in ("auto", "gpu"):
        return "cuda" if has_cuda else "mps" if has_mps else "cpu"
    return accelerator


def resolve_precision(precision: Any, device: str) -> Any:
    """Lightning's `precision`, where "auto" becomes bf16-mixed on hardware with bf16, and fp32 on other hardware."""
    if precision != "auto":
        return precision
    return "bf16-mixed" if has_native_bf16(device) else "32-true"


def compute_dtype(precision: Any) -> torch.dtype:
    """The dtype of matrix products under Lightning's `precision`."""
    name = str(precision)
    if "bf16" in name:
        return torch.bfloat16
    if "16" in name:
        return torch.float16
    return torch.float64 if "64" in name else torch.float32


def describe_device(device: str) -> str:
    """The name of a GPU, or the architecture of the CPU and torch's number of threads."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    if device == "cpu":
        threads = torch.get_num_threads()
        return f"CPU ({platform.machine()}, {threads} thread{'s' if threads > 1 else ''})"
    return device


def cpu_name() -> str:
    """The CPU's model name in /proc/cpuinfo; if there is none, the CPU's architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: on CUDA, of all tensors; on other devices, of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def free_memory(device: str) -> int | None:
    """Free memory of a device type in bytes; None where it is unknown."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    file = Path("/proc/meminfo")  # MemAvailable is Linux's estimate, which counts caches that it can drop
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    available = re.search(r"^MemAvailable: +(\d+) kB", text, re.MULTILINE)
    return 1024 * int(available[1]) if available else None


def keep_freed_memory() -> None:
    """Let this process keep the memory of freed CPU tensors for the tensors of the next step.

    Each step allocates blocks like those that the previous step freed. glibc returns large blocks to the system, and
    every 4 KiB page of a new block costs a page fault. The faults take a tenth of a bf16 step of 6 layers of width 384,
    and two thirds of the time of eager attention over 512 tokens. With other C libraries this does nothing.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(M_MMAP_MAX, 0)  # take blocks of any size from the heap,
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # never shrink it,
        libc.mallopt(M_TOP_PAD, 64 * 1024**2)  # and grow it by at least 64 MiB


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished its work."""
    if device.type in ("cuda", "mps"):
        torch.get_device_module(device).synchronize()


class Peak(NamedTuple):
    """The peak speed of matrix products, to which model FLOPs utilisation (MFU) is relative.

    Attributes:
        flops: floating-point operations per second.
        source: the origin of this number, for the run's summary, such as "a measured peak of".
    """

    flops: float
    source: str

    def __str__(self) -> str:
        tera = self.flops / 1e12
        return f"{self.source} {tera:,.0f} TFLOP/s" if tera >= 100 else f"{self.source} {tera:.3g} TFLOP/s"


@functools.cache
def matmul_peak(device: torch.device, dtype: torch.dtype) -> Peak:
    """The peak speed of matrix products of a dtype: from `TFLOPS`, or measured if the device is not listed."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = known_flops(name, dtype, torch.get_float32_matmul_precision() != "highest")
        if known is not None:
            return Peak(known, f"{name}'s peak of")
    return Peak(measured_flops(device, dtype), "a measured peak of")


def known_flops(name: str, dtype: torch.dtype, has_tf32: bool) -> float | None:
    """The peak FLOP/s in a GPU's datasheet, for fp32 with TF32 if `has_tf32`; None if `TFLOPS` lacks the GPU."""
    row = next((row for part, row in TFLOPS.items() if re.search(rf"\b{part}\b", name)), None)
    if row is None or "MIG" in name:  # a slice of a GPU, whose name contains the name of the whole GPU
        return None
    half, tf32, fp32 = row
    peak = {torch.float16: half, torch.float32: (has_tf32 and tf32) or fp32}.get(dtype)
    if dtype == torch.bfloat16 and tf32:  # tensor cores without TF32 compute fp16 but not bf16
        peak = half
    return None if peak is None else 1e12 * peak


def measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of several products of square matrices, whose size doubles as often as the time allows."""
    generator = torch.Generator(device).manual_seed(0)  # leaves the random state of training alone
    best, size, start = 0.0, 256, time.perf_counter()
    while time.perf_counter() - start < MEASURED_SECONDS:
        factor = torch.rand(size, size, device=device, generator=generator).to(dtype)
        torch.mm(factor, factor)  # a warm-up
        seconds = min(_seconds_of_product(factor) for _ in range(3))
        best = max(best, 2 * size**3 / seconds)
        # Double the size takes 8 times as long, for 4 products. If there is no time for that, measure the same size
        # once more: another process may have slowed this one down.
        if time.perf_counter() - start + 32 * seconds <= MEASURED_SECONDS:
            size *= 2
    return best


def _seconds_of_product(factor: torch.Tensor) -> float:
    synchronize(factor.device)
    start = time.perf_counter()
    torch.mm(factor, factor)
    synchronize(factor.device)
    return time.perf_counter() - start


def seconds_on(device: str) -> float:
    """The current time in seconds: CPU time on a CPU with one thread, else wall time (on CUDA, after all work ends).

    Other processes hardly affect CPU time, but several threads would spend it on waiting for one another.
    """
    if device == "cpu" and torch.get_num_threads() == 1:
        return time.process_time()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def median_seconds(passes: Mapping[str, Pass], device: str, patience: int = 1) -> dict[str, float]:
    """The median time of each pass in seconds, after a warm-up; if there is one pass, it is timed only once.

    `patience` multiplies the time limit and the number of rounds of a comparison.
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
    """The profiler's raw events. Building the tree of `watched.events()` would take longer than the profiled pass."""
    assert watched.profiler is not None
    assert watched.profiler.kineto_results is not None
    return watched.profiler.kineto_results.events()
