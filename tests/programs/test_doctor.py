"""The doctor: what it reports, and which broken backends it finds."""

import json
import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from commands import ROOT

from tinyformer.nn import BACKENDS
from tinyformer.nn.kernels.eager import eager
from tinyformer.programs.doctor import speed, verdict
from tinyformer.programs.doctor.cases import DTYPES, EXACT_SHAPE
from tinyformer.programs.doctor.exactness import Errors, kernel_among
from tinyformer.programs.doctor.variants import VARIANTS


@pytest.fixture(autouse=True)
def only_gross_slowness_counts(request, monkeypatch):
    """Small differences of time are for the timed tests, which have the machine to themselves."""
    if "slow" not in request.keywords:
        for module in (speed, verdict):
            monkeypatch.setattr(module, "MAX_SLOWDOWN", 5.0)
        monkeypatch.setattr(verdict, "TIMED_SHAPE", EXACT_SHAPE)
        monkeypatch.setattr(speed, "BUDGET_SECONDS", 0.0)


@pytest.fixture
def examine(call):
    """The cells of the doctor's JSON for fp32, by backend, variant and mask."""

    def run(words, code=0):
        ended = call(f"doctor --json --device=cpu --dtypes=fp32 {words}")
        found = json.loads(ended.out)
        assert (ended.code, set(found)) == (code, {"machine", "cells"})
        assert (found["machine"]["device"], found["machine"]["torch"]) == ("cpu", torch.__version__)
        return {" ".join(cell[key] for key in ("backend", "variant", "mask")): cell for cell in found["cells"]}

    return run


def altered(name, alter):
    """A backend's computation, its output changed."""
    compute = BACKENDS[name].compute
    return lambda *arguments: alter(compute(*arguments))


def test_cells_that_run(examine):
    cells = examine("--variants=mha,alibi --masks=causal --backends=sdpa,flash")
    assert list(cells) == ["sdpa mha causal", "flash mha causal", "sdpa alibi causal", "flash alibi causal"]
    for name, cell in cells.items():
        assert (cell["status"], cell["kernel"], cell["reason"], cell["failure"]) == ("ran", "flash", None, None)
        assert 0 < cell["output_error"] < 1e-5
        assert 0 < cell["gradient_error"] < 1e-5
        assert 1e-4 < cell["seconds"] < 1
        assert cell["auto"] == (name == "sdpa mha causal")  # a bias is eager's, when short


def test_what_a_backend_lacks_is_refused_with_the_reason(examine):
    cells = examine("--variants=dropout --masks=full --backends=flash,fa3")
    assert cells["flash dropout full"]["reason"] == "cannot compute attention dropout on CPU"
    for cell in cells.values():
        assert cell["status"] == "refused"
        assert cell["kernel"] is cell["output_error"] is cell["gradient_error"] is cell["seconds"] is None


def test_a_backend_without_a_backward_pass_runs_forward_only(examine):
    cells = examine("--variants=t5 --masks=padded --backends=flash,flex")
    for backend, kernel in {"flash": "flash", "flex": "math"}.items():
        cell = cells[f"{backend} t5 padded"]
        assert (cell["status"], cell["kernel"], cell["gradient_error"]) == ("ran", kernel, None)
        assert cell["reason"].startswith("forward only: cannot compute ")
        assert cell["output_error"] < 1e-5
        assert cell["seconds"] > 0


def double_gradient(compute):
    return lambda q, *rest: compute(q + (q - q.detach()), *rest)


def lie_in_empty_rows(out):
    return torch.where((out == 0).all(dim=-1, keepdim=True), 1.0, out)


def with_gradient_everywhere(compute):
    return lambda q, *rest: compute(q, *rest) + (q - q.detach())


def with_twice_the_dropout(*arguments):
    return eager(*arguments[:-1], 2 * arguments[-1])


