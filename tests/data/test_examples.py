"""Labelled texts: sequences and batches, token dropout, what is held out, which classes there are."""

import random
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyformer.data import (
    ByteTokenizer,
    ExampleFormat,
    Examples,
    LabelledSplit,
    SimilarLengthLoader,
    SourceDataModule,
)
from tinyformer.data.examples import truncate
from tinyformer.data.sources.documents import from_columns
from tinyformer.errors import ArgumentError
from tinyformer.run.results import describe_data

from .streams import EOS, split_of

TOKENIZER = ByteTokenizer().build([]).with_mask()


# Sequences and batches.


def labelled(lengths):
    """Examples of these lengths, the first token included; no token but `eos` stands for two places."""
    offsets = np.cumsum([0, *lengths])
    ids = np.arange(1000, 1000 + offsets[-1])
    ids[offsets[:-1]] = TOKENIZER.eos_id
    labels = np.arange(len(lengths)) % 3
    return LabelledSplit(ids.astype(np.uint32), offsets, labels, ["a", "b", "c"], TOKENIZER, 1, 0, 0)


def rows_of(batches):
    return [batch["rows"].tolist() for batch in batches]


def test_a_batch_is_padded_to_its_longest_example():
    batch = Examples(labelled([3, 1, 5])).__getitems__([2, 1, 0])
    eos = TOKENIZER.eos_id
    assert batch["inputs"].tolist() == [[eos, 1005, 1006, 1007, 1008], [eos] * 5, [eos, 1001, 1002, eos, eos]]
    columns = [batch[name].tolist() for name in ("lengths", "labels", "rows")]
    assert columns == [[5, 1, 3], [2, 1, 0], [2, 1, 0]]


def sequences(lengths, texts_per_example, max_length):
    ids, offsets, num_cut = truncate(split_of(lengths), texts_per_example, max_length)
    return [part.tolist() for part in np.split(ids, offsets[1:-1])], num_cut


@settings(max_examples=40)
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


@settings(max_examples=40)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=120), st.integers(1, 9), st.integers(1, 4), st.integers(0, 3))
def test_ranks_share_an_epoch_and_every_example_comes_once(texts, batch_size, world_size, seed):
    split = labelled([n + 1 for n in texts])
    loader = partial(SimilarLengthLoader, lambda epoch: Examples(split), split.lengths, batch_size, seed=seed)
    loaders = [loader(rank=rank, world_size=world_size) for rank in range(world_size)]
    assert len({len(loader) for loader in loaders}) == 1
    assert (len(loaders[0]) == 0) == (len(texts) < world_size)
    for _ in range(2 if len(loaders[0]) else 0):
        epoch = [rows_of(loader) for loader in loaders]
        assert {len(batches) for batches in epoch} == {len(loaders[0])}
        sizes = [len(batch) for batches in epoch for batch in batches]
        assert 1 <= min(sizes) <= max(sizes) <= min(min(sizes) + 1, max(batch_size, 2))
        assert sorted(chain.from_iterable(chain.from_iterable(epoch))) == list(range(len(texts)))


def dropped(split, rows, dropout=0.3, key=(0, 0)):
    """For each example, which of its tokens are replaced by the mask token."""
    batch = Examples(split, dropout, key).__getitems__(rows)
    is_mask, lengths = (batch["inputs"] == TOKENIZER.mask_id).tolist(), batch["lengths"].tolist()
    assert not any(any(row[length:]) for row, length in zip(is_mask, lengths, strict=True))
    return [row[:length] for row, length in zip(is_mask, lengths, strict=True)]


def test_the_given_share_of_tokens_is_dropped_and_never_the_first():
    rows = np.array(dropped(labelled([50] * 1000), list(range(1000)), 0.1))
    assert not rows[:, 0].any()
    assert rows[:, 1:].mean() == pytest.approx(0.1, abs=5 * 0.3 / np.sqrt(49_000))  # five standard errors
    assert rows[:, 1:].mean(axis=1).std() == pytest.approx(0.3 / np.sqrt(49), rel=0.2)  # independently of each other


