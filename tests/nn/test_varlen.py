"""What `_flash_varlen` asks of torch's kernel for packed sequences, forward and backward.

The kernel itself runs on CUDA only (`test_backends_cuda`): on the CPU, loops over the pairs of a query and a head are
registered in its place, below torch's own `varlen_attn` and its gradient formula.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nn.variants import documents, error
from tinyformer.nn import BACKENDS, AttentionMask, Scoring
from tinyformer.nn.kernels import flash
from tinyformer.nn.kernels.observe import running_kernel


def packed_pairs(query, key, starts_q, starts_k, max_q, max_k, **options) -> Iterator[tuple[int, int, int, list[int]]]:
    """Each query and head with its K/V head and the keys that it sees, where it sees any.

    As FlashAttention's documentation has it: in each sequence the last query stands at the last key.
    """
    assert starts_q.dtype == starts_k.dtype == torch.int32
    assert query.shape[-1] % 8 == 0
    limits = (options["window_size_left"], options["window_size_right"])
    before, after = (limit if limit >= 0 else math.inf for limit in limits)
    sequences = zip(*(starts.tolist() for starts in (starts_q, starts_q[1:], starts_k, starts_k[1:])), strict=False)
    for first_q, end_q, first_k, end_k in sequences:
        assert end_q - first_q <= max_q
        assert end_k - first_k <= max_k
        for row in range(first_q, end_q):
            at = row - end_q + end_k
            seen = [j for j in range(first_k, end_k) if at - before <= j <= at + after]
            for head in range(query.shape[1] if seen else 0):
                yield row, head, head // (query.shape[1] // key.shape[1]), seen


def forward_loop(query, key, value, *sizes, scale, **options):
    """aten::_flash_attention_forward: output and logsumexp, undefined where a query sees no key."""
    *sizes, dropout, causal, _ = sizes
    assert not dropout
    assert causal == ((options["window_size_left"], options["window_size_right"]) == (-1, 0))
    out, lse = torch.full_like(query, torch.nan), query.new_full(query.shape[1::-1], torch.nan)
    for row, head, shared, seen in packed_pairs(query, key, *sizes, **options):
        scores = scale * (key[seen, shared] @ query[row, head])
        lse[head, row] = scores.logsumexp(0)
        out[row, head] = scores.softmax(0) @ value[seen, shared]
    return out, lse, *(torch.empty(0) for _ in range(3))


def backward_loop(grad_out, query, key, value, out, lse, *sizes, scale, **options):
    """aten::_flash_attention_backward, from output and logsumexp (arXiv 2205.14135, algorithm 4)."""
    dq, dk, dv = (torch.zeros_like(x) for x in (query, key, value))
    for row, head, shared, seen in packed_pairs(query, key, *sizes[:4], **options):
        weights = torch.exp(scale * (key[seen, shared] @ query[row, head]) - lse[head, row])
        dv[seen, shared] += torch.outer(weights, grad_out[row, head])
        dweights = value[seen, shared] @ grad_out[row, head]
        dscores = scale * weights * (dweights - out[row, head] @ grad_out[row, head])
        dq[row, head] = dscores @ key[seen, shared]
        dk[seen, shared] += torch.outer(dscores, query[row, head])
    return dq, dk, dv


@pytest.fixture(autouse=True, scope="module")
def loops_in_place_of_the_kernel() -> Iterator[None]:
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward_loop, "CPU")
        library.impl("_flash_attention_backward", backward_loop, "CPU")
        yield


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
def test_packed_sequences_are_those_of_the_mask(kv_heads, mask):
    assert_equals_eager(mask, kv_heads=kv_heads)


def test_packed_queries_of_another_length_than_the_keys():
    assert_equals_eager(AttentionMask(lengths=torch.tensor([4, 9, 5])), q_seq=5)


def test_the_kernel_of_torch_2_11_shares_heads_unasked(monkeypatch):
    later = functools.partial(flash.varlen_attn, enable_gqa=True)
    monkeypatch.setattr(flash, "VARLEN_TAKES_ENABLE_GQA", False)
    monkeypatch.setattr(
        flash, "varlen_attn", lambda *args, scale, window_size: later(*args, scale=scale, window_size=window_size)
    )
    assert_equals_eager(PADDED)


def test_documents_whose_starts_are_known_are_packed_without_counting_them(monkeypatch):
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


def test_dropout_beside_a_mask_and_a_mask_of_any_pattern_are_refused_and_never_left_out():
    with FakeTensorMode():
        q, k, v = (torch.zeros(2, heads, 9, 8, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2))
        mask = AttentionMask(lengths=torch.tensor([4, 0], device="cuda"))
        with pytest.raises(ValueError, match="cannot compute sinks, biases or dropout together with a mask on CUDA"):
            BACKENDS["flash"].compute(q, k, v, mask, Scoring(0.3), 0.1)
        pattern = AttentionMask(allowed=torch.ones(1, 1, 9, 9, dtype=torch.bool, device="cuda"))
        with pytest.raises(ValueError, match="cannot compute a mask of any pattern on CUDA"):
            BACKENDS["flash"].compute(q, k, v, pattern, Scoring(0.3))
