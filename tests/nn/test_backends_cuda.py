"""The exactness of the backends on CUDA, the kernels that run there, and what flash refuses."""

import pytest
import torch

from nn.attention_cases import MASKS, Case, assert_within_bf16, eager_result, error, inputs, run_backend
from nn.variants import NAMES, able, prepared, small, tokens
from tinyformer.doctor.cases import MASKS as DOCTOR_MASKS
from tinyformer.doctor.cases import Shape, factory_of
from tinyformer.doctor.exactness import Problem
from tinyformer.doctor.verdict import Cell, check_exactness
from tinyformer.errors import ArgumentError
from tinyformer.nn import BACKENDS, Attention, AttentionCase, AttentionMask, Feature, Scoring, select_backend
from tinyformer.nn.kernels.case import features_of
from tinyformer.nn.kernels.observe import KernelObserver, running_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

VARLEN = ("padded", "documents", "causal+documents", "window", "causal+window", "causal+documents+window")
"""Masks that flash computes by its kernel for packed sequences."""
FLASH, FLEX = ("full", "causal", *VARLEN), (*MASKS, *VARLEN[1:])
CROSS = ((1, 63), (63, 257), (257, 63))
CASES = [
    *(("flash", Case(seq, seq, dim, mask)) for mask in FLASH for seq in (1, 63, 257) for dim in (32, 128)),
    *(("flash", Case(*sizes, 64, mask)) for mask in ("full", "padded") for sizes in CROSS),
    *(("flex", Case(seq, seq, dim, mask)) for mask in FLEX for seq in (63, 257) for dim in (32, 64, 128)),
    *(("sdpa", Case(seq, seq, dim, mask)) for mask in MASKS for seq in (1, 63, 257, 1024) for dim in (32, 64, 128)),
    *((name, Case(*sizes, 64, mask)) for name in ("flex", "sdpa") for mask in MASKS for sizes in CROSS),
]


@pytest.fixture(autouse=True)
def _exact_fp32_products():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("backend", "case"), CASES, ids=str)
def test_bf16_is_as_exact_as_its_rounding(backend, case):
    exact = eager_result(case, torch.bfloat16, torch.float64, "cuda")
    eager = eager_result(case, torch.bfloat16, torch.bfloat16, "cuda")
    actual = run_backend(backend, case, inputs(case, torch.bfloat16, "cuda"))
    for name in exact:
        assert actual[name].dtype == torch.bfloat16
        assert_within_bf16(actual[name], eager[name], exact[name], name)


@pytest.mark.parametrize("case", [case for name, case in CASES if name == "sdpa"], ids=str)
def test_fp32_is_exact(case):
    reference = eager_result(case, torch.float32, torch.float32, "cuda")
    actual = run_backend("sdpa", case, inputs(case, torch.float32, "cuda"))
    for name in reference:
        assert error(actual[name], reference[name]) <= 1e-5, name


@pytest.mark.parametrize("mask", ["causal", "padded", "documents"])
@pytest.mark.parametrize("name", NAMES)
def test_every_variant_is_exact(name, mask):
    shape, ran = Shape(33, 64, 3), 0  # heads of 64 dimensions, as kernels take them
    attention = prepared(lambda: factory_of(small(name))(shape.d_model, 4))
    problem = Problem(attention, DOCTOR_MASKS[mask], shape, torch.device("cuda"))
    for backend in ("sdpa", "flash", "flex"):
        cell = check_exactness(problem, Cell(backend, name, mask, "bf16"), torch.bfloat16)
        assert cell.failure is None, cell
        ran += cell.status == "ran"
    assert ran >= (able(name, training=False) != ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("mask", ["padded", "causal+padded"])
@pytest.mark.parametrize("backend", ["eager", "sdpa", "flash", "flex"])
def test_a_row_of_length_zero_gives_exact_zeros_and_gradients(backend, mask, dtype):
    if backend == "flash" and (mask != "padded" or dtype != torch.bfloat16):
        backend = "sdpa"  # flash refuses these, see below
    case = Case(63, 63, 64, mask)
    for name, value in run_backend(backend, case, inputs(case, dtype, "cuda")).items():
        assert torch.count_nonzero(value[1]) == 0, name
        assert value.isfinite().all(), name


@pytest.mark.parametrize("seq", [9, 300])
@pytest.mark.parametrize("backend", ["eager", "sdpa", "flash", "flex"])
def test_a_later_token_does_not_change_an_earlier_output(backend, seq):
    q, k, v, _ = inputs(Case(seq, seq, 64, "causal"), torch.bfloat16, "cuda")
    k2, v2 = k.clone(), v.clone()
    k2[:, :, seq // 2 :], v2[:, :, seq // 2 :] = 3.0, -50.0
    compute, mask = BACKENDS[backend].compute, AttentionMask(causal=True)
    before, after = compute(q, k, v, mask, Scoring(0.2)), compute(q, k2, v2, mask, Scoring(0.2))
    assert torch.equal(before[:, :, : seq // 2], after[:, :, : seq // 2])


@pytest.mark.parametrize("backend", ["auto", "flash"])
@pytest.mark.parametrize("num_kv_heads", [4, 2], ids=["mha", "gqa"])
def test_causal_bf16_runs_the_flash_kernel(num_kv_heads, backend):
    case = Case(257, 257, 64, "causal", num_kv_heads=num_kv_heads)
    asked = AttentionCase("cuda", torch.bfloat16, 64, frozenset({Feature.CAUSAL, Feature.GRADIENT}), seq=257)
    with KernelObserver() as kernels:
        run_backend(select_backend(backend, asked).name, case, inputs(case, torch.bfloat16, "cuda"))
    forward = "_scaled_dot_product_flash_attention"
    assert kernels.names == [forward, f"{forward}_backward"]


@pytest.mark.parametrize("mask", VARLEN)
def test_auto_runs_the_kernel_for_packed_sequences(mask):
    case = Case(63, 63, 64, mask)
    described = case.attention_mask("cuda")
    features = features_of(described, Scoring(), 63, 63, dropout=False, gradient=True)
    chosen = select_backend("auto", AttentionCase("cuda", torch.bfloat16, 64, features, 63))
    assert chosen.name == "flash"
    q, k, v, _ = inputs(case, torch.bfloat16, "cuda")
    assert running_kernel(lambda: chosen.compute(q, k, v, described, Scoring(0.125))) == "varlen"


def test_flash_refuses_fp32_and_padding_together_with_a_causal_mask():
    attention, x = Attention(64, 2, backend="flash").cuda(), tokens(2, 9, d_model=64).cuda()
    lengths = torch.tensor([9, 4], device="cuda")
    with pytest.raises(ArgumentError, match=r"not torch\.float32 \(eager, sdpa, flex can\)"):
        attention(x, AttentionMask(causal=True))
    with torch.autocast("cuda", torch.bfloat16):
        assert attention(x, AttentionMask(causal=True)).isfinite().all()
        assert attention(x, AttentionMask(lengths=lengths)).isfinite().all()
        with pytest.raises(ArgumentError, match=r"padding together with a causal mask .* \(eager, sdpa, flex can\)"):
            attention(x, AttentionMask(True, lengths))
    attention.backend = "auto"
    assert attention(x, AttentionMask(True, lengths)).isfinite().all()


@pytest.mark.parametrize("backend", ["eager", "sdpa", "flash", "flex"])
def test_autocast_trains_in_bf16(backend):
    attention = Attention(64, 2, 1, qk_norm=True, backend=backend).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        out = attention(tokens(2, 33, d_model=64).cuda(), AttentionMask(causal=True))
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in attention.parameters())
