"""The kernels: eager against loops, the others against eager, on the shapes and masks of single calls."""

import math

import pytest
import torch

from nn.attention_cases import (
    FUSED,
    MASKS,
    ON_CPU,
    TRAINABLE,
    Case,
    assert_within_bf16,
    eager_result,
    error,
    inputs,
    make_mask,
    run_backend,
    square,
)
from nn.variants import attend_by_loops
from tinyformer.nn import BACKENDS, ALiBi, AttentionCase, AttentionMask, Scoring, attention_weights, select_backend
from tinyformer.nn.kernels.case import features_of
from tinyformer.nn.kernels.eager import eager
from tinyformer.nn.kernels.flash import flash
from tinyformer.nn.kernels.observe import KernelObserver
from tinyformer.nn.kernels.sdpa import CPU_BF16_MIN_SEQ, sdpa

FLASH_ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"

SQUARE = [square(n, d, m) for n in (1, 63, 257, 1024) for d in (32, 64, 128) for m in MASKS]
CROSS = [Case(q, k, d, m) for q, k in ((1, 63), (63, 257), (257, 63)) for d in (32, 64, 128) for m in MASKS]
CASES = [
    pytest.param(case, marks=[] if index % 7 == 0 else [pytest.mark.nightly], id=str(case))
    for index, case in enumerate(SQUARE + CROSS)
]
"""Every seventh, which are all masks and head sizes at one length or another, is fast."""


# Eager, the definition.


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1], ids=["mha", "gqa", "mqa"])
def test_eager_is_the_definition_written_as_loops(num_kv_heads, mask):
    for q_seq, k_seq in ((5, 5), (2, 6), (6, 3)):
        random = torch.Generator().manual_seed(0)
        q = torch.randn(3, 4, q_seq, 8, generator=random, dtype=torch.float64)
        k, v = torch.randn(2, 3, num_kv_heads, k_seq, 8, generator=random, dtype=torch.float64)
        lengths = [k_seq, 2, 0]

        def by_loops(row: int, values: torch.Tensor) -> torch.Tensor:
            def may_attend(i: int, j: int) -> bool:
                is_past = "causal" not in mask or j <= i + k_seq - q_seq  # noqa: B023
                return is_past and ("padded" not in mask or j < lengths[row])  # noqa: B023

            score = lambda h, query, key, i, j: 0.3 * float(query @ key)  # noqa: E731
            return attend_by_loops(q[row : row + 1], k[row : row + 1], values, score, may_attend=may_attend)  # noqa: B023

        units = torch.eye(k_seq, dtype=torch.float64).expand(1, num_kv_heads, -1, -1)
        described, scoring = make_mask(mask, lengths), Scoring(0.3)
        weights, out = attention_weights(q, k, described, scoring), eager(q, k, v, described, scoring)
        for row in range(3):
            expected = by_loops(row, v[row : row + 1]), by_loops(row, units)
            for actual, reference in zip((out, weights), expected, strict=True):
                torch.testing.assert_close(actual[row : row + 1], reference, rtol=0, atol=1e-13)


def test_two_keys_by_hand():
    # Scores 0 and ln 3, so weights 1/4 and 3/4, and 1/4 * 8 + 3/4 * 4 = 5.
    q = torch.tensor([[[[2.0]]]])
    k = torch.tensor([[[[0.0], [math.log(3)]]]])
    v = torch.tensor([[[[8.0], [4.0]]]])
    weights = attention_weights(q, k, AttentionMask(), Scoring(0.5))
    torch.testing.assert_close(weights, torch.tensor([[[[0.25, 0.75]]]]))
    for backend in ON_CPU:
        out = BACKENDS[backend].compute(q, k, v, AttentionMask(), Scoring(0.5))
        torch.testing.assert_close(out, torch.tensor([[[[5.0]]]]), msg=backend)


def test_weights_of_low_precision_queries_are_normalised_in_fp32():
    q, k, _, _ = inputs(Case(63, 63, 32), torch.bfloat16)
    weights = attention_weights(q, k, AttentionMask(causal=True), Scoring(32**-0.5))
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 63), rtol=0, atol=1e-6)


# Every kernel equals eager, forward and gradient.


@pytest.mark.parametrize("case", CASES)
def test_fp32_parity(case):
    reference = eager_result(case, torch.float32, torch.float32)
    for backend in (*FUSED, "flex"):
        actual = run_backend(backend, case, inputs(case, torch.float32))
        errors = {name: error(actual[name], reference[name]) for name in actual}
        assert max(errors.values()) <= 1e-5, (backend, errors)


@pytest.mark.parametrize("case", CASES)
def test_bf16_parity_to_its_own_rounding(case):
    exact = eager_result(case, torch.bfloat16, torch.float64)
    eager = eager_result(case, torch.bfloat16, torch.bfloat16)
    for backend in (*FUSED, "flex"):
        actual = run_backend(backend, case, inputs(case, torch.bfloat16))
        for name in actual:
            assert actual[name].dtype == torch.bfloat16
            assert_within_bf16(actual[name], eager[name], exact[name], f"{backend}, {name}")


