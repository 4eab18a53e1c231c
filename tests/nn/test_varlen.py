"""The calls of torch's kernel for packed sequences by `_flash_varlen`, forward and backward.

The kernel itself runs on CUDA only (`test_backends_cuda`): on the CPU, its definition stands in its place.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from nn.variants import documents, error
from tinyformer.nn import BACKENDS, AttentionMask, Scoring
from tinyformer.nn.kernels import flash
from tinyformer.nn.maps import running_kernel
from tinyformer.nn.score import ScoreMod


def sequence_by_sequence(q, k, v, starts_q, starts_k, max_q, max_k, *, scale, window_size, enable_gqa=True):
    """In each sequence the last query stands at the last key; undefined where a query sees no key."""
    assert starts_q.dtype == starts_k.dtype == torch.int32
    assert q.shape[-1] % 8 == 0
    before, after = (limit if limit >= 0 else math.inf for limit in window_size)
    sizes_q, sizes_k = (starts.diff().tolist() for starts in (starts_q, starts_k))
    assert max(sizes_q) <= max_q
    assert max(sizes_k) <= max_k
    outputs = []
    for sequence in zip(q.split(sizes_q), k.split(sizes_k), v.split(sizes_k), strict=True):
        queries, keys, values = (x.transpose(0, 1) for x in sequence)
        num_q, num_k = queries.shape[1], keys.shape[1]
        distance = torch.arange(num_k) - torch.arange(num_k - num_q, num_k).unsqueeze(1)
        seen = (distance >= -before) & (distance <= after)
        out = scaled_dot_product_attention(queries, keys, values, seen, scale=scale, enable_gqa=enable_gqa)
        outputs.append(out.masked_fill(~seen.any(1, keepdim=True), torch.nan).transpose(0, 1))
    return torch.cat(outputs)


def assert_equals_eager(
    described: AttentionMask, known: AttentionMask | None = None, kv_heads: int = 2, q_seq: int = 9
) -> None:
    """Output and gradients; `known` is the mask with what the kernel is told besides."""
    random, found = torch.Generator().manual_seed(0), []
    sizes = ((4, q_seq), (kv_heads, 9), (kv_heads, 9), (4, q_seq))
    *values, upstream = (torch.randn(3, heads, seq, 6, generator=random) for heads, seq in sizes)
    for compute, mask in ((flash._flash_varlen, known or described), (BACKENDS["eager"].compute, described)):
        leaves = [x.clone().requires_grad_() for x in values]
        out = compute(*leaves, mask, Scoring(0.4))
        found.append([out, *torch.autograd.grad(out, leaves, upstream)])
    for actual, expected in zip(*found, strict=True):
        assert error(actual, expected) < 1e-6


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "varlen_attn", sequence_by_sequence)


PADDED = AttentionMask(lengths=torch.tensor([6, 9, 0]))
PACKED = AttentionMask(documents=documents(3, 9))
MASKS = {
    "padded": PADDED,
    "documents": PACKED,
    "causal documents": replace(PACKED, causal=True),
    "window": AttentionMask(window=3),
    "causal window": AttentionMask(True, window=3),
    "causal documents in a window": replace(PACKED, causal=True, window=3),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("kv_heads", [4, 2], ids=["own", "shared"])
def test_packed_sequences_are_those_of_the_mask(on_cpu, kv_heads, mask):
    assert_equals_eager(mask, kv_heads=kv_heads)


def test_packed_queries_of_another_length_than_the_keys(on_cpu, monkeypatch):
    monkeypatch.setattr(flash, "VARLEN_TAKES_ENABLE_GQA", False)  # as in torch 2.11, which shares heads unasked
    assert_equals_eager(AttentionMask(lengths=torch.tensor([4, 9, 5])), q_seq=5)


def test_documents_whose_starts_are_known_are_packed_without_counting_them(on_cpu, monkeypatch):
    monkeypatch.setattr(Tensor, "nonzero", None)
    packed = torch.tensor([[1] * 9, [3] * 4 + [4] * 5, [6] * 1 + [7] * 7 + [9] * 1])
    starts = torch.tensor([0, 0, 0, 9, 13, 13, 18, 19, 26, 27], dtype=torch.int32)
    known = AttentionMask(True, documents=packed, document_starts=starts)
    assert_equals_eager(AttentionMask(True, documents=packed), known)


@pytest.mark.parametrize("kv_heads", [4, 2], ids=["own", "shared"])
def test_torchs_own_kernel_takes_what_it_is_given(kv_heads):
    # Its stand-in for tracing looks at the arguments and computes nothing, so that it needs no GPU.
    with FakeTensorMode():
        sizes = ((4, 6), (kv_heads, 6), (kv_heads, 11))
        q, k, v = (torch.zeros(2, heads, 9, dim, dtype=torch.bfloat16) for heads, dim in sizes)
        mask, outputs = AttentionMask(lengths=torch.tensor([4, 0])), []
        assert running_kernel(lambda: outputs.append(flash._flash_varlen(q, k, v, mask, Scoring(0.3)))) == "varlen"
        assert outputs[0].shape == (2, 4, 9, 11)


def test_what_flash_lacks_on_cuda_is_refused_and_never_left_out():
    with FakeTensorMode():
        q, k, v = (torch.zeros(2, heads, 9, 8, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2))
        pattern = AttentionMask(allowed=torch.ones(1, 1, 9, 9, dtype=torch.bool, device="cuda"))
        bias = Scoring(0.3, mods=(ScoreMod(lambda score, *indices: score - 0.1, additive=True),))
        refused = ((AttentionMask(window=3), Scoring(0.3), 0.1), (pattern, Scoring(0.3)), (AttentionMask(), bias))
        for mask, *others in refused:
            with pytest.raises(ValueError, match="cannot compute a pattern or a bias on CUDA, nor sinks or dropout"):
                BACKENDS["flash"].compute(q, k, v, mask, *others)
