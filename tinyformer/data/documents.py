"""Documents as a `datasets.Dataset` with the one column `text`."""

from collections.abc import Iterable, Iterator

import datasets
import pyarrow as pa

_ROWS = 256  # rows read at a time: enough to hide the call, few enough for rows of megabytes


def from_texts(texts: Iterable[str]) -> datasets.Dataset:
    """A dataset in memory that holds each text as one document."""
    # large_string: the offsets of a plain Arrow string end at 2 GB of text
    return datasets.Dataset(pa.table({"text": pa.array(texts, pa.large_string())}))


def iterate_texts(documents: datasets.Dataset) -> Iterator[str]:
    """The texts of a dataset in order; a missing one (null) is the empty text."""
    for rows in documents.iter(batch_size=_ROWS):
        yield from (text or "" for text in rows["text"])
