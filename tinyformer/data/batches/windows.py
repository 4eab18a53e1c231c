"""A batch, and windows of fixed length over a token stream."""

from abc import ABC, abstractmethod
from typing import Literal, NotRequired, TypedDict, cast

import numpy as np
import torch
from jaxtyping import Bool, Int, Int32, Int64
from torch import Tensor

from tinyformer.data.stream import TokenSplit

Pack = Literal["concat", "document"]


IGNORED = -100
"""The value of a target that is not scored: the default `ignore_index` of PyTorch's cross-entropy."""


class Batch(TypedDict):
    """Rows of token ids, and what a model is to predict from them."""

    inputs: Int[Tensor, "batch seq"]
    targets: NotRequired[Int[Tensor, "batch seq"]]  # the token to predict at each position, or `IGNORED`
    labels: NotRequired[Int[Tensor, " batch"]]  # the class of each row
    lengths: NotRequired[Int[Tensor, " batch"]]  # number of tokens, if rows are padded on the right
    # The index of each token's document, if tokens attend only within their document; padding is a separate document.
    documents: NotRequired[Int[Tensor, "batch seq"]]
    document_starts: NotRequired[Int32[Tensor, " starts"]]  # see `AttentionMask`
    continues: NotRequired[Bool[Tensor, "batch seq"]]  # whether a token continues the word of the token before
    # The sequences from which `inputs` are predicted, such as sentences in another language.
    source: NotRequired[Int[Tensor, "batch source_seq"]]
    source_lengths: NotRequired[Int[Tensor, " batch"]]
    contexts: NotRequired[Int[Tensor, " batch"]]  # the index of the context's first token
    starts: NotRequired[Int[Tensor, " batch"]]  # the index of the answer's first token; 0: the row lacks the answer
    ends: NotRequired[Int[Tensor, " batch"]]  # the index of the answer's last token; 0: the row lacks the answer
    answerable: NotRequired[Bool[Tensor, " batch"]]  # whether there is an answer, possibly in another window
    rows: NotRequired[Int[Tensor, " batch"]]  # the index of each row in its split


def tensors(batch: Batch) -> dict[str, Tensor]:
    """The tensors of a batch by name."""
    return cast(dict[str, Tensor], batch)


class Rows(torch.utils.data.Dataset, ABC):
    """The rows of a split; any rows can be combined into a batch."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of rows."""

    @abstractmethod
    def __getitems__(self, indices: list[int]) -> Batch:
        """The rows with these indices as one batch, padded to the longest of them."""

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])


