"""Groups of documents that are near-copies of one another."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, UInt64

_SHINGLE = 3  # words
_THRESHOLD = 0.5
# A pair of similarity s becomes a candidate with probability 1 - (1 - s^_ROWS)^_BANDS: 0.995 at the threshold.
_BANDS, _ROWS = 40, 3


def splitmix64(x: UInt64[np.ndarray, "..."]) -> UInt64[np.ndarray, "..."]:
    """One step of the SplitMix64 generator, a hash: each input bit changes half of the output's bits on average."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def near_copy_groups(texts: Sequence[str]) -> Int[np.ndarray, " documents"]:
    """A group number for each document; near-copies, and near-copies of near-copies, share one.

    Two documents are near-copies if the Jaccard similarity of their sets of three-word shingles is at least 0.5,
    ignoring case and white space. MinHash with banding finds candidate pairs (Broder 1997, "On the resemblance and
    containment of documents"), which are then compared exactly.
    """
    words = [text.lower().split() for text in texts]
    first: dict[str, int] = {}
    group = [first.setdefault(" ".join(w), i) for i, w in enumerate(words)]  # identical texts share a number
    distinct = [i for i in first.values() if words[i]]
    for a, b in _similar_pairs([words[i] for i in distinct]):
        group[_root(group, distinct[a])] = _root(group, distinct[b])
    roots = np.array([_root(group, i) for i in range(len(texts))], np.int64)
    return np.unique(roots, return_inverse=True)[1].astype(np.int64)


def _root(parent: list[int], i: int) -> int:
    """The document that represents the group of document `i` (union-find)."""
    while parent[i] != i:
        parent[i] = parent[parent[i]]  # halves the path for the next search
        i = parent[i]
    return i


def _similar_pairs(words: Sequence[Sequence[str]]) -> list[tuple[int, int]]:
    """Pairs of documents whose exact similarity reaches the threshold, among MinHash's candidates."""
    if len(words) < 2:
        return []
    shingles, starts = _shingles(words)
    sets = [frozenset(part.tolist()) for part in np.split(shingles, starts[1:])]
    return [(a, b) for a, b in _candidates(_signatures(shingles, starts)).tolist() if _jaccard(sets[a], sets[b])]


def _jaccard(a: frozenset[int], b: frozenset[int]) -> bool:
    shared = len(a & b)
    return shared >= _THRESHOLD * (len(a) + len(b) - shared)


def _shingles(
    words: Sequence[Sequence[str]],
) -> tuple[UInt64[np.ndarray, " shingles"], Int[np.ndarray, " documents"]]:
    """The hashes of all documents' shingles, concatenated, and the index at which each document's begin.

    Documents are padded at the end, so that even a short one has a shingle for each word.
    """
    number: dict[str, int] = {}
    padding = [0] * (_SHINGLE - 1)
    ids = np.array([i for w in words for i in (*(number.setdefault(x, len(number) + 1) for x in w), *padding)])
    lengths = np.array([len(w) for w in words])
    starts = np.cumsum(lengths) - lengths
    at = np.arange(lengths.sum()) + np.repeat(np.arange(len(words)) * len(padding), lengths)
    hashes = np.zeros(len(at), np.uint64)
    for k in range(_SHINGLE):
        hashes = splitmix64(hashes ^ ids[at + k].astype(np.uint64))
    return hashes, starts


def _signatures(
    shingles: UInt64[np.ndarray, " shingles"], starts: Int[np.ndarray, " documents"]
) -> UInt64[np.ndarray, "hashes documents"]:
    """Each document's smallest shingle under each of `_BANDS * _ROWS` hash functions."""
    odd = np.random.default_rng(0).integers(0, 2**63, _BANDS * _ROWS, np.uint64) * 2 + 1
    return np.stack([np.minimum.reduceat(shingles * factor, starts) for factor in odd])


def _candidates(signatures: UInt64[np.ndarray, "hashes documents"]) -> Int[np.ndarray, "pairs 2"]:
    """Pairs of documents that agree in all rows of a band.

    In a bucket, each document is paired with the first one only: the cost of a text that thousands share must not be
    quadratic.
    """
    pairs = []
    for band in signatures.reshape(_BANDS, _ROWS, -1):
        key = np.zeros(band.shape[1], np.uint64)
        for row in band:
            key = splitmix64(key ^ row)
        _, first, bucket = np.unique(key, return_index=True, return_inverse=True)
        pairs.append(np.stack([first[bucket], np.arange(len(key))], axis=1))
    candidates = np.unique(np.concatenate(pairs), axis=0)
    return candidates[candidates[:, 0] < candidates[:, 1]]
