"""The data module of labelled text: what is held out, which classes there are, and a sentence for each mistake."""

import random
import time
from itertools import chain

import lightning
import numpy as np
import pytest
import torch

from tinyformer.data import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    LabelledDataModule,
    Pydoc,
    TextDataModule,
    TextFiles,
    near_copy_groups,
)
from tinyformer.data.documents import from_columns

GOOD, BAD = ["warm", "clever", "moving", "funny", "tender"], ["dull", "flat", "silly", "lame", "tired"]


def reviews(number, seed=0):
    """Sentences that no two of are alike, and what they are worth."""
    generator = random.Random(seed)
    for _ in range(number):
        label = generator.choice("01")
        nouns = [f"w{generator.randrange(10**6)}" for _ in range(generator.randint(2, 12))]
        yield " ".join([*nouns, generator.choice(GOOD if label == "1" else BAD)]), label


def write(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join("\t".join(row) + "\n" for row in rows))


@pytest.fixture
def make(tmp_path):
    """A module of lines "text tab label" by split, or of another source."""

    def module(tokenizer=None, source=None, folder="files", **changes):
        splits = {name: changes.pop(name) for name in ("train", "validation", "test") if name in changes}
        for name, rows in splits.items():
            write(tmp_path / folder / f"{name}.tsv", rows)
        columns = ["text", "label"] if len(next(iter(splits.values()), [("", "")])[0]) == 2 else ["a", "b", "label"]
        source = source or TextFiles(
            str(tmp_path / folder), columns[:-1], label_column="label", columns=columns, quoted=False
        )
        settings = {"seq_len": 32, "batch_size": 8, "cache_dir": str(tmp_path / "cache")}
        return LabelledDataModule(source, tokenizer or ByteTokenizer(), **(settings | changes))

    return module


def examples(split):
    """Text and label of each example."""
    return [(split.text(row), split.classes[split.labels[row]]) for row in range(split.num_documents)]


def test_splits_of_their_own_are_taken_as_they_are(make):
    train, validation, test = (list(reviews(n, n)) for n in (50, 20, 10))
    module = make(train=train, validation=validation, test=test, seq_len=256)
    module.prepare()
    assert {name: examples(split) for name, split in module.splits.items()} == {
        "train": train,
        "validation": validation,
        "test": test,
    }
    assert module.labels == ["0", "1"]
    assert module.splits["train"].label_counts == {
        label: sum(row[1] == label for row in train) for label in module.labels
    }
    assert module.splits["test"].num_bytes == sum(len(text) for text, _ in test)
    assert not module.scored_whole


def test_evaluation_gives_back_every_example(make):
    rows = list(reviews(50))
    module = make(train=rows, validation=rows[:21], test_fraction=0, seq_len=256)
    module.prepare()
    for name in ("train", "validation"):
        found = {}
        for batch in module.evaluation_dataloader(name):
            for inputs, length, label, row in zip(
                *(batch[k] for k in ("inputs", "lengths", "labels", "rows")), strict=True
            ):
                assert inputs[0] == module.tokenizer.eos_id
                found[int(row)] = module.tokenizer.decode(inputs[1:length]), module.labels[label]
        assert [found[row] for row in range(len(found))] == rows[: len(found)]
        assert len(found) == module.splits[name].num_documents
    again = list(module.val_dataloader())
    assert [b["rows"].tolist() for b in again] == [b["rows"].tolist() for b in module.val_dataloader()]


def test_processes_share_an_evaluation_without_repeating(make, monkeypatch):
    module = make(train=list(reviews(50)))
    module.prepare()
    shares = []
    for rank in range(3):
        monkeypatch.setattr(LabelledDataModule, "_rank", rank)
        monkeypatch.setattr(LabelledDataModule, "_world_size", 3)
        shares.append([row for batch in module.evaluation_dataloader("train") for row in batch["rows"].tolist()])
    assert sorted(chain.from_iterable(shares)) == list(range(module.splits["train"].num_documents))
    assert all(shares)