# Rows without keys, and masked keys.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", [Case(9, 9, 32, "padded"), Case(600, 600, 32, "causal+padded")], ids=str)
@pytest.mark.parametrize("backend", ON_CPU)
def test_a_row_of_length_zero_gives_exact_zeros_and_gradients(backend, case, dtype):
    result = run_backend(backend, case, inputs(case, dtype))
    for name, value in result.items():
        assert torch.count_nonzero(value[1]) == 0, name
        assert value.isfinite().all(), name
        assert torch.count_nonzero(value[0]) > 0, name


@pytest.mark.parametrize("backend", ON_CPU)
def test_causal_queries_before_the_first_key_give_exact_zeros(backend):
    case = Case(7, 3, 32, "causal")
    result = run_backend(backend, case, inputs(case, torch.float32))
    assert torch.count_nonzero(result["out"][:, :, :4]) == 0
    assert backend not in TRAINABLE or torch.count_nonzero(result["q"][:, :, :4]) == 0
    assert (result["out"][:, :, 4:] != 0).any(-1).all()
    assert all(value.isfinite().all() for value in result.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("seq", [100, 600])
@pytest.mark.parametrize("backend", ON_CPU)
def test_masked_keys_do_not_change_a_single_bit_of_long_sequences(backend, seq, dtype):
    q, k, v, _ = inputs(Case(seq, seq, 32), dtype)
    cut, compute = seq // 2, BACKENDS[backend].compute
    k2, v2 = k.clone(), v.clone()
    k2[:, :, cut:], v2[:, :, cut:] = 3.0, -50.0
    for mask, rows in (
        (AttentionMask(causal=True), slice(None, cut)),
        (AttentionMask(lengths=torch.tensor([cut, cut])), slice(None)),
    ):
        before, after = compute(q, k, v, mask, Scoring(0.2)), compute(q, k2, v2, mask, Scoring(0.2))
        assert torch.equal(before[:, :, rows], after[:, :, rows])
        assert rows.stop is None or not torch.equal(before[:, :, cut:], after[:, :, cut:])


# Which kernel runs.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend", ["auto", *FUSED])
def test_cpu_runs_the_flash_kernel_and_no_other(native_bf16, backend, mask, dtype):
    for seq, num_kv_heads in ((128, 2), (600, 4)):
        case = Case(seq, seq, 32, mask, num_kv_heads=num_kv_heads)
        features = features_of(case.attention_mask(), Scoring(), seq, seq, dropout=False, gradient=True)
        chosen = select_backend(backend, AttentionCase("cpu", dtype, 32, features, seq))
        with KernelObserver() as kernels:
            run_backend(chosen.name, case, inputs(case, dtype))
        # In bf16, auto takes matrix products up to 160 tokens unless rows are padded; without a mask up to any length.
        bf16_eager = mask == "full" or (mask == "causal" and seq <= 160)
        is_eager = backend == "auto" and dtype == torch.bfloat16 and bf16_eager
        assert kernels.names == ([] if is_eager else [FLASH_ON_CPU, f"{FLASH_ON_CPU}_backward"])


@pytest.mark.parametrize(("seq", "dtype"), [(64, torch.float32), (CPU_BF16_MIN_SEQ, torch.bfloat16)])
def test_short_bf16_is_computed_in_fp32_under_autocast_too(seq, dtype):
    case = Case(seq, seq, 32, "causal")
    with torch.autocast("cpu", torch.bfloat16), KernelObserver() as kernels:
        result = run_backend("sdpa", case, inputs(case, torch.bfloat16))
    assert kernels.calls[0] == (FLASH_ON_CPU, dtype)
    assert result["out"].dtype == torch.bfloat16


# Dropout of attention weights.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_dropout_keeps_the_expectation_and_drops_its_share(backend, dtype):
    # All keys alike and identity values: the output is the weights themselves, 1/k_seq each before dropout.
    seq, probability = 64, 0.25
    q = torch.zeros(4, 8, seq, seq, dtype=dtype)
    v = torch.eye(seq, dtype=dtype).expand(4, 8, seq, seq)
    torch.manual_seed(0)
    weights = BACKENDS[backend].compute(q, q, v, AttentionMask(), Scoring(), probability).float() * seq
    share = (weights == 0).float().mean().item()
    # 131,072 independent weights: the standard error of the share is 0.0012.
    assert abs(share - probability) < 0.006
    assert abs(weights.mean().item() - 1) < 0.01
    kept = weights[weights != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - probability)), rtol=2**-7, atol=0)


def test_a_bias_keeps_its_small_differences_in_low_precision():
    # Padding hides all near keys of the last queries: ALiBi's bias of the others is -500 and below, where bf16 knows
    # every second whole number alone.
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 1024, 32, requires_grad=True) for _ in range(3))
    mask = AttentionMask(lengths=torch.tensor([1024, 100]))
    mod = ALiBi(2).score_mod(q, 1024, 32**-0.5, causal=False)
    exact = eager(q.double(), k.double(), v.double(), mask, Scoring(32**-0.5, mods=(mod,)))
    for backend in (sdpa, flash):
        out = backend(q.bfloat16(), k.bfloat16(), v.bfloat16(), mask, Scoring(32**-0.5, mods=(mod,)))
        assert error(out.double(), exact) < 0.02, backend
