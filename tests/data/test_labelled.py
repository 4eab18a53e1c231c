"""The data module of labelled text: what is held out, which classes there are, and what cannot work."""

import random
from itertools import chain

import pytest
import torch

from tinyformer.data import ByteTokenizer, LabelledDataModule
from tinyformer.data.sources.documents import from_columns
from tinyformer.errors import ArgumentError
from tinyformer.tasks import Classification

GOOD, BAD = ["warm", "clever", "moving", "funny", "tender"], ["dull", "flat", "silly", "lame", "tired"]


def reviews(number, seed=0):
    """Sentences, no two of which are alike, and their labels."""
    generator = random.Random(seed)
    for _ in range(number):
        label = generator.choice("01")
        nouns = [f"w{generator.randrange(10**6)}" for _ in range(generator.randint(2, 12))]
        yield " ".join([*nouns, generator.choice(GOOD if label == "1" else BAD)]), label


class Labelled:
    """A source in memory that counts how often it is loaded; rows are (text, label) or (text, pair, label)."""

    name = "labelled"

    def __init__(self, **splits):
        self.splits, self.loads = splits, 0
        self.has_own_splits = "validation" in splits

    def fingerprint(self):
        return str(self.splits)

    def load(self, max_characters=None):
        return {name: from_columns(text=[row[0] for row in rows]) for name, rows in self.splits.items()}

    def load_examples(self):
        self.loads += 1
        columns = ("text", "label") if len(next(iter(self.splits.values()))[0]) == 2 else ("text", "pair", "label")
        return {
            name: from_columns(**dict(zip(columns, zip(*rows, strict=True), strict=True)))
            for name, rows in self.splits.items()
        }


@pytest.fixture
def make(tmp_path):
    """A module of these splits, or of a source."""

    def module(tokenizer=None, source=None, **changes):
        splits = {name: changes.pop(name) for name in ("train", "validation", "test") if name in changes}
        settings = {"seq_len": 32, "batch_size": 8, "cache_dir": str(tmp_path / "cache")}
        return LabelledDataModule(source or Labelled(**splits), tokenizer or ByteTokenizer(), **(settings | changes))

    return module


def prepared(module, **settings):
    module.prepare(**settings)
    return module


def examples(split):
    """Text and label of each example."""
    return [(split.text(row), split.classes[split.labels[row]]) for row in range(split.num_documents)]


def test_a_sources_own_splits_are_used_and_evaluated_whole(make):
    rows = {"train": list(reviews(50)), "validation": list(reviews(21, 1)), "test": list(reviews(10, 2))}
    module = prepared(make(**rows, seq_len=256))
    assert {name: examples(split) for name, split in module.splits.items()} == rows
    assert module.labels == ["0", "1"]
    assert module.splits["train"].label_counts == {
        label: sum(row[1] == label for row in rows["train"]) for label in module.labels
    }
    assert not module.scored_whole
    for name, expected in rows.items():
        found = {}
        for batch in module.evaluation_dataloader(name):
            columns = (batch[key] for key in ("inputs", "lengths", "labels", "rows"))
            for inputs, length, label, row in zip(*columns, strict=True):
                assert inputs[0] == module.tokenizer.eos_id
                found[int(row)] = module.tokenizer.decode(inputs[1:length]), module.labels[label]
        assert [found[row] for row in range(len(found))] == expected


def test_processes_share_an_evaluation_without_repeating(make, monkeypatch):
    module = prepared(make(train=list(reviews(50))))
    shares = []
    for rank in range(3):
        monkeypatch.setattr(LabelledDataModule, "_rank", rank)
        monkeypatch.setattr(LabelledDataModule, "_world_size", 3)
        shares.append([row for batch in module.evaluation_dataloader("train") for row in batch["rows"].tolist()])
    assert sorted(chain.from_iterable(shares)) == list(range(module.splits["train"].num_documents))
    assert all(shares)


def test_a_sample_is_random_whatever_the_batch_size(make):
    """A sorted split: neither its first rows nor its longest ones."""
    rows = [(" ".join(["a"] * number), "01"[number % 2]) for number in range(1, 301)]
    drawn = {}
    for batch_size in (7, 64):
        module = prepared(make(train=rows, validation=rows, seq_len=1000, batch_size=batch_size))
        batches = list(module.sample("validation", 100))
        assert [len(batch["rows"]) for batch in batches] == {7: [7] * 10 + [6] * 5, 64: [50, 50]}[batch_size]
        drawn[batch_size] = [row for batch in batches for row in batch["rows"].tolist()]
    assert drawn[7] == drawn[64] == sorted(set(drawn[7]))
    # The standard deviation of the mean is 300 / √(12 · 100) · √(2/3) = 7.
    assert abs(sum(drawn[7]) / 100 - 149.5) < 15
    assert [row for batch in module.sample("validation", 10**6) for row in batch["rows"].tolist()] == list(range(300))


