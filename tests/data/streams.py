"""Token streams to test with."""

import numpy as np

from tinyformer.data import TokenSplit

EOS = 7


def split_of(lengths):
    """A split of documents with these numbers of tokens; tokens count up from 10, so each is unique."""
    documents = np.split(np.arange(10, 10 + sum(lengths)), np.cumsum(lengths)[:-1])
    ids = np.concatenate([[EOS, *document] for document in documents]).astype(np.uint16)
    offsets = np.cumsum([0, *(n + 1 for n in lengths)])
    return TokenSplit(ids, offsets, num_bytes=1, num_characters=1, num_unknown=0, lost_bytes=0)
