"""The parity of the backends on CUDA, and what flash refuses there."""

import pytest
import torch
from attention_cases import (
    MASKS,
    Case,
    assert_within_bf16,
    eager_result,
    error,
    inputs,
    run_backend,
)
from variants import NAMES, able, make, mask_of, tokens

from tinyformer.nn import BACKENDS, Attention, AttentionCase, AttentionMask, Feature, Scoring, select_backend
from tinyformer.nn.kernels.case import features_of
from tinyformer.nn.kernels.observe import KernelObserver, running_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

LENGTHS = (1, 63, 257, 1024)
HEAD_DIMS = (32, 64, 128)
ON_CUDA = ("eager", "sdpa", "flash", "flex")
VARLEN = ("padded", "documents", "causal+documents", "window", "causal+window", "causal+documents+window")
"""What flash computes by its kernel for packed sequences."""


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


@pytest.mark.parametrize("mask", VARLEN)
@pytest.mark.parametrize("head_dim", [32, 128])
@pytest.mark.parametrize("seq", [1, 63, 257])
def test_flash_bf16_parity_of_packed_sequences(seq, head_dim, mask):
    assert_bf16_parity("flash", Case(seq, seq, head_dim, mask))


@pytest.mark.parametrize("mask", ["full", "padded"])
@pytest.mark.parametrize(("q_seq", "k_seq"), [(1, 63), (63, 257), (257, 63)])
def test_flash_bf16_parity_of_cross_attention(q_seq, k_seq, mask):
    assert_bf16_parity("flash", Case(q_seq, k_seq, 64, mask))


@pytest.mark.parametrize("mask", [*MASKS, *VARLEN[1:]])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("seq", [63, 257])
def test_flex_bf16_parity(seq, head_dim, mask):
    assert_bf16_parity("flex", Case(seq, seq, head_dim, mask))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("q_seq", "k_seq"), [(1, 63), (63, 257), (257, 63)])
def test_flex_bf16_parity_of_cross_attention(q_seq, k_seq, mask):
    assert_bf16_parity("flex", Case(q_seq, k_seq, 64, mask))


@pytest.mark.parametrize("mask", ["causal", "padded", "causal+documents"])
@pytest.mark.parametrize("name", NAMES)
def test_every_variant_is_eager_to_its_rounding(name, mask):
    x, described = tokens(seq=33).cuda().bfloat16(), mask_of(mask, 33)
    lengths, ids = (None if t is None else t.cuda() for t in (described.lengths, described.documents))
    described = AttentionMask(described.causal, lengths, ids)

    def of(backend: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        # Heads of 64 dimensions, as kernels want them; the same parameters in every dtype.
        attention = make(name, backend, head_dim=64).bfloat16().to("cuda", dtype)
        leaf = x.to(dtype).requires_grad_()
        out = attention(leaf, described)
        named = {"x": leaf} | dict(attention.named_parameters())
        upstream = tokens(3, 33, seed=6).to("cuda", dtype)
        grads = torch.autograd.grad(out, list(named.values()), upstream)
        return {"out": out.detach()} | dict(zip(named, grads, strict=True))

    exact, eager = of("eager", torch.float64), of("eager", torch.bfloat16)
    ran = 0
    for backend in ON_CUDA[1:]:
        try:
            actual = of(backend, torch.bfloat16)
        except ValueError as refusal:
            assert "can." in str(refusal), backend  # noqa: PT017
            continue
        ran += 1
        for key in exact:
            # Sums that cancel, see `test_exactness`.
            if not ("differential" in name and ("lambdas" in key or key == "sink")):
                assert_within_bf16(actual[key], eager[key], exact[key], f"{backend}, {key}")
    assert ran >= (able(name, training=False) != ())


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
@pytest.mark.parametrize("backend", ON_CUDA)
def test_a_row_of_length_zero_gives_exact_zeros_and_gradients(backend, mask, dtype):
    case = Case(63, 63, 64, mask)
    if backend == "flash" and (mask != "padded" or dtype != torch.bfloat16):
        backend = "sdpa"  # flash refuses these, see below
    result = run_backend(backend, case, inputs(case, dtype, "cuda"))
    for name, value in result.items():
        assert torch.count_nonzero(value[1]) == 0, name
        assert value.isfinite().all(), name


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
def test_packed_sequences_run_the_flash_kernel_by_themselves(mask):
    case = Case(63, 63, 64, mask)
    described = case.attention_mask("cuda")
    asked = features_of(described, Scoring(), 63, 63, dropout=False, gradient=True)
    chosen = select_backend("auto", AttentionCase("cuda", torch.bfloat16, 64, asked, 63))
    assert chosen.name == "flash"
    q, k, v, _ = inputs(case, torch.bfloat16, "cuda")
    assert running_kernel(lambda: chosen.compute(q, k, v, described, Scoring(0.125))) == "varlen"


def test_flash_refuses_fp32_and_names_one_that_can():
    attention = Attention(64, 2, backend="flash").cuda()
    x, mask = torch.randn(2, 9, 64, device="cuda"), AttentionMask(causal=True)
    able = r"auto or eager or sdpa or flex can\."
    with pytest.raises(ValueError, match=rf"torch\.float32 .*bf16-mixed works.*={able}") as caught:
        attention(x, mask)
    assert "attention.backend=flash" in str(caught.value)
    with torch.autocast("cuda", torch.bfloat16):
        assert attention(x, mask).isfinite().all()
    attention.backend = "auto"
    assert attention(x, mask).isfinite().all()


def test_flash_takes_padding_alone_and_refuses_it_beside_a_causal_mask():
    attention = Attention(64, 2, backend="flash").cuda().bfloat16()
    x = torch.randn(2, 9, 64, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([9, 4], device="cuda")
    assert attention(x, AttentionMask(lengths=lengths)).isfinite().all()
    sentence = r"cannot compute padding beside a causal mask .* on CUDA; .*=auto or eager or sdpa or flex can\."
    with pytest.raises(ValueError, match=sentence):
        attention(x, AttentionMask(True, lengths))
    attention.backend = "auto"
    assert attention(x, AttentionMask(True, lengths)).isfinite().all()


@pytest.mark.parametrize("seq", [9, 300])
@pytest.mark.parametrize("backend", ON_CUDA)
def test_a_later_token_never_changes_an_earlier_output(backend, seq):
    q, k, v, _ = inputs(Case(seq, seq, 64, "causal"), torch.bfloat16, "cuda")
    k2, v2 = k.clone(), v.clone()
    k2[:, :, seq // 2 :], v2[:, :, seq // 2 :] = 3.0, -50.0
    compute, mask = BACKENDS[backend].compute, AttentionMask(causal=True)
    before, after = compute(q, k, v, mask, Scoring(0.2)), compute(q, k2, v2, mask, Scoring(0.2))
    assert torch.equal(before[:, :, : seq // 2], after[:, :, : seq // 2])


@pytest.mark.parametrize("backend", ON_CUDA)
def test_autocast_trains_in_bf16(backend):
    attention = Attention(64, 2, 1, qk_norm=True, backend=backend).cuda()
    x = torch.randn(2, 33, 64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        out = attention(x, AttentionMask(causal=True))
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in attention.parameters())
