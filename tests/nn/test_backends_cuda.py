"""The exactness of the backends on CUDA, and the kernels that run there."""

from itertools import cycle

import pytest
import torch

from nn.variants import EITHER_WAY, NAMES, able, documents, prepared, small
from tinyformer.nn import AttentionMask, KernelRequirements, Scoring, select_backend
from tinyformer.nn.kernels.choose import features_of
from tinyformer.nn.maps import KernelObserver
from tinyformer.programs.doctor.cells import Cell, check_exactness
from tinyformer.programs.doctor.exactness import DTYPES, MASKS, Problem, Shape, factory_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("default"),  # torch's compiler raises, and hides, warnings of its own
]


@pytest.fixture(autouse=True)
def _exact_fp32_products():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def windowed(make_mask):
    """A mask in a window of a third of the row."""
    return lambda rows, seq, device: make_mask(rows, seq, device).within(max(1, seq // 3))


EVERY_MASK = MASKS | {
    "documents+full": lambda rows, seq, device: AttentionMask(documents=documents(rows, seq).to(device)),
    "window": windowed(MASKS["full"]),
    "causal+window": windowed(MASKS["causal"]),
    "documents+window": windowed(MASKS["documents"]),
    "pattern": lambda rows, seq, device: AttentionMask(
        allowed=torch.rand(rows, 4, 1, seq, generator=torch.Generator().manual_seed(0)).to(device) < 0.5
    ),
}


def assert_exact(name: str, make_mask, shape: Shape, dtype: str, cross: bool = False) -> int:
    """The number of fused backends that computed it, all of them exactly."""
    attention = prepared(lambda: factory_of(small(name))(shape.d_model, 4))
    problem, ran = Problem(attention, make_mask, shape, torch.device("cuda"), cross), 0
    for backend in ("sdpa", "flash", "flex"):
        cell = check_exactness(problem, Cell(backend, name, "", dtype), DTYPES[dtype])
        assert cell.failure is None, cell
        ran += cell.status == "ran"
    return ran


SEQS, HEAD_DIMS = (1, 63, 257, 1024), (32, 64, 128)
# Each kernel is compiled for each size, so a size has one mask in three.
CASES = [
    (seq, HEAD_DIMS[(i + j) % len(HEAD_DIMS)], mask)
    for i, seq in enumerate(SEQS)
    for j, mask in enumerate(EVERY_MASK)
    if not (seq == 1 and mask == "causal+padded")  # that of one token is padding alone, which flash computes
]


@pytest.mark.parametrize(("seq", "head_dim", "mask"), CASES)
def test_every_length_is_exact_under_every_mask(seq, head_dim, mask):
    for dtype in ("bf16", "fp32"):
        assert assert_exact("gqa", EVERY_MASK[mask], Shape(seq, head_dim, 3), dtype) >= 1


@pytest.mark.parametrize(("seq", "head_dim", "mask"), [case for case in CASES if case[2] in ("full", "padded")])
def test_cross_attention_is_exact(seq, head_dim, mask):
    assert assert_exact("gqa", MASKS[mask], Shape(seq, head_dim, 2), "bf16", cross=True) >= 1


@pytest.mark.parametrize(("name", "mask"), list(zip(NAMES, cycle(["causal", "padded", "documents"]))))
def test_every_variant_is_exact(name, mask):
    mask = mask if name in EITHER_WAY else "causal"
    ran = assert_exact(name, MASKS[mask], Shape(33, 64, 3), "bf16")  # heads of 64 dimensions, as kernels take them
    assert ran >= (able(name, training=False) != ())


@pytest.mark.parametrize("mask", [name for name in EVERY_MASK if name not in ("full", "causal+padded", "pattern")])
@pytest.mark.parametrize("kv_heads", [4, 2], ids=["own", "shared"])
def test_auto_runs_the_flash_kernel_or_that_for_packed_sequences(kv_heads, mask):
    described = EVERY_MASK[mask](3, 257, torch.device("cuda"))
    q, k, v = (
        torch.zeros(3, heads, 257, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for heads in (4, kv_heads, kv_heads)
    )
    features = features_of(described, Scoring(), 257, 257, dropout=False, gradient=True)
    chosen = select_backend("auto", KernelRequirements("cuda", torch.bfloat16, 64, features, 257))
    with KernelObserver() as kernels:
        chosen.compute(q, k, v, described, Scoring(0.125)).sum().backward()
    assert chosen.name == "flash"
    assert kernels.kernel == ("flash" if mask == "causal" else "varlen")
