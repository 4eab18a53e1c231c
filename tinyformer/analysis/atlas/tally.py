"""What is counted of every query of a split: the distribution of measures, and attention by token class."""

from collections.abc import Hashable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tinyformer.analysis.atlas.places import Places
from tinyformer.analysis.measures import measures as formulas
from tinyformer.analysis.measures.table import MEASURES
from tinyformer.nn import AttentionMask

NUM_BINS = 32  # of the histogram of a measure
QUERY_MEASURES = ("entropy", "entropy_share", "distance", "first_token", "previous_token", "self", "near")
"""The measures that are means over queries; in cross-attention, only the first two."""


def limits_of(measure: str, num_keys: int) -> tuple[float, float]:
    """The limits of a measure of one query."""
    return (0.0, float(max(num_keys - 1, 1))) if measure == "distance" else MEASURES[measure].limits(max(num_keys, 2))


def of_queries(
    weights: Float[Tensor, "batch maps q_seq k_seq"], num_visible: Tensor, is_cross: bool
) -> Float[Tensor, "measures batch maps q_seq"]:
    """The `QUERY_MEASURES` of each query; nan where one is not defined."""
    entropies = formulas.entropies(weights)
    values = [entropies, formulas.entropy_shares(entropies, weights.sum(dim=-1), num_visible)]
    if not is_cross:
        values += [formulas.distances(weights), weights[..., 0], formulas.previous_tokens(weights)]
        values += [formulas.own_tokens(weights), formulas.near_tokens(weights)]
    return torch.stack(values)


def by_offset(values: Float[Tensor, "*maps q_seq k_seq"]) -> Float[Tensor, "*maps offsets"]:
    """Sums over pairs of a query and a key by the key's offset, from 1 - q_seq to k_seq - 1."""
    q_seq, k_seq = values.shape[-2:]
    # With q_seq more columns, and read as rows that are one shorter, each row is shifted against the one above.
    sheared = F.pad(values.flip(-1), (0, q_seq)).flatten(-2)[..., :-q_seq].unflatten(-1, (q_seq, q_seq + k_seq - 1))
    return sheared.sum(dim=-2).flip(-1)