SDPA = BACKENDS["sdpa"].compute
EMPTY = "gives nonzero values for a row without keys"
BROKEN = {
    "scaled": (
        "sdpa mha causal",
        {"compute": altered("sdpa", lambda out: 1.001 * out)},
        "its output is off by 1.0e-03",
    ),
    "eager itself": ("eager mha full", {"compute": altered("eager", lambda out: 1.001 * out)}, "its output is off"),
    "gradient": ("sdpa mha causal", {"compute": double_gradient(SDPA)}, "its gradient is off by"),
    "dropout": ("eager dropout causal", {"compute": with_twice_the_dropout}, "its output is off"),
    "not finite": ("sdpa mha causal", {"compute": altered("sdpa", lambda out: out / 0)}, "gives values that are not"),
    "empty rows": ("sdpa mha padded", {"compute": altered("sdpa", lie_in_empty_rows)}, EMPTY),
    "gradients of empty rows": ("sdpa mha padded", {"compute": with_gradient_everywhere(SDPA)}, EMPTY),
    "refusal": ("sdpa mha causal", {"refusal": lambda case: "an ache"}, "refuses what it computes: an ache"),
    "acceptance": ("sdpa additive causal", {"refusal": lambda case: None}, "accepts scores other than dot products"),
    "crash": ("sdpa mha causal", {"compute": altered("sdpa", lambda out: out.nothing)}, "crashes: AttributeError: "),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_backend_fails(name, monkeypatch, examine):
    cell, changes, failure = BROKEN[name]
    backend, variant, mask = cell.split()
    monkeypatch.setitem(BACKENDS, backend, replace(BACKENDS[backend], **changes))
    cells = examine(f"--variants={variant} --masks={mask} --backends={backend}", code=1)
    assert cells[cell]["failure"].startswith(failure)


def test_auto_must_not_pick_a_slow_backend(monkeypatch, call):
    def slow(*arguments):
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass
        return SDPA(*arguments)

    monkeypatch.setitem(BACKENDS, "sdpa", replace(BACKENDS["sdpa"], compute=slow))
    ended = call("doctor --variants=mha --masks=causal --dtypes=fp32 --backends=sdpa,flash --device=cpu")
    assert ended.code == 1
    assert "✗ sdpa mha causal fp32: is chosen by auto but takes " in ended.out
    assert ended.out.rstrip().endswith("1 failed.")


def test_the_report_shows_a_row_for_each_attention_and_a_letter_for_each_mask(call):
    ended = call("doctor --variants=mha,dropout --masks=full,causal --dtypes=fp32 --device=cpu")
    lines = ended.out.splitlines()
    assert ended.code == 0
    header = ["attention", "dtype", "eager", "sdpa", "flash", "flex", "auto", "×", "output", "gradient"]
    assert lines[1].split() == header
    numbers = r"\s+[\d.e-]+"
    assert re.fullmatch(f"mha +fp32 +MM{numbers} +FF{numbers} +FF{numbers} +mm{numbers} +sdpa{3 * numbers} *", lines[2])
    assert re.fullmatch(f"dropout +fp32 +MM{numbers} +MM{numbers} +·· +·· +eager{3 * numbers} *", lines[3])
    assert "fa3 runs on CUDA, not on CPU: all" in lines
    assert re.fullmatch(
        r"24 cells in \d+ s: 12 ran \(2 forward only\), 12 refused. All do what the table says.", lines[-1]
    )


def test_peak_memory_is_the_most_that_is_held_at_once():
    def run() -> None:
        first = torch.empty(1000, 1000)
        second = first + 1  # two at once
        del first
        third = second * 2  # and two again
        del second, third

    million_floats = 4_000_000
    assert 2 * million_floats <= speed.peak_memory(run, "cpu") < 2.01 * million_floats


OPERATORS = {
    "aten::scaled_dot_product_attention aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::scaled_dot_product_attention aten::_scaled_dot_product_attention_math aten::bmm": "math",
    "torch_attn::_varlen_attn aten::_flash_attention_forward": "varlen",
    "Torch-Compiled-Region:0/0 triton_tem_fused_flex_attention_0": "triton",
    "aten::_scaled_dot_product_flash_attention flash::FlashAttnFwdSm90<...>": "fa3",
}


def test_a_kernel_is_known_by_the_operators_that_ran():
    assert {names: kernel_among(names.split()) for names in OPERATORS} == OPERATORS


@pytest.mark.nightly
@pytest.mark.timed
def test_this_machine_passes_in_less_than_two_minutes():
    started = time.perf_counter()
    command = [sys.executable, "-m", "tinyformer", "doctor", "--json", "--device=cpu"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    cells = json.loads(ended.stdout)["cells"]
    assert [cell for cell in cells if cell["failure"]] == []
    assert (ended.returncode, ended.stderr) == (0, "")
    assert {(cell["backend"], cell["variant"], cell["mask"], cell["dtype"]) for cell in cells} == {
        (backend, variant.name, mask, dtype)
        for backend in BACKENDS
        for variant in VARIANTS.values()
        for mask in variant.masks
        for dtype in DTYPES
    }
    assert seconds < 120


def test_the_errors_of_eager_do_not_excuse_any_error():
    assert verdict._excess(Errors(1e-3, None, None), Errors(1.0, None, None), torch.float32) is not None
    assert verdict._excess(Errors(3e-5, None, None), Errors(1e-5, None, None), torch.float32) is None
    assert verdict._excess(Errors(3e-5, None, None), Errors(1e-7, None, None), torch.float32) is not None
