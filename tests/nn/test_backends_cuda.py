"""The exactness of the backends on CUDA, the kernels that run there, and what flash refuses."""

import pytest
import torch

from nn.attention_cases import MASKS, Case, assert_within_bf16, eager_result, error, inputs, run_backend
from nn.variants import NAMES, able, prepared, small
from tinyformer.nn import AttentionCase, Feature, Scoring, select_backend
from tinyformer.nn.kernels.case import features_of
from tinyformer.nn.kernels.observe import KernelObserver, running_kernel
from tinyformer.programs.doctor.cases import MASKS as DOCTOR_MASKS
from tinyformer.programs.doctor.cases import Shape, factory_of
from tinyformer.programs.doctor.exactness import Problem
from tinyformer.programs.doctor.verdict import Cell, check_exactness

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("default"),  # torch's compiler raises, and hides, warnings of its own
]

VARLEN = ("padded", "documents", "causal+documents", "window", "causal+window", "causal+documents+window")
"""Masks that flash computes by its kernel for packed sequences."""
FLASH, FLEX = ("full", "causal", *VARLEN), (*MASKS, *VARLEN[1:], "pattern", "causal+padded+pattern")
CROSS = ((1, 63), (63, 257), (257, 63))
CASES = [
    *(("flash", Case(seq, seq, dim, mask)) for mask in FLASH for seq in (1, 63, 257) for dim in (32, 128)),
    *(("flash", Case(*sizes, 64, mask)) for mask in ("full", "padded") for sizes in CROSS),
    *(("flex", Case(seq, seq, dim, mask)) for mask in FLEX for seq in (63, 257) for dim in (32, 64, 128)),
    *(("sdpa", Case(seq, seq, dim, "causal+padded+pattern")) for seq in (1, 63, 257, 1024) for dim in (32, 64, 128)),
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