def test_few_examples_are_divided_whole(make):
    rows = [(f"{'long ' * 50}number {i}", str(i % 2)) for i in range(10)]
    module = make(train=rows, validation_fraction=0.2, test_fraction=0.1, group_near_copies=False)
    assert [split.num_documents for split in prepared(module).splits.values()] == [6, 2, 2]


@pytest.mark.parametrize("split_seed", range(3))
def test_each_class_is_divided_by_itself_and_one_without_examples_is_named(make, split_seed):
    rows = [*((f"common {i} {i}", "common") for i in range(400)), *((f"rare {i} {i}", "rare") for i in range(3))]
    rows += [(f"alarm {i} {i}", "alarm") for i in range(2)]
    module = prepared(make(train=rows, split_seed=split_seed, seed=7))
    assert {name: list(split.label_counts.values()) for name, split in module.splits.items()} == {
        "train": [1, 360, 1],
        "validation": [1, 20, 1],
        "test": [0, 20, 1],
    }
    assert module.caveats == ["the test split has no example of alarm"]
    assert examples(module.splits["test"]) == examples(prepared(make(train=rows, split_seed=split_seed)).splits["test"])
    assert examples(module.splits["test"]) != examples(prepared(make(train=rows, split_seed=9)).splits["test"])
    metrics = {"accuracy": 1.0, "macro_f1": 1.0, "majority_share": 0.9}
    described = Classification(module.labels).describe(metrics, module.splits["test"])["accuracy"]
    assert described.startswith("100.0%, macro-F1 1.000 (without alarm: no examples); ")


def test_a_label_that_is_no_class_is_refused(make):
    train = [("a", "no"), ("b", "yes")]
    sentence = r"^source='labelled': the label maybe of the validation split is not .* \(no, yes\); 2 examples have"
    with pytest.raises(ArgumentError, match=sentence):
        make(train=train, validation=[("c", "maybe"), ("d", "yes"), ("e", "maybe")]).prepare()
    module = prepared(make(train=train, validation=[("c", "no")], test=[("c", "perhaps")]))
    assert len(list(module.val_dataloader())) == 1
    with pytest.raises(ArgumentError, match="the label perhaps of the test split"):
        module.test_dataloader()
    with pytest.raises(ArgumentError, match=r"^source='labelled': all examples have the label 7; there must be"):
        make(train=[("a", "7"), ("b", "7")]).prepare()


def test_whole_data_are_all_examples_in_the_order_of_given_classes(make):
    rows, test = list(reviews(30)), list(reviews(5, 1))
    module = make(train=rows, test=test, labels=["1", "other", "0"], seq_len=256)
    assert module.scored_whole
    assert set(prepared(module, whole=True).splits) == {"all"}
    assert module.labels == ["1", "other", "0"]
    assert examples(module.splits["all"]) == rows + test
    assert module.splits["all"].label_counts["other"] == 0


def test_prepared_examples_are_opened_again(make):
    source = Labelled(train=list(reviews(80)))
    first, second = make(source=source), make(source=source)
    tokenizer = ByteTokenizer().build([])
    assert not first.is_prepared(tokenizer)
    prepared(first), prepared(second)
    assert first.fingerprint == second.fingerprint
    assert [examples(split) for split in first.splits.values()] == [examples(s) for s in second.splits.values()]
    assert second.is_prepared(tokenizer)
    assert second.is_prepared(tokenizer.with_mask())
    shorter = prepared(make(source=source, seq_len=8))  # another length needs no other tokens
    assert source.loads == 1
    assert shorter.splits["train"].num_truncated > 50


def test_a_model_of_single_texts_is_not_given_pairs_nor_the_reverse(make):
    single, pairs = list(reviews(40)), [(text, "so", label) for text, label in reviews(40)]
    for rows, num_texts in ((single, 1), (pairs, 2)):
        assert [make(train=rows, num_texts=n).prepare() for n in (None, num_texts)] == [None, None]
        with pytest.raises(ArgumentError, match=r"^source='labelled': has .* texts, and the model classifies "):
            make(train=rows, num_texts=3 - num_texts).prepare()


def test_two_epochs_drop_different_tokens(make):
    data = make(train=list(reviews(40)), token_dropout=0.5, validation_fraction=0, test_fraction=0)
    data.prepare()
    loader, texts = data.train_dataloader(), []
    for _ in range(2):
        rows = {int(row): ids for batch in loader for row, ids in zip(batch["rows"], batch["inputs"], strict=True)}
        lengths = data.splits["train"].lengths
        texts.append(torch.cat([rows[row][1 : lengths[row]] for row in range(40)]) == data.tokenizer.mask_id)
    assert (texts[0] != texts[1]).double().mean() == pytest.approx(0.5, abs=0.1)
