"""`auto` is never slower than 1.1 times the fastest backend that supports the case."""

from collections.abc import Callable

import pytest
import torch

from nn.attention_cases import Case, inputs
from tinyformer.doctor.speed import MAX_SLOWDOWN, compare
from tinyformer.memory import keep_freed_memory
from tinyformer.nn import BACKENDS, AttentionCase, Scoring, select_backend
from tinyformer.nn.kernels.case import features_of

TOKENS = 2048
"""In one batch, so that short sequences are measured on as much work as long ones."""


@pytest.fixture(scope="module", autouse=True)
def memory_is_kept():
    keep_freed_memory()


def one_pass(name: str, case: Case, values: tuple[torch.Tensor, ...], dropout: float) -> Callable[[], None]:
    """One forward and backward pass."""
    mask = case.attention_mask(values[0].device.type)

    def run() -> None:
        q, k, v = (x.detach().requires_grad_() for x in values[:3])
        out = BACKENDS[name].compute(q, k, v, mask, Scoring(case.head_dim**-0.5), dropout)
        torch.autograd.grad(out, (q, k, v), values[3])

    return run


@pytest.mark.slow
@pytest.mark.timed
@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["", "dropout"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("mask", ["causal", "causal+padded"])
@pytest.mark.parametrize("head_dim", [32, 64])
@pytest.mark.parametrize("seq", [64, 257, 1024])
def test_auto_is_the_fastest_within_a_tenth(seq, head_dim, mask, dtype, dropout):
    case = Case(seq, seq, head_dim, mask, batch=TOKENS // seq, num_kv_heads=4)
    features = features_of(case.attention_mask(), Scoring(), seq, seq, dropout > 0, gradient=True)
    asked = AttentionCase("cpu", dtype, head_dim, features, seq)
    able = [name for name, backend in BACKENDS.items() if backend.refusal(asked) is None]
    chosen = select_backend("auto", asked).name
    values = inputs(case, dtype)
    measured, slowdown = compare({name: one_pass(name, case, values, dropout) for name in able}, chosen, "cpu")
    assert MAX_SLOWDOWN == 1.1
    assert slowdown <= MAX_SLOWDOWN, f"auto chose {chosen}: {measured}"