class Tally:
    """What is counted of the maps of one layer.

    - Histograms of `QUERY_MEASURES` over the queries.
    - The share of attention on the keys of each class, Σ_qk w_qk [k in class] / number of queries. The classes are the
      first token of the document, the token before the query, other occurrences of the query's token that it sees,
      punctuation, and the first token of a line.
    - Beside it the share that fixed offsets would give: Σ_o a(o) · P(class | o), where a(o) = Σ_q w_q,q+o / number of
      queries is the map's mean attention by offset, and P(class | o) the share of the visible keys at this offset
      that are in the class. A head whose share is larger looks for such keys; one that only looks at positions has the
      same share. For the token before the query both are equal.
    """

    def __init__(self, num_maps: int, is_cross: bool, max_seq_len: int, device: torch.device) -> None:
        self.is_cross, self.max_seq_len, self.num_queries = is_cross, (max_seq_len := max(2, max_seq_len)), 0
        measures = QUERY_MEASURES[:2] if is_cross else QUERY_MEASURES
        limits = torch.tensor([limits_of(name, max_seq_len) for name in measures], device=device)
        self._lows, self._widths = limits[:, 0].view(-1, 1, 1, 1), limits.diff(dim=1).view(-1, 1, 1, 1) / NUM_BINS
        exact = {"dtype": torch.float64, "device": device}
        self.histograms = torch.zeros(len(measures), num_maps, NUM_BINS, dtype=torch.int64, device=device)
        self._sums = torch.zeros(len(measures), num_maps, **exact)
        self._on_class = torch.zeros(4, num_maps, **exact)
        self._by_offset = torch.zeros(num_maps, 2 * max_seq_len - 1, **exact)
        self._visible = torch.zeros(5, num_maps, 2 * max_seq_len - 1, **exact)

    def add(
        self,
        places: Places,
        measures: Float[Tensor, "measures batch maps q_seq"],
        received: Float[Tensor, "batch maps k_seq"],
        on_same: Float[Tensor, " maps"],
        total: Float[Tensor, "maps q_seq k_seq"],
        visible: Float[Tensor, "5 #maps offsets"],
    ) -> None:
        """Count a batch.

        Args:
            measures: of each query, see `of_queries`.
            received: the sum of the weights that each key receives from the queries.
            on_same: the sum of the weights on `Places.is_same`.
            total: the weights of the queries, summed over the batch.
            visible: see `visible_by_offset`.
        """
        self.num_queries += int(places.is_query.sum())
        num_measures, _, num_maps, _ = measures.shape
        is_counted = places.is_query.unsqueeze(1) & ~measures.isnan()
        bins = ((measures.nan_to_num() - self._lows) / self._widths).long().clamp(0, NUM_BINS - 1)
        first = torch.arange(num_measures * num_maps, device=bins.device).view(num_measures, 1, num_maps, 1)
        indices = (first * (NUM_BINS + 1) + bins.where(is_counted, NUM_BINS)).flatten()
        counts = indices.bincount(minlength=num_measures * num_maps * (NUM_BINS + 1))
        self.histograms += counts.view(num_measures, num_maps, -1)[..., :NUM_BINS]
        self._sums += measures.where(is_counted, 0).double().sum(dim=(1, 3))
        self._on_class[:3] += torch.einsum("bmk,cbk->cm", received.double(), places.key_classes.double())
        self._on_class[3] += on_same
        _add_at(self._by_offset, by_offset(total), total.shape[1])
        _add_at(self._visible, visible, total.shape[1])

    def means(self) -> Float[Tensor, "measures maps"]:
        """The mean of each measure over the queries for which it is defined; nan for none."""
        return self._sums / self.histograms.sum(dim=-1)

    def shares(self) -> Float[Tensor, "5 maps 2"]:
        """The share of each of `CLASSES`, and that of fixed offsets; nan for the previous token in cross-attention."""
        seen = self._visible[:1].clamp(min=1)
        expected = (self._by_offset * self._visible[1:] / seen).sum(dim=-1)
        pairs = torch.stack([self._on_class, expected], dim=-1) / self.num_queries
        previous = self._by_offset[:, self.max_seq_len - 2 : self.max_seq_len - 1].expand(-1, 2) / self.num_queries
        first, punctuation, line, same = pairs
        return torch.stack([first, previous * (torch.nan if self.is_cross else 1), same, punctuation, line])


def _add_at(sums: Tensor, parts: Tensor, q_seq: int) -> None:
    """Add sums by offset of shorter sequences to those of the longest ones."""
    first = (sums.shape[-1] + 1) // 2 - q_seq
    sums[..., first : first + parts.shape[-1]] += parts


def mask_key(mask: AttentionMask) -> Hashable:
    """A key that is equal for masks of a batch that hide the same keys."""
    return mask.causal, mask.window, id(mask.lengths), id(mask.documents), id(mask.allowed)


def visible_keys(mask: AttentionMask, places: Places) -> Float[Tensor, "#batch #maps q_seq k_seq"]:
    """1 where a query that is no padding sees a key."""
    queries = places.is_query[:, None, :, None]
    allowed = mask.dense(queries.shape[2], places.keys.tokens.shape[1], queries.device)
    if allowed is None:
        allowed = torch.ones(1, 1, 1, places.keys.tokens.shape[1], dtype=torch.bool, device=queries.device)
    return (allowed & queries).float()


def visible_by_offset(visible: Float[Tensor, "batch maps q_seq k_seq"], places: Places) -> Int[Tensor, "5 maps offsets"]:
    """By offset, the number of visible pairs, and of those whose key is in each of the key classes, or the same."""
    of_class = [visible * keys[:, None, None, :] for keys in places.key_classes]
    pairs = [visible, *of_class, visible * places.is_same.unsqueeze(1)]
    return torch.stack([by_offset(part.sum(dim=0).double()) for part in pairs])
