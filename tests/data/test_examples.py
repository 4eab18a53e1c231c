"""Labelled sequences and batches: truncation, padding, order and token dropout."""

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyformer.data import ByteTokenizer, Examples, LabelledSplit, SimilarLengthLoader
from tinyformer.data.examples import truncate

from .streams import EOS, split_of

TOKENIZER = ByteTokenizer().build([]).with_mask()
lengths_of_texts = st.lists(st.integers(0, 40), min_size=1, max_size=120)


def labelled(lengths):
    """Examples of these lengths, the first token included; no token but `eos` stands for two places."""
    offsets = np.cumsum([0, *lengths])
    ids = np.arange(1000, 1000 + offsets[-1])
    ids[offsets[:-1]] = TOKENIZER.eos_id
    labels = np.arange(len(lengths)) % 3
    return LabelledSplit(ids.astype(np.uint32), offsets, labels, ["a", "b", "c"], TOKENIZER, 1, 0, 0)


def loader_of(split, batch_size, **settings):
    return SimilarLengthLoader(lambda epoch: Examples(split), split.lengths, batch_size, **settings)


def rows_of(batches):
    return [batch["rows"].tolist() for batch in batches]


def test_a_batch_is_padded_to_its_longest_example():
    batch = Examples(labelled([3, 1, 5])).__getitems__([2, 1, 0])
    eos = TOKENIZER.eos_id
    assert batch["inputs"].tolist() == [[eos, 1005, 1006, 1007, 1008], [eos] * 5, [eos, 1001, 1002, eos, eos]]
    columns = [batch[name].tolist() for name in ("lengths", "labels", "rows")]
    assert columns == [[5, 1, 3], [2, 1, 0], [2, 1, 0]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def sequences(lengths, texts_per_example, max_length):
    stream = split_of(lengths)
    ids, offsets, num_cut = truncate(stream, texts_per_example, max_length)
    return [part.tolist() for part in np.split(ids, offsets[1:-1])], num_cut


def test_long_texts_lose_their_end():
    assert sequences([3, 1, 4], 1, 4) == ([[EOS, 10, 11, 12], [EOS, 13], [EOS, 14, 15, 16]], 1)
    assert sequences([3, 1], 1, 5) == ([[EOS, 10, 11, 12], [EOS, 13]], 0)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=8), st.integers(1, 16))
def test_pairs_are_truncated_as_if_token_by_token(pairs, max_length):
    truncated, num_cut = sequences(list(chain.from_iterable(pairs)), 2, max_length)
    expected, start = [], 10
    for first, second in pairs:
        one, two = [EOS, *range(start, start + first)], [EOS, *range(start + first, start + first + second)]
        start += first + second
        while len(one) + len(two) > max_length:
            del (one if len(one) > len(two) else two)[-1]
        expected.append(one + two)
    assert truncated == expected
    assert num_cut == sum(first + second + 2 > max_length for first, second in pairs)


@settings(max_examples=40, deadline=None)
@given(lengths_of_texts, st.integers(1, 9), st.integers(1, 4), st.integers(0, 3))
def test_ranks_share_an_epoch_and_every_example_comes_once(texts, batch_size, world_size, seed):
    split = labelled([n + 1 for n in texts])
    loaders = [loader_of(split, batch_size, seed=seed, rank=r, world_size=world_size) for r in range(world_size)]
    assert len({len(loader) for loader in loaders}) == 1
    if len(texts) < world_size:
        assert len(loaders[0]) == 0
        return
    for _ in range(2):
        epoch = [rows_of(loader) for loader in loaders]
        assert {len(batches) for batches in epoch} == {len(loaders[0])}
        sizes = [len(batch) for batches in epoch for batch in batches]
        assert 1 <= min(sizes) <= max(sizes) <= min(sizes) + 1
        assert max(sizes) <= max(batch_size, 2)
        assert sorted(chain.from_iterable(chain.from_iterable(epoch))) == list(range(len(texts)))


def test_epochs_differ_in_batches_and_a_seed_repeats_them():
    split = labelled(np.random.default_rng(0).integers(2, 84, 200).tolist())
    loader = loader_of(split, 8, seed=1)
    epochs = [rows_of(loader) for _ in range(3)]
    assert len({frozenset(map(frozenset, epoch)) for epoch in epochs}) == 3  # other batches, not only another order
    assert epochs[0] == rows_of(loader_of(split, 8, seed=1)) != rows_of(loader_of(split, 8, seed=2))


def dropped(split, rows, dropout=0.3, key=(0, 0)):
    """For each example, which of its tokens are replaced by the mask token."""
    batch = Examples(split, dropout, key).__getitems__(rows)
    is_mask = (batch["inputs"] == TOKENIZER.mask_id).tolist()
    lengths = batch["lengths"].tolist()
    assert not any(any(row[length:]) for row, length in zip(is_mask, lengths, strict=True))
    return [row[:length] for row, length in zip(is_mask, lengths, strict=True)]


@pytest.mark.parametrize("dropout", [0.1, 0.3, 0.9])
def test_the_given_share_of_tokens_is_dropped_and_never_the_first(dropout):
    split = labelled([50] * 1000)
    rows = dropped(split, list(range(1000)), dropout)
    assert not any(row[0] for row in rows)
    share = np.array([row[1:] for row in rows])
    deviation = np.sqrt(dropout * (1 - dropout))
    assert share.mean() == pytest.approx(dropout, abs=5 * deviation / np.sqrt(share.size))
    assert share.mean(axis=1).std() == pytest.approx(deviation / np.sqrt(49), rel=0.2)
    assert np.corrcoef(share[:, 1:].ravel(), share[:, :-1].ravel())[0, 1] == pytest.approx(0, abs=0.03)


def test_what_is_dropped_depends_on_seed_epoch_and_example_alone():
    split = labelled([5, 40, 20, 31])
    alone = [dropped(split, [row])[0] for row in range(4)]
    assert dropped(split, [3, 1, 0, 2]) == [alone[3], alone[1], alone[0], alone[2]]
    keys = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({str(dropped(split, [1, 2, 3], key=key)) for key in keys}) == len(keys)
    plain, some = (Examples(split, dropout).__getitems__([0, 1, 2, 3])["inputs"] for dropout in (0.0, 0.3))
    assert torch.equal(some, torch.where(some == TOKENIZER.mask_id, some, plain))
    assert not (plain == TOKENIZER.mask_id).any()
