"""Holding out validation and test text."""

import functools
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import TypeAlias

import datasets
import numpy as np
from jaxtyping import Bool, Float, Int

from tinyformer.data.near_copies import near_copy_groups
from tinyformer.data.sources.documents import from_columns, iterate_texts, text_lengths

_LARGEST = 0.05
"""Largest share of a held-out split for a group, where enough are smaller, so that no text decides the split's loss."""

_COMMON = 0.01
"""Words that more than this share of the documents have in common are boilerplate."""

Groups: TypeAlias = Int[np.ndarray, " documents"]


def hold_out(
    splits: Mapping[str, datasets.Dataset],
    validation_fraction: float,
    test_fraction: float,
    seed: int,
    group_near_copies: bool,
    keep_whole: bool = False,
    compared: Sequence[str] = (),
    classes: str | None = None,
) -> tuple[dict[str, datasets.Dataset], str | None]:
    """The splits train, validation and test; those that a source lacks are taken from its training documents.

    Whole documents are held out at random, near-copies together. A group of near-copies that fills more than a
    twentieth of a split is not held out if there are enough smaller ones. If the groups are too large to fill the
    splits, the largest are divided: first, what more than a hundredth of the documents have in common no longer makes
    them copies; then, only the first of several columns is compared; then by document. If the documents are too large,
    each split has one, or a few that are at least half of what is asked for. A single document is cut by position into
    train, validation and test, in this order.

    Args:
        splits: the source's splits, "train" among them.
        validation_fraction: share of the training characters; 0: no validation split, unless the source has one.
        test_fraction: the same for the test split.
        seed: determines which documents are held out.
        group_near_copies: find near-copies (see `near_copy_groups`), for which all texts are held in memory.
        keep_whole: never cut a document; the fractions are of the number of documents.
        compared: columns: rows that are equal in all of them stay together, and near-copies are found among the values
            of each; empty: whole documents are compared.
        classes: a column: of each of its values, the splits have their share.

    Returns:
        The splits; and a phrase if a document was cut, or near-copies were not kept together.
    """
    requested = {"validation": validation_fraction, "test": test_fraction}
    # From the decimal text, since int(100 * (1 - 0.05 - 0.05)) is 89.
    fractions = {s: Fraction(str(f)) for s, f in requested.items() if f > 0 and s not in splits}
    if not fractions:
        return dict(splits), None
    train = splits["train"]
    sizes = np.ones(len(train), np.int64) if keep_whole else text_lengths(train)
    levels = _levels(train, group_near_copies, compared)
    if not keep_whole and len(np.unique(levels[-1]()[sizes > 0])) < 2:
        return dict(splits) | _cut(train, fractions), "one document, cut by position"
    _, first, group = np.unique(levels[0](), return_index=True, return_inverse=True)
    class_of = _numbered(np.array(list(train[classes])))[first[group]] if classes else np.zeros_like(sizes)
    choice, is_divided = np.zeros_like(sizes), np.zeros(len(train), bool)
    generator = np.random.default_rng(seed)
    for rows in (np.flatnonzero(class_of == number) for number in np.unique(class_of)):
        choice[rows], is_divided[rows] = _divide(levels, rows, sizes[rows], list(fractions.values()), generator)
    parts = {split: np.flatnonzero(choice == i) for i, split in enumerate(("train", *fractions))}
    phrase = f"{is_divided.sum():,} documents are near-copies of too many others to be kept together with them"
    return dict(splits) | {s: train.select(rows) for s, rows in parts.items()}, phrase if is_divided.any() else None


def _levels(train: datasets.Dataset, group_near_copies: bool, compared: Sequence[str]) -> list[Callable[[], Groups]]:
    """Functions that return the group of each document, from large groups to small ones."""
    if not len(train) or not (group_near_copies or compared):
        return [lambda: np.arange(len(train))]
    number: dict[tuple[str, ...], int] = {}
    rows = zip(*(train[column] for column in compared), strict=True) if compared else zip(iterate_texts(train))
    same = np.array([number.setdefault(row, len(number)) for row in rows], np.int64)
    if not group_near_copies:
        return [lambda: same]

    @functools.cache
    def near_copies(num_columns: int, most_common: int) -> Groups:
        columns = [*zip(*number, strict=True)][:num_columns]
        return near_copy_groups(*columns, most_common=most_common)[same]

    common = max(10, int(_COMMON * len(number)))
    settings = (len(compared) or 1, len(number)), (len(compared) or 1, common), (1, common)
    return [*(functools.partial(near_copies, *each) for each in settings), lambda: same]


def _divide(
    levels: Sequence[Callable[[], Groups]],
    rows: Int[np.ndarray, " rows"],
    sizes: Int[np.ndarray, " rows"],
    fractions: Sequence[Fraction],
    generator: np.random.Generator,
) -> tuple[Int[np.ndarray, " rows"], Bool[np.ndarray, " rows"]]:
    """For some documents 0 (train), or 1 + the index of their split; and whether their group was divided."""
    asked = np.array([float(int(sizes.sum()) * fraction) for fraction in fractions])
    whole, documents = (_numbered(level()[rows]) for level in (levels[0], levels[-1]))
    groups = whole
    if _can_fill(asked, documents, sizes):
        for level in levels[1:]:
            if not _can_fill(asked, groups, sizes):
                is_large = np.bincount(groups, sizes) > asked.min()
                groups = _numbered(np.where(is_large[groups], level()[rows] + len(is_large), groups))
    elif whole.max(initial=0) < len(fractions):
        groups = documents
    totals = np.bincount(groups, sizes)
    share = next((share for share in (_LARGEST, 1) if _can_fill(asked, groups, sizes, share)), None)
    largest = np.median(totals) if share is None else asked.min() * share
    order = generator.permutation(np.flatnonzero((totals > 0) & (totals <= largest)))[: len(totals) - 1]
    choice, missing = np.zeros(len(totals), np.int64), asked.copy()
    for group in order:
        split = (missing / asked).argmax()
        if totals[group] <= missing[split] or (share is None and missing[split] > asked[split] / 2):
            choice[group] = 1 + split
            missing[split] -= totals[group]
    return choice[groups], np.bincount(whole)[whole] > np.bincount(groups)[groups]


def _numbered(values: np.ndarray) -> Groups:
    """The index of each value among the different ones."""
    return np.unique(values, return_inverse=True)[1].astype(np.int64)


def _can_fill(asked: Float[np.ndarray, " splits"], groups: Groups, sizes: Groups, share: float = 1) -> bool:
    """Return True if groups of at most this share of each split contain twice what is asked for, or everything."""
    totals = np.bincount(groups, sizes)
    return bool(totals[totals <= asked.min() * share].sum() >= min(2 * asked.sum(), sizes.sum()) > 0)


def _cut(train: datasets.Dataset, fractions: Mapping[str, Fraction]) -> dict[str, datasets.Dataset]:
    """Each document, cut into consecutive parts, one for each split."""
    texts, shares = list(iterate_texts(train)), (1 - sum(fractions.values()), *fractions.values())
    bounds = pairwise(accumulate(shares, initial=Fraction(0)))
    return {
        name: from_columns(text=[text[int(len(text) * begin) : int(len(text) * end)] for text in texts])
        for name, (begin, end) in zip(("train", *fractions), bounds, strict=True)
    }
