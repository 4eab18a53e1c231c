"""Records of a split in bounded memory: samples, distributions of measures, attention by class and offset of keys."""

import unicodedata
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tinyformer.data import TextTokenizer
from tinyformer.data.batches.windows import Batch
from tinyformer.measures import formulas
from tinyformer.measures.batches import queries_by_kind
from tinyformer.nn import AttentionMask

Entries: TypeAlias = dict[str, Tensor]
"""The fields of entries by name, each with a row for each entry: `group`, `score` and further data."""

STRETCH = 33  # tokens of a snippet, at most

MIN_PENDING = 1024  # the least number of new entries that are merged with the kept entries

NUM_BINS = 32  # bins in the histogram of a measure

CLASSES = ("first", "punctuation", "line_start", "same_token", "previous")
"""Classes of keys: the first token of the document, punctuation, the first token of a line, other occurrences of the
query's token, and the token before the query."""


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
    """The tokens of the queries or of the keys, and the positions at which each token's document begins and ends."""

    tokens: Int[Tensor, "batch seq"]
    begins: Int[Tensor, "batch seq"]
    ends: Int[Tensor, "batch seq"]

    @classmethod
    def of(cls, tokens: Tensor, lengths: Int[Tensor, " batch"], documents: Tensor | None = None) -> "Side":
        """Make a side; without `documents`, the tokens of a row are one document, and its padding another."""
        if documents is None:
            documents = (torch.arange(tokens.shape[1], device=tokens.device) >= lengths.unsqueeze(1)).long()
        return cls(tokens, *(torch.searchsorted(documents, documents, right=right) for right in (False, True)))

    def stretch(self, rows: Tensor, positions: Tensor, centre: Tensor) -> Int[Tensor, "events 2"]:
        """The first position and the end of at most `STRETCH` tokens around a centre, within the document."""
        begins, ends = self.begins[rows, positions], self.ends[rows, positions]
        first = (centre - STRETCH // 2).minimum(ends - STRETCH).maximum(begins)
        return torch.stack([first, (first + STRETCH).minimum(ends)], dim=1)

    def positions(self, stretch: Int[Tensor, "events 2"]) -> Int[Tensor, "events stretch"]:
        """`STRETCH` positions from the beginning of each stretch, even if a stretch has fewer tokens."""
        steps = torch.arange(STRETCH, device=stretch.device)
        return (stretch[:, :1] + steps).clamp(max=self.tokens.shape[1] - 1)


@dataclass(frozen=True)
class Places:
    """The queries and keys of a batch in one kind of attention."""

    queries: Side
    keys: Side
    is_query: Bool[Tensor, "batch q_seq"]  # False at padding
    rows: Int[Tensor, " batch"]  # the number of each row in the split
    documents: Int[Tensor, "batch q_seq"] | None  # each token's document; None if attention crosses them
    is_cross: bool
    vocabulary: Vocabulary

    @cached_property
    def key_classes(self) -> Float[Tensor, "3 batch k_seq"]:
        """1 where a key is in one of three classes: first token of its document, punctuation, first token of a line."""
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
        """Entries with the text around queries and their keys: at most `STRETCH` tokens, from one document.

        If query and key are in one sequence, one text contains both, or only the query if the key is too far away.
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
    """The `Places` of a batch by kind of attention; `first_row` is the number of rows in earlier batches."""
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


def priorities(seed: int, *indices: Tensor) -> Int[Tensor, "..."]:
    """For each tuple of indices, a random number from 0 to 2³² - 1 that does not depend on the batch.

    A 32-bit hash mixes in one index after another (Wellons 2018, "Prospecting for hash functions").
    """
    mixed = torch.as_tensor(seed)
    for index in indices:
        mixed = (mixed + 0x9E3779B9 + index) & 0xFFFFFFFF
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFF
        mixed = mixed ^ (mixed >> 16)
    return mixed


class Smallest:
    """The entries with the smallest scores in each group; of entries with equal scores, those offered first.

    With random scores, the entries are a uniform sample of each group without replacement (Cohen & Kaplan 2007,
    "Summarizing data using bottom-k sketches"). `offer` needs only entries with scores below their group's `limits`.
    """

    def __init__(self, num_groups: int, size: int, device: torch.device) -> None:
        self.size, self._parts, self._num_kept, self._num_pending = size, list[Entries](), 0, 0
        self.limits = torch.full((num_groups,), torch.inf, dtype=torch.float64, device=device)

    def offer(self, entries: Entries) -> None:
        self._parts.append(entries)
        self._num_pending += len(entries["score"])
        if self._num_pending >= max(MIN_PENDING, self._num_kept // 4):
            self.kept()

    def kept(self) -> Entries:
        """The kept entries, sorted by group and score."""
        entries = {name: torch.cat([part[name] for part in self._parts]) for name in self._parts[0]}
        order = entries["score"].argsort(stable=True)
        order = order[entries["group"][order].argsort(stable=True)]
        groups = entries["group"][order]
        counts = groups.bincount(minlength=len(self.limits))
        firsts, is_full = counts.cumsum(dim=0) - counts, counts >= self.size
        self.limits[is_full] = entries["score"][order][firsts[is_full] + self.size - 1]
        order = order[torch.arange(len(order), device=order.device) - firsts[groups] < self.size]
        self._parts = [{name: field[order] for name, field in entries.items()}]
        self._num_kept, self._num_pending = len(order), 0
        return self._parts[0]


def limits_of_measures(num_keys: int) -> dict[str, tuple[float, float]]:
    """The measures of queries, each with the range of its values; cross-attention has only the first two."""
    lengths = {"entropy": torch.tensor(max(num_keys, 2)).log().item(), "distance": max(num_keys - 1.0, 1.0)}
    names = ("entropy", "entropy_share", "distance", "first_token", "previous_token", "self", "near")
    return {name: (0.0, lengths.get(name, 1.0)) for name in names}


def of_queries(
    weights: Float[Tensor, "batch maps rows k_seq"], num_visible: Tensor, is_cross: bool
) -> Float[Tensor, "measures batch maps rows"]:
    """The measures of successive queries, the last of which is at the last key's position; nan where undefined."""
    entropies = formulas.entropy.of_queries(weights)
    values = [entropies, formulas.entropy_share.of_queries(weights, num_visible, entropies)]
    others = (formulas.distance, formulas.first_token, formulas.previous_token, formulas.self_attention, formulas.near)
    return torch.stack(values + [measure.of_queries(weights) for measure in others if not is_cross])


def by_offset(values: Float[Tensor, "*maps q_seq k_seq"]) -> Float[Tensor, "*maps offsets"]:
    """Sums over the pairs of query and key with the same offset, key minus query, from 1 - q_seq to k_seq - 1."""
    q_seq, k_seq = values.shape[-2:]
    # Each row gets q_seq zeros at its end; viewed as rows of one entry less, it is shifted against the row before.
    flat = F.pad(values.flip(-1), (0, q_seq)).flatten(-2)[..., :-q_seq]
    return flat.unflatten(-1, (q_seq, q_seq + k_seq - 1)).sum(dim=-2).flip(-1)


def visible_keys(
    mask: AttentionMask, places: Places
) -> tuple[Float[Tensor, "batch #maps q_seq"], Float[Tensor, "5 #maps offsets"]]:
    """The number of keys that each query sees; and by offset, five counts of pairs of a query and a visible key.

    [0] counts all pairs; [1] to [4], those whose key is in one of the classes except `previous`. Padding sees no key.
    """
    queries, k_seq = places.is_query[:, None, :, None], places.keys.tokens.shape[1]
    allowed = mask.dense(queries.shape[2], k_seq, queries.device)
    visible = (queries.expand(-1, -1, -1, k_seq) if allowed is None else allowed & queries).float()
    of_classes = [visible * of_class[:, None, None] for of_class in places.key_classes]
    pairs = visible, *of_classes, visible * places.is_same.unsqueeze(1)
    return visible.sum(dim=-1), torch.stack([by_offset(each.sum(dim=0).double()) for each in pairs])


class Tally:
    """The counts of one layer's maps: histograms of measures, and shares of attention by class.

    The share of a class is Σ_qk w_qk [k in class] / number of queries. It is compared with the share that fixed offsets
    would give, Σ_o a(o) P(class | o), where a(o) = Σ_q w_q,q+o / number of queries is the mean attention by offset, and
    P(class | o) the share of the visible keys at that offset that are in the class. A head that attends to the class
    has a larger share than expected; a head that attends by position alone has the expected share.
    """

    def __init__(self, num_maps: int, limits: Float[Tensor, "measures 2"], max_seq_len: int) -> None:
        self.max_seq_len, self.num_queries, exact = max(2, max_seq_len), 0, limits.double()
        self._lows, self._widths = limits[:, 0].view(-1, 1, 1, 1), limits.diff(dim=1).view(-1, 1, 1, 1) / NUM_BINS
        self.histograms = torch.zeros(len(limits), num_maps, NUM_BINS, dtype=torch.int64, device=limits.device)
        self.on_class = exact.new_zeros(4, num_maps)  # sums of weights
        self._by_offset = exact.new_zeros(num_maps, 2 * self.max_seq_len - 1)
        self._visible = exact.new_zeros(5, num_maps, 2 * self.max_seq_len - 1)

    def add(self, places: Places, measures: Tensor, total: Float[Tensor, "maps q_seq k_seq"], visible: Tensor) -> None:
        """Add a batch: its measures, see `of_queries`, the sum of its maps, and its visible keys by offset."""
        self.num_queries += int(places.is_query.sum())
        is_counted = places.is_query.unsqueeze(1) & ~measures.isnan()
        bins = ((measures.nan_to_num() - self._lows) / self._widths).long().clamp(0, NUM_BINS - 1)
        first = torch.arange(self.histograms[..., 0].numel(), device=bins.device).view(len(bins), 1, -1, 1)
        indices = first * (NUM_BINS + 1) + bins.where(is_counted, NUM_BINS)
        counts = indices.flatten().bincount(minlength=first.numel() * (NUM_BINS + 1))
        self.histograms += counts.view(*self.histograms.shape[:2], -1)[..., :NUM_BINS]
        offsets = slice(self.max_seq_len - total.shape[1], self.max_seq_len + total.shape[2] - 1)
        self._by_offset[:, offsets] += by_offset(total)
        self._visible[..., offsets] += visible

    def shares(self) -> Float[Tensor, "classes maps 2"]:
        """The share of each class, and that expected from fixed offsets; nan for `previous` in cross-attention."""
        expected = (self._by_offset * self._visible[1:] / self._visible[:1].clamp(min=1)).sum(dim=-1)
        previous = self._by_offset[None, :, [self.max_seq_len - 2] * 2] * (1 if len(self.histograms) > 2 else torch.nan)
        return torch.cat([torch.stack([self.on_class, expected], dim=-1), previous]) / self.num_queries
