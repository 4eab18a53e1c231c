"""Holding out: nothing is lost, near-copies stay together, and what was trained on is recognised in other data."""

import json
from itertools import chain

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyformer.data import (
    ByteTokenizer,
    ExampleFormat,
    PairFormat,
    QuestionFormat,
    Recipe,
    SquadFiles,
    TextFiles,
    WindowFormat,
    hold_out,
    near_copy_groups,
)
from tinyformer.data.splits import LENGTH, cut_out, fingerprints, fingerprints_of_all, num_blocks

WORDS = np.array("the of and to in is that it was for on are as with his they at be this have from or".split())  # noqa: SIM905


def random_texts(count, words, seed=0):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, words)) + f" {i}" for i in range(count)]


def divide(texts, *arguments, **own):
    features = datasets.Features(text=datasets.Value("string"))
    train = datasets.Dataset.from_dict({"text": texts}, features=features)
    divided, _ = hold_out({"train": train, **own}, *arguments)
    return {name: list(split["text"]) for name, split in divided.items()}


def test_one_document_is_cut_by_position_at_exact_fractions():
    text = "".join(chr(0x100 + i % 500) for i in range(1_115_394))
    parts = divide([text], 0.1, 0.0, 0, True)
    assert parts == {"train": [text[:1_003_854]], "validation": [text[1_003_854:]]}
    parts = divide(["x" * 90 + "v" * 5 + "t" * 5], 0.05, 0.05, 0, True)
    assert parts == {"train": ["x" * 90], "validation": ["v" * 5], "test": ["t" * 5]}


@given(
    st.lists(st.text("ab\n", max_size=40), min_size=1, max_size=60),
    st.sampled_from([0.0, 0.05, 0.1, 0.3]),
    st.sampled_from([0.0, 0.05, 0.25]),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_nothing_is_lost(texts, validation, test, group):
    parts = divide(texts, validation, test, 0, group)
    assert set(parts) == {"train"} | ({"validation"} if validation else set()) | ({"test"} if test else set())
    whole = sorted(text for part in parts.values() for text in part)
    cut = ["".join(pieces) for pieces in zip(*parts.values(), strict=False)]
    assert whole == sorted(texts) or cut == texts


def test_many_documents_are_divided_by_document_and_by_seed():
    texts = random_texts(200, 30)
    parts = divide(texts, 0.1, 0.2, 0, True)
    total = sum(map(len, texts))
    assert sum(map(len, parts["validation"])) == pytest.approx(0.1 * total, rel=0.05)
    assert sum(map(len, parts["test"])) == pytest.approx(0.2 * total, rel=0.05)
    assert parts == divide(texts, 0.1, 0.2, 0, True)
    assert parts != divide(texts, 0.1, 0.2, 1, True)
    parts = divide([*texts * 5, *(text * 20 for text in texts[:20])], 0.05, 0.05, 0, False)
    assert max(map(len, parts["validation"])) <= 0.1 * sum(map(len, parts["validation"]))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("sizes", "fractions", "numbers"),
    [
        ([70, 50], (0.1, 0.0), [1, 1]),
        ([70, 50], (0.05, 0.05), [1, 1, 0]),
        ([60, 90, 50], (0.05, 0.05), [1, 1, 1]),
        ([950, 10, 10, 0], (0.05, 0.05), [2, 1, 1]),
        ([100] * 8, (0.05, 0.4), [4, 1, 3]),
    ],
)
def test_of_a_few_documents_whole_ones_are_held_out_and_the_largest_is_trained_on(sizes, fractions, numbers, seed):
    texts = [letter * size for letter, size in zip("abcdefgh", sizes, strict=False)]
    parts = divide(texts, *fractions, seed, True)
    assert sorted(chain.from_iterable(parts.values())) == sorted(texts)
    assert list(map(len, parts.values())) == numbers
    assert max(map(len, parts["train"])) == max(sizes)


@pytest.mark.parametrize("fraction", [0.34, 0.1])
@pytest.mark.parametrize("seed", range(4))
def test_near_copies_stay_together_even_among_few_documents(seed, fraction):
    originals = random_texts(3, 40)
    parts = divide([*originals, *(f"{text} changed" for text in originals)], fraction, fraction, seed, True, True)
    assert [len(part) for part in parts.values()] == [2, 2, 2]
    for part in parts.values():
        assert part[1] == f"{part[0]} changed"


@pytest.mark.parametrize("group_near_copies", [True, False])
def test_rows_that_are_equal_in_a_compared_column_are_held_out_together(group_near_copies):
    rows = [(f"source {i % 99} {i} {i}", f"target {i // 3}") for i in range(300)]
    train = datasets.Dataset.from_dict(dict(zip(("text", "pair"), map(list, zip(*rows, strict=True)), strict=True)))
    settings = {"keep_whole": True, "compared": ("text", "pair") if group_near_copies else ("pair",)}
    parts, _ = hold_out({"train": train}, 0.1, 0.1, 0, group_near_copies, **settings)
    targets = [set(part["pair"]) for part in parts.values()]
    assert [len(part) for part in parts.values()] == pytest.approx([240, 30, 30], abs=3)
    assert sum(map(len, targets)) == len(set().union(*targets)) == 100


