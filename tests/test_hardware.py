"""Devices, precisions, and the peak speed of a device: by its name, or measured."""

import pytest
import torch

from tinyformer import hardware
from tinyformer.errors import ArgumentError

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("precision", "dtype"), {"bf16-mixed": BF16, "16-mixed": FP16, 16: FP16, "64-true": FP64, None: FP32}.items()
)
def test_the_dtype_of_a_precision(precision, dtype):
    assert hardware.compute_dtype(precision) == dtype


@pytest.mark.parametrize(("native", "precision"), [(True, "bf16-mixed"), (False, "32-true")])
def test_auto_precision_is_bf16_if_the_hardware_has_it(native_bf16, native, precision):
    native_bf16(native)
    given = [("auto", "cpu"), ("64-true", "cpu"), ("auto", "mps")]
    assert [hardware.resolve_precision(*each) for each in given] == [precision, "64-true", "32-true"]


@pytest.mark.parametrize(("cuda", "mps", "device"), [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")])
def test_auto_device_is_the_fastest_and_a_missing_one_is_refused(monkeypatch, cuda, mps, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert (hardware.resolve_device("auto"), hardware.resolve_device("cpu")) == (device, "cpu")
    if device != "cpu":
        assert hardware.resolve_device("gpu") == device
        return
    for accelerator in ("gpu", "mps"):
        with pytest.raises(ArgumentError, match=rf"^accelerator='{accelerator}': .*; accelerator='cpu' works\.$"):
            hardware.resolve_device(accelerator)


@pytest.mark.parametrize(
    ("name", "dtype", "has_tf32", "tera"),
    [
        ("NVIDIA H200", BF16, False, 989.5),
        ("NVIDIA A100-PCIE-40GB", FP32, True, 156),
        ("NVIDIA A100-PCIE-40GB", FP32, False, 19.5),
        ("NVIDIA GeForce RTX 4090", FP16, False, 165.2),
        ("Tesla V100-SXM2-16GB", FP32, True, 15.7),  # it has no TF32,
        ("NVIDIA GeForce RTX 4090 Laptop GPU", BF16, True, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", BF16, True, None),
    ],
)
def test_listed_gpus_are_found_by_their_names(name, dtype, has_tf32, tera):
    assert hardware.known_flops(name, dtype, has_tf32) == (tera and 1e12 * tera)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_no_gpu_is_faster_than_its_datasheet():
    known = hardware.known_flops(torch.cuda.get_device_name(), BF16, has_tf32=False)
    measured = hardware.measured_flops(torch.device("cuda", 0), BF16)
    assert measured > 1e12
    assert known is None or 0.3 * known < measured < 1.1 * known