def test_what_is_dropped_depends_on_seed_epoch_and_example_alone():
    split = labelled([5, 40, 20, 31])
    alone = [dropped(split, [row])[0] for row in range(4)]
    assert dropped(split, [3, 1, 0, 2]) == [alone[3], alone[1], alone[0], alone[2]]
    keys = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({str(dropped(split, [1, 2, 3], key=key)) for key in keys}) == len(keys)
    plain, some = (Examples(split, dropout).__getitems__([0, 1, 2, 3])["inputs"] for dropout in (0.0, 0.3))
    assert torch.equal(some, torch.where(some == TOKENIZER.mask_id, some, plain))
    assert not (plain == TOKENIZER.mask_id).any()


# The data of a run.


def reviews(number, seed=0):
    """Sentences, no two of which are alike, and their labels."""
    generator = random.Random(seed)
    for _ in range(number):
        words = [f"w{generator.randrange(10**6)}" for _ in range(generator.randint(2, 12))]
        yield " ".join(words), generator.choice("01")


class Labelled:
    """A source in memory; rows are (text, label) or (text, pair, label)."""

    name = "labelled"
    rows = ("texts", "examples")

    def __init__(self, **splits):
        self.splits, self.has_own_splits = splits, "validation" in splits

    def fingerprint(self):
        return str(self.splits)

    def load(self, rows="texts", max_characters=None):
        names = {2: ("text", "label"), 3: ("text", "pair", "label")}[len(self.splits["train"][0])]
        return {
            split: from_columns(**dict(zip(names, zip(*rows, strict=True), strict=True)))
            for split, rows in self.splits.items()
        }


@pytest.fixture
def make(tmp_path):

    def module(whole=False, seq_len=32, **changes):
        splits = {name: changes.pop(name) for name in ("train", "validation", "test") if name in changes}
        options = {name: changes.pop(name) for name in ("labels", "num_texts", "token_dropout") if name in changes}
        settings = {"tokenizer": ByteTokenizer(), "batch_size": 8, "cache_dir": str(tmp_path / "cache")} | changes
        data = SourceDataModule(Labelled(**splits), row_format=ExampleFormat(seq_len, **options), **settings)
        data.prepare(whole)
        return data

    return module


def examples(split):
    return [(split.text(row), split.classes[split.labels[row]]) for row in range(split.num_documents)]


def test_a_sources_own_splits_are_used_and_evaluated_whole(make):
    rows = {"train": list(reviews(50)), "validation": list(reviews(21, 1)), "test": list(reviews(10, 2))}
    module = make(**rows, seq_len=256)
    assert {name: examples(split) for name, split in module.splits.items()} == rows
    assert (module.labels, module.num_texts, module.scored_whole) == (["0", "1"], 1, False)
    for name, expected in rows.items():
        found = {}
        for batch in module.evaluation_dataloader(name):
            columns = (batch[key].tolist() for key in ("rows", "inputs", "lengths", "labels"))
            for row, inputs, length, label in zip(*columns, strict=True):
                found[row] = module.tokenizer.decode(inputs[1:length]), module.labels[label]
        assert [found[row] for row in range(len(found))] == expected


def test_a_sample_is_random_whatever_the_batch_size(make):
    """A sorted split: neither its first rows nor its longest ones."""
    rows, drawn = [("a " * number, "01"[number % 2]) for number in range(1, 301)], {}
    for batch_size, sizes in ((7, [7] * 10 + [6] * 5), (64, [50, 50])):
        module = make(train=rows, validation=rows, seq_len=1000, batch_size=batch_size)
        batches = rows_of(module.sample("validation", 100))
        assert list(map(len, batches)) == sizes
        drawn[batch_size] = list(chain.from_iterable(batches))
    assert drawn[7] == drawn[64] == sorted(set(drawn[7]))
    # The standard deviation of the mean is 300 / √(12 · 100) · √(2/3) = 7.
    assert abs(sum(drawn[7]) / 100 - 149.5) < 15
    assert list(chain.from_iterable(rows_of(module.sample("validation", 10**6)))) == list(range(300))


