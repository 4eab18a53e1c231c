"""What `_flash_varlen` asks of the kernel for packed sequences, answered on CPU by that kernel's definition.

The kernel itself runs on CUDA only (`test_backends_cuda`): here its place is taken by one sequence after the other.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nn.attention_cases import Case, error, inputs
from tinyformer.nn import BACKENDS, AttentionMask, Scoring
from tinyformer.nn.kernels import flash
from tinyformer.nn.kernels.observe import running_kernel

MASKS = ("padded", "documents", "causal+documents", "window", "causal+window", "causal+documents+window")


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    window_size: tuple[int, int],
) -> Tensor:
    """As FlashAttention's documentation has it: in each sequence the last query stands at the last key."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert query.shape[-1] % 8 == 0
    before, after = (limit if limit >= 0 else math.inf for limit in window_size)
    out = torch.full((*query.shape[:2], value.shape[-1]), torch.nan)
    starts_q, starts_k = cu_seq_q.tolist(), cu_seq_k.tolist()
    for number in range(len(starts_q) - 1):
        q, k, v = (
            x[starts[number] : starts[number + 1]]
            for x, starts in ((query, starts_q), (key, starts_k), (value, starts_k))
        )
        assert len(q) <= max_q
        assert len(k) <= max_k
        for head in range(query.shape[1]):
            shared = head // (query.shape[1] // key.shape[1])
            for i in range(len(q)):
                at = i + len(k) - len(q)
                seen = [j for j in range(len(k)) if at - before <= j <= at + after]
                if seen:  # else it is left undefined
                    weights = torch.softmax(scale * (k[seen, shared] @ q[i, head]), dim=0)
                    out[starts_q[number] + i, head] = weights @ v[seen, shared]
    return out


def packed_attention_that_asks(*args: object, enable_gqa: bool, **options: object) -> Tensor:
    """Newer ones refuse to share K/V heads unasked."""
    assert enable_gqa == (args[0].shape[1] != args[1].shape[1])
    return packed_attention(*args, **options)


@pytest.mark.parametrize("asks", [False, True], ids=["torch-2.11", "later"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("num_kv_heads", [4, 2], ids=["own", "shared"])
def test_packed_sequences_are_those_of_the_mask(num_kv_heads, mask, asks, monkeypatch):
    monkeypatch.setattr(flash, "varlen_attn", packed_attention_that_asks if asks else packed_attention)
    monkeypatch.setattr(flash, "VARLEN_TAKES_ENABLE_GQA", asks)
    case = Case(9, 9, 6, mask, batch=3, num_kv_heads=num_kv_heads)
    q, k, v, _ = inputs(case, torch.float32)
    described, scoring = case.attention_mask(), Scoring(case.head_dim**-0.5)
    actual = flash._flash_varlen(q, k, v, described, scoring)
    expected = BACKENDS["eager"].compute(q, k, v, described, scoring)
    assert error(actual, expected) < 1e-6


def test_documents_whose_starts_are_known_are_packed_without_counting_them(monkeypatch):
    monkeypatch.setattr(flash, "varlen_attn", packed_attention)
    monkeypatch.setattr(flash, "VARLEN_TAKES_ENABLE_GQA", False)
    monkeypatch.setattr(Tensor, "nonzero", None)
    q, k, v, _ = inputs(Case(9, 9, 8, "causal", batch=3), torch.float32)
    documents = torch.tensor([[1] * 9, [3] * 4 + [4] * 5, [6] * 1 + [7] * 7 + [9] * 1])
    starts = torch.tensor([[0, 0, 0], [0, 4, 0], [0, 1, 8]])
    described, scoring = AttentionMask(True, documents=documents), Scoring(0.3)
    known = AttentionMask(True, documents=documents, document_starts=F.pad(starts, (0, 2)))
    expected = BACKENDS["eager"].compute(q, k, v, described, scoring)
    assert error(flash._flash_varlen(q, k, v, known, scoring), expected) < 1e-6
    # Rows that were cut behind their seventh token.
    cut = AttentionMask(True, documents=documents[:, :7], document_starts=starts)
    q, k, v = (x[:, :, :7] for x in (q, k, v))
    expected = BACKENDS["eager"].compute(q, k, v, AttentionMask(True, documents=documents[:, :7]), scoring)
    assert error(flash._flash_varlen(q, k, v, cut, scoring), expected) < 1e-6


def test_packed_queries_of_another_length_than_the_keys(monkeypatch):
    monkeypatch.setattr(flash, "varlen_attn", packed_attention)
    monkeypatch.setattr(flash, "VARLEN_TAKES_ENABLE_GQA", False)
    case = Case(5, 9, 8, "padded", batch=2)
    q, k, v, _ = inputs(case, torch.float32)
    described, scoring = AttentionMask(lengths=torch.tensor([4, 9])), Scoring(0.3)
    expected = BACKENDS["eager"].compute(q, k, v, described, scoring)
    assert error(flash._flash_varlen(q, k, v, described, scoring), expected) < 1e-6


@pytest.mark.parametrize("num_kv_heads", [4, 2], ids=["own", "shared"])
def test_torchs_own_kernel_takes_what_it_is_given(num_kv_heads):
    # Its stand-in for tracing looks at the arguments and computes nothing, so that it needs no GPU.
    with FakeTensorMode():
        sizes = ((4, 6), (num_kv_heads, 6), (num_kv_heads, 11))
        q, k, v = (torch.zeros(2, heads, 9, dim, dtype=torch.bfloat16) for heads, dim in sizes)
        mask, outputs = AttentionMask(lengths=torch.tensor([4, 0])), []
        kernel = running_kernel(lambda: outputs.append(flash._flash_varlen(q, k, v, mask, Scoring(0.3))))
        assert kernel == "varlen"
        assert outputs[0].shape == (2, 4, 9, 11)


def test_dropout_beside_a_mask_is_refused_and_never_left_out():
    with FakeTensorMode():
        q, k, v = (torch.zeros(2, heads, 9, 8, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2))
        mask = AttentionMask(lengths=torch.tensor([4, 0], device="cuda"))
        with pytest.raises(ValueError, match="cannot compute sinks, biases or dropout together with a mask on CUDA"):
            BACKENDS["flash"].compute(q, k, v, mask, Scoring(0.3), 0.1)
