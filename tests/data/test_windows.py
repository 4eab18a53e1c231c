"""Windows: every target exactly once, in order, whatever the lengths."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyformer.batch import IGNORED
from tinyformer.data import Windows
from tinyformer.data.batches.windows import TensorWindows

from .streams import EOS, split_of

lengths_of_documents = st.lists(st.integers(1, 20), min_size=1, max_size=12)
packs = st.sampled_from(["concat", "document"])


def all_of(windows):
    return windows.__getitems__(list(range(len(windows))))


@given(lengths_of_documents, st.integers(1, 12), packs)
@settings(max_examples=60, deadline=None)
def test_every_target_is_covered_once_and_in_order(lengths, seq_len, pack):
    split = split_of(lengths)
    batch = all_of(Windows(split, seq_len, pack, with_documents=True))
    scored = batch["targets"] != IGNORED
    assert batch["targets"][scored].tolist() == split.ids[1:].tolist()
    assert batch["inputs"][scored].tolist() == split.ids[:-1].tolist()
    assert (batch["inputs"][~scored] == EOS).all()
    assert batch["lengths"].tolist() == scored.sum(dim=1).tolist()
    # Padding is on the right only, and no window is all padding.
    assert (scored.int().diff(dim=1) <= 0).all()
    assert scored[:, 0].all()
    # An eos opens a document, so counting them from the beginning numbers the documents.
    assert batch["documents"][scored].tolist() == (batch["inputs"][scored] == EOS).cumsum(0).tolist()
    assert (batch["documents"].diff(dim=1) >= 0).all()
    assert not set(batch["documents"][scored].tolist()) & set(batch["documents"][~scored].tolist())
    rows, starts = batch["documents"].tolist(), batch["document_starts"].tolist()
    per_row = (len(starts) - 1) // len(rows)
    for number, row in enumerate(rows):
        begun = [number * seq_len + i for i in range(seq_len) if not i or row[i] != row[i - 1]]
        assert starts[number * per_row :][:per_row] == begun + begun[-1:] * (per_row - len(begun))
    assert starts[-1] == len(rows) * seq_len
    if pack == "document":
        assert not (batch["inputs"] == EOS)[:, 1:][scored[:, 1:]].any()


@given(lengths_of_documents, st.integers(1, 12), st.integers(0, 11))
@settings(max_examples=40, deadline=None)
def test_training_windows_are_full_and_begin_at_the_phase(lengths, seq_len, phase):
    split = split_of(lengths)
    mapped = Windows(split, seq_len, "concat", phase, drop_partial=True)
    held = TensorWindows(torch.from_numpy(split.ids.astype(np.int32)), seq_len, phase)
    num_windows = max(split.num_tokens - phase, 0) // seq_len
    assert len(mapped) == num_windows
    if phase <= split.num_tokens:
        assert len(held) == num_windows
    if num_windows:
        for batch in (all_of(mapped), all_of(held)):
            assert batch["targets"].flatten().tolist() == split.ids[phase + 1 :][: num_windows * seq_len].tolist()
            assert batch["inputs"].flatten().tolist() == split.ids[phase:][: num_windows * seq_len].tolist()
