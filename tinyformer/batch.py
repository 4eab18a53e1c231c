"""The type of a batch, which data modules make and tasks and analyses read."""

from typing import NotRequired, TypedDict, cast

from jaxtyping import Bool, Int, Int32
from torch import Tensor

IGNORED = -100
"""The target that is not scored: `ignore_index` of PyTorch's cross-entropy."""


class Batch(TypedDict):
    """Rows of token ids, and what a model has to predict for them.

    `targets`: the token to predict at each position, or `IGNORED`. `labels`: the class of each row. `lengths`: the
    number of tokens of each row, where rows are padded on the right. `documents`: the document of each token, where
    tokens attend within their own document only, and padding is a document of its own; `document_starts`: where the
    documents begin, see `AttentionMask`. `source`: the sequences from which those of `inputs` are predicted, such as
    sentences in another language, and `source_lengths`: their lengths. `contexts`: the position at which the context of
    a question begins, and `starts` and `ends`: those of the first and the last token of its answer, 0 where there is
    none. `answerable`: whether the question has an answer, even if only in another window of the context. `rows`: the
    index of each row in its split.
    """

    inputs: Int[Tensor, "batch seq"]
    targets: NotRequired[Int[Tensor, "batch seq"]]
    labels: NotRequired[Int[Tensor, " batch"]]
    lengths: NotRequired[Int[Tensor, " batch"]]
    documents: NotRequired[Int[Tensor, "batch seq"]]
    document_starts: NotRequired[Int32[Tensor, " starts"]]
    source: NotRequired[Int[Tensor, "batch source_seq"]]
    source_lengths: NotRequired[Int[Tensor, " batch"]]
    contexts: NotRequired[Int[Tensor, " batch"]]
    starts: NotRequired[Int[Tensor, " batch"]]
    ends: NotRequired[Int[Tensor, " batch"]]
    answerable: NotRequired[Bool[Tensor, " batch"]]
    rows: NotRequired[Int[Tensor, " batch"]]


def tensors(batch: Batch) -> dict[str, Tensor]:
    """The tensors of a batch by name."""
    return cast(dict[str, Tensor], batch)
