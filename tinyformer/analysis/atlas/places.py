"""Where queries and keys stand: their tokens, rows and documents, the classes of keys, and the stretches shown."""

import unicodedata
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tinyformer.analysis.measures.inputs import queries_by_kind
from tinyformer.batch import Batch
from tinyformer.data import TextTokenizer

STRETCH = 33  # tokens of a snippet, at most
CLASSES = ("first", "previous", "same token", "punctuation", "line start")
"""The classes of keys, see `Tally`."""


class Vocabulary(NamedTuple):
    """What the classes of keys depend on, for each token of a vocabulary."""

    is_punctuation: Bool[Tensor, " vocab_size"]  # it consists of punctuation and symbols
    ends_line: Bool[Tensor, " vocab_size"]  # it ends with a newline, or with spaces after one

    @classmethod
    def of(cls, tokenizer: TextTokenizer, size: int, device: torch.device) -> "Vocabulary":
        strings = tokenizer.token_strings(range(size))
        signs = [text.strip("·⏎") for text in strings]  # spaces and newlines, as `token_strings` shows them
        are_signs = [bool(text) and all(unicodedata.category(char)[0] in "PS" for char in text) for text in signs]
        for special in tokenizer.special_ids:
            are_signs[special] = False
        ends = [text.rstrip("·").endswith("⏎") for text in strings]
        return cls(*(torch.tensor(flags, device=device) for flags in (are_signs, ends)))


class Side(NamedTuple):
    """The tokens of one side of attention, and for each the first and the end of its document within the row."""

    tokens: Int[Tensor, "batch seq"]
    begins: Int[Tensor, "batch seq"]
    ends: Int[Tensor, "batch seq"]

    @classmethod
    def of(cls, tokens: Tensor, lengths: Int[Tensor, " batch"], documents: Tensor | None) -> "Side":
        """A row is one document, without its padding, unless the batch says where others begin."""
        if documents is None:
            begins, ends = torch.zeros_like(tokens), lengths.unsqueeze(1).expand_as(tokens)
            return cls(tokens, begins, ends)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        is_first = documents.diff(dim=1, prepend=documents[:, :1] - 1) != 0
        begins = positions.where(is_first, 0).cummax(dim=1).values
        is_last = is_first.roll(-1, dims=1)
        is_last[:, -1] = True
        ends = (positions + 1).where(is_last, tokens.shape[1]).flip(1).cummin(dim=1).values.flip(1)
        return cls(tokens, begins, ends)


@dataclass(frozen=True)
class Places:
    """The queries and keys of a batch in one kind of attention."""

    queries: Side
    keys: Side
    is_query: Bool[Tensor, "batch q_seq"]  # and not padding
    rows: Int[Tensor, " batch"]  # the number of each row in the split
    documents: Int[Tensor, "batch q_seq"] | None  # the document of each token, where attention stays within them
    is_cross: bool
    vocabulary: Vocabulary

    @cached_property
    def is_full(self) -> bool:
        """Whether no query is padding."""
        return bool(self.is_query.all())

    @cached_property
    def key_classes(self) -> Bool[Tensor, "3 batch k_seq"]:
        """Which keys are the first of their document, punctuation, and the first of a line."""
        tokens, begins, _ = self.keys
        is_first = begins == torch.arange(tokens.shape[1], device=tokens.device)
        starts_line = is_first | self.vocabulary.ends_line[tokens].roll(1, dims=1)
        return torch.stack([is_first, self.vocabulary.is_punctuation[tokens], starts_line])

    @cached_property
    def is_same(self) -> Float[Tensor, "batch q_seq k_seq"]:
        """1 where a key is another occurrence of the query's token; in cross-attention, any occurrence."""
        same = self.queries.tokens.unsqueeze(2) == self.keys.tokens.unsqueeze(1)
        same = same if self.is_cross else same & ~torch.eye(*same.shape[1:], dtype=torch.bool, device=same.device)
        return same.float()

    def stretches(
        self, batch: Int[Tensor, " events"], queries: Int[Tensor, " events"], keys: Int[Tensor, " events"]
    ) -> tuple[Int[Tensor, "events 2"], Int[Tensor, "events 2"]]:
        """The first position and the end of the tokens shown of queries and keys, at most `STRETCH` of a document.

        Within one sequence they are the same: around query and key, or around the query where the key is too far.
        """
        if self.is_cross:
            return _around(self.queries, batch, queries), _around(self.keys, batch, keys)
        centre = ((queries + keys) // 2).where((queries - keys).abs() < STRETCH, queries)
        stretch = _around(self.queries, batch, queries, centre)
        return stretch, stretch


def _around(side: Side, batch: Tensor, positions: Tensor, centre: Tensor | None = None) -> Int[Tensor, "events 2"]:
    begins, ends = side.begins[batch, positions], side.ends[batch, positions]
    first = (positions if centre is None else centre) - STRETCH // 2
    first = first.minimum(ends - STRETCH).maximum(begins)
    return torch.stack([first, (first + STRETCH).minimum(ends)], dim=1)


def places_by_kind(batch: Batch, first_row: int, vocabulary: Vocabulary) -> dict[str, Places]:
    """The places of a batch by kind of attention; `first_row` is the number of rows before it, see `TokenPair`."""
    inputs, are_queries, documents = batch["inputs"], queries_by_kind(batch), batch.get("documents")
    rows = batch.get("rows", first_row + torch.arange(len(inputs), device=inputs.device))
    own = Side.of(inputs, [*are_queries.values()][-1].sum(dim=1), documents)
    sides = {"": (own, own)}
    if "source" in batch:
        source = Side.of(batch["source"], batch["source_lengths"], None)
        predicted = own._replace(tokens=batch["targets"].clamp(min=0))
        sides = {"encoder": (source, source), "decoder": (own, own), "cross": (predicted, source)}
    return {
        kind: Places(*of, are_queries[kind], rows, documents, kind == "cross", vocabulary) for kind, of in sides.items()
    }
