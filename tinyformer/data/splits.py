"""Holding out validation and test text."""

from collections.abc import Mapping
from fractions import Fraction

import datasets
import numpy as np
from jaxtyping import Int

from tinyformer.data.documents import from_texts, iterate_texts
from tinyformer.data.near_copies import near_copy_groups


def hold_out(
    splits: Mapping[str, datasets.Dataset],
    validation_fraction: float,
    test_fraction: float,
    seed: int,
    group_near_copies: bool,
    keep_whole: bool = False,
    unit: str | None = None,
) -> dict[str, datasets.Dataset]:
    """The splits train, validation and test; those that a source lacks are taken from its training documents.

    Many documents are divided by document, at random, near-copies together. Where documents are too few or too large
    for that, each is cut by position into train, validation and test, in this order; with `keep_whole`, the fractions
    are then of the number of documents.

    Args:
        splits: the source's splits, "train" among them.
        validation_fraction: share of the training characters; 0: no validation split, unless the source has one.
        test_fraction: the same for the test split.
        seed: determines which documents are held out.
        group_near_copies: find near-copies (see `near_copy_groups`), for which all texts are held in memory.
        keep_whole: never cut a document.
        unit: a column: rows with the same value in it stay together, and near-copies are found among its values; None:
            whole documents are compared.
    """
    requested = {"validation": validation_fraction, "test": test_fraction}
    # From the decimal text, since int(100 * (1 - 0.05 - 0.05)) is 89.
    fractions = {s: Fraction(str(f)) for s, f in requested.items() if f > 0 and s not in splits}
    if not fractions:
        return dict(splits)
    train = splits["train"]
    sizes = np.fromiter(map(len, iterate_texts(train)), np.int64, len(train))
    number: dict[str, int] = {}
    groups = np.arange(len(train))
    if unit is not None:
        groups = np.array([number.setdefault(value, len(number)) for value in train[unit]])
    if group_near_copies and (keep_whole or _can_divide(sizes, fractions)):
        groups = near_copy_groups(list(iterate_texts(train)) if unit is None else list(number))[groups]
    group_sizes = np.bincount(groups, weights=sizes).astype(np.int64)
    if not _can_divide(group_sizes, fractions):
        if not keep_whole:
            return dict(splits) | _cut(train, fractions)
        group_sizes = np.bincount(groups)
    choice = _divide(group_sizes, fractions, seed)[groups]
    parts = {split: np.flatnonzero(choice == i) for i, split in enumerate(("train", *fractions))}
    return dict(splits) | {split: train.select(rows) for split, rows in parts.items()}


def _can_divide(sizes: Int[np.ndarray, " groups"], fractions: Mapping[str, Fraction]) -> bool:
    """Whether the groups that fit into each held-out split contain twice the text to hold out."""
    total = int(sizes.sum())
    fitting = sizes[sizes <= float(total * min(fractions.values()))]
    return bool(fitting.sum() >= 2 * total * float(sum(fractions.values()))) and total > 0


def _divide(
    sizes: Int[np.ndarray, " groups"], fractions: Mapping[str, Fraction], seed: int
) -> Int[np.ndarray, " groups"]:
    """For each group 0 (train), or 1 + the index of the held-out split that it is assigned to."""
    choice = np.zeros(len(sizes), np.int64)
    order = np.random.default_rng(seed).permutation(len(sizes))
    for i, fraction in enumerate(fractions.values(), start=1):
        missing = int(int(sizes.sum()) * fraction)
        for group in order:
            if choice[group] == 0 and 0 < sizes[group] <= missing:
                choice[group] = i
                missing -= int(sizes[group])
    return choice


def _cut(train: datasets.Dataset, fractions: Mapping[str, Fraction]) -> dict[str, datasets.Dataset]:
    """Each document, cut into consecutive parts, one for each split."""
    names = ("train", *fractions)
    shares = (1 - sum(fractions.values()), *fractions.values())
    parts: dict[str, list[str]] = {name: [] for name in names}
    for text in iterate_texts(train):
        begin, share = 0, Fraction(0)
        for name, part in zip(names, shares, strict=True):
            share += part
            end = int(len(text) * share)
            parts[name].append(text[begin:end])
            begin = end
    return {name: from_texts(texts) for name, texts in parts.items()}
