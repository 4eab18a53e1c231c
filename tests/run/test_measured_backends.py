"""The backend that a run on a CPU trains with, if backends may be measured."""

import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import BOOK, SMALL, TEXT
from training.runs import make_data, make_module

import tinyformer
from tinyformer import hardware
from tinyformer.checkpoint.file import Checkpoint, load_checkpoint
from tinyformer.nn import BACKENDS, AttentionMask
from tinyformer.run import network as of_run
from tinyformer.run.network import planned_seconds, training_kernels
from tinyformer.run.settings import Settings
from tinyformer.run.starting_checkpoint import InitialCheckpoint

LONG = {"precision": "32-true", "devices": 1, "max_steps": 10**9, "max_epochs": -1}


def slowed(name):
    """A backend that takes 10 ms longer."""
    compute = BACKENDS[name].compute

    def slow(*arguments):
        end = time.process_time() + 0.01
        while time.process_time() < end:
            pass
        return compute(*arguments)

    return replace(BACKENDS[name], compute=slow)


@pytest.fixture
def kernels_with(tmp_path, monkeypatch):
    """The kernels of two layers in a run with one slow backend, and what its checkpoint says of them."""
    monkeypatch.setenv("TINYFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hardware, "BUDGET_SECONDS", 0.0)

    def kernels(changes=(), slow=None, device="cpu", earlier=None, key="resume", **network):
        module = make_module(data := make_data(tmp_path / "data"), **network)
        start = InitialCheckpoint(Checkpoint(Path("last.ckpt"), {}, {}, None, {"backends": earlier}, 9), key)
        settings = Settings(LONG | dict(changes), device, None, start=start)
        state = torch.get_rng_state()
        with monkeypatch.context() as changed:
            if slow is not None:
                changed.setitem(BACKENDS, slow, slowed(slow))
            found = training_kernels(module.network, settings, AttentionMask(causal=True), module.task, data)
        assert torch.equal(torch.get_rng_state(), state)
        return found

    return kernels


@pytest.mark.parametrize(("slow", "name", "kernel"), [("sdpa", "eager", "eager"), ("eager", "sdpa", "flash")])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_faster_backend_is_chosen_and_remembered(precision, slow, name, kernel, kernels_with, monkeypatch):
    chosen = ([kernel] * 2, f"{name}-{name}")
    assert kernels_with({"precision": precision}, slow, key="init_from", earlier=f"{slow}-{slow}") == chosen
    assert kernels_with({"precision": precision}, name, key="init_from") == chosen  # of the cache folder
    monkeypatch.setattr(torch, "__version__", "another")
    assert kernels_with({"precision": precision}, name, key="init_from") != chosen


@pytest.mark.parametrize(
    ("usual", "seconds", "chosen"),
    [("sdpa", (1.0, 1.09), "sdpa"), ("sdpa", (1.0, 1.11), "eager"), ("eager", (1.09, 1.0), "eager")],
)
def test_another_backend_has_to_be_a_tenth_faster(usual, seconds, chosen, monkeypatch):
    monkeypatch.setattr(of_run, "median_seconds", lambda *arguments: dict(zip(("eager", "sdpa"), seconds, strict=True)))
    assert of_run.faster(usual, {}, "cpu") == chosen


@pytest.mark.parametrize(
    ("kernels", "measured", "options"),
    [
        (["flash"] * 2, None, {"changes": {"deterministic": True}}),
        (["flash"] * 2, None, {"changes": {"devices": 2}}),
        (["flash"] * 2, None, {"changes": {"precision": "64-true"}}),
        (["flash"] * 2, None, {"backend": "sdpa"}),
        (["flash"] * 2, None, {"earlier": None, "key": "resume"}),
        (["eager"] * 2, "eager-eager", {"softcap": 5.0}),
        (["eager", "flash"], "eager-sdpa", {"earlier": "eager-sdpa", "key": "resume", "changes": {"devices": 2}}),
        (["flash"] * 2, None, {"earlier": "eager", "key": "resume"}),
        (["eager"] * 2, None, {"earlier": "sdpa-sdpa", "key": "resume", "softcap": 5.0}),
    ],
)
def test_the_usual_backend_or_that_of_the_resumed_run_is_taken_else(kernels, measured, options, kernels_with):
    assert kernels_with(**{"slow": "sdpa", "key": "init_from"} | options) == (kernels, measured)


def test_a_layer_with_too_many_weights_for_eager_is_not_measured(kernels_with, monkeypatch):
    monkeypatch.setattr(of_run, "MAX_WEIGHTS", 4 * 4 * 16 * 16)
    assert kernels_with(slow="sdpa", key="init_from")[1] == "eager-eager"
    monkeypatch.setattr(of_run, "MAX_WEIGHTS", 4 * 4 * 16 * 16 - 1)
    assert kernels_with(slow="sdpa", key="init_from")[1] == "sdpa-sdpa"


def test_a_resumed_run_keeps_its_backend_and_is_compiled_if_it_was(tmp_path, monkeypatch, capsys):
    def compile(network, **options):
        network._compiled_call_impl = network._call_impl

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.nn.Module, "compile", compile)
    monkeypatch.setattr(of_run, "can_compile", lambda: True)
    monkeypatch.setattr(of_run, "faster", lambda usual, passes, device: min(passes))
    (tmp_path / "book.txt").write_text(BOOK)
    words, runs = [*SMALL.split(), *TEXT.split(), "trainer.precision=bf16-mixed"], []
    for least in (0.0, 1e9):
        for name in ("MIN_SECONDS_TO_COMPILE", "MIN_SECONDS_TO_MEASURE"):
            monkeypatch.setattr(of_run, name, least)
        runs.append(tinyformer.train(words))
        words = [f"resume={runs[0].folder}", "trainer.max_steps=6"]
    for each in runs:
        assert (each.results["attention_kernel"], each.results["is_compiled"]) == ("eager", True)
        facts = load_checkpoint(each.checkpoint).facts
        assert (facts["backends"], facts["is_compiled"]) == ("eager-eager", True)
    assert capsys.readouterr().out.count("eager kernel (attention.backend=auto, measured)") == 2


def test_a_run_is_long_from_a_minute_on(kernels_with, tmp_path, monkeypatch):
    module = make_module(data := make_data(tmp_path / "data"))
    seconds = planned_seconds(module.network, Settings(LONG | {"max_steps": 1}, "cpu", None), data)
    steps = math.ceil(60 / seconds)
    assert kernels_with({"max_steps": steps}, "sdpa", key="init_from")[1] == "eager-eager"
    assert kernels_with({"max_steps": steps - 1}, "sdpa", key="init_from")[1] is None
    monkeypatch.setattr(of_run, "uncounted", lambda network: ["a user-defined attention"])
    assert kernels_with({"max_steps": steps}, "sdpa", key="init_from")[1] is None
