"""What the machine offers: devices and number formats."""

import ctypes
import platform
import re
import resource
import sys
from pathlib import Path
from typing import Any

import torch


def has_native_bf16(device: str) -> bool:
    """Whether a device type multiplies bf16 in hardware, not by emulation: AVX512-BF16 and AMX CPUs, newer GPUs."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device == "cpu":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return False


def resolve_device(accelerator: str) -> str:
    """The device type behind Lightning's `trainer.accelerator`.

    Raises:
        ValueError: it asks for a GPU and there is none.
    """
    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    available = {"cuda": has_cuda, "mps": has_mps, "gpu": has_cuda or has_mps}
    if not available.get(accelerator, True):
        raise ValueError(f"trainer.accelerator={accelerator}: this machine has none; trainer=cpu works.")
    if accelerator in ("auto", "gpu"):
        return "cuda" if has_cuda else "mps" if has_mps else "cpu"
    return accelerator


def resolve_precision(precision: Any, device: str) -> Any:
    """Lightning's `trainer.precision`, with "auto" as bf16-mixed where that is native and fp32 elsewhere."""
    if precision != "auto":
        return precision
    return "bf16-mixed" if has_native_bf16(device) else "32-true"


def compute_dtype(precision: Any) -> torch.dtype:
    """The dtype of matrix products under Lightning's `trainer.precision`."""
    name = str(precision)
    if "bf16" in name:
        return torch.bfloat16
    if "16" in name:
        return torch.float16
    return torch.float64 if "64" in name else torch.float32


def describe_device(device: str) -> str:
    """The device in words: a GPU's name, or the processor and the threads that torch uses."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    if device == "cpu":
        threads = torch.get_num_threads()
        return f"CPU ({platform.machine()}, {threads} thread{'s' if threads > 1 else ''})"
    return device


M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # glibc's malloc.h


def keep_freed_memory() -> None:
    """Let this process keep the memory that tensors on the CPU give back, for the tensors of the next step.

    A step frees and takes the same blocks as the one before. glibc hands large ones back to the system, and a fault for
    each 4 KiB of the next one fetches empty pages: a tenth of a bf16 step of 6 layers of 384, two thirds of eager
    attention over 512 tokens. Other C libraries are left as they are.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(M_MMAP_MAX, 0)  # blocks of any size from the heap ...
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # ... which never shrinks ...
        libc.mallopt(M_TOP_PAD, 64 * 1024**2)  # ... and grows by so much at least


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that tensors took on a CUDA device, elsewhere the most memory that this process had."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def free_memory(device: str) -> int | None:
    """Bytes that tensors can still take on a device type; None where nobody says."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    memory = Path("/proc/meminfo")  # Linux's own estimate, which knows that its caches give way
    found = re.search(r"^MemAvailable: +(\d+) kB", memory.read_text(), re.MULTILINE) if memory.exists() else None
    return 1024 * int(found[1]) if found else None
