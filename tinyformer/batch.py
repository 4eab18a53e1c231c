"""A batch: what data modules produce, and tasks and analyses read."""

from typing import NotRequired, TypedDict, cast

from jaxtyping import Bool, Int, Int32
from torch import Tensor

IGNORED = -100
"""The target that is not scored: `ignore_index` of PyTorch's cross-entropy."""


class Batch(TypedDict):
    """Rows of token ids, and what a model is to predict from them."""

    inputs: Int[Tensor, "batch seq"]
    targets: NotRequired[Int[Tensor, "batch seq"]]  # the token to predict at each position, or `IGNORED`
    labels: NotRequired[Int[Tensor, " batch"]]  # the class of each row
    lengths: NotRequired[Int[Tensor, " batch"]]  # in tokens, where rows are padded on the right
    # The document of each token, where tokens attend within their own document only; padding is one of its own.
    documents: NotRequired[Int[Tensor, "batch seq"]]
    document_starts: NotRequired[Int32[Tensor, " starts"]]  # see `AttentionMask`
    continues: NotRequired[Bool[Tensor, "batch seq"]]  # the tokens that go on with the word of the token before
    # The sequences from which `inputs` are predicted, such as sentences in another language.
    source: NotRequired[Int[Tensor, "batch source_seq"]]
    source_lengths: NotRequired[Int[Tensor, " batch"]]
    contexts: NotRequired[Int[Tensor, " batch"]]  # where the context of a question begins
    starts: NotRequired[Int[Tensor, " batch"]]  # the first token of the answer; 0 where the row does not hold it
    ends: NotRequired[Int[Tensor, " batch"]]  # the last token of the answer; 0 where the row does not hold it
    answerable: NotRequired[Bool[Tensor, " batch"]]  # whether there is an answer, possibly in another window
    rows: NotRequired[Int[Tensor, " batch"]]  # the index of each row in its split


def tensors(batch: Batch) -> dict[str, Tensor]:
    """The tensors of a batch by name."""
    return cast(dict[str, Tensor], batch)
