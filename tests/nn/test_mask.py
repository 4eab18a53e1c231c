import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyformer.nn import AttentionMask

CPU = torch.device("cpu")


def grid(rows: list[str]) -> torch.Tensor:
    return torch.tensor([[letter == "x" for letter in row] for row in rows])


def test_no_condition_is_no_mask():
    assert AttentionMask().dense(3, 3, CPU) is None


@pytest.mark.parametrize(
    ("q_seq", "k_seq", "rows"),
    [
        pytest.param(3, 3, ["x..", "xx.", "xxx"], id="square"),
        pytest.param(1, 4, ["xxxx"], id="one-query-sees-all"),
        pytest.param(2, 4, ["xxx.", "xxxx"], id="fewer-queries"),
        pytest.param(4, 2, ["..", "..", "x.", "xx"], id="more-queries"),
    ],
)
def test_causal_has_the_last_query_at_the_last_key(q_seq, k_seq, rows):
    allowed = AttentionMask(causal=True).dense(q_seq, k_seq, CPU)
    assert torch.equal(allowed[0, 0], grid(rows))


def test_lengths_hide_the_keys_at_the_right():
    allowed = AttentionMask(lengths=torch.tensor([2, 0, 3])).dense(2, 3, CPU)
    assert torch.equal(allowed.expand(3, 1, 2, 3)[:, 0, 0], grid(["xx.", "...", "xxx"]))
    assert torch.equal(allowed.expand(3, 1, 2, 3)[:, 0, 1], grid(["xx.", "...", "xxx"]))


def test_causal_and_lengths_must_both_hold():
    allowed = AttentionMask(causal=True, lengths=torch.tensor([2])).dense(3, 3, CPU)
    assert torch.equal(allowed[0, 0], grid(["x..", "xx.", "xx."]))


@pytest.mark.parametrize(
    ("mask", "q_seq", "expected"),
    [
        pytest.param(AttentionMask(causal=True), 4, True, id="causal"),
        pytest.param(AttentionMask(causal=True), 3, False, id="fewer-queries"),
        pytest.param(AttentionMask(), 4, False, id="full"),
        pytest.param(AttentionMask(causal=True, lengths=torch.tensor([4])), 4, False, id="padded"),
    ],
)
def test_only_plain_causal_self_attention_needs_no_mask_in_memory(mask, q_seq, expected):
    assert mask.is_square_causal(q_seq, 4) is expected


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    causal=st.booleans(),
    q_seq=st.integers(1, 6),
    k_seq=st.integers(1, 6),
    lengths=st.none() | st.lists(st.integers(0, 6), min_size=1, max_size=3),
)
def test_an_empty_row_is_always_announced(causal, q_seq, k_seq, lengths):
    mask = AttentionMask(causal, None if lengths is None else torch.tensor(lengths))
    allowed = mask.dense(q_seq, k_seq, CPU)
    has_empty_row = allowed is not None and bool((~allowed).all(dim=-1).any())
    assert mask.may_leave_rows_empty(q_seq, k_seq) or not has_empty_row


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    causal=st.booleans(),
    q_seq=st.integers(1, 6),
    k_seq=st.integers(1, 6),
    lengths=st.none() | st.lists(st.integers(0, 6), min_size=1, max_size=3),
)
def test_each_cell_follows_the_definition(causal, q_seq, k_seq, lengths):
    allowed = AttentionMask(causal, None if lengths is None else torch.tensor(lengths)).dense(q_seq, k_seq, CPU)
    batch = len(lengths or [0])
    expected = torch.ones(batch, 1, q_seq, k_seq, dtype=torch.bool)
    for b in range(batch):
        for i in range(q_seq):
            for j in range(k_seq):
                is_past = not causal or j <= k_seq - q_seq + i
                is_real = lengths is None or j < lengths[b]
                expected[b, 0, i, j] = is_past and is_real
    assert allowed is None or torch.equal(allowed.expand_as(expected), expected)
    assert allowed is not None or expected.all()
