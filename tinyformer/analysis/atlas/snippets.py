"""The events and vectors of heads as the page shows them."""

import base64
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

NUM_PROMOTED = 3  # tokens


def events_of(events: LayerEvents) -> list[Entries]:
    """The events of each map: its strongest, the strongest first, then some of each decile of strengths, see `decile`.

    All events in one bin of strengths are in the decile of its middle event. That of the strongest is -1.
    """
    middles = (events.counts.cumsum(dim=1) - events.counts / 2) / events.counts.sum(dim=1, keepdim=True)
    numbers, sampled = torch.arange(events.num_maps, device=middles.device), dict(events.sampled.kept())
    deciles = ((10 * middles).long() + 10 * numbers.unsqueeze(1)).flatten()
    of_deciles = Smallest(10 * events.num_maps, NUM_OF_DECILE, middles.device)
    of_deciles.offer(sampled | {"group": deciles[sampled["group"]]})
    chosen, strongest = of_deciles.kept(), events.strongest.kept()
    parts = [(strongest, strongest["group"], torch.full_like(strongest["group"], -1))]
    parts.append((chosen, chosen["group"] // 10, chosen["group"] % 10))
    return [
        {
            name: torch.cat(
                [{**entries, "decile": decile}[name][of_map == number] for entries, of_map, decile in parts]
            )
            for name in (*strongest, "decile")
            if name != "map"
        }
        | {"map": strongest["map"][strongest["group"] == number]}
        for number in range(events.num_maps)
    ]


def promoted_tokens(
    network: Network, layer: BaseAttention, head: int, outputs: Float[Tensor, "events v_head_dim"]
) -> Int[Tensor, "events tokens"] | None:
    """The tokens whose logits the outputs of a head raise most by what W_O makes of them, through norms and readout.

    A norm is linear but for its scale, a positive number that changes no order, see `LogitAttribution`. None where
    nothing is added to the logits of tokens that way, as in the encoder of an encoder–decoder, or in a classifier.
    """
    stack, names = network.stacks()[-1], ("attention", "cross_attention", "feed_forward")
    sublayers = [(block, name) for block in stack.layers for name in names if getattr(block, name, None) is not None]
    place = next((at for at, (block, name) in enumerate(sublayers) if getattr(block, name) is layer), None)
    if place is None or type(network.readout) is not TokenReadout:
        return None
    (block, name), *later = sublayers[place:]
    scale = math.prod(
        [getattr(block, f"{name}_residual").branch, *(getattr(of, f"{at}_residual").skip for of, at in later)]
    )
    norms = [getattr(of, f"{at}_norm") for of, at in sublayers[place:] if isinstance(of, PostNormBlock)]
    norms = [norm for norm in (*norms, stack.final_norm) if not isinstance(norm, nn.Identity)]
    are_known = [isinstance(of, PreNormBlock | PostNormBlock) for of, _ in later]
    if scale == 0 or not all(are_known + [isinstance(norm, nn.LayerNorm | nn.RMSNorm) for norm in norms]):
        return None
    x = scale * outputs @ layer.o_proj.weight.detach().float().unflatten(1, (layer.num_heads, -1))[:, head].T
    for norm in norms:
        x = (x - x.mean(dim=-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else x) * norm.weight.detach().float()
    return (x @ network.readout.proj.weight.detach().float().T).topk(NUM_PROMOTED).indices


class Snippets:
    """Stretches of text as JSON; `strings` are those of the vocabulary, `what` is what a row is."""

    def __init__(self, strings: Sequence[str], what: str) -> None:
        self.strings, self.what, self._index = strings, what, dict[int, int]()
        self.shown = list[str]()  # the tokens that snippets show, by the index that they use

    def tokens(self, ids: Sequence[int]) -> list[int]:
        self.shown += [self.strings[token] for token in dict.fromkeys(ids) if token not in self._index]
        return [self._index.setdefault(token, len(self._index)) for token in ids]

    def row(self, row: int, document: int) -> str:
        return f"{self.what} {row}" + f", document {document}" * (document >= 0)

    def points(self, entries: Entries) -> list[dict[str, Any]]:
        """The queries whose vectors are shown."""
        fields = (entries[name].tolist() for name in ("place", "stretches", "queries"))
        return [
            {"snippet": self.tokens(ids[: end - begin]), "query": at - begin, "row": self.row(row, document), "at": at}
            for (row, document, at, *_), (begin, end, *_), ids in zip(*fields, strict=True)
        ]

    def events(self, entries: Entries, promoted: Tensor | None) -> list[dict[str, Any]]:
        """The events of a map."""
        found, fields = self.points(entries), ("place", "stretches", "strength", "decile")
        for index, (event, (*_, at, key, _), (begin, end, first, last), strength, decile) in enumerate(
            zip(found, *(entries[name].tolist() for name in fields), strict=True)
        ):
            event["queries"] = event.pop("snippet")
            event |= {"key": key - first if first <= key < last else None, "strength": float(f"{strength:.5g}")}
            event |= {
                "decile": decile if decile >= 0 else None,
                "weights": packed(entries["weights"][index, : last - first]),
            }
            if "keys" in entries:
                event["keys"] = self.tokens(entries["keys"][index, : last - first].tolist())
            elif event["key"] is None:
                event["outside"] = key - at
            if decile < 0:
                event["map"] = packed(entries["map"][index, : end - begin, : last - first])
            if promoted is not None:
                event["promotes"] = self.tokens(promoted[index].tolist())
        return found

    def rows(self, events: Sequence[Mapping[str, Any]], entries: Entries) -> Iterator[list[Any]]:
        """The events of a map as rows of a table; in its text, the query is in brackets and the key in parentheses."""
        fields = (entries[name].tolist() for name in ("place", "weight", "strength"))
        for event, (*_, position, token), weight, strength in zip(events, *fields, strict=True):
            sides = [[self.shown[index] for index in event[name]] for name in ("queries", "keys") if name in event]
            query = sides[0][event["query"]]
            sides[0][event["query"]] = f"[{query}]"
            if event["key"] is not None:
                sides[-1][event["key"]] = f"({sides[-1][event['key']]})"
            promoted = [self.shown[index] for index in event.get("promotes", ())]
            place = [event["decile"], event["row"], event["at"], query, position, self.strings[token]]
            text = " / ".join(map(" ".join, sides))
            yield [
                *place,
                weight,
                strength / max(weight, 1e-30),
                strength,
                text,
                *promoted,
                *[None] * (NUM_PROMOTED - len(promoted)),
            ]


def packed(numbers: Tensor) -> str:
    return base64.b64encode(numbers.cpu().contiguous().numpy().tobytes()).decode()


def projected(vectors: Float[Tensor, "points dims"]) -> tuple[str, list[float]]:
    """The first two principal components of some vectors, and the share of the variance that each explains.

    The coordinates x, y, x, y, … are whole numbers of 16 bits in base64, of which the largest is 32767.
    """
    left, sizes, _ = torch.linalg.svd((vectors - vectors.mean(dim=0)).double(), full_matrices=False)
    components, tiny = F.pad(left * sizes, (0, 2))[:, :2], torch.finfo(torch.float64).tiny
    signs = components.gather(0, components.abs().argmax(dim=0, keepdim=True)).sign()  # the same on any machine
    levels = (components * signs / components.abs().max().clamp(min=tiny) * 32767).round()
    shares = F.pad(sizes.square() / sizes.square().sum().clamp(min=tiny), (0, 2))[:2]
    return packed(levels.to(torch.int16)), shares.tolist()
