"""The peak speed of matrix products on a device, to which model FLOPs utilisation (MFU) is relative."""

import functools
import re
import time
from typing import NamedTuple

import torch

HALF, TF32, FP32 = "half", "tf32", "fp32"

DENSE_TFLOPS: dict[str, dict[str, float]] = {
    r"B200": {HALF: 2250, TF32: 1125, FP32: 75},
    r"H200 NVL": {HALF: 835.5, TF32: 417.5, FP32: 60},
    r"H200": {HALF: 989.5, TF32: 494.5, FP32: 67},
    r"H100 PCIe": {HALF: 756, TF32: 378, FP32: 51},
    r"H100 NVL": {HALF: 835.5, TF32: 417.5, FP32: 60},
    r"H100 80GB HBM3": {HALF: 989.5, TF32: 494.5, FP32: 67},
    r"A100": {HALF: 312, TF32: 156, FP32: 19.5},
    r"A40": {HALF: 149.7, TF32: 74.8, FP32: 37.4},
    r"A30": {HALF: 165, TF32: 82, FP32: 10.3},
    r"A10": {HALF: 125, TF32: 62.5, FP32: 31.2},
    r"L40S": {HALF: 362, TF32: 183, FP32: 91.6},
    r"L40": {HALF: 181, TF32: 90.5, FP32: 90.5},
    r"L4": {HALF: 121, TF32: 60, FP32: 30.3},
    r"RTX A6000": {HALF: 154.8, TF32: 77.4, FP32: 38.7},
    r"RTX 4090$": {HALF: 165.2, TF32: 82.6, FP32: 82.6},
    r"RTX 3090$": {HALF: 71, TF32: 35.6, FP32: 35.6},
    r"V100S-PCIE": {HALF: 130, FP32: 16.4},
    r"V100-PCIE": {HALF: 112, FP32: 14},
    r"V100-SXM2": {HALF: 125, FP32: 15.7},
    r"T4": {HALF: 65, FP32: 8.1},
}
"""Peak TFLOP/s by a pattern for CUDA's name of the GPU; the first that matches counts.

For dense products accumulated in fp32, as torch computes them: half of the sparse figures. Sources: NVIDIA's
datasheets; for GeForce and the RTX A6000 the whitepapers of their architectures (GA102, Ada). Lightning's table
(`lightning.fabric.utilities.throughput`) has sparse figures for some GPUs, and lacks tensor cores for others.
"""

WITHOUT_BF16 = r"V100|T4"
"""GPUs whose tensor cores compute fp16 but not bf16."""

MEASURED_SECONDS = 0.2
"""Time after which no further product is measured."""


class Peak(NamedTuple):
    """The peak speed of a device.

    Args:
        flops: floating-point operations per second.
        source: where the figure comes from, in the words of the run's summary.
    """

    flops: float
    source: str

    def __str__(self) -> str:
        tera = self.flops / 1e12
        return f"{self.source} {tera:,.0f} TFLOP/s" if tera >= 100 else f"{self.source} {tera:.3g} TFLOP/s"


@functools.cache
def matmul_peak(device: torch.device, dtype: torch.dtype) -> Peak:
    """The peak speed of matrix products of a dtype: from `DENSE_TFLOPS`, or measured if the device is not listed."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = known_flops(name, dtype, torch.get_float32_matmul_precision() != "highest")
        if known is not None:
            return Peak(known, f"{name}'s peak of")
    return Peak(measured_flops(device, dtype), "a measured peak of")


def known_flops(name: str, dtype: torch.dtype, tf32: bool) -> float | None:
    """FLOP/s of a GPU according to its datasheet; None if it is not listed.

    Args:
        name: CUDA's name of the GPU.
        dtype: dtype of the matrices.
        tf32: whether fp32 products may use TF32.
    """
    if "MIG" in name:  # a slice of a GPU, whose name contains that of the whole
        return None
    peaks = next((peaks for part, peaks in DENSE_TFLOPS.items() if re.search(rf"\b{part}\b", name)), {})
    if dtype == torch.float32:
        peak = peaks.get(TF32, peaks.get(FP32)) if tf32 else peaks.get(FP32)
    elif dtype == torch.float16 or (dtype == torch.bfloat16 and not re.search(rf"\b({WITHOUT_BF16})\b", name)):
        peak = peaks.get(HALF)
    else:
        peak = None
    return None if peak is None else 1e12 * peak


def measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest product of square matrices, in sizes that double while there is time."""
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
    _synchronize(factor.device)
    start = time.perf_counter()
    torch.mm(factor, factor)
    _synchronize(factor.device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type in ("cuda", "mps"):
        torch.get_device_module(device).synchronize()