def test_training_hides_tokens_and_evaluation_none(make):
    module = make(train=list(reviews(200)), token_dropout=0.3, seq_len=256)
    module.prepare()
    mask_id = module.tokenizer.mask_id
    batches = list(module.train_dataloader())
    hidden = sum(int((batch["inputs"] == mask_id).sum()) for batch in batches)
    assert hidden / sum(int(batch["lengths"].sum()) for batch in batches) == pytest.approx(0.3, abs=0.02)
    for name in module.splits:
        assert not any((batch["inputs"] == mask_id).any() for batch in module.evaluation_dataloader(name))


def test_texts_of_every_kind(make):
    texts = ["", "x", "👩‍👩‍👧 مرحبا 世界", "<eos> <mask> é", "long " * 100, "\u2028\x85"]
    module = make(train=[(text, str(i % 2)) for i, text in enumerate(texts)], validation=[("", "0")], seq_len=40)
    module.prepare()
    split = module.splits["train"]
    assert [split.text(row) for row in (0, 1, 2, 3, 5)] == [texts[row] for row in (0, 1, 2, 3, 5)]
    assert split.text(4) == texts[4][:39]
    assert split.num_truncated == 1
    assert split.num_documents == 6
    assert np.diff(split.offsets).tolist() == [min(len(text.encode()) + 1, 40) for text in texts]
    batch = next(iter(module.val_dataloader()))
    assert (batch["inputs"].tolist(), batch["lengths"].tolist()) == ([[module.tokenizer.eos_id]], [1])


def test_characters_are_learned_from_training_texts_and_counted(make):
    texts = {"train": [("ab", "0"), ("ba", "1")], "validation": [("abc👩", "0")]}
    module = make(CharTokenizer(), **texts, test_fraction=0)
    module.prepare()
    assert [split.num_unknown for split in module.splits.values()] == [0, 2]
    assert module.splits["validation"].text(0) == "ab<unk><unk>"


def test_pairs_are_one_sequence(make):
    module = make(train=[("one", "two", "yes"), ("", "", "no"), ("a" * 9, "b" * 9, "yes")], seq_len=10)
    module.prepare(whole=True)
    split, eos = module.splits["all"], module.tokenizer.eos_id
    sequences = [part.tolist() for part in np.split(split.ids, split.offsets[1:-1])]
    assert sequences == [[eos, *b"one", eos, *b"two"], [eos, eos], [eos, *b"aaaa", eos, *b"bbbb"]]
    assert split.num_truncated == 1
    assert split.text(0) == "one<eos>two"


def test_ten_megabytes_on_one_line_take_seconds(make):
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghij", k=generator.randint(2, 9))) for _ in range(2000)]
    long = " ".join(words * 800)
    assert len(long) > 10**7
    module = make(BPETokenizer(512), train=[("short", "0"), (long, "1")], validation=[("short", "0")])
    start = time.monotonic()
    module.prepare()
    assert time.monotonic() - start < 20
    split = module.splits["train"]
    assert split.num_truncated == 1
    assert np.diff(split.offsets)[1] == 32
    assert long.startswith(split.text(1))
    assert split.num_bytes < 2 * 10**6  # no more is tokenised than a model could read


def test_what_is_held_out_is_the_same_as_for_a_language_model(make, tmp_path):
    rows = [*reviews(400), ("", "0")]
    module = make(train=rows, seed=3, seq_len=256)
    module.prepare()
    text = TextDataModule(
        module.source, ByteTokenizer(), seq_len=16, batch_size=4, seed=3, cache_dir=str(tmp_path / "cache")
    )
    text.prepare()
    for name, split in module.splits.items():
        stream = text.splits[name]
        documents = [text.tokenizer.decode(part[1:]) for part in np.split(stream.ids, stream.offsets[1:-1])]
        assert documents == [found for found, _ in examples(split) if found]
    assert sum(split.num_documents for split in module.splits.values()) == len(rows)


