"""Generated sequences: every scored target against a solver that reads the text, and fresh epochs."""

import itertools
import re

import pytest
import torch
from commands import SMALL, column, ran, results_of

import tinyformer
from tinyformer.data import (
    BigramBackcopyDataModule,
    ByteTokenizer,
    CopyDataModule,
    InductionDataModule,
    Masking,
    ModularAdditionDataModule,
    RecallDataModule,
)
from tinyformer.data.batches.windows import IGNORED
from tinyformer.data.generated.sequences import NUMBERS
from tinyformer.errors import ArgumentError

NUMBER = {"num_sequences": 50, "num_validation_sequences": 20}
INDUCTION = {"seq_len": 40, "num_symbols": 16, "min_period": 6, "max_period": 12} | NUMBER
RECALL = {"seq_len": 30, "num_pairs": 4, "num_keys": 9, "num_values": 5} | NUMBER
COPY = {"num_symbols": 5, "min_length": 2, "max_length": 7, "max_test_length": 12} | NUMBER
KINDS = {
    "induction": (InductionDataModule, INDUCTION),
    "recall": (RecallDataModule, RECALL),
    "copy": (CopyDataModule, COPY),
    "bigram_backcopy": (BigramBackcopyDataModule, {"seq_len": 30, "num_symbols": 9, "num_triggers": 2} | NUMBER),
    "modular_addition": (ModularAdditionDataModule, {"modulus": 13, "train_fraction": 0.3}),
}


def prepared(kind, **changes):
    make, arguments = KINDS[kind]
    module = make(**{"max_seq_len": 40, "batch_size": 8} | arguments | changes)
    module.prepare()
    return module


def texts(module, split):
    """Each sequence as text, and the positions in it that are scored."""
    tokens = module.splits[split]
    for begin, end in itertools.pairwise(tokens.offsets):
        assert tokens.ids[begin] == module.tokenizer.eos_id
        scored = tokens.scored[begin + 1 : end].nonzero()[0].tolist()
        assert not tokens.scored[begin]
        yield module.tokenizer.decode(tokens.ids[begin + 1 : end]), scored


# Independent of the module: what a person would write under each scored position, from the text before it.


def induced(text):
    period = text.index(text[0], 1)
    assert len(set(text)) == period >= 6
    assert text == (text[:period] * 7)[: len(text)]  # the same block again and again
    return {at: text[text.rindex(text[at - 1], 0, at - 1) + 1] for at in range(period + 1, len(text))}


def recalled(text):
    pairs = dict(re.findall("(.)(.)", text[:8]))
    assert len(pairs) == 4  # distinct keys
    asked = {2 * n + 9: pairs[key] for n, (key, _) in enumerate(re.findall("(.)(.)", text[8:])) if key != "."}
    assert sorted(text[at - 1] for at in asked) == sorted(pairs)  # each once
    return asked


def copied(text):
    original, equals, _ = text.partition("=")
    assert equals
    return {len(original) + 1 + n: symbol for n, symbol in enumerate(original)}


def backcopied(text):
    assert text[0] not in "ab"  # the triggers
    return {at: text[at - 2] if at and text[at - 1] in "ab" else symbol for at, symbol in enumerate(text)}


def added(text):
    a, b = text[:3].split("+")
    assert text[3] == "="
    return {4: NUMBERS[(NUMBERS.index(a) + NUMBERS.index(b)) % 13]}


