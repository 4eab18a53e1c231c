"""One pass over a split, which records some of each head's events; an event is a query with its strongest key."""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tinyformer.analysis.atlas.tally import (
    CLASSES,
    Entries,
    Places,
    Smallest,
    Tally,
    Vocabulary,
    limits_of_measures,
    of_queries,
    places_by_kind,
    priorities,
    visible_keys,
)
from tinyformer.analysis.context import AnalysisContext
from tinyformer.data.batches.windows import Batch, tensors
from tinyformer.measures.batches import queries_by_kind
from tinyformer.measures.capture import PassIsComplete, running_hooks
from tinyformer.nn import AttentionInputs, BaseAttention, DifferentialAttention
from tinyformer.nn.maps import TOLERANCES, HeadOutputs, NoMapsError, is_own
from tinyformer.report.page import as_bytes

NUM_STRONGEST, NUM_OF_DECILE = 20, 5  # events of a head that are shown
NUM_BINS, LOWEST, OCTAVES = 1024, -20, 32  # of strengths: logarithmic bins from 2⁻²⁰ to 2¹², each 2.2 % wide
NUM_QUERIES = 64  # queries of a causal map that are computed at once, without later keys
NUM_POINTS = 200  # queries of each kind of attention whose vectors are kept
NUM_WEIGHTS = {"cpu": 2**23}  # weights of a layer that are computed at once; 2²⁸ on other devices
VECTORS = ("queries", "keys", "outputs")


class SplitEvents:
    """One pass over a split, which fills the `LayerEvents` of each layer and samples queries of each kind of attention.

    The sampled queries are the same for all heads, and the vectors that `LayerEvents.end` returns for them are kept. A
    forward pass stops after the last layer's heads.
    """

    def __init__(self, context: AnalysisContext, seed: int) -> None:
        network, device = context.network, context.batches[0]["inputs"].device
        self._kinds, self.num_rows = context.kinds, 0
        are_queries = [of for batch in context.batches for of in queries_by_kind(batch).values()]
        self.limits = limits_of_measures(max(int(of.sum(dim=1).max()) for of in are_queries))
        limits = torch.tensor([*self.limits.values()], device=device)
        self.layers = [
            LayerEvents(layer, limits[:2] if kind == "cross" else limits, network.max_seq_len, seed + index)
            for index, (layer, kind) in enumerate(zip(context.layers, self._kinds, strict=True))
        ]
        self.points = {kind: Smallest(1, NUM_POINTS, device) for kind in dict.fromkeys(self._kinds)}
        vocabulary = Vocabulary.of(context.tokenizer, network.vocab_size, device)
        hooks = [of.inputs_hook.register_forward_hook(partial(self._begin, at)) for at, of in enumerate(context.layers)]
        hooks += [of.o_proj.register_forward_pre_hook(partial(self._end, at)) for at, of in enumerate(context.layers)]
        with running_hooks(network, hooks), torch.no_grad():
            for batch in _resized(context.split(), max(layer.num_maps for layer in self.layers)):
                self._places = places_by_kind(batch, self.num_rows, vocabulary)
                self._shared, self._chosen = defaultdict[str, dict[Hashable, Any]](dict), self._choose(seed)
                with context.precision(), suppress(PassIsComplete):
                    context.task.forward(network, batch)
                for kind, kept in self.points.items():
                    kept.offer(self._chosen[kind][2])
                self.num_rows += len(batch["inputs"])

    def _choose(self, seed: int) -> dict[str, tuple[Tensor, Tensor, Entries]]:
        """For each kind of attention, the queries that may enter the sample: their rows, positions and `Entries`."""
        chosen = dict[str, tuple[Tensor, Tensor, Entries]]()
        for kind, kept in self.points.items():
            of = self._places[kind]
            positions = torch.arange(of.is_query.shape[1], device=of.is_query.device)
            scores = priorities(seed, of.rows.unsqueeze(1), positions).double().masked_fill(~of.is_query, torch.inf)
            last = scores.flatten().kthvalue(min(NUM_POINTS, scores.numel())).values
            rows, at = index = ((scores <= last) & (scores < kept.limits)).nonzero(as_tuple=True)
            entries = of.entries(rows, at, at.clamp(max=of.keys.tokens.shape[1] - 1))
            chosen[kind] = rows, at, entries | {"group": torch.zeros_like(at), "score": scores[index]}
        return chosen

    def _begin(self, number: int, module: Any, inputs: Any, call: AttentionInputs) -> AttentionInputs:
        kind = self._kinds[number]
        with torch.autocast(call.qkv.q.device.type, enabled=False):  # autocast would round the measured values
            return self.layers[number].begin(call, self._places[kind], self._shared[kind])

    def _end(self, number: int, module: Any, inputs: tuple[Tensor]) -> None:
        rows, at, entries = self._chosen[kind := self._kinds[number]]
        with torch.autocast(inputs[0].device.type, enabled=False):
            vectors = self.layers[number].end(inputs[0], self._places[kind], rows, at)
        entries.update({f"{name} of {number}": of for name, of in zip(VECTORS, vectors, strict=True)})
        if number == len(self.layers) - 1:
            raise PassIsComplete


