"""The events of heads: each query of a split with its strongest key, of which some are kept."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tinyformer.analysis.atlas.places import STRETCH, Places
from tinyformer.analysis.atlas.reservoirs import Entries, Smallest, priorities
from tinyformer.analysis.atlas.tally import Tally, mask_key, of_queries, visible_by_offset, visible_keys
from tinyformer.analysis.measures.capture import running_hooks
from tinyformer.nn import AttentionCall, AttentionMask, BaseAttention, DifferentialAttention, Network
from tinyformer.nn.kernels.eager import attention_weights
from tinyformer.nn.maps import QKV, TOLERANCES, NoMapsError, is_own

NUM_STRONGEST, NUM_OF_DECILE = 20, 5  # events of a head that are shown
NUM_BINS, LOWEST, OCTAVES = 1024, -20, 32  # of strengths: logarithmic bins from 2⁻²⁰ to 2¹², 2.2 % wide each
NUM_QUERIES = 64  # of a causal map that are computed at once, without the keys after them
NUM_ELEMENTS = {"cpu": 2**20}  # of maps that are computed at once, so that they stay in the cache; 2²⁶ elsewhere


class Block(NamedTuple):
    """A part of the maps of a layer."""

    rows: slice  # of the batch
    queries: slice
    keys: slice


class Layer(NamedTuple):
    """One layer in one forward pass."""

    layer: BaseAttention
    call: AttentionCall
    outputs: Float[Tensor, "batch heads q_seq v_head_dim"]  # that the output projection is given
    factors: Float[Tensor, "batch maps q_seq"]  # by which values are multiplied beside weights

    def blocks(self) -> Iterator[tuple[slice, list["Block"]]]:
        """The maps of some rows after the other, in blocks of about `NUM_ELEMENTS` weights.

        Under a causal mask, the keys after the last query of a block, which it does not see, are left out.
        """
        (batch, num_maps, q_seq, _), k_seq = self.call.qkv.q.shape, self.call.qkv.k.shape[2]
        is_causal = self.call.mask.causal and not is_own(self.layer)
        step = min(NUM_QUERIES, q_seq) if is_causal else q_seq
        size = max(1, NUM_ELEMENTS.get(self.outputs.device.type, 2**26) // (num_maps * step * k_seq))
        for first in range(0, batch, size):
            rows = slice(first, min(first + size, batch))
            ends = [min(start + step, q_seq) for start in range(0, q_seq, step)]
            yield rows, [Block(rows, slice(end - (end - 1) % step - 1, end), slice(0, end if is_causal else k_seq)) for end in ends]

    def weights(self, block: "Block") -> Float[Tensor, "rows maps queries keys"]:
        """The attention weights of a part."""
        (q, k, v), mask, n = self.call.qkv, self.call.mask, self.layer.num_softmaxes
        lengths, documents = (part if part is None else part[block.rows] for part in (mask.lengths, mask.documents))
        documents = documents if documents is None or self.call.is_cross else documents[:, block.keys]
        if (allowed := mask.allowed) is not None:
            index = zip((block.rows, slice(None), block.queries, block.keys), allowed.shape, strict=True)
            allowed = allowed[tuple(part if size > 1 else slice(None) for part, size in index)]
        mask = AttentionMask(mask.causal, lengths, documents, mask.window, allowed=allowed)
        q, k = q[block.rows, :, block.queries], k[block.rows, :, block.keys]
        if is_own(self.layer):
            own = self.call._replace(qkv=QKV(q, k, v[block.rows]), mask=mask)
            return self.layer.maps_of_call(own).weights
        k, _ = self.layer.head_map.expand_kv(k, k)
        parts = [
            attention_weights(q[:, i::n], k[:, i::n], mask, self.layer.scoring(q[:, i::n], k.shape[2], mask, self.call.is_cross))
            for i in range(n)
        ]
        return torch.stack(parts, dim=2).flatten(1, 2) if n > 1 else parts[0]


@torch.no_grad()
def visit_layers(network: Network, forward: Callable[[], Any], visit: Callable[[int, Layer], None]) -> None:
    """Run a network up to its last attention, and visit each of its attention layers when its outputs are known.

    Beside its weight, a value is multiplied by the gate of its head, and by 0 in an ablated head. In differential
    attention the value is scaled by the norm of the query's output, and that of the second softmax by λ.
    """
    layers, seen = network.require_heads(), dict[tuple[BaseAttention, str], Any]()
    visited: set[BaseAttention] = set()

    def keep(layer: BaseAttention, name: str, module: Any, inputs: Any, output: Any) -> None:
        seen[layer, name] = inputs[0] if name == "difference" else output

    def end(index: int, layer: BaseAttention, module: Any, inputs: tuple[Tensor]) -> None:
        outputs = inputs[0].unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
        factors = outputs.new_ones(1, 1, 1)
        if (gate := seen.get((layer, "gate"))) is not None:
            factors = gate.float().sigmoid().transpose(1, 2)
        if layer.head_gate.factors is not None:
            factors = factors * layer.head_gate.factors.view(-1, layer.num_heads, 1)
        if isinstance(layer, DifferentialAttention):
            norm, difference = layer.head_norm, seen[layer, "difference"].float()
            scale = (difference.square().mean(dim=-1) + cast(float, norm.eps)).rsqrt() * (1 - layer.lambda_init)
            pair = torch.stack([torch.ones_like(layer.factor()), -layer.factor()])
            factors = ((factors * scale).unsqueeze(2) * pair.view(-1, 1)).flatten(1, 2)
        shape = len(outputs), layer.num_heads * layer.num_softmaxes, outputs.shape[2]
        visit(index, Layer(layer, seen.pop((layer, "call")), outputs, factors.float().expand(shape)))
        visited.add(layer)
        if len(visited) == len(layers):
            raise _AllVisited

    hooks = []
    for index, layer in enumerate(layers):
        modules = {"call": layer.call_point, "gate": layer.output_gate and layer.output_gate.proj}
        modules["difference"] = layer.head_norm if isinstance(layer, DifferentialAttention) else None
        hooks += [of.register_forward_hook(partial(keep, layer, name)) for name, of in modules.items() if of]
        hooks.append(layer.o_proj.register_forward_pre_hook(partial(end, index, layer)))
    with running_hooks(network, hooks), suppress(_AllVisited):
        forward()
    if missing := [layer for layer in layers if layer not in visited]:
        raise NoMapsError(missing[0], "overrides `forward`, and what it computes there has no maps")


class _AllVisited(Exception):  # noqa: N818 -- no error
    """Ends a forward pass whose remaining layers are not needed."""


class LayerEvents:
    """What is kept of one layer over a split: its events, their strengths, and its `Tally`.

    An event is a query with its strongest key: the one with the largest α ‖f W_O v‖, where α is the weight, v the
    key's value, W_O the head's part of the output projection, and f what else the value is multiplied by, such as a
    gate (Kobayashi et al. 2020, arXiv 2004.10102).
    """

    def __init__(self, layer: BaseAttention, is_cross: bool, max_seq_len: int, seed: int) -> None:
        self.layer, self.seed, device = layer, seed, layer.o_proj.weight.device
        self.num_maps = layer.num_heads * layer.num_softmaxes
        self.tally = Tally(self.num_maps, is_cross, max_seq_len, device)
        self.counts = torch.zeros(self.num_maps, NUM_BINS, dtype=torch.int64, device=device)
        self.strength = torch.zeros(self.num_maps, dtype=torch.float64, device=device)
        self.strongest = Smallest(self.num_maps, NUM_STRONGEST, device)
        self.sampled = Smallest(self.num_maps * NUM_BINS, NUM_OF_DECILE, device)
        weight = layer.o_proj.weight.detach().float().unflatten(1, (layer.num_heads, -1)).transpose(0, 1)
        if isinstance(layer, DifferentialAttention):
            weight = weight * layer.head_norm.weight.detach()
        # ‖W v‖ = ‖R v‖ for W = QR, which has fewer rows.
        self._triangles: Float[Tensor, "heads rows v_head_dim"] = torch.linalg.qr(weight, mode="r").R
        self._kv_heads = torch.tensor(layer.head_map.kv_heads, device=device)
        softmaxes = torch.arange(layer.num_softmaxes, device=device)
        self._k_heads = (self._kv_heads.unsqueeze(1) * layer.num_softmaxes + softmaxes).flatten()
        self._is_checked = False

    def add(
        self,
        at: Layer,
        places: Places,
        shared: dict[Hashable, Any],
        points: tuple[Tensor, Tensor],
    ) -> dict[str, Tensor]:
        """Add a batch; returns the vectors of some of its queries, see `Points`.

        Args:
            shared: what the layers of a kind have in common: the visible keys by `mask_key`, and memory by shape.
            points: the rows and positions of those queries.
        """
        if (key := mask_key(at.call.mask)) not in shared:
            seen = visible_keys(at.call.mask, places)
            shared[key] = seen.sum(dim=-1), visible_by_offset(seen, places)
        num_visible, by_offset = shared[key]
        values, n = at.call.qkv.v.float()[:, self._kv_heads], self.layer.num_softmaxes
        norms = torch.einsum("bhkv,hrv->bhkr", values, self._triangles).norm(dim=-1).repeat_interleave(n, dim=1)
        device, (batch, q_seq), k_seq = norms.device, places.is_query.shape, norms.shape[-1]
        numbers = torch.arange(self.num_maps, device=device).view(-1, 1)
        random = priorities(self.seed, places.rows.unsqueeze(1), torch.arange(q_seq, device=device))
        random = priorities(self.seed, random.unsqueeze(1), numbers).double()
        (of, position), factors = points, at.factors.abs()
        measures = norms.new_empty(len(self.tally.histograms), batch, self.num_maps, q_seq)
        strengths, bins = norms.new_empty(batch, self.num_maps, q_seq), random.new_empty(random.shape, dtype=torch.long)
        received, total = torch.zeros_like(norms), norms.new_zeros(self.num_maps, q_seq, k_seq)
        on_same, strongest = norms.new_zeros(self.num_maps), position.unsqueeze(1).repeat(1, self.num_maps)
        for rows, blocks in at.blocks():
            shape = rows.stop - rows.start, self.num_maps, q_seq, k_seq
            maps = shared.setdefault(shape, norms.new_zeros(shape))  # keys after a block stay 0
            for block in blocks:
                _, queries, keys = block
                weights = at.weights(block)
                if not places.is_full:
                    weights = weights * places.is_query[rows, None, queries, None]
                maps[:, :, queries, keys] = weights
                total[:, queries, keys] += weights.sum(dim=0)
                received[rows, :, keys] += weights.sum(dim=2)
                same = places.is_same[rows, queries, keys].flatten(1).unsqueeze(2)
                on_same += (weights.flatten(2) @ same).sum(dim=(0, 2))
                strengths[rows, :, queries] = (weights * norms[rows, :, None, keys]).amax(dim=-1)
                of_rows = num_visible[..., queries] if len(num_visible) == 1 else num_visible[rows, :, queries]
                measures[:, rows, :, queries] = of_queries(weights, of_rows, places.is_cross)
            if not self._is_checked:
                self._check(maps, values[rows], at, rows)
            strengths[rows] *= factors[rows]
            bins[rows] = ((strengths[rows].log2() - LOWEST) * (NUM_BINS / OCTAVES)).clamp(0, NUM_BINS - 1).long()
            bins[rows] += NUM_BINS * numbers
            self._keep(maps, norms, at, places, rows, strengths, bins, random)
            if places.is_cross and len(inside := ((of >= rows.start) & (of < rows.stop)).nonzero().squeeze(1)):
                b, q = of[inside], position[inside]
                strongest[inside] = (maps[b - rows.start, :, q] * norms[b]).argmax(dim=-1)
        self.tally.add(places, measures, received, on_same, total, by_offset)
        is_query = places.is_query.unsqueeze(1).expand(-1, self.num_maps, -1)
        self.counts += bins[is_query].bincount(minlength=self.counts.numel()).view_as(self.counts)
        self.strength += strengths.double().sum(dim=(0, 2))
        return {
            "queries": at.call.qkv.q[of, :, position].float(),
            "keys": at.call.qkv.k[of.unsqueeze(1), self._k_heads, strongest].float(),
            "outputs": at.outputs[of, :, position].float().repeat_interleave(n, dim=1),
        }

    def _check(self, maps: Tensor, values: Tensor, at: Layer, rows: slice) -> None:
        """Refuse a layer whose output is not what its weights and values give."""
        self._is_checked = True
        writes = (maps * at.factors[rows].unsqueeze(-1)).unflatten(1, (self.layer.num_heads, -1)).sum(dim=2) @ values
        living = [not flag for flag in self.layer.ablated()]
        error, outputs = (writes - at.outputs[rows])[:, living].abs(), at.outputs[rows][:, living]
        if error.numel() and error.max() > TOLERANCES.get(outputs.dtype, 0.03) * outputs.abs().max():
            reason = "adds to its output more than weights times values, so that no key alone has a strength"
            raise NoMapsError(self.layer, reason)

    def _keep(
        self,
        maps: Float[Tensor, "rows maps q_seq k_seq"],
        norms: Float[Tensor, "batch maps k_seq"],
        at: Layer,
        places: Places,
        rows: slice,
        strengths: Float[Tensor, "batch maps q_seq"],
        bins: Int[Tensor, "batch maps q_seq"],
        random: Float[Tensor, "batch maps q_seq"],
    ) -> None:
        """Offer the events of some rows that may be kept."""
        is_query = places.is_query[rows].unsqueeze(1)
        scores = (-strengths[rows]).masked_fill(~is_query, torch.inf)
        of_maps = scores.transpose(0, 1).flatten(1)
        highest = of_maps.topk(min(NUM_STRONGEST, of_maps.shape[1]), largest=False).values[:, -1:]
        is_strongest = (scores <= highest) & (scores < self.strongest.limits.view(-1, 1))
        is_sampled = (random[rows] < self.sampled.limits[bins[rows]]) & is_query
        steps = torch.arange(STRETCH, device=maps.device)
        for kept, chosen in ((self.strongest, is_strongest), (self.sampled, is_sampled)):
            part, m, q = chosen.nonzero(as_tuple=True)
            if not len(m):
                continue
            b, of_query = part + rows.start, maps[part, m, q]
            k = (of_query * norms[b, m]).argmax(dim=-1)
            of_queries, of_keys = places.stretches(b, q, k)
            q_shown = (of_queries[:, :1] + steps).clamp(max=maps.shape[2] - 1)
            k_shown = (of_keys[:, :1] + steps).clamp(max=maps.shape[3] - 1)
            document = torch.full_like(b, -1) if places.documents is None else places.documents[b, q]
            entries = {
                "group": bins[b, m, q] if kept is self.sampled else m,
                "score": random[b, m, q] if kept is self.sampled else scores[part, m, q].double(),
                "place": torch.stack([places.rows[b], document, q, k, places.keys.tokens[b, k]], dim=1),
                "stretches": torch.cat([of_queries, of_keys], dim=1),
                "strength": strengths[b, m, q],
                "weight": of_query.gather(1, k.unsqueeze(1)).squeeze(1),
                "queries": places.queries.tokens[b.unsqueeze(1), q_shown],
                "weights": as_bytes(of_query.gather(1, k_shown)),
                "output": at.outputs[b, m // self.layer.num_softmaxes, q].float(),
            }
            if places.is_cross:
                entries["keys"] = places.keys.tokens[b.unsqueeze(1), k_shown]
            if kept is self.strongest:
                index = part.view(-1, 1, 1), m.view(-1, 1, 1), q_shown.unsqueeze(2), k_shown.unsqueeze(1)
                entries["map"] = as_bytes(maps[index])
            kept.offer(entries)


def as_bytes(weights: Float[Tensor, "..."]) -> Tensor:
    """Weights as whole numbers from 0 to 255, 255 √w: small ones can be told apart."""
    return (weights.clamp(0, 1).sqrt() * 255).round().to(torch.uint8)
