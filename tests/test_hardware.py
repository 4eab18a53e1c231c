"""Devices, precisions and memory."""

import subprocess
import sys

import pytest
import torch

from tinyformer.errors import ArgumentError
from tinyformer.hardware import compute_dtype, has_native_bf16, resolve_device, resolve_precision


def test_the_dtype_of_a_precision():
    half = {"bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16, "16-mixed": torch.float16, 16: torch.float16}
    for precision, dtype in (half | {"64-true": torch.float64, None: torch.float32}).items():
        assert compute_dtype(precision) == dtype


@pytest.mark.parametrize(("native", "precision"), [(True, "bf16-mixed"), (False, "32-true")])
def test_auto_precision_is_bf16_if_the_hardware_has_it(native_bf16, native, precision):
    native_bf16(native)
    assert has_native_bf16("cpu") is native
    assert resolve_precision("auto", "cpu") == precision
    assert resolve_precision("64-true", "cpu") == "64-true"
    assert resolve_precision("auto", "mps") == "32-true"


@pytest.mark.parametrize(("cuda", "mps", "device"), [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")])
def test_auto_device_is_the_fastest(monkeypatch, cuda, mps, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert resolve_device("auto") == device
    assert resolve_device("cpu") == "cpu"
    if device != "cpu":
        assert resolve_device("gpu") == device


@pytest.mark.parametrize("accelerator", ["gpu", "mps"])
def test_a_missing_device_is_refused(monkeypatch, accelerator):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ArgumentError, match=rf"^accelerator='{accelerator}': .*; accelerator='cpu' works\.$"):
        resolve_device(accelerator)


STEPS_AFTER_STEPS = """
import resource
import torch
from tinyformer.memory import keep_freed_memory

if {keep}:
    keep_freed_memory()

def steps():
    for _ in range(10):
        activations = [torch.ones(size) for size in (200_000, 10_000_000, 300_000, 1_000_000)]
        [2 * activation for activation in activations]

steps()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
steps()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has mallopt")
def test_freed_memory_is_reused_without_page_faults():
    programs = (STEPS_AFTER_STEPS.format(keep=keep) for keep in (False, True))
    returned, kept = (int(subprocess.check_output([sys.executable, "-c", program])) for program in programs)
    assert kept < returned / 5
