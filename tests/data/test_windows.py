"""Windows and the loaders of training: every target once, in order; an epoch is exact, also when it is resumed."""

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyformer.data import (
    CharTokenizer,
    Examples,
    Masking,
    ResumableLoader,
    SimilarLengthLoader,
    SourceDataModule,
    TextFiles,
    WindowFormat,
    Windows,
)
from tinyformer.data.batches.windows import IGNORED, TensorWindows

from .streams import EOS, split_of
from .test_examples import labelled

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


# Training loaders.

SPLIT = split_of([52, 33, 116])  # 203 scored tokens; each token is unique


def loader(**changes):
    return ResumableLoader(SPLIT, **({"seq_len": 5, "batch_size": 4, "seed": 1} | changes))


def example_loader(**changes):
    """Ten batches of examples in each epoch, with token dropout."""
    split = labelled(range(2, 39))
    return SimilarLengthLoader(lambda epoch: Examples(split, 0.5, (3, epoch)), split.lengths, 4, seed=3, **changes)


def first_targets(batches):
    """The first target of each window, by batch: it identifies the window."""
    return [batch["targets"][:, 0].tolist() for batch in batches]


@pytest.mark.parametrize(
    ("pack", "num_ranks", "num_batches"), [("concat", 1, 39 // 4), ("document", 1, 42 // 4), ("concat", 2, 39 // 8)]
)
def test_an_epoch_has_no_window_twice_and_leaves_out_less_than_a_batch(pack, num_ranks, num_batches):
    ranks = [loader(pack=pack, rank=rank, world_size=num_ranks) for rank in range(num_ranks)]
    assert [len(training) for training in ranks] == [num_batches] * num_ranks
    for _ in range(3):
        batches = [batch for training in ranks for batch in first_targets(training)]
        assert [len(batch) for batch in batches] == [4] * num_batches * num_ranks
        windows = list(chain.from_iterable(batches))
        assert len(set(windows)) == len(windows)


def test_epochs_differ_in_order_and_phase_and_a_seed_repeats_them():
    epochs, same = (
        [list(chain.from_iterable(first_targets(training))) for _ in range(8)] for training in (loader(), loader())
    )
    assert epochs == same
    assert len({tuple(epoch) for epoch in epochs}) == 8
    assert len({min(epoch) for epoch in epochs}) > 2
    assert epochs[0] != list(chain.from_iterable(first_targets(loader(seed=2))))


@pytest.mark.parametrize(
    ("make", "stop"), [(loader, 1), (loader, 9), (loader, 12), (example_loader, 4), (example_loader, 10)]
)
def test_a_saved_state_resumes_at_the_next_batch(make, stop):
    reference = make()
    expected = [batch["inputs"].tolist() for _ in range(3) for batch in reference]
    interrupted, seen = make(), []
    while len(seen) < stop:
        for batch in interrupted:
            seen.append(batch["inputs"].tolist())
            if len(seen) == stop:
                break
    resumed = make()
    resumed.load_state_dict(interrupted.state_dict())
    while len(seen) < len(expected):
        seen += [batch["inputs"].tolist() for batch in resumed]
    assert seen == expected


@pytest.mark.parametrize(("lengths", "ranks"), [([52, 33, 116], {"rank": 1, "world_size": 2}), ([6], {}), ([10], {})])
def test_tokens_on_a_device_give_the_same_batches_as_the_memory_map(lengths, ranks):
    devices = (None, torch.device("cpu"))
    mapped, held = (ResumableLoader(split_of(lengths), 5, 4, seed=1, **ranks, device=device) for device in devices)
    assert len(mapped) == len(held) > 0
    for _ in range(6):
        for one, other in zip(mapped, held, strict=True):
            assert one.keys() == other.keys()
            for name, tensor in one.items():
                torch.testing.assert_close(other[name], tensor, rtol=0, atol=0)
                assert other[name].is_contiguous()
        assert mapped.state_dict() == held.state_dict()


# The data of a run.


@pytest.mark.parametrize(
    ("windows", "free", "device"),
    [
        ({}, 10**6, "cuda"),
        ({}, 10**5, None),  # 4 bytes for each of 2,772 tokens are more than a tenth of that
        ({"masking": Masking()}, 10**6, None),
    ],
)
def test_tokens_are_kept_on_a_gpu_if_they_fit_and_windows_are_plain(tmp_path, monkeypatch, windows, free, device):
    (tmp_path / "book.txt").write_text(
        "Happy families are alike; each unhappy family is unhappy in its own way.\n" * 43
    )
    source, settings = TextFiles(str(tmp_path / "book.txt")), {"cache_dir": str(tmp_path / "cache")}
    data = SourceDataModule(source, CharTokenizer(), WindowFormat(16, **windows), 8, **settings)
    data.prepare()
    assert data.is_prepared(data.tokenizer)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**12))
    found = data.row_format.token_device(data.splits["train"], torch.device("cuda"))
    assert found == (torch.device(device) if device else None)
    assert data.row_format.token_device(data.splits["train"], torch.device("cpu")) is None
