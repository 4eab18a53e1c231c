"""Sequences that repeat a block: how they are drawn, and what is scored."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tinyformer.batch import IGNORED
from tinyformer.data import ByteTokenizer, InductionDataModule

SETTINGS = {"seq_len": 40, "max_seq_len": 64, "batch_size": 8, "num_symbols": 16, "min_period": 6, "max_period": 12}
SETTINGS |= {"num_sequences": 100, "num_validation_sequences": 50}


def prepared(**changes):
    module = InductionDataModule(**SETTINGS | changes)
    module.prepare()
    return module


def sequences(module, split):
    """The symbols of each sequence."""
    tokens = module.splits[split]
    return [tokens.ids[a + 1 : b].tolist() for a, b in zip(tokens.offsets, tokens.offsets[1:], strict=False)]


def period_of(symbols):
    """The length of the block, whose symbols are distinct."""
    return symbols.index(symbols[0], 1)


@st.composite
def changes(draw):
    smallest = draw(st.integers(3, 9))
    largest = draw(st.integers(smallest, 12))
    return {
        "min_period": smallest,
        "max_period": largest,
        "seq_len": draw(st.integers(largest + 3, 50)),
        "num_symbols": draw(st.integers(max(largest, 8), 30)),  # enough for unseen sequences
        "split_seed": draw(st.integers(0, 5)),
        "num_sequences": 20,
        "num_validation_sequences": 10,
    }


@given(changes())
@settings(max_examples=30, deadline=None)
def test_a_scored_target_is_the_one_that_followed_the_previous_occurrence(changes):
    module = prepared(**changes)
    for split in ("train", "validation"):
        for symbols in sequences(module, split):
            period = period_of(symbols)
            assert changes["min_period"] <= period <= changes["max_period"]
            assert len(set(symbols)) == period
            assert symbols == [symbols[i % period] for i in range(changes["seq_len"] - 1)]
    windows = [row for batch in module.train_dataloader() for row in batch["inputs"].tolist()]
    drawn = [[module.tokenizer.eos_id, *symbols] for symbols in sequences(module, "train")]
    # Each window is one sequence. The last token of the stream is not an input, since nothing follows it.
    assert all(row[:-1] in [sequence[:-1] for sequence in drawn] for row in windows)
    for batch in module.val_dataloader():
        for inputs, targets in zip(batch["inputs"].tolist(), batch["targets"].tolist(), strict=True):
            assert inputs[0] == module.tokenizer.eos_id
            for i, (token, target) in enumerate(zip(inputs, targets, strict=True)):
                earlier = [k for k in range(i) if inputs[k] == token]
                assert (target != IGNORED) == (bool(earlier) and i < len(inputs) - 1)
                if target != IGNORED:
                    assert target == inputs[earlier[-1] + 1]


def test_the_fingerprint_covers_everything_that_changes_the_tokens():
    changes = [{"split_seed": 1}, {"seq_len": 41}, {"num_symbols": 17}, {"min_period": 7}, {"max_period": 13}]
    changes += [{"num_sequences": 101}, {"num_validation_sequences": 51}, {"tokenizer": ByteTokenizer().build([])}]
    first, others = prepared(), [prepared(**change) for change in changes]
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 1 + len(changes)
    same = prepared(batch_size=3, num_workers=1, max_seq_len=99)
    assert same.fingerprint == first.fingerprint
    for split in ("train", "validation"):
        assert sequences(first, split) == sequences(same, split) != sequences(others[0], split)


def test_no_validation_sequence_is_trained_on():
    # There are only 24 + 60 + 60 different sequences: by chance, many would be in both splits.
    module = prepared(num_symbols=5, min_period=3, max_period=4, num_sequences=60, seq_len=9)
    train, validation = ({*map(tuple, sequences(module, split))} for split in ("train", "validation"))
    assert validation
    assert not train & validation
    assert module.splits["validation"].num_documents < 50
