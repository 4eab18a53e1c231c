"""Groups of documents that are near-copies of one another."""

import re
from collections.abc import Sequence
from itertools import chain

import numpy as np
from jaxtyping import Int, UInt64

_FEWEST, _MOST = 5, 20  # words of a shared run
# Thai to Tibetan and Myanmar to Khmer, kana, and Chinese characters, which no spaces separate: each counts as a word.
_UNSPACED = "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(f"[{_UNSPACED}]|[^\\s{_UNSPACED}]+")


def splitmix64(x: UInt64[np.ndarray, "..."]) -> UInt64[np.ndarray, "..."]:
    """One step of the SplitMix64 generator, a hash: each input bit changes half of the output's bits on average."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def near_copy_groups(*columns: Sequence[str], most_common: int | None = None) -> Int[np.ndarray, " documents"]:
    """A group number for each document; near-copies, and near-copies of near-copies, share one.

    Two texts are near-copies if they have a run of words in common that is half as long as the shorter text, but at
    least 5 and at most 20 words, ignoring case and white space; shorter texts if they are the same. So they also are
    if one contains a part of the other. In a script without spaces, a word is a character. An index of the hashes of
    all runs makes this linear in the number of words (compare Brown et al. 2020, arXiv:2005.14165, appendix C).

    A document has a text in each of the columns, which are compared each for itself. A run that more than `most_common`
    documents have in common is boilerplate, such as a licence, and no sign of a copy.
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
    """Pairs of documents that link all those with a run in common."""
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    ids = np.fromiter(chain.from_iterable(words), np.uint64, lengths.sum())
    document = np.repeat(np.arange(len(words)), lengths)
    shortest = np.clip(-(-lengths // 2), _FEWEST, _MOST)  # size of the shortest run that counts
    shortest, length = np.minimum(shortest, lengths)[document], lengths[document]
    left = np.cumsum(lengths)[document] - np.arange(len(ids))
    hashes, pairs = np.zeros(len(ids), np.uint64), []
    for size in range(1, _MOST + 1):
        end = max(len(ids) - size + 1, 0)
        hashes[:end] = splitmix64(hashes[:end] ^ ids[size - 1 :])
        is_run = (left >= size) & (shortest >= size) & ((size >= _FEWEST) | (length == size))
        if size < _MOST:  # one of the two texts must be so short that a run of this size counts
            is_run[is_run] = np.isin(hashes[is_run], hashes[is_run & (shortest == size)])
        pairs += _linked(hashes[is_run], document[is_run], most_common)
    return pairs


def _linked(
    runs: UInt64[np.ndarray, " runs"], documents: Int[np.ndarray, " runs"], most_common: int
) -> list[list[int]]:
    """For each run, the pairs of successive documents that have it, unless it is in too many."""
    order = np.lexsort((documents, runs))
    runs, documents = runs[order], documents[order]
    is_first = np.append(True, (np.diff(runs) != 0) | (np.diff(documents) != 0))[: len(runs)]
    runs, documents = runs[is_first], documents[is_first]
    counts = np.unique(runs, return_counts=True)[1]
    is_link = (np.diff(runs) == 0) & np.repeat(counts <= most_common, counts)[1:]
    return np.unique(np.stack([documents[:-1][is_link], documents[1:][is_link]], 1), axis=0).tolist()
