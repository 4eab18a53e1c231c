"""The machine: devices, precisions and memory."""

import platform
import re
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from tinyformer.errors import ArgumentError, require_choice


def has_native_bf16(device: str) -> bool:
    """Whether a device type computes bf16 products in hardware: CPUs with AVX512-BF16 or AMX, and newer GPUs."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device == "cpu":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return False


def resolve_device(accelerator: str) -> str:
    """The device type that Lightning's `accelerator` stands for on this machine.

    Raises:
        ArgumentError: it is unknown, or asks for a GPU on a machine that has none.
    """
    require_choice("accelerator", accelerator, ("auto", "cpu", "gpu", "cuda", "mps"))
    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    available = {"cuda": has_cuda, "mps": has_mps, "gpu": has_cuda or has_mps}
    if not available.get(accelerator, True):
        raise ArgumentError("accelerator", accelerator, "this machine has none", {"accelerator": "cpu"})
    if accelerator in ("auto", "gpu"):
        return "cuda" if has_cuda else "mps" if has_mps else "cpu"
    return accelerator


def resolve_precision(precision: Any, device: str) -> Any:
    """Lightning's `precision`, where "auto" is bf16-mixed on hardware that has bf16 and fp32 elsewhere."""
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


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: of tensors on a CUDA device, elsewhere of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def free_memory(device: str) -> int | None:
    """Free memory of a device type in bytes; None where it is unknown."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    file = Path("/proc/meminfo")  # MemAvailable is Linux's estimate, which counts caches that it can drop
    available = re.search(r"^MemAvailable: +(\d+) kB", file.read_text(), re.MULTILINE) if file.exists() else None
    return 1024 * int(available[1]) if available else None