def test_near_copies_never_cross_the_hold_out(make):
    generator = random.Random(0)
    originals = [[f"w{generator.randrange(10**6)}" for _ in range(12)] for _ in range(60)]
    rows = [(" ".join([*words, f"x{copy}"]), str(copy % 2)) for words in originals for copy in range(4)]
    generator.shuffle(rows)
    module = make(train=rows, validation_fraction=0.2, test_fraction=0.2, seq_len=512)
    module.prepare()
    texts = {name: [text for text, _ in examples(split)] for name, split in module.splits.items()}
    assert min(map(len, texts.values())) > 20
    groups = near_copy_groups(list(chain.from_iterable(texts.values())))
    bounds = np.cumsum([len(part) for part in texts.values()])[:-1]
    parts = [set(part.tolist()) for part in np.split(groups, bounds)]
    assert len(set(groups.tolist())) == 60
    assert not parts[0] & parts[1]
    assert not parts[0] & parts[2]
    assert not parts[1] & parts[2]


def test_few_examples_are_divided_whole(make):
    rows = [(f"{'long ' * 50}number {i}", str(i % 2)) for i in range(10)]
    module = make(train=rows, validation_fraction=0.2, test_fraction=0.1, group_near_copies=False, seq_len=512)
    module.prepare()
    assert [split.num_documents for split in module.splits.values()] == [7, 2, 1]
    assert sorted(chain.from_iterable(examples(split) for split in module.splits.values())) == sorted(rows)


def test_nothing_to_hold_out_is_refused_when_asked_for(make):
    module = make(train=[("a", "0"), ("b", "1")], test_fraction=0)
    module.prepare()
    with pytest.raises(ValueError, match=r"the split validation holds no examples; .*data.validation_fraction, .* 0.1"):
        module.val_dataloader()
    with pytest.raises(ValueError, match=r"no split test, only train, validation; data.test_fraction=0.05 holds"):
        module.test_dataloader()


def test_a_class_that_only_the_held_out_examples_have_is_a_class(make):
    for seed in range(8):
        rows = [*reviews(19), ("rare", "2")]
        module = make(train=rows, seed=seed, validation_fraction=0.5, test_fraction=0, folder=f"seed{seed}")
        module.prepare()
        assert module.labels == ["0", "1", "2"]
        if module.splits["train"].label_counts["2"] == 0:
            return
    pytest.fail("it was never held out")


def test_a_label_that_was_not_trained_on_is_named(make):
    train = [("a", "no"), ("b", "yes")]
    with pytest.raises(
        ValueError, match=r"the label maybe of the split validation is none of those trained on \(no, yes\); 2 examples"
    ):
        make(train=train, validation=[("c", "maybe"), ("d", "yes"), ("e", "maybe")]).prepare()
    module = make(train=train, validation=[("c", "no")], test=[("c", "perhaps")], folder="other")
    module.prepare()
    assert len(list(module.val_dataloader())) == 1
    with pytest.raises(ValueError, match="the label perhaps of the split test"):
        module.test_dataloader()


def test_a_checkpoints_classes_are_kept_in_their_order(make):
    rows = list(reviews(30))
    module = make(train=rows, labels=["1", "other", "0"])
    module.prepare(whole=True)
    assert module.labels == ["1", "other", "0"]
    split = module.splits["all"]
    assert [["1", "other", "0"][i] for i in split.labels] == [label for _, label in rows]
    assert split.label_counts["other"] == 0
    foreign = make(train=[*rows, ("x", "5")], labels=["0", "1"], folder="foreign")
    foreign.prepare(whole=True)
    with pytest.raises(ValueError, match=r"the label 5 of the split all is none of those trained on \(0, 1\); 1 exam"):
        foreign.evaluation_dataloader("all")


def test_whole_data_are_all_examples_of_all_splits(make):
    train, test = list(reviews(20)), list(reviews(5, 1))
    module = make(train=train, test=test, seq_len=256)
    assert module.scored_whole
    module.prepare(whole=True)
    assert set(module.splits) == {"all"}
    assert examples(module.splits["all"]) == train + test


