"""Labelled token sequences, and batches of them."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int64, UInt

from tinyformer.batch import Batch
from tinyformer.data.batches.windows import Rows
from tinyformer.data.near_copies import splitmix64
from tinyformer.data.stream import Split, TokenSplit
from tinyformer.data.tokenizer.tokenizer import TextTokenizer


@dataclass(frozen=True)
class LabelledSplit(Split):
    """The examples of one split: sequences `[eos, *text]`, or `[eos, *first, eos, *second]`, and their classes.

    Attributes:
        ids: the sequences, concatenated, each truncated to the model's length.
        offsets: the index in `ids` at which each sequence begins, and the length of `ids`.
        labels: for each example, the index of its class in `classes`; -1 where it is none of them.
        classes: names of the classes.
        tokenizer: the tokenizer of the ids.
        num_bytes: length of the raw texts in UTF-8 before truncation (each text up to a million characters).
        num_unknown: number of `<unk>` tokens before truncation.
        num_truncated: number of truncated sequences.
    """

    ids: UInt[np.ndarray, " tokens"]
    offsets: Int64[np.ndarray, " examples_and_end"]
    labels: Int64[np.ndarray, " examples"]
    classes: list[str]
    tokenizer: TextTokenizer
    num_bytes: int
    num_unknown: int
    num_truncated: int

    @property
    def num_documents(self) -> int:
        """Number of examples, those without text included."""
        return len(self.labels)

    @property
    def lengths(self) -> Int64[np.ndarray, " examples"]:
        """Number of tokens of each sequence."""
        return np.diff(self.offsets)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return len(self.ids)

    @property
    def label_counts(self) -> dict[str, int]:
        """The number of examples of each class."""
        counts = np.bincount(self.labels[self.labels >= 0], minlength=len(self.classes))
        return dict(zip(self.classes, counts.tolist(), strict=True))

    @property
    def absent(self) -> str:
        """The names of classes without examples, or of the first five and the number of the others."""
        names = [name for name, number in self.label_counts.items() if not number]
        return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if names[5:] else "")

    @property
    def majority_share(self) -> float:
        """The accuracy of always predicting the most frequent class."""
        return max(self.label_counts.values()) / len(self.labels)

    def text(self, row: int) -> str:
        """An example's text, truncated as for the model; `eos` separates the texts of a pair."""
        return self.tokenizer.decode(self.ids[self.offsets[row] + 1 : self.offsets[row + 1]])


def truncate(
    stream: TokenSplit, texts_per_example: int, max_length: int
) -> tuple[UInt[np.ndarray, " tokens"], Int64[np.ndarray, " examples_and_end"], int]:
    """Sequences of limited length from a stream of texts; in a pair, the longer text is truncated first.

    Args:
        stream: the texts, each with its `eos`.
        texts_per_example: 1, or 2 for pairs.
        max_length: maximum number of tokens of a sequence.

    Returns:
        The sequences, their offsets (the end of the last one included), and the number of truncated sequences.
    """
    begins = stream.offsets[:-1]
    lengths = np.diff(stream.offsets).reshape(-1, texts_per_example)
    new_lengths = np.minimum(lengths, max_length)
    if texts_per_example == 2:
        first, second = lengths.T
        new_lengths[:, 0] = np.minimum(first, np.maximum(max_length - second, max_length - max_length // 2))
        new_lengths[:, 1] = np.minimum(second, max_length - new_lengths[:, 0])
    num_cut = int((new_lengths < lengths).any(axis=1).sum())
    if not num_cut:
        return stream.ids, stream.offsets[::texts_per_example], 0
    sizes = new_lengths.ravel()
    ends = np.cumsum(sizes)
    positions = np.repeat(begins - (ends - sizes), sizes) + np.arange(ends[-1])
    offsets = np.concatenate([[0], ends[texts_per_example - 1 :: texts_per_example]])
    return stream.ids[positions], offsets, num_cut


class Examples(Rows):
    """Batches of the examples of a split.

    Token dropout replaces tokens by the tokenizer's mask token, each with the same probability, except the first of a
    sequence, which a model may pool. It regularises by hiding single words ("word dropout": Iyyer et al. 2015, "Deep
    Unordered Composition Rivals Syntactic Methods for Text Classification"; Dai and Le 2015, arXiv 1511.01432). These
    papers remove a word or replace it by `<unk>`, which byte-level BPE lacks. A hash of `key` and of a token's position
    in the split determines whether it is replaced, independently of the batch.

    Args:
        split: the examples.
        token_dropout: the probability.
        key: determines which tokens are replaced: the seed and the epoch.
    """

    def __init__(
        self,
        split: LabelledSplit,
        token_dropout: float = 0.0,
        key: tuple[int, ...] = (0,),
    ) -> None:
        self._split = split
        self._ids = split.ids.view(np.ndarray)  # an array is indexed faster than a memory map
        self._threshold = np.uint64(token_dropout * 2**64)
        self._key = np.random.SeedSequence(key).generate_state(1, np.uint64)

    def __len__(self) -> int:
        return self._split.num_documents

    def __getitems__(self, indices: list[int]) -> Batch:
        """The examples with these indices as one batch, padded on the right with `eos` to the longest of them."""
        rows = np.asarray(indices)
        begin = self._split.offsets[rows]
        lengths = self._split.offsets[rows + 1] - begin
        place = np.arange(lengths.max())
        positions = begin[:, None] + place
        ids = self._ids.take(positions, mode="clip").astype(np.int64)
        if self._threshold:
            ids = np.where((place > 0) & self._dropped(positions), self._split.tokenizer.mask_id, ids)
        ids = np.where(place < lengths[:, None], ids, self._split.tokenizer.eos_id)
        return {
            "inputs": torch.from_numpy(ids),
            "lengths": torch.from_numpy(lengths),
            "labels": torch.from_numpy(self._split.labels[rows]),
            "rows": torch.from_numpy(rows),
        }

    def _dropped(self, positions: Int64[np.ndarray, "batch seq"]) -> Bool[np.ndarray, "batch seq"]:
        # The element of a SplitMix64 sequence at each position, which does not depend on those before.
        return splitmix64(self._key + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) < self._threshold
