"""The parity of the backends on CUDA, and what flash refuses there."""

import pytest
import torch
from attention_cases import (
    MASKS,
    AttentionKernels,
    Case,
    assert_within_bf16,
    eager_result,
    error,
    inputs,
    run_backend,
)

from tinyformer.nn import BACKENDS, Attention, AttentionCase, AttentionMask, select_backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = (1, 63, 257, 1024)
HEAD_DIMS = (32, 64, 128)


@pytest.fixture(autouse=True)
def _exact_fp32_products():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def assert_bf16_parity(backend: str, case: Case) -> None:
    exact = eager_result(case, torch.bfloat16, torch.float64, "cuda")
    eager = eager_result(case, torch.bfloat16, torch.bfloat16, "cuda")
    actual = run_backend(backend, case, inputs(case, torch.bfloat16, "cuda"))
    for name in exact:
        assert actual[name].dtype == torch.bfloat16
        assert_within_bf16(actual[name], eager[name], exact[name], name)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("seq", LENGTHS)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_flash_bf16_parity(mask, seq, head_dim):
    assert_bf16_parity("flash", Case(seq, seq, head_dim, mask))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("seq", LENGTHS)
def test_sdpa_bf16_parity(seq, head_dim, mask):
    assert_bf16_parity("sdpa", Case(seq, seq, head_dim, mask))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("q_seq", "k_seq"), [(1, 63), (63, 257), (257, 63)])
def test_sdpa_bf16_parity_of_cross_attention(q_seq, k_seq, mask):
    assert_bf16_parity("sdpa", Case(q_seq, k_seq, 64, mask))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("seq", LENGTHS)
def test_sdpa_fp32_parity(seq, head_dim, mask):
    case = Case(seq, seq, head_dim, mask)
    reference = eager_result(case, torch.float32, torch.float32, "cuda")
    actual = run_backend("sdpa", case, inputs(case, torch.float32, "cuda"))
    for name in reference:
        assert error(actual[name], reference[name]) <= 1e-5, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("mask", ["padded", "causal+padded"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_a_row_of_length_zero_gives_exact_zeros_and_gradients(backend, mask, dtype):
    case = Case(63, 63, 64, mask)
    result = run_backend(backend, case, inputs(case, dtype, "cuda"))
    for name, value in result.items():
        assert torch.count_nonzero(value[1]) == 0, name
        assert value.isfinite().all(), name


@pytest.mark.parametrize("backend", ["auto", "flash"])
@pytest.mark.parametrize("num_kv_heads", [4, 2], ids=["mha", "gqa"])
def test_causal_bf16_runs_the_flash_kernel(num_kv_heads, backend):
    case = Case(257, 257, 64, "causal", num_kv_heads=num_kv_heads)
    chosen = select_backend(backend, AttentionCase("cuda", torch.bfloat16, 64, seq=257))
    with AttentionKernels() as kernels:
        run_backend(chosen.name, case, inputs(case, torch.bfloat16, "cuda"))
    forward = "_scaled_dot_product_flash_attention"
    assert kernels.names == [forward, f"{forward}_backward"]


def test_flash_refuses_fp32_and_names_one_that_can():
    attention = Attention(64, 2, backend="flash").cuda()
    x, mask = torch.randn(2, 9, 64, device="cuda"), AttentionMask(causal=True)
    with pytest.raises(ValueError, match=r"torch\.float32 .*bf16-mixed works.*=auto or eager or sdpa can") as caught:
        attention(x, mask)
    assert "attention.backend=flash" in str(caught.value)
    with torch.autocast("cuda", torch.bfloat16):
        assert attention(x, mask).isfinite().all()
    attention.backend = "auto"
    assert attention(x, mask).isfinite().all()


def test_flash_refuses_padding_and_names_one_that_can():
    attention = Attention(64, 2, backend="flash").cuda().bfloat16()
    x = torch.randn(2, 9, 64, device="cuda", dtype=torch.bfloat16)
    mask = AttentionMask(lengths=torch.tensor([9, 4], device="cuda"))
    with pytest.raises(ValueError, match=r"takes no padding mask on CUDA; .*=auto or eager or sdpa can"):
        attention(x, mask)
    attention.backend = "auto"
    assert attention(x, mask).isfinite().all()


@pytest.mark.parametrize("seq", [9, 300])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_later_token_never_changes_an_earlier_output(backend, seq):
    q, k, v, _ = inputs(Case(seq, seq, 64, "causal"), torch.bfloat16, "cuda")
    k2, v2 = k.clone(), v.clone()
    k2[:, :, seq // 2 :], v2[:, :, seq // 2 :] = 3.0, -50.0
    compute, mask = BACKENDS[backend].compute, AttentionMask(causal=True)
    before, after = compute(q, k, v, mask, 0.2), compute(q, k2, v2, mask, 0.2)
    assert torch.equal(before[:, :, : seq // 2], after[:, :, : seq // 2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_trains_in_bf16(backend):
    attention = Attention(64, 2, 1, qk_norm=True, backend=backend).cuda()
    x = torch.randn(2, 33, 64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        out = attention(x, AttentionMask(causal=True))
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in attention.parameters())
