"""Division of texts into splits without near-copies across splits, and removal of a checkpoint's training text."""

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, chain, pairwise
from typing import TypeAlias

import datasets
import numpy as np
from jaxtyping import Bool, Float, Int, Int64, UInt64

from tinyformer.data.sources.documents import from_columns, iterate_texts, text_lengths

_FEWEST, _MOST = 5, 20  # bounds on the number of words in a shared run that makes two texts near-copies
# Thai to Tibetan and Myanmar to Khmer, kana, and Chinese characters, which no spaces separate: each is a word.
_UNSPACED = "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(f"[{_UNSPACED}]|[^\\s{_UNSPACED}]+")

_LARGEST = 0.05
"""Maximum share of a held-out split for one group, if enough groups are smaller: no text shall dominate the loss."""

_COMMON = 0.01
"""A run of words that occurs in more than this share of the documents is boilerplate."""

Groups: TypeAlias = Int[np.ndarray, " documents"]

LENGTH = 128
"""Number of characters in a block, about 22 words; each block of a text has a fingerprint."""

MAX_FINGERPRINTS = 2**22
"""Maximum number of blocks whose fingerprints are stored (32 MB), enough for some 500 MB of text."""

_FACTOR = 0x9E3779B97F4A7C15


def splitmix64(x: UInt64[np.ndarray, "..."]) -> UInt64[np.ndarray, "..."]:
    """One step of the SplitMix64 generator, a hash: each input bit changes half of the output's bits on average."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def near_copy_groups(*columns: Sequence[str], most_common: int | None = None) -> Int[np.ndarray, " documents"]:
    """A group number for each document; near-copies, and near-copies of near-copies, have the same number.

    Two texts are near-copies if they share a run of words that is half as long as the shorter text, but at least 5 and
    at most 20 words long, ignoring case and white space. Texts of fewer than 5 words are near-copies if they are equal.
    In a script without spaces, each character is a word. An index of the hashes of all runs makes the search linear in
    the number of words (compare Brown et al. 2020, arXiv:2005.14165, appendix C).

    Each column has one text of every document; texts are compared within a column only. A run that occurs in more than
    `most_common` documents is boilerplate, such as a licence, and is ignored.
    """
    group = list(range(len(columns[0])))
    for texts in columns:
        number: dict[str, int] = {}
        words = [[number.setdefault(word, len(number)) for word in _WORD.findall(text.lower())] for text in texts]
        for a, b in _sharing(words, most_common or len(texts)):
            group[_root(group, a)] = _root(group, b)
    return np.unique([_root(group, i) for i in range(len(group))], return_inverse=True)[1].astype(np.int64)


def _root(parent: list[int], i: int) -> int:
    """The document that represents the group of document `i` (union-find)."""
    while parent[i] != i:
        parent[i] = parent[parent[i]]  # halves the path for the next search
        i = parent[i]
    return i


def _sharing(words: Sequence[Sequence[int]], most_common: int) -> list[list[int]]:
    """Pairs of documents with a run of words in common; the pairs connect all documents that share a run."""
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    ids = np.fromiter(chain.from_iterable(words), np.uint64, lengths.sum())
    document = np.repeat(np.arange(len(words)), lengths)
    shortest = np.clip(-(-lengths // 2), _FEWEST, _MOST)  # size of the shortest run that makes near-copies
    shortest, length = np.minimum(shortest, lengths)[document], lengths[document]
    left = np.cumsum(lengths)[document] - np.arange(len(ids))
    hashes, pairs = np.zeros(len(ids), np.uint64), []
    for size in range(1, _MOST + 1):
        end = max(len(ids) - size + 1, 0)
        hashes[:end] = splitmix64(hashes[:end] ^ ids[size - 1 :])
        is_run = (left >= size) & (shortest >= size) & ((size >= _FEWEST) | (length == size))
        if size < _MOST:  # one of the two texts must be so short that a run of this size suffices
            is_run[is_run] = np.isin(hashes[is_run], hashes[is_run & (shortest == size)])
        pairs += _linked(hashes[is_run], document[is_run], most_common)
    return pairs


def _linked(
    runs: UInt64[np.ndarray, " runs"], documents: Int[np.ndarray, " runs"], most_common: int
) -> list[list[int]]:
    """The pairs of successive documents that contain the same run, for each run in at most `most_common` documents."""
    order = np.lexsort((documents, runs))
    runs, documents = runs[order], documents[order]
    is_first = np.append(True, (np.diff(runs) != 0) | (np.diff(documents) != 0))[: len(runs)]
    runs, documents = runs[is_first], documents[is_first]
    counts = np.unique(runs, return_counts=True)[1]
    is_link = (np.diff(runs) == 0) & np.repeat(counts <= most_common, counts)[1:]
    return np.unique(np.stack([documents[:-1][is_link], documents[1:][is_link]], 1), axis=0).tolist()


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
    """Return the splits train, validation and test; a split that the source lacks is taken from its training documents.

    Whole documents are held out at random, near-copies together. A group of near-copies that fills more than a
    twentieth of a split stays in training if enough groups are smaller. If the groups are too large to fill the splits,
    the largest groups are divided in up to three steps: runs of words in more than a hundredth of the documents are
    ignored; then only the first compared column is used; then only equal documents are a group. If single documents
    are too large, a split gets whole documents until it has at least half of the requested size. A single document is
    cut by position into train, validation and test, in this order.

    Args:
        splits: the source's splits, including "train".
        validation_fraction: share of the training characters; 0: no validation split, unless the source has one.
        test_fraction: the same for the test split.
        seed: determines which documents are held out.
        group_near_copies: keep near-copies together (see `near_copy_groups`), which needs all texts in memory.
        keep_whole: never cut a document; the fractions refer to the number of documents.
        compared: names of columns. Rows that are equal in all these columns stay together, and near-copies are found
            within each column; empty: whole documents are compared.
        classes: name of a column; each of its values is divided by the same fractions (a stratified split).

    Returns:
        The splits; and a phrase if a document was cut or near-copies were separated, else None.
    """
    requested = {"validation": validation_fraction, "test": test_fraction}
    # Exact fractions from the decimal text, since int(100 * (1 - 0.05 - 0.05)) is 89.
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
    """Functions that return the group of each document; later functions return smaller groups."""
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
    """For each row, its split: 0 (train) or 1 + the index of a fraction; and a flag: True if its group was divided."""
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
    """The index of each value in the sorted distinct values."""
    return np.unique(values, return_inverse=True)[1].astype(np.int64)


def _can_fill(asked: Float[np.ndarray, " splits"], groups: Groups, sizes: Groups, share: float = 1) -> bool:
    """Return True if the groups that fit into `share` of each split have twice the total of `asked`, or all text."""
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


def fingerprints(text: str) -> set[int]:
    """The fingerprints of a text's blocks.

    The text is divided into blocks of `LENGTH` characters. The last block is the end of the text and may overlap the
    block before; a shorter text is one block.
    """
    hashes = _hashes(text)
    return {*hashes[::LENGTH].tolist(), int(hashes[-1])}


def fingerprints_of_all(texts: Iterable[str]) -> UInt64[np.ndarray, " fingerprints"]:
    """The fingerprints of all blocks of some texts, in ascending order."""
    found: set[int] = set()
    for text in texts:
        found |= fingerprints(text)
    return np.array(sorted(found), np.uint64)


def num_blocks(lengths: Int64[np.ndarray, " texts"]) -> int:
    """The number of blocks of texts, given their lengths in characters."""
    return int(np.maximum(1, -(-lengths // LENGTH)).sum())


def cut_out(text: str, known: UInt64[np.ndarray, " fingerprints"]) -> list[str]:
    """Remove every run of `LENGTH` characters with a known fingerprint from a text; return the pieces that remain.

    The `LENGTH - 1` characters on either side of such a run are removed, too, since they may be an incomplete block of
    the known text. So every passage of `2 * LENGTH - 1` or more characters of a known text is removed completely.
    """
    is_out = np.zeros(len(text), bool)
    for place in np.flatnonzero(np.isin(_hashes(text), known)):
        is_out[max(place - LENGTH + 1, 0) : place + 2 * LENGTH - 1] = True
    bounds = [0, *(np.flatnonzero(np.diff(is_out)) + 1), len(text)]
    return [text[begin:end] for begin, end in pairwise(bounds) if not is_out[begin]]


def _hashes(text: str) -> UInt64[np.ndarray, " places"]:
    """The hash of each run of `LENGTH` characters in a text, or of the whole text if it is shorter.

    The hash of c_0 … c_n is the sum of (c_i + 1) f^i modulo 2^64: a polynomial, whose values at all indices follow from
    prefix sums (Karp and Rabin 1987, "Efficient randomized pattern-matching algorithms").
    """
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64) + np.uint64(1)
    size = min(len(codes), LENGTH)
    powers = np.cumprod(np.full(len(codes), _FACTOR, np.uint64))
    inverses = np.cumprod(np.full(len(codes) + 1 - size, pow(_FACTOR, -1, 2**64), np.uint64))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(codes * powers)])
    return (sums[size:] - sums[: len(sums) - size]) * inverses