def are_near_copies(a, b):
    """The definition, for texts of five words or more."""
    size = min(20, max(5, (min(len(a), len(b)) + 1) // 2))
    runs = [{tuple(words[i : i + size]) for i in range(len(words) - size + 1)} for words in (a, b)]
    return bool(runs[0] & runs[1])


def test_groups_are_those_of_the_definition():
    texts = [text.split() for text in random_texts(40, 30)]
    texts += [[*words[:keep], "end"] for words, keep in zip(texts, range(5, 31), strict=False)]
    texts += [["so", *texts[8][4:], *words[10:16], *words[20:28]] for words in texts[:10]]
    expected = np.arange(len(texts))
    for i, a in enumerate(texts):
        for j, b in enumerate(texts):
            if are_near_copies(a, b):
                expected[expected == expected[i]] = expected[j]
    groups = near_copy_groups(list(map(" ".join, texts)))
    assert 1 < len(set(groups)) < len(texts)
    assert (np.equal.outer(groups, groups) == np.equal.outer(expected, expected)).all()


@pytest.mark.parametrize(
    ("texts", "groups"),
    [
        ([], []),
        (["", " ", "a", "A ", "a b"], [0, 1, 2, 2, 3]),
        (["close the file", "CLOSE  the\nfile", "close the file now"], [0, 0, 1]),
        (["the cat sat on a mat", "so the cat sat on a rug", "the dog sat on a mat"], [0, 0, 1]),
        (["山高月小水落石出清风徐来水波不兴", "苏子曰：山高月小水落石出清风徐来", "水波"], [0, 0, 1]),
    ],
)
def test_groups_of_short_texts_and_of_texts_without_spaces(texts, groups):
    assert near_copy_groups(texts).tolist() == groups


# What was trained on, whatever its file, order and format.

RNG = np.random.default_rng(0)
TEXT = "".join(map(chr, RNG.integers(97, 123, 3000)))
NEW = "".join(map(chr, RNG.integers(65, 91, 1500)))


def test_blocks_of_known_text_are_cut_out_wherever_they_stand():
    known, beside = fingerprints_of_all(["short", TEXT[:2000]]), LENGTH - 1
    for text, left in {
        TEXT: [TEXT[2000 + beside :]],
        NEW + TEXT[:2000] + NEW: [NEW[:-beside], NEW[beside:]],
        NEW: [NEW],
        "short": [],
        "shor": ["shor"],
        NEW + "short": [NEW + "short"],
        TEXT[1:LENGTH]: [TEXT[1:LENGTH]],
        TEXT[1 : 2 * LENGTH]: [],
        TEXT[5:999] + TEXT[1005:1999]: [],
    }.items():
        assert cut_out(text, known) == left
    rows = ["short", TEXT[:2000], TEXT[1:2000], "", "shor", TEXT[:1999]]
    assert [fingerprints(row) <= set(known.tolist()) for row in rows] == [True, True, False, False, False, False]
    assert num_blocks(np.array([*map(len, rows)])) == sum(len(fingerprints(row)) for row in rows)


def row_of(kind, i):
    """A row in the columns of a kind of data."""
    context = f"context {i}. " * 20
    answers = {"text": [str(i)], "answer_start": [context.index(str(i))]}
    return {
        WindowFormat: {"text": f"row {i} " * 40},
        ExampleFormat: {"text": f"row {i}", "label": i % 2},
        PairFormat: {"source": f"row {i}", "target": f"fila {i} " * 30},
        QuestionFormat: {"question": f"which {i}?", "context": context, "answers": answers},
    }[kind]


@pytest.mark.parametrize("kind", [WindowFormat, ExampleFormat, PairFormat, QuestionFormat])
def test_rows_of_the_training_split_are_left_out_of_every_other_split(tmp_path, kind):
    def recipe(name, numbers, **settings):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(json.dumps(row_of(kind, i)) for i in numbers))
        source = SquadFiles(str(path)) if kind is QuestionFormat else TextFiles(str(path), label_column="label")
        return Recipe(source, ByteTokenizer(), kind(16), 0.2, 0.2, **settings)

    def numbers(prepared, split):
        ids = np.asarray(prepared.splits[split].ids)
        texts = bytes(np.where(ids == 256, 10, ids).astype(np.uint8)).decode()
        return {int(word.strip(".?")) for word in texts.split() if word.strip(".?").isdecimal()}

    run = recipe("run.jsonl", range(60))
    own = run.prepare(tmp_path)
    trained, known = numbers(own, "train"), own.trained_on
    assert len(trained) in range(30, 40)
    moved = recipe("there/moved.jsonl", range(60))
    assert (moved.content, moved.key) == (run.content, run.key)
    changed = recipe("changed.jsonl", reversed(range(70)))
    assert changed.content != run.content
    whole = recipe("changed.jsonl", reversed(range(70)), whole=True, without=known).prepare(tmp_path)
    assert numbers(whole, "all") == {*range(70)} - trained
    assert sum(whole.facts["left_out"]["all"].values()) >= len(trained)
    divided = recipe("changed.jsonl", reversed(range(70)), seed=3, without=known).prepare(tmp_path)
    for split in ("validation", "test"):
        assert not numbers(divided, split) & trained
    assert numbers(divided, "train") & trained
