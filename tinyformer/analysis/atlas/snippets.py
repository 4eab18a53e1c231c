"""The events and vectors of heads, in the formats of the page and of the tables."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.analysis.atlas.events import NUM_OF_DECILE, VECTORS, LayerEvents, SplitEvents
from tinyformer.analysis.atlas.tally import CLASSES, Entries, Smallest
from tinyformer.analysis.context import AnalysisContext
from tinyformer.files import finite
from tinyformer.measures.capture import map_names
from tinyformer.nn import BaseAttention, Block, Network, TokenReadout
from tinyformer.nn.layers import weight_of
from tinyformer.report.page import packed

NUM_PROMOTED = 3  # promoted tokens that are shown
COLUMNS = ["decile", "row", "position", "query", "key_position", "key", "weight", "norm", "strength", "text"]
COLUMNS += [f"promoted_{number}" for number in range(1, NUM_PROMOTED + 1)]
"""The columns of the table of events; the decile of the strongest events is empty."""


def events_of(events: LayerEvents) -> list[Entries]:
    """The events of each map: group 0 has the strongest, groups 1 to 10 random events from each decile of strengths.

    All events in one bin of strengths are in the decile of the bin's middle event.
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
    """The tokens whose logits a head's outputs raise most directly: through W_O, the following norms and the readout.

    A norm is linear except for its scale, a positive number that changes no order, see `LogitAttribution`. Logits are
    compared before a softcap of the readout. The result is None if there is no such path to token logits, as in the
    encoder of an encoder–decoder, or in a classifier.
    """
    stack, names = network.stacks()[-1], ("attention", "cross_attention", "feed_forward")
    sublayers = [(block, name) for block in stack.layers for name in names if getattr(block, name, None) is not None]
    place = next((at for at, (block, name) in enumerate(sublayers) if getattr(block, name) is layer), len(sublayers))
    after = sublayers[place:]
    of_sublayers = [block.norms(name) for block, name in after if isinstance(block, Block)]
    norms: list[Any] = [*(of.output for of in of_sublayers[:1]), *(of.stream for of in of_sublayers), stack.final_norm]
    norms = [norm for norm in norms if not isinstance(norm, nn.Identity)]
    are_linear = [isinstance(norm, nn.LayerNorm | nn.RMSNorm) for norm in norms]
    are_linear += [isinstance(block, Block) for block, _ in after]
    if not after or not all(are_linear) or type(network.readout) is not TokenReadout:
        return None
    own, *others = (getattr(block, f"{name}_residual") for block, name in after)
    x = outputs @ layer.o_proj.weight.detach().float().unflatten(1, (layer.num_heads, -1))[:, head].T
    for norm in norms:
        x = x - x.mean(dim=-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else x
        x = x * weight_of(norm).detach().float()
    scale = own.branch * math.prod(float(residual.scale) for residual in others)
    logits = scale * x @ network.readout.proj.weight.detach().float().T
    return logits.topk(min(NUM_PROMOTED, logits.shape[1])).indices if scale else None


class Snippets:
    """The events, distributions and vectors of all heads, as JSON for the page and as rows of tables.

    In the JSON, texts are lists of indices into `tokens`.
    """

    def __init__(self, context: AnalysisContext, split: SplitEvents) -> None:
        self._context, self._index, self.tokens = context, dict[int, int](), list[str]()
        self._strings = context.tokenizer.token_strings(range(context.network.vocab_size))
        self.of_heads, self.events, self.classes = list[dict[str, Any]](), list[list[Any]](), list[list[Any]]()
        kept = {kind: of.kept() for kind, of in split.points.items()}
        self.points = {kind: [self._point(point) for point in _each(entries)] for kind, entries in kept.items()}
        for number, (of, kind) in enumerate(zip(split.layers, context.kinds, strict=True)):
            counts = F.pad(of.tally.histograms, (0, 0, 0, 0, 0, len(split.limits) - len(of.tally.histograms)))
            for index, entries in enumerate(events_of(of)):
                if of.layer.ablated_maps()[index]:
                    self.of_heads.append({})
                    continue
                address = [*context.addresses[number], map_names(of.layer)[index]]
                shares = [[*map(finite, pair)] for pair in of.tally.shares()[:, index].tolist()]
                self.classes += [[*address, name, *pair] for name, pair in zip(CLASSES, shares, strict=True)]
                planes = {name: projected(kept[kind][f"{name} of {number}"][:, index]) for name in VECTORS}
                projection: dict[str, Any] = {name: plane for name, (plane, _) in planes.items()}
                projection["explained"] = {name: explained for name, (_, explained) in planes.items()}
                shown = {"histograms": counts[:, index].tolist(), "shares": shares, "projection": projection}
                head = index // of.layer.num_softmaxes
                promoted = promoted_tokens(context.network, of.layer, head, entries["output"])
                self.of_heads.append({"events": shown | {"snippets": self._events(address, entries, promoted)}})

    def _events(self, address: list[Any], entries: Entries, promoted: Tensor | None) -> list[dict[str, Any]]:
        """The events of one attention map as JSON; a table row for each event is added to `self.events`."""
        tokens = [None] * len(entries["group"]) if promoted is None else promoted.tolist()
        pairs = [(of, self._event(of, ids)) for of, ids in zip(_each(entries), tokens, strict=True)]
        self.events += [[*address, *self._row(of, event)] for of, event in pairs]
        return [event for _, event in pairs]

    def _indices(self, ids: Sequence[int]) -> list[int]:
        self.tokens += [self._strings[token] for token in dict.fromkeys(ids) if token not in self._index]
        return [self._index.setdefault(token, len(self._index)) for token in ids]

    def _point(self, of: Entries) -> dict[str, Any]:
        """A query and the text around it, as JSON."""
        (row, document, at, *_), (begin, end, *_) = of["place"].tolist(), of["stretches"].tolist()
        name = f"{self._context.row} {row}" + f", document {document}" * (document >= 0)
        snippet = self._indices(of["queries"][: end - begin].tolist())
        return {"snippet": snippet, "query": at - begin, "row": name, "at": at}

    def _event(self, of: Entries, promoted: Sequence[int] | None) -> dict[str, Any]:
        (*_, at, key, _), (begin, end, first, last) = of["place"].tolist(), of["stretches"].tolist()
        event, decile = self._point(of), int(of["group"]) % 11 - 1
        event |= {"queries": event.pop("snippet"), "key": key - first if first <= key < last else None}
        event |= {"strength": float(f"{float(of['strength']):.5g}"), "decile": None if decile < 0 else decile}
        event["weights"] = packed(of["weights"][: last - first])
        if "keys" in of:
            event["keys"] = self._indices(of["keys"][: last - first].tolist())
        if event["key"] is None:
            event["outside"] = key - at
        if decile < 0:
            event["map"] = packed(of["map"][: end - begin, : last - first])
        if promoted is not None:
            event["promotes"] = self._indices(promoted)
        return event

    def _row(self, of: Entries, event: Mapping[str, Any]) -> list[Any]:
        """The `COLUMNS` of an event; in the text, the query is in brackets and the key in parentheses."""
        (*_, position, token), weight, strength = of["place"].tolist(), float(of["weight"]), float(of["strength"])
        sides = [[self.tokens[index] for index in event[name]] for name in ("queries", "keys") if name in event]
        query = sides[0][event["query"]]
        sides[0][event["query"]] = f"[{query}]"
        if event["key"] is not None:
            sides[-1][event["key"]] = f"({sides[-1][event['key']]})"
        promoted = [self.tokens[index] for index in event.get("promotes", ())]
        promoted += [None] * (NUM_PROMOTED - len(promoted))
        place = [event["decile"], event["row"], event["at"], query, position, self._strings[token]]
        norm = strength / weight if weight else None
        return [*place, weight, norm, strength, " / ".join(map(" ".join, sides)), *promoted]


def _each(entries: Entries) -> Iterator[Entries]:
    """Iterate over single entries, each a dictionary with the fields of `entries`."""
    fields = (of.cpu() for of in entries.values())
    return (dict(zip(entries, of, strict=True)) for of in zip(*fields, strict=True))


def projected(vectors: Float[Tensor, "points dims"]) -> tuple[str, list[float]]:
    """The first two principal components of some vectors, and the share of the variance that each explains.

    The coordinates x, y, x, y, … are 16-bit integers in base64, scaled to a largest size of 32767.
    """
    left, sizes, _ = torch.linalg.svd((vectors - vectors.mean(dim=0)).double(), full_matrices=False)
    components, tiny = F.pad(left * sizes, (0, 2))[:, :2], torch.finfo(torch.float64).tiny
    signs = components.gather(0, components.abs().argmax(dim=0, keepdim=True)).sign()  # the same on any machine
    levels = (components * signs / components.abs().max().clamp(min=tiny) * 32767).round()
    explained = F.pad(sizes.square(), (0, 2))[:2] / sizes.square().sum().clamp(min=tiny)
    return packed(levels.to(torch.int16)), explained.tolist()