class Labelled:
    """A source in memory that counts how often it is loaded."""

    name = "labelled"

    def __init__(self, **splits):
        self.splits, self.loads = splits, 0

    def fingerprint(self):
        return str(self.splits)

    def load(self, max_characters=None):
        raise AssertionError("nobody asked for texts without labels")

    def load_examples(self):
        self.loads += 1
        return {
            name: from_columns(text=[text for text, _ in rows], label=[label for _, label in rows])
            for name, rows in self.splits.items()
        }


def test_a_split_without_labels_is_left_out_with_a_line(make, capsys):
    source = Labelled(train=list(reviews(40)), validation=list(reviews(9, 1)), test=[("x", None), ("y", None)])
    for _ in range(2):  # what lies in the cache says it too
        module = make(source=source, test_fraction=0)
        module.prepare()
        assert set(module.splits) == {"train", "validation"}
        assert capsys.readouterr().err == "data=labelled: the split test has no labels, and is left out.\n"
    with pytest.raises(
        ValueError, match=r"data=labelled: no example of the split train has a label; data.label_column"
    ):
        make(source=Labelled(train=[("x", None)], test=[("y", "1")])).prepare()


def test_a_second_call_opens_and_gives_the_same(make):
    source = Labelled(train=list(reviews(80)))
    first, again = make(source=source), make(source=source)
    assert not first.is_prepared(first._recipe.build([]))
    first.prepare()
    again.prepare()
    assert source.loads == 1
    assert first.fingerprint == again.fingerprint
    assert {name: examples(s) for name, s in first.splits.items()} == {n: examples(s) for n, s in again.splits.items()}
    assert first.tokenizer.fingerprint == again.tokenizer.fingerprint
    assert again.is_prepared(ByteTokenizer().build([]))
    assert again.is_prepared(again.tokenizer)
    assert not again.is_prepared(CharTokenizer().build(["abc"]))
    assert not again.is_prepared(again.tokenizer, whole=True)
    shorter = make(source=source, seq_len=8)  # nothing is tokenised anew for another length
    shorter.prepare()
    assert source.loads == 1
    assert shorter.splits["train"].num_truncated > 50


@pytest.mark.parametrize("damaged", ["train.npy", "train.labels.npy", "train.offsets.npy", "meta.json"])
def test_a_damaged_folder_is_built_again(make, tmp_path, damaged):
    source = Labelled(train=list(reviews(80)))
    make(source=source).prepare()
    (file,) = tmp_path.glob(f"cache/*/{damaged}")
    file.write_bytes(file.read_bytes()[:100])
    module = make(source=source)
    module.prepare()
    assert source.loads == 2
    assert module.splits["train"].num_documents > 50


@pytest.mark.parametrize(
    "change",
    [
        {"source": Labelled(train=[*reviews(79), ("other", "0")])},
        {"source": Labelled(train=[(text, {"0": "1", "1": "0"}[label]) for text, label in reviews(80)])},
        {"tokenizer": CharTokenizer()},
        {"validation_fraction": 0.3},
        {"test_fraction": 0.3},
        {"group_near_copies": False},
        {"max_examples": 10},
        {"seed": 1},
    ],
    ids=["text", "labels", "tokenizer", "validation", "test", "near-copies", "max", "seed"],
)
def test_the_fingerprint_covers_whatever_shapes_the_examples(make, change):
    module, other = (make(**({"source": Labelled(train=list(reviews(80)))} | changes)) for changes in ({}, change))
    module.prepare()
    other.prepare()
    assert module.fingerprint != other.fingerprint


