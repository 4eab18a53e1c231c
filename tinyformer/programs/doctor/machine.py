"""The machine that the doctor examines: its description, and a quiet, single-threaded state."""

import contextlib
import os
import platform
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from tinyformer.hardware import cpu_name, keep_freed_memory


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