def _resized(batches: Iterable[Batch], num_maps: int) -> Iterator[Batch]:
    """Regroup the rows of batches, so that the maps of one layer have about `NUM_WEIGHTS` weights in each batch."""
    waiting = dict[str, Tensor]()
    for batch in batches:
        rows = {name: of for name, of in tensors(batch).items() if name != "document_starts"}
        if waiting and any(of.shape[1:] != waiting[name].shape[1:] for name, of in rows.items()):
            yield cast(Batch, waiting)
            waiting = {}
        waiting = {name: torch.cat([waiting[name], of]) if waiting else of for name, of in rows.items()}
        num_keys = max(of.shape[1] for of in rows.values() if of.ndim > 1)
        size = max(1, NUM_WEIGHTS.get(batch["inputs"].device.type, 2**28) // (num_maps * num_keys**2))
        while len(waiting["inputs"]) >= size:
            yield cast(Batch, {name: of[:size] for name, of in waiting.items()})
            waiting = {name: of[size:] for name, of in waiting.items()}
    if len(waiting.get("inputs", ())):
        yield cast(Batch, waiting)


class LayerEvents:
    """The record of one layer over a split: some events, the number of all events by bin of strength, and a `Tally`.

    An event is a query with its strongest key. The strength of a key is α ‖f W_O v‖, where α is the weight, v the key's
    value, and W_O the head's part of the output projection (Kobayashi et al. 2020, arXiv 2004.10102). f is any other
    factor of the head's output, such as a gate. In differential attention, each softmax has events, and f is the scale
    of the head's norm, multiplied by λ for the second softmax.
    """

    def __init__(self, layer: BaseAttention, limits: Float[Tensor, "measures 2"], max_seq_len: int, seed: int) -> None:
        self.layer, self.seed, device, self._is_checked = layer, seed, limits.device, False
        self.num_maps = layer.num_heads * layer.num_softmaxes
        self.tally, self.strength = Tally(self.num_maps, limits, max_seq_len), limits.new_zeros(self.num_maps).double()
        self.counts = torch.zeros(self.num_maps, NUM_BINS, dtype=torch.int64, device=device)
        self.strongest = Smallest(self.num_maps, NUM_STRONGEST, device)
        self.sampled = Smallest(self.num_maps * NUM_BINS, NUM_OF_DECILE, device)
        is_gated = layer.output_gate is not None or layer.head_gate.factors is not None
        self._is_scaled = is_gated or layer.num_softmaxes > 1
        self._signs, self._scales = limits.new_ones(layer.num_softmaxes), limits.new_ones(())
        if isinstance(layer, DifferentialAttention):
            self._signs[1], self._scales = -layer.factor().detach(), layer.head_norm.weight.detach().float()
        weight = layer.o_proj.weight.detach().float().unflatten(1, (layer.num_heads, -1)).transpose(0, 1)
        # ‖W v‖ = ‖R v‖ for W = QR, which has fewer rows.
        self._triangles: Float[Tensor, "heads v_head_dim rows"] = torch.linalg.qr(weight, mode="r").R.mT

    def begin(self, call: AttentionInputs, places: Places, shared: dict[Hashable, Any]) -> AttentionInputs:
        """Add a batch's weights to the tally, and to `call`, which is returned; layers share the cache `shared`."""
        (q, k, v), mask, n = call.qkv, call.mask, self.layer.num_softmaxes
        values = v[:, self.layer.head_map.kv_heads].float() * self._scales
        norms = (values @ self._triangles).norm(dim=-1).repeat_interleave(n, dim=1)
        key = mask.causal, mask.window, *map(id, (mask.lengths, mask.documents, mask.allowed))
        if key not in shared:
            shared[key] = visible_keys(mask, places)
        num_visible, by_offset = shared[key]
        shape = len(q), self.num_maps, q.shape[2], k.shape[2]
        if shape not in shared:
            shared[shape] = norms.new_zeros(shape)  # weights outside all blocks stay 0
        maps = shared[shape]
        measures, strengths = norms.new_empty(len(self.tally.histograms), *shape[:3]), norms.new_empty(shape[:3])
        total, received, on_same = norms.new_zeros(shape[1:]), torch.zeros_like(norms), norms.new_zeros(self.num_maps)
        is_causal = mask.causal and not is_own(self.layer)
        for first in range(0, shape[2], NUM_QUERIES if is_causal else shape[2]):
            queries = slice(first, first + NUM_QUERIES if is_causal else None)
            keys = slice(queries.stop)
            weights = self._weights(call, queries, keys) * places.is_query[:, None, queries, None]
            maps[:, :, queries, keys] = weights
            strengths[:, :, queries] = (weights * norms[:, :, None, keys]).amax(dim=-1)
            measures[..., queries] = of_queries(weights, num_visible[..., queries], places.is_cross)
            total[:, queries, keys] += weights.sum(dim=0)
            received[..., keys] += weights.sum(dim=2)
            on_same += (weights.flatten(2) @ places.is_same[:, queries, keys].flatten(1).unsqueeze(2)).sum(dim=(0, 2))
        self.tally.add(places, measures, total, by_offset)
        self.tally.on_class[:3] += torch.einsum("bmk,cbk->cm", received, places.key_classes)
        self.tally.on_class[3] += on_same
        self._values, self._norms, self._strengths, self._maps = values, norms, strengths, maps
        self._qkv = call.qkv
        return call._replace(weights=maps)

    def end(
        self, joined: Float[Tensor, "batch seq joined"], places: Places, rows: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Record the events of a batch; `joined` are the outputs of the heads, before the output projection.

        Return the query, key and output vectors at some rows and positions. The key vector is that of the same position
        or, in cross-attention, of the strongest key.
        """
        outputs = joined.unflatten(-1, (self.layer.num_heads, -1)).transpose(1, 2).float()
        maps, norms, strengths, n = self._maps, self._norms, self._strengths, self.layer.num_softmaxes
        if self._is_scaled or not self._is_checked:
            factors = self._factors(outputs * places.is_query[:, None, :, None])
            strengths = strengths * factors if self._is_scaled else strengths
        bins = ((strengths.log2() - LOWEST) * (NUM_BINS / OCTAVES)).clamp(0, NUM_BINS - 1).long()
        groups = bins + NUM_BINS * torch.arange(self.num_maps, device=bins.device).view(-1, 1)
        is_query = places.is_query.unsqueeze(1)
        counts = groups.where(is_query, self.counts.numel()).flatten().bincount(minlength=self.counts.numel() + 1)
        self.counts += counts[:-1].view_as(self.counts)
        self.strength += (strengths * is_query).double().sum(dim=(0, 2))
        self._keep(maps, norms, strengths, groups, outputs, places)
        of_keys = positions.unsqueeze(1)
        if places.is_cross:
            of_keys = (maps[rows, :, positions] * norms[rows]).argmax(dim=-1)
        k_heads = [kv_head * n + part for kv_head in self.layer.head_map.kv_heads for part in range(n)]
        keys = self._qkv.k[rows.unsqueeze(1), torch.tensor(k_heads, device=of_keys.device), of_keys]
        of_queries = outputs[rows, :, positions].repeat_interleave(n, dim=1)
        return self._qkv.q[rows, :, positions].float(), keys.float(), of_queries

    def _weights(self, call: AttentionInputs, queries: slice, keys: slice) -> Float[Tensor, "batch maps queries keys"]:
        """The weights of a slice of queries to a slice of keys; in causal attention, both slices end together."""
        (q, k, v), mask = call.qkv, call.mask
        if (allowed := mask.allowed) is not None:
            parts = zip((queries, keys), allowed.shape[2:], strict=True)
            allowed = allowed[:, :, *(part if size > 1 else slice(None) for part, size in parts)]
        documents = None if mask.documents is None else mask.documents[:, keys]
        decay = None if mask.log_decay is None else mask.log_decay[..., keys]
        mask = replace(mask, documents=documents, document_starts=None, allowed=allowed, log_decay=decay)
        qkv = call.qkv._replace(q=q[:, :, queries], k=k[:, :, keys], v=v[:, :, keys])
        with torch.autocast(q.device.type, enabled=q.dtype.itemsize < 4):  # as in the forward pass
            return self.layer.maps_of_call(call._replace(qkv=qkv, mask=mask)).weights.float()

    def measures(self) -> dict[str, list[float]]:
        """For each map, the mean and quantiles of strengths, and `Tally.shares`; nan for ablated heads."""
        found = {"strength": self.strength / self.tally.num_queries}
        for percent in (10, 50, 90):
            bins = (self.counts.cumsum(dim=1) < self.tally.num_queries * percent / 100).sum(dim=1)
            found[f"strength_{percent}"] = 2.0 ** (LOWEST + (bins + 0.5) * OCTAVES / NUM_BINS)
        for name, pairs in zip(CLASSES, self.tally.shares(), strict=True):
            found |= {f"share_{name}": pairs[:, 0], f"expected_{name}": pairs[:, 1]}
        ablated = torch.tensor(self.layer.ablated_maps(), device=self.counts.device)
        return {name: of_maps.masked_fill(ablated, math.nan).tolist() for name, of_maps in found.items()}

    def _factors(self, outputs: HeadOutputs) -> Float[Tensor, "batch maps q_seq"]:
        """The factor that turns each head's weighted values into its output; an error is raised if there is none."""
        self._is_checked, signs, maps = True, self._signs.view(-1, 1, 1), self._maps
        mixed = (maps.unflatten(1, (self.layer.num_heads, -1)) * signs).sum(dim=2) @ self._values
        factors = (mixed * outputs).sum(dim=-1) / mixed.square().sum(dim=-1).clamp(min=torch.finfo(maps.dtype).tiny)
        is_active = ~torch.tensor(self.layer.ablated(), device=maps.device).view(-1, 1, 1)
        error = ((factors.unsqueeze(-1) * mixed - outputs) * is_active).abs().max()
        if error > TOLERANCES.get(self._qkv.v.dtype, 0.03) * outputs.abs().max():
            reason = (
                "has outputs that are no multiple of the weighted values, such as with gate=elementwise, exclusive=true"
            )
            reason += " or relative values, so the strength of a key is not defined"
            raise NoMapsError(self.layer, reason)
        return (factors.unsqueeze(2) * self._signs.view(-1, 1)).flatten(1, 2).abs()

    def _keep(
        self,
        maps: Float[Tensor, "batch maps q_seq k_seq"],
        norms: Float[Tensor, "batch maps k_seq"],
        strengths: Float[Tensor, "batch maps q_seq"],
        bins: Int[Tensor, "batch maps q_seq"],
        outputs: HeadOutputs,
        places: Places,
    ) -> None:
        """Offer events to `strongest` and to `sampled`; each gets only the events that it could keep."""
        batch, num_maps, q_seq = strengths.shape
        numbers, positions = (torch.arange(size, device=maps.device) for size in (num_maps, q_seq))
        random = priorities(self.seed, places.rows.view(-1, 1, 1), positions, numbers.view(-1, 1)).double()
        is_query, scores = places.is_query.unsqueeze(1), -strengths.double()
        scores, random = (of.masked_fill(~is_query, torch.inf) for of in (scores, random))
        first = scores.transpose(0, 1).flatten(1).topk(min(NUM_STRONGEST, batch * q_seq), largest=False).values[:, -1:]
        is_strongest = (scores <= first) & (scores < self.strongest.limits.view(-1, 1))
        is_sampled = random < self.sampled.limits[bins]
        groups = numbers.view(-1, 1).expand_as(bins)
        for kept, chosen, of, group in (
            (self.strongest, is_strongest, scores, groups),
            (self.sampled, is_sampled, random, bins),
        ):
            b, m, q = index = chosen.nonzero(as_tuple=True)
            if not len(b):
                continue
            weights, of_events = maps[index], norms[b, m]
            k = (weights * of_events).argmax(dim=-1)
            entries = places.entries(b, q, k)
            shown = places.keys.positions(entries["stretches"][:, 2:])
            entries |= {"group": group[index], "score": of[index], "strength": strengths[index]}
            entries |= {"weight": maps[b, m, q, k], "weights": as_bytes(weights.gather(1, shown))}
            entries["output"] = outputs[b, m // self.layer.num_softmaxes, q]
            if kept is self.strongest:
                of_queries = places.queries.positions(entries["stretches"][:, :2])
                grid = b.view(-1, 1, 1), m.view(-1, 1, 1), of_queries.unsqueeze(2), shown.unsqueeze(1)
                entries["map"] = as_bytes(maps[grid])
            kept.offer(entries)
