"""Masks: each cell by its definition, what is left of them for some queries and keys, and FlexAttention's form."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyformer.nn import AttentionMask

CPU = torch.device("cpu")


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    causal=st.booleans(),
    q_seq=st.integers(1, 6),
    k_seq=st.integers(1, 6),
    lengths=st.none() | st.lists(st.integers(0, 6), min_size=1, max_size=3),
    window=st.none() | st.integers(1, 7),
    cut=st.none() | st.integers(1, 5),
    axes=st.none() | st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_each_cell_follows_the_definition_and_an_empty_row_is_announced(
    causal, q_seq, k_seq, lengths, window, cut, axes
):
    batch = len(lengths or [0])
    mask = AttentionMask(
        causal,
        None if lengths is None else torch.tensor(lengths),
        None if cut is None else torch.arange(k_seq).ge(cut).long().expand(batch, -1),
        window,
    )
    expected = torch.ones(batch, 2, q_seq, k_seq, dtype=torch.bool)
    if axes is not None:  # the others are of size 1
        shape = [size if is_whole else 1 for size, is_whole in zip(expected.shape, axes, strict=True)]
        pattern = torch.rand(shape, generator=torch.Generator().manual_seed(7)) < 0.7
        of_examples = pattern[:, 0] if shape[1] == 1 else pattern
        mask = replace(mask, allowed=pattern[0, 0] if shape[:2] == [1, 1] else of_examples)
        expected &= pattern
    allowed = mask.dense(q_seq, k_seq, CPU)
    for b in range(batch):
        for row in range(q_seq):
            i = k_seq - q_seq + row
            for j in range(k_seq):
                is_past = not causal or j <= i
                is_real = lengths is None or j < lengths[b]
                is_same = cut is None or (i >= 0 and (i < cut) == (j < cut))  # before the first key there is none
                is_near = window is None or (i - window < j if causal else -(window // 2) <= j - i < (window + 1) // 2)
                expected[b, :, row, j] &= is_past and is_real and is_same and is_near
    assert allowed is None or torch.equal(allowed.expand_as(expected), expected)
    assert allowed is not None or expected.all()
    assert mask.may_leave_rows_empty(q_seq, k_seq) or expected.any(-1).all()
    if mask.is_plain(q_seq, k_seq):  # so that kernels have a flag for it
        assert expected.all() if not causal else torch.equal(expected, torch.ones_like(expected).tril())


@pytest.mark.parametrize("window", [None, 1, 4, 5, 9])
@pytest.mark.parametrize("causal", [True, False])
def test_the_last_query_alone_sees_the_same_through_a_simpler_mask(causal, window):
    mask = AttentionMask(causal, torch.tensor([5, 3, 0]), window=window)
    simpler = mask.for_last(5)
    assert torch.equal(simpler.dense(1, 5, CPU), mask.dense(1, 5, CPU).expand(3, 1, 1, 5))
    bare = AttentionMask(causal, window=window).for_last(5)
    assert bare.is_plain(1, 5) == (window is None or (causal and window >= 5))


def test_a_mask_without_its_first_keys_is_the_rest_of_it():
    documents = torch.tensor([[0, 0, 1, 1, 2], [0, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
    for mask in (AttentionMask(True, torch.tensor([5, 3, 1])), AttentionMask(True, documents=documents, window=2)):
        rest = mask.without_first(2).dense(2, 3, CPU)
        assert torch.equal(rest, mask.dense(2, 5, CPU)[..., 2:])
    pattern = torch.rand(1, 2, 2, 5) < 0.5
    assert torch.equal(AttentionMask(allowed=pattern).without_first(2).allowed, pattern[..., 2:])
    assert AttentionMask(allowed=pattern[..., :1]).without_first(2).dense(2, 3, CPU).shape == (1, 2, 2, 3)
    assert AttentionMask(True, window=3).without_first(2) == AttentionMask(True, window=3)


@pytest.mark.parametrize("q_seq", [1, 4, 7])
@pytest.mark.parametrize("window", [None, 1, 4, 5])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("documents", [None, torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0] * 7, [0, 1, 2, 3, 4, 5, 6]])])
def test_the_number_of_visible_keys_is_that_of_the_dense_mask(documents, causal, window, q_seq):
    mask = AttentionMask(causal, torch.tensor([7, 4, 0]), documents, window)
    expected = mask.dense(q_seq, 7, torch.device("cpu")).expand(-1, -1, q_seq, -1).sum(dim=-1)
    assert torch.equal(mask.num_visible(q_seq, 7, torch.device("cpu")), expected)
