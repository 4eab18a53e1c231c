"""The events of heads as the page and the tables show them: stretches of text with the query and the key."""

import base64
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tinyformer.analysis.atlas.events import NUM_BINS, NUM_OF_DECILE, LayerEvents
from tinyformer.analysis.atlas.reservoirs import Entries


class Tokens:
    """The tokens that a page shows, each once."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings, self._index = strings, dict[int, int]()

    def __call__(self, ids: Sequence[int]) -> list[int]:
        """The indices of some tokens in `shown`."""
        return [self._index.setdefault(token, len(self._index)) for token in ids]

    @property
    def shown(self) -> list[str]:
        return [self._strings[token] for token in self._index]


def deciles_of(counts: Tensor) -> Tensor:
    """The decile of each bin of strengths: that of its middle event, so that all of a bin are in the same."""
    middle = counts.cumsum(dim=-1) - counts / 2
    return (10 * middle / counts.sum(dim=-1, keepdim=True).clamp(min=1)).long().clamp(max=9)


def events_of(events: LayerEvents) -> list[Entries]:
    """For each map of a layer its strongest events, the strongest first, then those of each decile; see `decile`."""
    strongest, sampled = events.strongest.merge(), events.sampled.merge()
    deciles = deciles_of(events.counts).flatten()
    found = []
    for number in range(events.num_maps):
        top = _chosen(strongest, (strongest["group"] == number).nonzero().squeeze(1))
        of_map = _chosen(sampled, (sampled["group"] // NUM_BINS == number).nonzero().squeeze(1))
        own = deciles[of_map["group"]]
        kept = [
            of_decile[of_map["score"][of_decile].argsort(stable=True)[:NUM_OF_DECILE]]
            for of_decile in ((own == decile).nonzero().squeeze(1) for decile in range(10))
        ]
        of_map = _chosen({**of_map, "decile": own}, torch.cat(kept))
        top = {**top, "decile": torch.full_like(top["group"], -1)}
        found.append({name: torch.cat([top[name], of_map[name]]) for name in of_map} | {"map": top["map"]})
    return found


def _chosen(entries: Entries, index: Tensor) -> dict[str, Tensor]:
    return {name: field[index] for name, field in entries.items()}


def snippets_of(
    entries: Entries, tokens: Tokens, name_row: Callable[[int, int], str], promoted: Tensor | None, is_cross: bool
) -> list[dict[str, Any]]:
    """The events of a map as the page reads them."""
    columns = {name: field.tolist() for name, field in entries.items() if name not in ("output", "weights", "map")}
    found = []
    for index, (at, key, of_queries, of_keys) in enumerate(
        zip(*(columns[name] for name in ("at", "key", "of_queries", "of_keys")), strict=True)
    ):
        num_queries, num_keys = of_queries[1] - of_queries[0], of_keys[1] - of_keys[0]
        is_inside, decile = of_keys[0] <= key < of_keys[1], columns["decile"][index]
        snippet = {
            "queries": tokens(columns["query_tokens"][index][:num_queries]),
            "query": at - of_queries[0],
            "key": key - of_keys[0] if is_inside else None,
            "strength": float(f"{columns['strength'][index]:.5g}"),
            "decile": None if decile < 0 else decile,
            "row": name_row(columns["row"][index], columns["document"][index]),
            "at": at,
            "weights": _packed(entries["weights"][index, :num_keys]),
        }
        if is_cross:
            snippet["keys"] = tokens(columns["key_tokens"][index][:num_keys])
        if not is_inside:
            snippet["outside"] = key - at
        if decile < 0:
            snippet["map"] = _packed(entries["map"][index, :num_queries, :num_keys])
        if promoted is not None:
            snippet["promotes"] = tokens(promoted[index].tolist())
        found.append(snippet)
    return found


def _packed(numbers: Tensor) -> str:
    return base64.b64encode(numbers.contiguous().cpu().numpy().tobytes()).decode()
