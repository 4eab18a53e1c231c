"""Whether a run's network is compiled, and how."""

from types import SimpleNamespace

import pytest
import torch
from nn.model_cases import make_transformer

from tinyformer.analysis.costs import count_costs
from tinyformer.hardware import Peak, can_compile
from tinyformer.nn import AttentionMask
from tinyformer.run import compiling
from tinyformer.run.compiling import compile_arguments, decide_compiling
from tinyformer.run.parts import Options
from tinyformer.run.trainer import Settings

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


BF16 = {"precision": "bf16-mixed", "devices": 1, "max_steps": 1000, "max_epochs": -1}


@pytest.mark.parametrize(
    ("is_compiled", "device", "changes", "facts"),
    [
        (True, "cpu", {}, {}),
        (True, "cpu", {"devices": "auto", "accumulate_grad_batches": 2, "max_steps": 500}, {}),
        (True, "cpu", {"max_steps": -1}, {}),
        (True, "cpu", {"max_time": "00:00:10:00", "max_steps": -1}, {}),
        (True, "cpu", {"max_steps": 999}, {"is_compiled": True}),
        (False, "cpu", {}, {"is_compiled": False}),
        (False, "cpu", {"max_steps": 999}, {}),
        (False, "cpu", {"max_epochs": 1}, {}),
        (False, "cpu", {"max_time": "00:00:09:59", "max_steps": -1}, {}),
        (False, "cpu", {"precision": "32-true"}, {}),
        (False, "cpu", {"devices": 2}, {}),
        (False, "mps", {}, {}),
    ],
)
def test_long_runs_on_a_cpu_are_compiled_by_auto(is_compiled, device, changes, facts, monkeypatch):
    """1,000 steps are planned to take 600 seconds, and an epoch 500."""
    network, options = make_transformer(), Options()
    row_format = SimpleNamespace(varying_length=False)
    num_tokens = 8 * network.max_seq_len
    data = SimpleNamespace(
        batch_size=8, row_format=row_format, splits={"train": SimpleNamespace(num_tokens=num_tokens * 1000 * 5 // 6)}
    )
    flops = 1000 * num_tokens * count_costs(network).training_flops_per_token
    monkeypatch.setattr(compiling, "matmul_peak", lambda *of: Peak(4 * flops / 600, ""))
    monkeypatch.setattr(compiling, "can_compile", lambda: True)
    start = SimpleNamespace(checkpoint=SimpleNamespace(facts=facts), is_resumed=True) if facts else None
    settings = Settings(BF16 | changes, device, None)
    assert decide_compiling(settings, options, network, data, start).compile_mode == ("auto" if is_compiled else None)
    assert decide_compiling(settings, Options(compile=False), network, data, start) == settings
    monkeypatch.setattr(compiling, "can_compile", lambda: False)  # without a compiler
    assert decide_compiling(settings, options, network, data, start) == settings
    row_format.varying_length = True
    monkeypatch.setattr(compiling, "can_compile", lambda: True)
    assert decide_compiling(settings, options, network, data, start) == settings


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own
def test_a_machine_without_a_compiler_is_recognised():
    with torch._inductor.config.patch({"cpp.cxx": (None, "/nonexistent")}):
        assert not can_compile.__wrapped__()