def test_each_class_is_divided_by_itself_and_one_without_examples_is_named(make):
    rows = [*((f"common {i} {i}", "common") for i in range(400)), *((f"rare {i} {i}", "rare") for i in range(3))]
    rows += [(f"alarm {i} {i}", "alarm") for i in range(2)]
    module = make(train=rows, seed=7)
    assert {name: list(split.label_counts.values()) for name, split in module.splits.items()} == {
        "train": [1, 360, 1],
        "validation": [1, 20, 1],
        "test": [0, 20, 1],
    }
    assert module.caveats == ["the test split has no example of alarm"]
    test = module.splits["test"]
    assert examples(test) == examples(make(train=rows).splits["test"])
    assert examples(test) != examples(make(train=rows, split_seed=9).splits["test"])


def test_the_summary_counts_classes_and_what_is_cut(make):
    rows = [("a bc", "12.0" if number == 1 else str(number)) for number in range(1, 13)]
    classes = ", ".join(f"{name} (1)" for name in range(2, 12))
    for seq_len, cut, num_bytes in ((5, {}, 48), (4, {"documents truncated": 12}, None)):
        data = make(train=rows, seq_len=seq_len, whole=True)
        told = "".join(f", {number} {what}" for what, number in cut.items())
        line = f"12 documents, {12 * seq_len} tokens{told}\nclasses: {classes} and 1 more"
        facts = describe_data(data, ["all"])
        results = facts[0].results["data"]["all"]
        assert (facts[-1][:2], results["too_long"], results["classes"]["12"]) == (("all", line), cut, 2)
        assert data.splits["all"].num_bytes == num_bytes


def test_numbers_name_classes(make):
    for labels in ([1, 0], ["1.0", "0.0"]):
        data = make(train=[("a", "0"), ("b", "1.0"), ("c", "1")], labels=labels, whole=True)
        assert (data.labels, data.splits["all"].labels.tolist()) == (["1", "0"], [1, 0, 0])


def test_a_label_that_is_no_class_is_refused(make):
    train = [("a", "no"), ("b", "yes")]
    sentence = r"^source='labelled': the label maybe of the validation split is not .* \(no, yes\); 2 examples have"
    with pytest.raises(ArgumentError, match=sentence):
        make(train=train, validation=[("c", "maybe"), ("d", "yes"), ("e", "maybe")])
    module = make(train=train, validation=[("c", "no")], test=[("c", "perhaps")])
    assert len(list(module.val_dataloader())) == 1
    with pytest.raises(ArgumentError, match="the label perhaps of the test split"):
        module.test_dataloader()
    with pytest.raises(ArgumentError, match=r"^source='labelled': all examples have the label 7; there must be"):
        make(train=[("a", "7"), ("b", "7")])


def test_whole_data_are_all_examples_in_the_order_of_given_classes(make):
    rows, test = list(reviews(30)), list(reviews(5, 1))
    module = make(train=rows, test=test, labels=["1", "other", "0"], seq_len=256, whole=True)
    assert (module.scored_whole, set(module.splits)) == (True, {"all"})
    assert module.labels == ["1", "other", "0"]
    assert examples(module.splits["all"]) == rows + test
    assert module.splits["all"].label_counts["other"] == 0


def test_a_model_of_single_texts_is_not_given_pairs_nor_the_reverse(make):
    single, pairs = list(reviews(40)), [(text, "so", label) for text, label in reviews(40)]
    for rows, num_texts in ((single, 1), (pairs, 2)):
        assert [make(train=rows, num_texts=n).num_texts for n in (None, num_texts)] == [num_texts] * 2
        with pytest.raises(ArgumentError, match=r"^source='labelled': has .* texts, and the model classifies "):
            make(train=rows, num_texts=3 - num_texts)


def test_two_epochs_drop_different_tokens(make):
    data, texts = make(train=list(reviews(40)), token_dropout=0.5, validation_fraction=0, test_fraction=0), []
    loader, lengths = data.train_dataloader(), data.splits["train"].lengths
    for _ in range(2):
        rows = {int(row): ids for batch in loader for row, ids in zip(batch["rows"], batch["inputs"], strict=True)}
        texts.append(torch.cat([rows[row][1 : lengths[row]] for row in range(40)]) == data.tokenizer.mask_id)
    assert (texts[0] != texts[1]).double().mean() == pytest.approx(0.5, abs=0.1)
