"""The events and vectors of heads as the page and the tables show them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.analysis.atlas.events import NUM_OF_DECILE, LayerEvents
from tinyformer.analysis.atlas.reservoirs import Entries, Smallest
from tinyformer.nn import BaseAttention, Network, PostNormBlock, PreNormBlock, TokenReadout
from tinyformer.report.atlas import packed

NUM_PROMOTED = 3  # tokens
COLUMNS = ["decile", "row", "position", "query", "key_position", "key", "weight", "norm", "strength", "text"]
COLUMNS += [f"promoted_{number}" for number in range(1, NUM_PROMOTED + 1)]
"""What a table tells of an event; one without a decile is among the strongest."""


def events_of(events: LayerEvents) -> list[Entries]:
    """The events of each map: the strongest, in the group 0, and some of each decile of strengths, in 1 to 10.

    All events in one bin of strengths are in the decile of its middle event.
    """
    strongest, sampled, counts = events.strongest.kept(), events.sampled.kept(), events.counts
    middles = (counts.cumsum(dim=1) - counts / 2) / counts.sum(dim=1, keepdim=True).clamp(min=1)
    first = 11 * torch.arange(events.num_maps, device=counts.device)
    deciles = Smallest(11 * events.num_maps, NUM_OF_DECILE, counts.device)
    deciles.offer(sampled | {"group": ((10 * middles).long() + 1 + first.unsqueeze(1)).flatten()[sampled["group"]]})
    parts = [strongest | {"group": first[strongest["group"]]}, dict(deciles.kept())]
    parts[1]["map"] = strongest["map"].new_zeros(len(parts[1]["group"]), *strongest["map"].shape[1:])
    both = {name: torch.cat([part[name] for part in parts]) for name in strongest}
    order, maps = both["group"].argsort(stable=True), both["group"] // 11
    by_map = (of[order].split(maps.bincount(minlength=events.num_maps).tolist()) for of in both.values())
    return [dict(zip(both, of, strict=True)) for of in zip(*by_map, strict=True)]


def promoted_tokens(
    network: Network, layer: BaseAttention, head: int, outputs: Float[Tensor, "events v_head_dim"]
) -> Int[Tensor, "events tokens"] | None:
    """The tokens whose logits the outputs of a head raise most by what W_O makes of them, through norms and readout.

    A norm is linear but for its scale, a positive number that changes no order, see `LogitAttribution`. None where
    nothing is added to the logits of tokens that way, as in the encoder of an encoder–decoder, or in a classifier.
    """
    stack, names = network.stacks()[-1], ("attention", "cross_attention", "feed_forward")
    sublayers = [(block, name) for block in stack.layers for name in names if getattr(block, name, None) is not None]
    place = next((at for at, (block, name) in enumerate(sublayers) if getattr(block, name) is layer), len(sublayers))
    after = sublayers[place:]
    norms = [getattr(block, f"{name}_norm") for block, name in after if isinstance(block, PostNormBlock)]
    norms = [norm for norm in (*norms, stack.final_norm) if not isinstance(norm, nn.Identity)]
    are_linear = [isinstance(norm, nn.LayerNorm | nn.RMSNorm) for norm in norms]
    are_linear += [isinstance(block, PreNormBlock | PostNormBlock) for block, _ in after]
    if not after or not all(are_linear) or type(network.readout) is not TokenReadout:
        return None
    own, *others = (getattr(block, f"{name}_residual") for block, name in after)
    x = outputs @ layer.o_proj.weight.detach().float().unflatten(1, (layer.num_heads, -1))[:, head].T
    for norm in norms:
        x = (x - x.mean(dim=-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else x) * norm.weight.detach().float()
    scale = own.branch * math.prod(residual.skip for residual in others)
    logits = scale * x @ network.readout.proj.weight.detach().float().T
    return logits.topk(min(NUM_PROMOTED, logits.shape[1])).indices if scale else None


class Snippets:
    """Stretches of text as JSON; `strings` are those of the vocabulary, `what` is what a row is."""

    def __init__(self, strings: Sequence[str], what: str) -> None:
        self.strings, self.what, self._index = strings, what, dict[int, int]()
        self.shown = list[str]()  # the tokens of snippets, by the index that these use

    def tokens(self, ids: Sequence[int]) -> list[int]:
        self.shown += [self.strings[token] for token in dict.fromkeys(ids) if token not in self._index]
        return [self._index.setdefault(token, len(self._index)) for token in ids]

    def points(self, entries: Entries) -> list[dict[str, Any]]:
        """Queries, each in its stretch of text."""
        points, fields = [], (entries[name].tolist() for name in ("place", "stretches", "queries"))
        for (row, document, at, *_), (begin, end, *_), ids in zip(*fields, strict=True):
            name = f"{self.what} {row}" + f", document {document}" * (document >= 0)
            points.append({"snippet": self.tokens(ids[: end - begin]), "query": at - begin, "row": name, "at": at})
        return points

    def events(self, entries: Entries, promoted: Tensor | None) -> list[dict[str, Any]]:
        """The events of a map."""
        events, fields = self.points(entries), [entries[name].tolist() for name in ("group", "place", "stretches")]
        for index, (event, group, (*_, at, key, _), stretches) in enumerate(zip(events, *fields, strict=True)):
            begin, end, first, last = stretches
            event |= {"queries": event.pop("snippet"), "key": key - first if first <= key < last else None}
            event |= {"strength": float(f"{float(entries['strength'][index]):.5g}"), "decile": group % 11 - 1}
            event["weights"] = packed(entries["weights"][index, : last - first])
            if "keys" in entries:
                event["keys"] = self.tokens(entries["keys"][index, : last - first].tolist())
            if event["key"] is None:
                event["outside"] = key - at
            if event["decile"] < 0:
                event |= {"decile": None, "map": packed(entries["map"][index, : end - begin, : last - first])}
            if promoted is not None:
                event["promotes"] = self.tokens(promoted[index].tolist())
        return events

    def rows(self, events: Sequence[Mapping[str, Any]], entries: Entries) -> Iterator[list[Any]]:
        """The `COLUMNS` of the events of a map; in the text, the query is in brackets and the key in parentheses."""
        fields = (entries[name].tolist() for name in ("place", "weight", "strength"))
        for event, (*_, position, token), weight, strength in zip(events, *fields, strict=True):
            sides = [[self.shown[index] for index in event[name]] for name in ("queries", "keys") if name in event]
            query = sides[0][event["query"]]
            sides[0][event["query"]] = f"[{query}]"
            if event["key"] is not None:
                sides[-1][event["key"]] = f"({sides[-1][event['key']]})"
            promoted = [self.shown[index] for index in event.get("promotes", ())]
            promoted += [None] * (NUM_PROMOTED - len(promoted))
            place = [event["decile"], event["row"], event["at"], query, position, self.strings[token]]
            numbers = [weight, strength / weight if weight else None, strength]
            yield [*place, *numbers, " / ".join(map(" ".join, sides)), *promoted]


def projected(vectors: Float[Tensor, "points dims"]) -> tuple[str, list[float]]:
    """The first two principal components of some vectors, and the share of the variance that each explains.

    The coordinates x, y, x, y, … are whole numbers of 16 bits in base64, of which the largest is 32767.
    """
    left, sizes, _ = torch.linalg.svd((vectors - vectors.mean(dim=0)).double(), full_matrices=False)
    components, tiny = F.pad(left * sizes, (0, 2))[:, :2], torch.finfo(torch.float64).tiny
    signs = components.gather(0, components.abs().argmax(dim=0, keepdim=True)).sign()  # the same on any machine
    levels = (components * signs / components.abs().max().clamp(min=tiny) * 32767).round()
    explained = F.pad(sizes.square(), (0, 2))[:2] / sizes.square().sum().clamp(min=tiny)
    return packed(levels.to(torch.int16)), explained.tolist()
