"""Holding out: nothing is lost, near-copies stay together, sizes are as requested."""

from itertools import chain

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyformer.data import hold_out, near_copy_groups

WORDS = np.array("the of and to in is that it was for on are as with his they at be this have from or".split())  # noqa: SIM905


def documents(*texts):
    return datasets.Dataset.from_dict({"text": list(texts)}, features=datasets.Features(text=datasets.Value("string")))


def random_texts(count, words, seed=0):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, words)) + f" {i}" for i in range(count)]


def divide(texts, *arguments, **own):
    """The texts of each split."""
    splits = hold_out({"train": documents(*texts), **own}, *arguments)
    return {name: list(split["text"]) for name, split in splits.items()}


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
    assert sorted(chain.from_iterable(parts.values())) == sorted(texts)
    assert parts == divide(texts, 0.1, 0.2, 0, True)
    assert parts != divide(texts, 0.1, 0.2, 1, True)


def test_documents_too_large_for_the_smaller_split_are_cut():
    texts = ["x" * 100 for _ in range(8)]  # each is 1/8 of the text: less than 0.4, and more than 0.05
    parts = divide(texts, 0.05, 0.4, 0, False)
    assert {name: list(map(len, part)) for name, part in parts.items()} == {
        "train": [55] * 8,
        "validation": [5] * 8,
        "test": [40] * 8,
    }


def test_near_copies_are_held_out_together():
    originals = random_texts(100, 40)
    copies = [text.replace(" the ", " a ", 1) + " changed" for text in originals]
    parts = divide([*originals, *copies], 0.2, 0.2, 3, True)
    for original, copy in zip(originals, copies, strict=True):
        assert any(original in part and copy in part for part in parts.values())
    train = divide([*originals, *copies], 0.2, 0.2, 3, False)["train"]
    assert not all((o in train) == (c in train) for o, c in zip(originals, copies, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_near_copies_stay_together_even_among_few_documents(seed):
    originals = random_texts(3, 40)
    parts = divide([*originals, *(f"{text} changed" for text in originals)], 0.34, 0.34, seed, True, True)
    assert [len(part) for part in parts.values()] == [2, 2, 2]
    for part in parts.values():
        assert part[1] == f"{part[0]} changed"


def similarity(a, b):
    sets = [{tuple((*words, "", "")[i : i + 3]) for i in range(len(words))} for words in (a.split(), b.split())]
    return len(sets[0] & sets[1]) / max(len(sets[0] | sets[1]), 1)


def test_groups_are_those_of_the_exact_similarity():
    texts = random_texts(40, 30)
    texts += [" ".join(text.split()[:keep]) + " end" for text, keep in zip(texts, range(5, 31), strict=False)]
    groups = near_copy_groups(texts)
    for i, a in enumerate(texts):
        nearest = max(similarity(a, b) for k, b in enumerate(texts) if k != i)
        for j, b in enumerate(texts):
            if similarity(a, b) >= 0.55:  # just above the threshold MinHash may miss a pair
                assert groups[i] == groups[j]
            if groups[i] == groups[j] and i != j:
                assert nearest >= 0.5