def test_fewer_examples_are_drawn_from_all_and_the_rest_stays(make):
    rows = sorted(reviews(300), key=lambda row: row[1])  # as some data sets are
    whole, part = make(train=rows), make(train=rows, max_examples=40)
    whole.prepare()
    part.prepare()
    chosen = examples(part.splits["train"])
    assert len(chosen) == 40
    assert min(part.splits["train"].label_counts.values()) > 10
    every = examples(whole.splits["train"])
    places = [every.index(example) for example in chosen]
    assert places == sorted(places)
    assert examples(part.splits["validation"]) == examples(whole.splits["validation"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "data.batch_size=0: must be at least 1"),
        ({"num_workers": -1}, "data.num_workers=-1: must not be negative"),
        ({"seq_len": 0}, "model.max_seq_len=0: must be at least 1"),
        ({"max_examples": 0}, "data.max_examples=0: must be at least 1; data.max_examples=1000 works"),
        ({"token_dropout": 1.0}, r"data.token_dropout=1.0: .* less than 1; data.token_dropout=0.3 works"),
        ({"token_dropout": -0.1}, r"data.token_dropout=-0.1: must be at least 0"),
        ({"validation_fraction": 1.0}, r"data.validation_fraction=1.0: .*0.05 works"),
        ({"labels": ["a"]}, r"task.labels=\['a'\]: must be two different names or more"),
        ({"labels": ["a", "a"]}, r"task.labels=\['a', 'a'\]: must be two"),
        ({"source": Pydoc()}, "data=pydoc: its texts have no labels to classify by; data=docstrings has, or data=text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_mistakes_are_named_at_once(make, changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_one_class_is_none(make):
    with pytest.raises(ValueError, match="data=text: all examples have the label 7; there must be two to tell apart"):
        make(train=[("a", "7"), ("b", "7")]).prepare()


def test_more_devices_than_examples_are_refused(make, monkeypatch):
    module = make(train=[("a", "0"), ("b", "1")])
    module.prepare()
    monkeypatch.setattr(LabelledDataModule, "_world_size", 3)
    with pytest.raises(ValueError, match=r"trainer.devices=3: there are fewer training examples than devices"):
        module.train_dataloader()


class Bag(lightning.LightningModule):
    """Counts bytes, each with a weight for each class: enough to tell these reviews apart."""

    def __init__(self, vocab_size):
        super().__init__()
        self.weight = torch.nn.EmbeddingBag(vocab_size, 2, mode="sum")
        self.seen, self.right, self.total = [], 0, 0

    def forward(self, batch):
        real = torch.arange(batch["inputs"].shape[1]) < batch["lengths"][:, None]
        return self.weight(batch["inputs"], per_sample_weights=real.float())

    def training_step(self, batch):
        self.seen.append(batch["rows"].tolist())
        return torch.nn.functional.cross_entropy(self(batch), batch["labels"])

    def validation_step(self, batch):
        self.right += int((self(batch).argmax(1) == batch["labels"]).sum())
        self.total += len(batch["labels"])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.05)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.")
@pytest.mark.filterwarnings("ignore:.*`weights_only` was not set")
def test_lightning_trains_evaluates_and_resumes_mid_epoch(make, tmp_path):
    settings = {"train": list(reviews(300)), "validation": list(reviews(100, 1)), "test_fraction": 0}
    settings |= {"seq_len": 128, "batch_size": 16, "token_dropout": 0.1}

    def fit(steps, checkpoint=None):
        module = make(BPETokenizer(600), **settings)
        module.prepare()
        torch.manual_seed(0)
        bag = Bag(module.tokenizer.vocab_size)
        trainer = lightning.Trainer(
            max_steps=steps,
            max_epochs=-1,
            accelerator="cpu",
            num_sanity_val_steps=0,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(bag, datamodule=module, ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return bag, module

    whole, module = fit(100)
    assert len(module.train_dataloader()) == -(-module.splits["train"].num_documents // 16)
    before, _ = fit(25)  # in the middle of the second epoch
    after, _ = fit(100, tmp_path / "25.ckpt")
    assert before.seen + after.seen == whole.seen
    assert torch.equal(after.weight.weight, whole.weight.weight)
    whole.right = whole.total = 0
    with torch.no_grad():
        for batch in module.val_dataloader():
            whole.validation_step(batch)
    assert whole.total == 100
    assert whole.right > 80
