"""How a run's network is compiled."""

import pytest
import torch

from tinyformer.nn import AttentionMask
from tinyformer.run.trainer import Settings, compile_arguments

WINDOWS = AttentionMask(causal=True)
DOCUMENTS = AttentionMask(causal=True, documents=torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize(
    ("device", "mode", "accumulated", "varies", "mask", "num_processes", "compiled"),
    [
        ("cuda", "auto", 1, False, WINDOWS, 1, "reduce-overhead"),
        ("cuda", "auto", None, False, WINDOWS, 1, "reduce-overhead"),
        ("cuda", "auto", 2, False, WINDOWS, 1, "default"),
        ("cuda", "auto", 1, True, WINDOWS, 1, "default"),
        ("cuda", "auto", 1, False, DOCUMENTS, 1, "default"),
        ("cuda", "auto", 1, False, WINDOWS, 2, "default"),
        ("cuda", "default", 1, False, WINDOWS, 1, "default"),
        ("cuda", "reduce-overhead", 1, True, WINDOWS, 1, "reduce-overhead"),
        ("cpu", "auto", 1, False, WINDOWS, 1, "default"),
    ],
)
def test_batches_of_one_shape_are_recorded(device, mode, accumulated, varies, mask, num_processes, compiled):
    settings = Settings({"accumulate_grad_batches": accumulated}, device, mode)
    given = compile_arguments(settings, varies, mask, num_processes)
    assert given == {"mode": compiled, "dynamic": varies or None}