class Windows(Rows):
    """Consecutive windows of a split: together they cover every target exactly once, in order.

    A window that extends past the end of its text is padded on the right: inputs with `eos`, targets with `IGNORED`. If
    windows may be padded, batches have `lengths`. Targets that the split does not score are `IGNORED`, too.

    Args:
        pack: "concat": windows run across documents; "document": each window lies within one document.
        phase: number of targets to skip at the beginning, which shifts all windows; for "concat" only.
        drop_partial: leave out windows that would be padded.
        with_documents: add the index of each token's document to the batches; padding is a separate document.
    """

    def __init__(
        self,
        split: TokenSplit,
        seq_len: int,
        pack: Pack = "concat",
        phase: int = 0,
        drop_partial: bool = False,
        with_documents: bool = False,
    ) -> None:
        self.seq_len, self.may_be_padded = seq_len, not drop_partial
        self._offsets = split.offsets if with_documents else None
        if with_documents:
            # The largest number of documents in a window: one, those that begin after its first token, and padding.
            begun = np.searchsorted(split.offsets, split.offsets + seq_len) - np.arange(len(split.offsets))
            self._most = 1 + int(begun.max(initial=0)) + self.may_be_padded
        self._scored, self._continues = split.scored, split.continues
        self._ids = split.ids.view(np.ndarray)  # an array is indexed faster than a memory map
        # Each text is cut separately: the whole stream, or a document (whose last target is the next eos).
        bounds = np.array([min(phase, split.num_targets), split.num_targets]) if pack == "concat" else split.offsets
        self._begin = bounds[:-1]
        self._end = np.minimum(bounds[1:], split.num_targets)
        lengths = self._end - self._begin
        windows = lengths // seq_len if drop_partial else -(-lengths // seq_len)
        # The index of each text's first window, and at the end the number of windows.
        self._first = np.concatenate([[0], np.cumsum(windows)])

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitems__(self, indices: list[int]) -> Batch:
        window = np.asarray(indices)
        text = np.searchsorted(self._first, window, side="right") - 1
        start = self._begin[text] + (window - self._first[text]) * self.seq_len
        ids = _slices(self._ids, start, self.seq_len + 1)
        inputs, targets = ids[:, :-1].astype(np.int64), ids[:, 1:].astype(np.int64)
        if self._scored is not None:
            targets = np.where(_slices(self._scored, start + 1, self.seq_len), targets, IGNORED)
        length = np.minimum(self._end[text] - start, self.seq_len)
        padding = np.arange(self.seq_len) >= length[:, None]
        if padding.any():
            inputs = np.where(padding, int(self._ids[0]), inputs)  # a stream begins with eos
            targets = np.where(padding, IGNORED, targets)
        batch: Batch = {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}
        if self._continues is not None:
            batch["continues"] = torch.from_numpy(_slices(self._continues, start, self.seq_len))
        if self.may_be_padded:
            batch["lengths"] = torch.from_numpy(length)
        if self._offsets is not None:
            # An eos opens the document that follows it.
            positions = start[:, None] + np.arange(self.seq_len)
            documents = np.searchsorted(self._offsets, positions, side="right")
            documents = np.where(padding, len(self._offsets), documents)  # padding: after all documents
            batch["documents"] = torch.from_numpy(documents)
            batch["document_starts"] = torch.from_numpy(document_starts(documents, self._most))
        return batch


def document_starts(documents: Int64[np.ndarray, "batch seq"], most: int | None = None) -> Int32[np.ndarray, " starts"]:
    """The index of each document's first token in the concatenated rows, and the number of tokens; see `AttentionMask`.

    Each row has `most` starts, so that the shape depends on the number of rows only; by default, as many as the row
    with the most documents needs. The last start is repeated in rows with fewer documents.
    """
    changes = np.diff(documents, axis=1) != 0
    row, position = np.nonzero(changes)
    most = most or 1 + int(changes.sum(axis=1).max(initial=0))
    first = np.searchsorted(row, row)  # the index of the row's first boundary
    starts = np.zeros((len(documents), most), np.int32)
    starts[row, 1 + np.arange(len(row)) - first] = position + 1
    rows = np.arange(len(documents), dtype=np.int32)[:, None] * documents.shape[1]
    packed = rows + np.maximum.accumulate(starts, axis=1)
    return np.append(packed, np.int32(documents.size))


def _slices(numbers: np.ndarray, start: np.ndarray, length: int) -> np.ndarray:
    """`length` numbers from each start; past the end, the last number is repeated."""
    if start.max() + length > len(numbers):
        return numbers.take(start[:, None] + np.arange(length), mode="clip")
    # Copying rows of a strided view is four times as fast as gathering their elements.
    shape = (len(numbers) - length + 1, length)
    return np.lib.stride_tricks.as_strided(numbers, shape, 2 * numbers.strides, writeable=False)[start]


class TensorWindows(Rows):
    """The windows of `Windows` with `drop_partial` over tokens on a device, where a batch is one gather operation."""

    def __init__(self, ids: Int[Tensor, " tokens"], seq_len: int, phase: int = 0) -> None:
        self._ids, self._seq_len, self._phase = ids, seq_len, phase
        self._positions = phase + torch.arange(seq_len + 1, device=ids.device)

    def __len__(self) -> int:
        return (len(self._ids) - 1 - self._phase) // self._seq_len

    def __getitems__(self, indices: list[int] | Int[Tensor, " batch"]) -> Batch:
        """The windows with these indices as one batch; indices on the device are faster, since they are not copied."""
        start = torch.as_tensor(indices, device=self._ids.device) * self._seq_len
        ids = self._ids[start[:, None] + self._positions].long()
        return {"inputs": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}
