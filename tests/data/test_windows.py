"""Windows: every target exactly once, in order, whatever the lengths."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyformer.data import IGNORED, TokenSplit, Windows

from .streams import EOS, split_of

lengths_of_documents = st.lists(st.integers(1, 20), min_size=1, max_size=12)
packs = st.sampled_from(["concat", "document"])


@given(lengths_of_documents, st.integers(1, 12), packs)
def test_every_target_is_covered_once_and_in_order(lengths, seq_len, pack):
    split = split_of(lengths)
    windows = Windows(split, seq_len, pack)
    batch = windows.__getitems__(list(range(len(windows))))
    scored = batch["targets"] != IGNORED
    assert batch["targets"][scored].tolist() == split.ids[1:].tolist()
    assert batch["inputs"][scored].tolist() == split.ids[:-1].tolist()
    assert (batch["inputs"][~scored] == EOS).all()
    # padding is on the right only, and no window is all padding
    assert (scored.int().diff(dim=1) <= 0).all()
    assert scored[:, 0].all()


@given(lengths_of_documents, st.integers(1, 12), packs, st.randoms(use_true_random=False))
def test_targets_that_are_not_scored_are_ignored(lengths, seq_len, pack, random):
    whole = split_of(lengths)
    scored = np.array([random.random() < 0.5 for _ in whole.ids])
    split = replace(whole, scored=scored)
    windows = Windows(split, seq_len, pack)
    everything = list(range(len(windows)))
    batch, plain = windows.__getitems__(everything), Windows(whole, seq_len, pack).__getitems__(everything)
    kept = batch["targets"] != IGNORED
    assert batch["targets"][kept].tolist() == whole.ids[1:][scored[1:]].tolist()
    assert (batch["targets"] == plain["targets"])[kept].all()
    assert batch["inputs"].tolist() == plain["inputs"].tolist()
    assert split.num_tokens == int(kept.sum())
    assert split.num_targets == whole.num_targets == whole.num_tokens


@given(lengths_of_documents, st.integers(1, 12))
def test_no_window_spans_two_documents(lengths, seq_len):
    windows = Windows(split_of(lengths), seq_len, "document")
    batch = windows.__getitems__(list(range(len(windows))))
    scored = batch["targets"] != IGNORED
    for inputs in (row[keep] for row, keep in zip(batch["inputs"], scored, strict=True)):
        assert EOS not in inputs[1:]


@given(lengths_of_documents, st.integers(1, 12), st.integers(0, 11))
def test_training_windows_are_full_and_begin_at_the_phase(lengths, seq_len, phase):
    split = split_of(lengths)
    windows = Windows(split, seq_len, "concat", phase, drop_partial=True)
    assert len(windows) == max(split.num_tokens - phase, 0) // seq_len
    if len(windows):
        batch = windows.__getitems__(list(range(len(windows))))
        assert batch["targets"].flatten().tolist() == split.ids[phase + 1 :][: batch["targets"].numel()].tolist()


@given(lengths_of_documents, st.integers(1, 12), packs)
def test_documents_are_those_between_two_eos(lengths, seq_len, pack):
    windows = Windows(split_of(lengths), seq_len, pack, with_documents=True)
    batch = windows.__getitems__(list(range(len(windows))))
    scored = batch["targets"] != IGNORED
    # An eos opens a document: counting them from the beginning numbers the documents.
    expected = (batch["inputs"][scored] == EOS).cumsum(0)
    assert batch["documents"][scored].tolist() == expected.tolist()
    assert (batch["documents"].diff(dim=1) >= 0).all()


def test_documents_come_only_where_they_are_asked_for():
    assert "documents" not in Windows(split_of([5, 9, 2]), 4)[0]


def test_indices_may_come_in_any_order():
    windows = Windows(split_of([5, 9, 2]), 4, "document")
    batch = windows.__getitems__([3, 0, 3])
    for row, index in enumerate([3, 0, 3]):
        assert batch["inputs"][row].tolist() == windows[index]["inputs"][0].tolist()


def test_four_byte_ids_survive():
    ids = np.array([EOS, 70_000, 100_000], np.uint32)
    windows = Windows(TokenSplit(ids, np.array([0, 3]), 1, 1, 0), 2)
    assert windows[0]["targets"].tolist() == [[70_000, 100_000]]


@pytest.mark.parametrize("pack", ["concat", "document"])
def test_a_split_without_text_has_no_windows(pack):
    empty = TokenSplit(np.array([], np.uint16), np.array([0]), 0, 0, 0)
    assert len(Windows(empty, 4, pack)) == 0