SOLVERS = {
    "induction": induced,
    "recall": recalled,
    "copy": copied,
    "bigram_backcopy": backcopied,
    "modular_addition": added,
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_scored_is_what_a_solver_predicts(kind):
    module = prepared(kind)
    for split, tokens in module.splits.items():
        number = 0
        for text, scored in texts(module, split):
            solved = SOLVERS[kind](text)
            assert scored == sorted(solved)
            assert all(text[position] == symbol for position, symbol in solved.items())
            number += len(solved)
        assert tokens.num_tokens == number > 0
        batches = list(module.evaluation_dataloader(split))
        rows = [
            pair for batch in batches for pair in zip(batch["inputs"].tolist(), batch["targets"].tolist(), strict=True)
        ]
        for (inputs, targets), (text, scored) in zip(rows, texts(module, split), strict=True):
            # Each sequence is one window, from its <eos> on. The last token of the stream is not an input.
            assert module.tokenizer.decode(inputs).startswith("<eos>" + text[:-1])
            assert [n for n, target in enumerate(targets) if target != IGNORED] == scored
            assert module.tokenizer.decode(targets[n] for n in scored) == "".join(text[n] for n in scored)


def test_lengths_of_copies_and_the_whole_table_of_sums():
    module = prepared("copy", num_validation_sequences=200)
    for split, lengths in {"train": (2, 7), "validation": (2, 7), "test": (8, 12)}.items():
        found = {len(scored) for _, scored in texts(module, split)}
        assert found == set(range(lengths[0], lengths[1] + 1))
    module = prepared("modular_addition")
    train, validation = ([text[:3] for text, _ in texts(module, split)] for split in ("train", "validation"))
    assert (len(train), len(validation)) == (51, 118)  # 0.3 of 169
    assert sorted(train + validation) == sorted(f"{a}+{b}" for a in NUMBERS[:13] for b in NUMBERS[:13])


@pytest.mark.parametrize("kind", ["recall", "copy"])
def test_fresh_epochs_are_new_resume_exactly_and_never_show_validation(kind):
    # So few sequences that by chance many of a new epoch would be of the validation split.
    few = {"recall": {"num_keys": 2, "num_values": 3, "num_pairs": 1, "seq_len": 7}, "copy": {"max_length": 3}}[kind]
    module = prepared(kind, **few, batch_size=10, num_sequences=20)
    held_out = {text for text, _ in texts(module, "validation")}
    assert held_out

    def rows(batch):
        return [text.replace("<eos>", "") for text in map(module.tokenizer.decode, batch["inputs"].tolist())]

    reference = module.train_dataloader()
    epochs = [[rows(batch) for batch in reference] for _ in range(3)]
    assert not held_out & {row for epoch in epochs for batch in epoch for row in batch}
    assert len({str(sorted(itertools.chain.from_iterable(epoch))) for epoch in epochs}) == 3
    interrupted = module.train_dataloader()
    list(interrupted)
    next(iter(interrupted))
    resumed = module.train_dataloader()
    resumed.load_state_dict(interrupted.state_dict())
    assert [rows(batch) for batch in resumed] == epochs[1][1:]
    assert [rows(batch) for batch in resumed] == epochs[2]
    fixed = prepared(kind, **few, batch_size=10, num_sequences=20, fresh=False).train_dataloader()
    first, second = (sorted(row for batch in fixed for row in rows(batch)) for _ in range(2))
    assert first == second


DRAWN = [{"num_sequences": 51}, {"num_validation_sequences": 21}, {"fresh": False}]
CHANGES = {
    "induction": [{"seq_len": 39}, {"num_symbols": 17}, {"min_period": 7}, {"max_period": 13}, *DRAWN[:2]],
    "recall": [{"seq_len": 29}, {"num_pairs": 3}, {"num_keys": 8}, {"num_values": 4}, *DRAWN],
    "copy": [{"num_symbols": 6}, {"min_length": 1}, {"max_length": 6}, {"max_test_length": 13}, *DRAWN],
    "bigram_backcopy": [{"seq_len": 29}, {"num_symbols": 8}, {"num_triggers": 3}, *DRAWN],
    "modular_addition": [{"modulus": 12}, {"train_fraction": 0.4}],
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_fingerprint_covers_everything_that_changes_the_tokens(kind):
    changes = [{"split_seed": 1}, {"tokenizer": ByteTokenizer().build([])}, *CHANGES[kind]]
    first, others = prepared(kind), [prepared(kind, **change) for change in changes]
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 1 + len(changes)
    same = prepared(kind, batch_size=3, max_seq_len=99)
    assert same.fingerprint == first.fingerprint
    for split in first.splits:
        assert list(texts(first, split)) == list(texts(same, split)) != list(texts(others[0], split))


MISTAKES = [
    ("induction", {"num_symbols": 11}, "max_period=12: must be from min_period=6, at least 1, to num_symbols=11"),
    ("recall", {"seq_len": 16}, "seq_len=16: must be at least 17, .*; seq_len=17 works"),
    ("recall", {"masking": Masking()}, "masking=.*: .*recall needs a causal language model"),
    ("copy", {"max_test_length": 7}, "max_length=7: must be below max_test_length=7, and at least min_length=2"),
    ("bigram_backcopy", {"num_triggers": 9}, "num_triggers=9: must be at least 1, and below num_symbols=9"),
    ("modular_addition", {"max_seq_len": 5}, "max_seq_len=5: must be at least 6, "),
]


@pytest.mark.parametrize(("kind", "changes", "sentence"), MISTAKES)
def test_arguments(kind, changes, sentence):
    with pytest.raises(ArgumentError, match=f"^{sentence}"):
        prepared(kind, **changes)


def test_a_run_its_training_accuracy_and_what_an_evaluation_may_change(program):
    data = "data=modular_addition data.modulus=7 data.batch_size=8 model.max_seq_len=8 optimizer.lr=1e-2"
    out = ran(program, "train.py", SMALL, data, "trainer.max_steps=40 trainer.val_check_interval=20 hydra.run.dir=run")
    assert "not every token is scored" in out
    module, results = prepared("modular_addition", modulus=7, train_fraction=0.5), results_of("run")
    assert (results["val/bits_per_byte"], results["val/num_tokens"]) == (None, 25)
    ids = torch.tensor(module.splits["train"].ids.tolist()).view(-1, 6)
    predicted = tinyformer.load("run/checkpoints/last.ckpt").logits(ids[:, :-1])[:, -1].argmax(-1)
    logged = [float(value) for value in column("run", "train/accuracy").values()]
    assert 0 < results["train/accuracy"] == logged[-1] != logged[0]
    assert logged[-1] == pytest.approx((predicted == ids[:, -1]).float().mean().item())
    evaluate = "checkpoint=run/checkpoints/last.ckpt hydra.run.dir=evaluated"
    for change in ("data.split_seed=5", "data.train_fraction=0.2"):
        ended = program("evaluate.py", evaluate, change)
        assert ended.err.startswith(f"Error: {change}: would make other splits, with sequences that the checkpoint may")
    assert "not the data and splits of the run" not in ran(program, "evaluate.py", evaluate, "seed=5")
