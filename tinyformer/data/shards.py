"""Tokenising more text than fits into memory, shard by shard: a call that is stopped goes on with the next shard."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import datasets
import numpy as np

from tinyformer.data.storage import build_once
from tinyformer.data.stream import Encoded, encode, with_progress
from tinyformer.data.tokenizer.tokenizer import TextTokenizer

SHARD_BYTES = 2**28
"""The text of a shard, and the smallest text that is tokenised in shards: half a minute on two cores."""


def num_shards(rows: datasets.Dataset) -> int:
    """The number of shards of some rows, whose size follows from that of their table."""
    num_bytes = rows.data.nbytes * len(rows) // max(1, rows.data.num_rows)
    return min(-(-num_bytes // SHARD_BYTES), len(rows))


def encode_shards(
    rows: datasets.Dataset,
    texts_of: Callable[[datasets.Dataset], Iterable[str]],
    tokenizer: TextTokenizer,
    name: str,
    kept: Path,
    limit: int | None = None,
) -> Iterator[Encoded]:
    """The stream of the texts of some rows, as `encode` gives it; shards in the folder `kept` are not encoded again."""
    number = num_shards(rows)

    def build(shard: datasets.Dataset, folder: Path) -> None:
        folder.mkdir()
        np.savez(folder / "tokens.npz", **Encoded.joined(encode(texts_of(shard), tokenizer))._asdict())

    for index in with_progress(range(number), number, f"Tokenising {name}"):
        shard = rows.shard(number, index, contiguous=True)
        encoded = build_once(kept / f"{name}-{index}-of-{number}", _open, partial(build, shard))
        if limit is not None and len(encoded.ids) >= limit:
            yield from encode(texts_of(shard), tokenizer, limit)
            return
        yield encoded
        limit = None if limit is None else limit - len(encoded.ids)


def _open(folder: Path) -> Encoded:
    with np.load(folder / "tokens.npz") as arrays:
        return Encoded(arrays["ids"], arrays["lengths"], int(arrays["num_bytes"]), int(arrays["num_characters"]))
