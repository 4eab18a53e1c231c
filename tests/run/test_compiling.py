"""The decision whether a run's network is compiled, and the arguments of torch's compiler."""

from pathlib import Path

import pytest
import torch
from training.runs import make_data, make_module

from tinyformer.checkpoint.file import Checkpoint
from tinyformer.costs.network import count_costs
from tinyformer.data import WindowFormat
from tinyformer.hardware import can_compile
from tinyformer.nn import AttentionMask
from tinyformer.run import network as of_run
from tinyformer.run.network import compile_arguments, compile_network, decide_compiling
from tinyformer.run.settings import Options, Settings
from tinyformer.run.starting_checkpoint import InitialCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler

WINDOWS = AttentionMask(causal=True)
DOCUMENTS = AttentionMask(causal=True, documents=torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize(
    ("device", "mode", "accumulated", "varies", "mask", "num_processes", "compiled"),
    [
        ("cuda", "auto", 1, False, WINDOWS, 1, "reduce-overhead"),
        ("cuda", "auto", 2, False, WINDOWS, 1, "default"),
        ("cuda", "auto", 1, True, WINDOWS, 1, "default"),
        ("cuda", "auto", 1, False, DOCUMENTS, 1, "default"),
        ("cuda", "auto", 1, False, WINDOWS, 2, "default"),
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
    ("is_compiled", "device", "changes", "earlier"),
    [
        (True, "cpu", {}, None),
        (True, "cpu", {"devices": "auto", "accumulate_grad_batches": 2, "max_steps": 500}, None),
        (True, "cpu", {"max_steps": -1, "max_epochs": 1000, "limit_train_batches": 1}, None),
        (True, "cpu", {"max_time": "00:00:10:00", "max_steps": -1}, None),
        (True, "cpu", {"max_steps": 999}, True),
        (False, "cpu", {}, False),
        (False, "cpu", {"max_epochs": 1}, None),
        (False, "cpu", {"max_time": "00:00:09:59", "max_steps": -1}, None),
        (False, "cpu", {"precision": "32-true"}, None),
        (False, "cpu", {"devices": 2}, None),
        (False, "cpu", {"num_nodes": 2}, None),
        (False, "cpu", {"max_steps": -1, "max_epochs": 999, "limit_train_batches": 1}, None),
        (False, "mps", {}, None),
    ],
)
def test_long_runs_on_a_cpu_are_compiled_by_auto(is_compiled, device, changes, earlier, tmp_path, monkeypatch):
    """1,000 steps of 64 tokens are planned to take 600 seconds, and so are 1,000 epochs of a batch."""
    data = make_data(tmp_path)
    module = make_module(data)
    flops = 1000 * 64 * count_costs(module.network).training_flops_per_token
    monkeypatch.setattr(of_run, "FLOPS_OF_A_THREAD", flops / 600 / torch.get_num_threads())

    def decided(can_compile=True, compile="auto", key="resume", earlier=earlier):
        monkeypatch.setattr(of_run, "can_compile", lambda: can_compile)
        facts = {} if earlier is None else {"is_compiled": earlier}
        start = InitialCheckpoint(Checkpoint(Path("last.ckpt"), {}, {}, None, facts, 9), key)
        settings = Settings(BF16 | changes, device, None, Options(compile=compile), start=start)
        return decide_compiling(settings, module.network, data).compile_mode

    assert decided() == ("auto" if is_compiled else None)
    assert decided(key="init_from", earlier=not is_compiled) == decided(earlier=None)
    assert decided(can_compile=False) is decided(compile=False) is None
    with monkeypatch.context() as changed:
        changed.setattr(WindowFormat, "varying_length", True)
        assert decided() is None
    monkeypatch.setattr(of_run, "uncounted", lambda network: ["a user-defined attention"])
    assert decided() is None


def test_what_was_compiled_for_an_earlier_run_is_forgotten(tmp_path):
    graphs, network = [], make_module(make_data(tmp_path)).network
    double = torch.compile(lambda x: 2 * x, backend=lambda graph, _: graphs.append(graph) or graph)
    for _ in range(2):
        compile_network(network, Settings({}, "cpu", "default"), False, WINDOWS, 1)
        double(torch.ones(1))
    assert len(graphs) == 2


def test_a_machine_without_a_compiler_is_recognised():
    with torch._inductor.config.patch({"cpp.cxx": (None, "/nonexistent")}):
        assert not can_compile.__wrapped__()
