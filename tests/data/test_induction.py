"""Sequences that repeat a block: what is drawn, what is scored, and what it takes to score."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tinyformer.data import IGNORED, BPETokenizer, ByteTokenizer, CharTokenizer, InductionDataModule
from tinyformer.tasks import CausalLM

SETTINGS = {
    "seq_len": 40,
    "max_seq_len": 64,
    "batch_size": 8,
    "num_symbols": 16,
    "min_period": 6,
    "max_period": 12,
    "num_sequences": 100,
    "num_validation_sequences": 50,
}


def make(**changes):
    return InductionDataModule(**SETTINGS | changes)


def prepared(**changes):
    module = make(**changes)
    module.prepare()
    return module


def documents(module, split):
    """The symbols of each sequence."""
    tokens = module.splits[split]
    return [tokens.ids[a + 1 : b].tolist() for a, b in zip(tokens.offsets, tokens.offsets[1:], strict=False)]


def period_of(symbols):
    """The length of the block, which holds each of its symbols once."""
    return symbols.index(symbols[0], 1)


@st.composite
def settings(draw):
    smallest = draw(st.integers(3, 9))
    largest = draw(st.integers(smallest, 12))
    seq_len = draw(st.integers(largest + 3, 50))
    return {
        "min_period": smallest,
        "max_period": largest,
        "seq_len": seq_len,
        "num_symbols": draw(st.integers(max(largest, 8), 30)),  # else they all may be trained on
        "seed": draw(st.integers(0, 5)),
        "num_sequences": 20,
        "num_validation_sequences": 10,
    }


@given(settings())
def test_a_target_is_scored_where_its_input_was_there_before_and_is_what_followed_then(changes):
    module = prepared(**changes)
    for batch in module.val_dataloader():
        for inputs, targets in zip(batch["inputs"].tolist(), batch["targets"].tolist(), strict=True):
            assert inputs[0] == module.tokenizer.eos_id
            for i, (token, target) in enumerate(zip(inputs, targets, strict=True)):
                before = [k for k in range(i) if inputs[k] == token]
                is_symbol_to_come = i < len(inputs) - 1
                assert (target != IGNORED) == (bool(before) and is_symbol_to_come)
                if target != IGNORED:
                    assert target == inputs[before[-1] + 1]


@given(settings())
def test_a_sequence_repeats_distinct_symbols_and_fills_a_window(changes):
    module = prepared(**changes)
    for split in ("train", "validation"):
        for symbols in documents(module, split):
            period = period_of(symbols)
            assert changes["min_period"] <= period <= changes["max_period"]
            assert len(set(symbols)) == period
            assert symbols == [symbols[i % period] for i in range(changes["seq_len"] - 1)]
    assert all(batch["inputs"].shape[1] == changes["seq_len"] for batch in module.train_dataloader())
    assert sum(len(batch["inputs"]) for batch in module.val_dataloader()) == module.splits["validation"].num_documents


def test_the_training_windows_are_the_sequences():
    module = prepared(batch_size=10)
    windows = [row for batch in module.train_dataloader() for row in batch["inputs"].tolist()]
    drawn = [[module.tokenizer.eos_id, *symbols] for symbols in documents(module, "train")]
    # The last token of the stream is no input: nothing follows it.
    assert sorted(row[:-1] for row in windows) == sorted(row[:-1] for row in drawn)


def test_periods_and_symbols_are_drawn_uniformly():
    module = prepared(num_sequences=7000, seed=3)
    drawn = documents(module, "train")
    periods = np.bincount([period_of(symbols) for symbols in drawn], minlength=13)
    assert periods[:6].sum() == 0
    assert periods[6:].min() > 850  # 1000 each, give or take 5 standard deviations
    assert periods[6:].max() < 1150
    for place in (0, 3, 5):
        symbols = np.bincount([row[place] for row in drawn])
        symbols = symbols[symbols > 0]
        assert len(symbols) == 16
        assert symbols.min() > 335  # 437.5 each
        assert symbols.max() < 540


def test_the_symbols_can_be_read():
    module = prepared(num_symbols=12)
    (symbols, *_) = documents(module, "train")
    text = module.tokenizer.decode(symbols)
    assert set(text) <= set("abcdefghijkl")
    assert module.tokenizer.vocab_size == 12 + 2
    split = module.splits["train"]
    assert split.num_bytes == split.num_characters == 100 * 39


def test_the_same_seed_draws_the_same():
    first, again, other = prepared(seed=1), prepared(seed=1), prepared(seed=2)
    for split in ("train", "validation"):
        assert documents(first, split) == documents(again, split) != documents(other, split)
    assert first.fingerprint == again.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"seq_len": 41},
        {"num_symbols": 17},
        {"min_period": 7},
        {"max_period": 13},
        {"num_sequences": 101},
        {"num_validation_sequences": 51},
        {"tokenizer": ByteTokenizer().build([])},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_changes_the_tokens_changes_the_fingerprint(change):
    assert prepared(**change).fingerprint != prepared().fingerprint


def test_what_does_not_change_the_tokens_does_not():
    assert prepared(batch_size=3, num_workers=1, max_seq_len=99).fingerprint == prepared().fingerprint


def test_no_validation_sequence_is_trained_on():
    # 24 + 60 + 60 different sequences: by chance, many would be in both.
    few = {"num_symbols": 5, "min_period": 3, "max_period": 4, "num_sequences": 60}
    module = prepared(**few, seq_len=9)
    train, validation = ({*map(tuple, documents(module, split))} for split in ("train", "validation"))
    assert validation
    assert not train & validation
    assert module.splits["validation"].num_documents < 50


def test_too_few_different_sequences_are_refused():
    with pytest.raises(ValueError, match=r"data.num_sequences=6 different sequences leave none .*data.max_period"):
        prepared(num_symbols=3, min_period=3, max_period=3)


# What solves it, through the path that reports `val/accuracy`.


class Copier(torch.nn.Module):
    """Predicts what stood at `places(tokens)`."""

    def __init__(self, places, vocab_size):
        super().__init__()
        self.places, self.vocab_size = places, vocab_size

    def forward(self, tokens, mask):
        found = tokens.gather(1, self.places(tokens).clamp(min=0))
        return torch.nn.functional.one_hot(found, self.vocab_size).float() * 20


def after_the_last_occurrence(tokens):
    """The place after the latest earlier occurrence of each token; 0 where there is none."""
    n = tokens.shape[1]
    earlier = (tokens[:, :, None] == tokens[:, None, :]).tril(-1)
    return torch.where(earlier.any(-1), (earlier * torch.arange(n)).amax(-1) + 1, 0)


def accuracy(module, places):
    model, task = Copier(places, module.tokenizer.vocab_size), CausalLM()
    scores = [task.score(model, batch) for batch in module.val_dataloader()]
    sums = {name: torch.stack([score[name] for score in scores]).sum() for name in scores[0]}
    assert sums["tokens"] == module.splits["validation"].num_tokens
    metrics = task.metrics(sums, module.splits["validation"])
    assert metrics["bits_per_byte"] is None
    return metrics["accuracy"]


@given(settings())
def test_an_induction_head_is_always_right(changes):
    assert accuracy(prepared(**changes), after_the_last_occurrence) == 1.0


@given(settings(), st.integers(0, 40))
def test_a_fixed_distance_is_right_for_its_period_only(changes, back):
    assume(changes["min_period"] < changes["max_period"])

    def places(tokens):
        return torch.arange(tokens.shape[1]).expand_as(tokens) - back

    assert accuracy(prepared(**changes), places) < 1.0


def test_no_distance_is_right_for_much_of_the_default():
    module = prepared(
        seq_len=64, num_symbols=52, min_period=8, max_period=32, num_validation_sequences=256, batch_size=256
    )
    best = max(
        accuracy(module, lambda tokens, back=back: torch.arange(tokens.shape[1]).expand_as(tokens) - back)
        for back in range(64)
    )
    assert best < 0.15


# Tokens of another vocabulary, and mistakes.


@pytest.mark.parametrize(
    "tokenizer",
    [ByteTokenizer(), BPETokenizer(300), CharTokenizer()],
    ids=lambda recipe: recipe.name,
)
def test_a_given_tokenizer_writes_the_same_sequences(tokenizer):
    tokenizer = tokenizer.build(["the quick brown fox jumps over the lazy dog " * 9])
    own, given = make(), make(tokenizer=tokenizer)
    assert not own.is_prepared(tokenizer)
    assert given.is_prepared(tokenizer)
    own.prepare()
    given.prepare()
    for split in ("train", "validation"):
        texts = [[module.tokenizer.decode(s) for s in documents(module, split)] for module in (own, given)]
        assert texts[0] == texts[1]
        assert own.splits[split].scored.tolist() == given.splits[split].scored.tolist()
    assert accuracy(given, after_the_last_occurrence) == 1.0


def test_a_vocabulary_without_the_symbols_is_refused():
    with pytest.raises(ValueError, match=r"data.num_symbols=16: the checkpoint's vocabulary has no token for b d f"):
        prepared(tokenizer=CharTokenizer().build(["aceg" + "hijklmnop"]))


def test_there_is_nothing_held_out_but_validation():
    module = make()
    module.prepare(whole=True)
    assert set(module.splits) == {"train", "validation"}
    for split in ("test", "all"):
        with pytest.raises(ValueError, match=rf"^there is no split {split}, only train, validation\.$"):
            module.evaluation_dataloader(split)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, r"data.batch_size=0: must be at least 1; data.batch_size=16 works"),
        ({"num_workers": -1}, r"data.num_workers=-1: must not be negative"),
        ({"num_sequences": 0}, r"data.num_sequences=0: .*; data.num_sequences=65536 works"),
        ({"num_validation_sequences": 0}, r"data.num_validation_sequences=0: .*; .*=512 works"),
        ({"num_symbols": 0}, r"data.num_symbols=0: must be from 1 to 94"),
        ({"num_symbols": 95}, r"data.num_symbols=95: must be from 1 to 94; data.num_symbols=26 works"),
        ({"min_period": 0}, r"data.min_period=0: must be at least 1"),
        ({"min_period": 13}, r"data.max_period=12 is less than data.min_period=13; data.max_period=13 works"),
        ({"num_symbols": 11}, r"data.max_period=12: .* only 11; data.max_period=11 works"),
        ({"seq_len": 14}, r"data.seq_len=14: a block of data.max_period=12 .*; data.seq_len=15 works"),
        ({"max_seq_len": 39}, r"data.seq_len=40 is longer than model.max_seq_len=39; data.seq_len=39 works"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_mistakes_are_named_at_once(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_the_shortest_window_scores_one_target_of_each_longest_block():
    module = prepared(seq_len=15, min_period=12)
    assert module.splits["validation"].num_tokens == module.splits["validation"].num_documents
