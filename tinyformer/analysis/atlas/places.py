"""The places of queries and keys: their tokens, rows and documents, the classes of keys, and the stretches shown."""

import unicodedata
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tinyformer.batch import Batch
from tinyformer.data import TextTokenizer
from tinyformer.measures.inputs import queries_by_kind

Entries: TypeAlias = dict[str, Tensor]
"""Fields of entries by name, each with a row for each entry: `group`, `score` and what else is to be kept."""

STRETCH = 33  # tokens of a snippet, at most


class Vocabulary(NamedTuple):
    """The properties of each token of a vocabulary that determine the classes of keys."""

    is_punctuation: Bool[Tensor, " vocab_size"]  # it consists of punctuation and symbols
    ends_line: Bool[Tensor, " vocab_size"]  # it ends with a newline, or with spaces after one

    @classmethod
    def of(cls, tokenizer: TextTokenizer, size: int, device: torch.device) -> "Vocabulary":
        strings = tokenizer.token_strings(range(size))  # which show spaces as "·" and newlines as "⏎"
        signs = ["" if token in tokenizer.special_ids else text.strip("·⏎") for token, text in enumerate(strings)]
        are_signs = [bool(text) and all(unicodedata.category(char)[0] in "PS" for char in text) for text in signs]
        ends_line = [text.rstrip("·").endswith("⏎") for text in strings]
        return cls(torch.tensor(are_signs, device=device), torch.tensor(ends_line, device=device))


class Side(NamedTuple):
    """The tokens of the queries or of the keys, and where the document of each begins and ends within its row."""

    tokens: Int[Tensor, "batch seq"]
    begins: Int[Tensor, "batch seq"]
    ends: Int[Tensor, "batch seq"]

    @classmethod
    def of(cls, tokens: Tensor, lengths: Int[Tensor, " batch"], documents: Tensor | None = None) -> "Side":
        """By default, a row is one document, and its padding another."""
        if documents is None:
            documents = (torch.arange(tokens.shape[1], device=tokens.device) >= lengths.unsqueeze(1)).long()
        return cls(tokens, *(torch.searchsorted(documents, documents, right=right) for right in (False, True)))

    def stretch(self, rows: Tensor, positions: Tensor, centre: Tensor) -> Int[Tensor, "events 2"]:
        """The first position and the end of the tokens around a centre that are shown, in the document of a token."""
        begins, ends = self.begins[rows, positions], self.ends[rows, positions]
        first = (centre - STRETCH // 2).minimum(ends - STRETCH).maximum(begins)
        return torch.stack([first, (first + STRETCH).minimum(ends)], dim=1)

    def positions(self, stretch: Int[Tensor, "events 2"]) -> Int[Tensor, "events stretch"]:
        """The positions of a stretch, and others after its end."""
        steps = torch.arange(STRETCH, device=stretch.device)
        return (stretch[:, :1] + steps).clamp(max=self.tokens.shape[1] - 1)


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
    def is_padded(self) -> bool:
        """Return True if some queries are padding."""
        return not bool(self.is_query.all())

    @cached_property
    def key_classes(self) -> Float[Tensor, "3 batch k_seq"]:
        """1 where a key is the first of its document, punctuation, or the first of a line."""
        tokens, begins, _ = self.keys
        is_first = begins == torch.arange(tokens.shape[1], device=tokens.device)
        starts_line = is_first | self.vocabulary.ends_line[tokens].roll(1, dims=1)
        return torch.stack([is_first, self.vocabulary.is_punctuation[tokens], starts_line]).float()

    @cached_property
    def is_same(self) -> Float[Tensor, "batch q_seq k_seq"]:
        """1 where a key is another occurrence of the query's token; in cross-attention, any occurrence."""
        same = (self.queries.tokens.unsqueeze(2) == self.keys.tokens.unsqueeze(1)).float()
        return same if self.is_cross else same - torch.eye(same.shape[1], device=same.device)

    def entries(self, rows: Tensor, queries: Tensor, keys: Tensor) -> Entries:
        """The text around some queries and a key of each: at most `STRETCH` tokens of the document.

        Within one sequence it is the text around both, or around the query where the key is too far.
        """
        centre = ((queries + keys) // 2).where((queries - keys).abs() < STRETCH, queries)
        of_queries = of_keys = self.queries.stretch(rows, queries, queries if self.is_cross else centre)
        if self.is_cross:
            of_keys = self.keys.stretch(rows, keys, keys)
        document = torch.full_like(rows, -1) if self.documents is None else self.documents[rows, queries]
        shown = {"queries": (self.queries, of_queries)} | ({"keys": (self.keys, of_keys)} if self.is_cross else {})
        return {
            "place": torch.stack([self.rows[rows], document, queries, keys, self.keys.tokens[rows, keys]], dim=1),
            "stretches": torch.cat([of_queries, of_keys], dim=1),
            **{name: side.tokens[rows.unsqueeze(1), side.positions(of)] for name, (side, of) in shown.items()},
        }


def places_by_kind(batch: Batch, first_row: int, vocabulary: Vocabulary) -> dict[str, Places]:
    """The places of a batch by kind of attention; `first_row` is the number of rows before it."""
    inputs, are_queries, documents = batch["inputs"], queries_by_kind(batch), batch.get("documents")
    rows = batch.get("rows", first_row + torch.arange(len(inputs), device=inputs.device))
    own = Side.of(inputs, [*are_queries.values()][-1].sum(dim=1), documents)
    sides = {"": (own, own)}
    if "source" in batch:  # a query of cross-attention is named by the token that is predicted there, see `TokenPair`
        source, predicted = Side.of(batch["source"], batch["source_lengths"]), batch["targets"].clamp(min=0)
        sides = {"encoder": (source, source), "decoder": (own, own), "cross": (own._replace(tokens=predicted), source)}
    return {
        kind: Places(*of, are_queries[kind], rows, documents, kind == "cross", vocabulary) for kind, of in sides.items()
    }
