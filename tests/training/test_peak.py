"""The peak speed of a device: by its name, or measured."""

import pytest
import torch

from tinyformer.training import peak
from tinyformer.training.peak import Peak, known_flops, matmul_peak, measured_flops

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")


def test_listed_gpus_are_found_by_their_names():
    for name, dtype, tf32, tera in (
        ("NVIDIA H200", BF16, False, 989.5),
        ("NVIDIA H100 80GB HBM3", BF16, False, 989.5),
        ("NVIDIA H100 PCIe", FP16, False, 756),
        ("NVIDIA A100-PCIE-40GB", FP32, True, 156),
        ("NVIDIA A100-PCIE-40GB", FP32, False, 19.5),
        ("NVIDIA L4", BF16, False, 121),
        ("NVIDIA L40S", FP32, True, 183),
        ("NVIDIA GeForce RTX 4090", FP16, False, 165.2),
        ("Tesla V100-SXM2-16GB", FP32, True, 15.7),  # it has no TF32
    ):
        assert known_flops(name, dtype, tf32) == 1e12 * tera, name
    for unlisted in ("NVIDIA A10G", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"):
        assert known_flops(unlisted, BF16, tf32=True) is None, unlisted
    assert known_flops("Tesla T4", BF16, tf32=True) is None
    assert known_flops("NVIDIA H200", torch.float64, tf32=True) is None


def test_a_peak_is_measured_once(monkeypatch):
    matmul_peak.cache_clear()
    calls = []
    monkeypatch.setattr(peak, "measured_flops", lambda *case: calls.append(case) or 4.3e11)
    found = [matmul_peak(CPU, FP32), matmul_peak(CPU, FP32), matmul_peak(CPU, BF16)]
    matmul_peak.cache_clear()
    assert calls == [(CPU, FP32), (CPU, BF16)]
    assert str(found[0]) == "a measured peak of 0.43 TFLOP/s"
    assert str(Peak(9.895e14, "NVIDIA H200's peak of")) == "NVIDIA H200's peak of 990 TFLOP/s"


def test_measuring_takes_little_time_on_a_slow_machine(monkeypatch):
    """On a machine that multiplies at 1 GFLOP/s."""
    sizes, now = [], [0.0]

    def seconds(factor):
        sizes.append(len(factor))
        now[0] += 2 * len(factor) ** 3 / 1e9
        return 2 * len(factor) ** 3 / 1e9

    monkeypatch.setattr(peak, "_seconds_of_product", seconds)
    monkeypatch.setattr(peak.time, "perf_counter", lambda: now[0])
    assert measured_flops(CPU, FP32) == pytest.approx(1e9)
    assert set(sizes) == {256}
    assert now[0] < 0.3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_no_gpu_is_faster_than_its_datasheet():
    device = torch.device("cuda", 0)
    known = known_flops(torch.cuda.get_device_name(), BF16, tf32=False)
    measured = measured_flops(device, BF16)
    assert measured > 1e12
    assert known is None or 0.3 * known < measured < 1.1 * known
