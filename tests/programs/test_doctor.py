"""The doctor: what it reports, and which broken backends it finds."""

import json
from dataclasses import replace

import pytest
import torch

from tinyformer.nn import BACKENDS
from tinyformer.nn.kernels.eager import eager
from tinyformer.programs.doctor.cells import _excess
from tinyformer.programs.doctor.exactness import Errors


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


def test_cells_run_forward_only_or_are_refused_with_the_reason(examine):
    cells = examine("--variants=mha,alibi,dropout,t5 --masks=causal --backends=sdpa,flash,flex,fa3")
    for name in ("sdpa mha causal", "flash mha causal", "sdpa alibi causal", "flash alibi causal"):
        cell = cells[name]
        assert [cell[key] for key in ("status", "kernel", "reason", "failure")] == ["ran", "flash", None, None]
        assert all(0 < cell[key] < 1e-5 for key in ("output_error", "gradient_error"))
        assert cell["auto"] == name.startswith("sdpa")
    for name, kernel in {"flash t5 causal": "flash", "flex t5 causal": "math"}.items():
        cell = cells[name]
        assert (cell["status"], cell["kernel"], cell["gradient_error"]) == ("ran", kernel, None)
        assert cell["reason"].startswith("forward only: cannot compute ")
        assert cell["output_error"] < 1e-5
    assert cells["flash dropout causal"]["reason"] == "cannot compute attention dropout on CPU"
    for cell in (cells["flash dropout causal"], cells["fa3 mha causal"]):
        assert cell["status"] == "refused"
        assert {cell[key] for key in ("kernel", "output_error", "gradient_error")} == {None}


SDPA = BACKENDS["sdpa"].compute


def altered(alter, compute=SDPA):
    """A backend's computation, its output changed, given q and the output."""
    return {"compute": lambda q, *rest: alter(q, compute(q, *rest))}


EMPTY = "gives nonzero values for a row without keys"
BROKEN = {
    "scaled": ("sdpa mha causal", altered(lambda q, out: 1.001 * out), "its output is off by 1.0e-03"),
    "eager itself": ("eager mha full", altered(lambda q, out: 1.001 * out, eager), "its output is off"),
    "gradient": ("sdpa mha causal", altered(lambda q, out: out + q - q.detach()), "its gradient is off by"),
    "dropout": (
        "eager dropout causal",
        {"compute": lambda *given: eager(*given[:-1], 2 * given[-1])},
        "its output is off",
    ),
    "not finite": ("sdpa mha causal", altered(lambda q, out: out / 0), "gives values that are not"),
    "empty rows": ("sdpa mha padded", altered(lambda q, out: out.where(out.any(-1, keepdim=True), 1.0)), EMPTY),
    "gradients of empty rows": ("sdpa mha padded", altered(lambda q, out: out + q - q.detach()), EMPTY),
    "refusal": ("sdpa mha causal", {"refusal": lambda case: "an ache"}, "refuses a case that it computes: an ache"),
    "acceptance": ("sdpa additive causal", {"refusal": lambda case: None}, "accepts scores other than dot products"),
    "crash": ("sdpa mha causal", altered(lambda q, out: out.nothing), "crashes: AttributeError: "),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_backend_fails(name, monkeypatch, examine):
    cell, changes, failure = BROKEN[name]
    backend, variant, mask = cell.split()
    monkeypatch.setitem(BACKENDS, backend, replace(BACKENDS[backend], **changes))
    cells = examine(f"--variants={variant} --masks={mask} --backends={backend}", code=1)
    assert cells[cell]["failure"].startswith(failure)


@pytest.mark.parametrize(("error", "of_eager", "fails"), [(1e-3, 1.0, True), (3e-5, 1e-5, False), (3e-5, 1e-7, True)])
def test_the_errors_of_eager_do_not_excuse_any_error(error, of_eager, fails):
    excess = _excess(Errors(error, None, None), Errors(of_eager, None, None), torch.float32)
    assert (excess is not None) == fails
