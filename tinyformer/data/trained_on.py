"""Fingerprints of a training split, by which its text is recognised in other data, whatever their files and order."""

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
from jaxtyping import Int64, UInt64

LENGTH = 128
"""Characters of a block, of which a fingerprint is taken: about 22 words."""

MAX_FINGERPRINTS = 2**22
"""Maximum number of blocks whose fingerprints are kept (32 MB): those of some 500 MB of text."""

_FACTOR = 0x9E3779B97F4A7C15


def fingerprints(text: str) -> set[int]:
    """The fingerprints of a text's blocks.

    It is divided into blocks of `LENGTH` characters, the last of which ends with it and overlaps the one before; a
    shorter text is one block.
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
    """The rest of a text without the blocks, at any place, that are among some fingerprints.

    The `LENGTH - 1` characters on either side of such a block are cut out, too: they may be the rest of a text whose
    other blocks begin elsewhere. So nothing remains of `2 * LENGTH - 1` or more consecutive characters of a known text.
    """
    is_out = np.zeros(len(text), bool)
    for place in np.flatnonzero(np.isin(_hashes(text), known)):
        is_out[max(place - LENGTH + 1, 0) : place + 2 * LENGTH - 1] = True
    bounds = [0, *(np.flatnonzero(np.diff(is_out)) + 1), len(text)]
    return [text[begin:end] for begin, end in pairwise(bounds) if not is_out[begin]]


def _hashes(text: str) -> UInt64[np.ndarray, " places"]:
    """The hash of `LENGTH` characters from each place in a text on; of the whole text where it is shorter.

    That of c_0 … c_n is the sum of (c_i + 1) f^i modulo 2^64: a polynomial, whose values for all places follow from
    prefix sums (Karp and Rabin 1987, "Efficient randomized pattern-matching algorithms").
    """
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64) + np.uint64(1)
    size = min(len(codes), LENGTH)
    powers = np.cumprod(np.full(len(codes), _FACTOR, np.uint64))
    inverses = np.cumprod(np.full(len(codes) + 1 - size, pow(_FACTOR, -1, 2**64), np.uint64))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(codes * powers)])
    return (sums[size:] - sums[: len(sums) - size]) * inverses
