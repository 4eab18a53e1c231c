"""The events of heads: each query of a split with its strongest key, of which some are kept."""

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tinyformer.analysis.atlas.places import STRETCH, Places
from tinyformer.analysis.atlas.reservoirs import Entries, Smallest, priorities
from tinyformer.analysis.atlas.tally import Tally, mask_key, of_queries, visible_by_offset, visible_keys
from tinyformer.analysis.measures.capture import LayerCall, running_hooks
from tinyformer.nn import AttentionCall, AttentionMask, BaseAttention, DifferentialAttention, Network
from tinyformer.nn.kernels.eager import weighted_values
from tinyformer.nn.maps import QKV, TOLERANCES, NoMapsError

NUM_STRONGEST, NUM_OF_DECILE = 20, 5  # events of a head that are shown
NUM_BINS, LOWEST, OCTAVES = 1024, -20, 32  # of strengths: logarithmic bins from 2⁻²⁰ to 2¹², 2.2 % wide each
NUM_ELEMENTS = {"cpu": 2**20}  # of maps that are computed at once, so that they stay in the cache; 2²⁶ elsewhere


class Layer(NamedTuple):
    """One layer in one forward pass."""

    layer: BaseAttention
    call: AttentionCall
    outputs: Float[Tensor, "batch heads q_seq v_head_dim"]  # that the output projection is given
    factors: Float[Tensor, "batch maps q_seq"]  # by which values are multiplied beside weights

    def rows(self, rows: slice) -> AttentionCall:
        """The call of some rows of the batch."""
        mask = self.call.mask
        allowed = mask.allowed if mask.allowed is None or len(mask.allowed) == 1 else mask.allowed[rows]
        lengths, documents = (part if part is None else part[rows] for part in (mask.lengths, mask.documents))
        own = AttentionMask(mask.causal, lengths, documents, mask.window, allowed=allowed)
        return self.call._replace(qkv=QKV(*(part[rows] for part in self.call.qkv)), mask=own)


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
        visible: dict[Hashable, tuple[Tensor, Tensor]],
        points: tuple[Tensor, Tensor],
    ) -> dict[str, Tensor]:
        """Add a batch; returns the vectors of some of its queries, see `Points`.

        Args:
            visible: what the layers of a kind have in common, by `mask_key`.
            points: the rows and positions of those queries.
        """
        if (key := mask_key(at.call.mask)) not in visible:
            seen = visible_keys(at.call.mask, places)
            visible[key] = seen.sum(dim=-1), visible_by_offset(seen, places)
        num_visible, by_offset = visible[key]
        values, n = at.call.qkv.v.float()[:, self._kv_heads], self.layer.num_softmaxes
        norms = torch.einsum("bhkv,hrv->bhkr", values, self._triangles).norm(dim=-1).repeat_interleave(n, dim=1)
        device, (batch, q_seq), k_seq = norms.device, places.is_query.shape, norms.shape[-1]
        maps = torch.arange(self.num_maps, device=device).view(-1, 1)
        random = priorities(self.seed, places.rows.unsqueeze(1), torch.arange(q_seq, device=device))
        random = priorities(self.seed, random.unsqueeze(1), maps)
        total, on_same, parts = norms.new_zeros(self.num_maps, q_seq, k_seq), norms.new_zeros(self.num_maps), []
        of, position = points
        size = max(1, NUM_ELEMENTS.get(device.type, 2**26) // total.numel())
        for rows in (slice(first, first + size) for first in range(0, batch, size)):
            weights = self.layer.maps_of_call(at.rows(rows)).weights
            if not self._is_checked:
                self._check(weights, values[rows], at, rows)
            if not places.is_full:
                weights = weights * places.is_query[rows, None, :, None]
            total += weights.sum(dim=0)
            on_same += torch.einsum("bmqk,bqk->m", weights, places.is_same[rows].float())
            strengths = (weights * norms[rows].unsqueeze(2)).amax(dim=-1) * at.factors[rows].abs()
            bins = ((strengths.log2() - LOWEST) * (NUM_BINS / OCTAVES)).clamp(0, NUM_BINS - 1).long() + NUM_BINS * maps
            self._keep(weights, norms, at, places, rows, strengths, bins, random[rows])
            measures = of_queries(weights, num_visible if len(num_visible) == 1 else num_visible[rows], places.is_cross)
            inside = (of >= rows.start) & (of < rows.stop)
            chosen = (weights[of[inside] - rows.start, :, position[inside]] * norms[of[inside]]).argmax(dim=-1)
            parts.append((measures, weights.sum(dim=2), strengths, bins, chosen))
        measures, received, strengths, bins, keys = zip(*parts, strict=True)
        self.tally.add(places, torch.cat(measures, dim=1), torch.cat(received), on_same, total, by_offset)
        is_query = places.is_query.unsqueeze(1).expand(-1, self.num_maps, -1)
        self.counts += torch.cat(bins)[is_query].bincount(minlength=self.counts.numel()).view_as(self.counts)
        self.strength += torch.cat(strengths).double().sum(dim=(0, 2))
        keys = torch.cat(keys) if places.is_cross else position.unsqueeze(1)
        return {
            "queries": at.call.qkv.q[of, :, position].float(),
            "keys": at.call.qkv.k[of.unsqueeze(1), self._k_heads, keys].float(),
            "outputs": at.outputs[of, :, position].float().repeat_interleave(n, dim=1),
        }

    def _check(self, weights: Tensor, values: Tensor, at: Layer, rows: slice) -> None:
        """Refuse a layer whose output is not what its weights and values give, such as one that adds relative vectors.
        """
        self._is_checked = True
        writes = (weights * at.factors[rows].unsqueeze(-1)).unflatten(1, (self.layer.num_heads, -1)).sum(dim=2) @ values
        living = [not flag for flag in self.layer.ablated()]
        error, outputs = (writes - at.outputs[rows])[:, living].abs(), at.outputs[rows][:, living]
        if error.numel() and error.max() > TOLERANCES.get(outputs.dtype, 0.03) * outputs.abs().max():
            reason = "writes more than its weights times its values, so no key alone has a strength"
            raise NoMapsError(self.layer, reason)

    def _keep(
        self,
        weights: Float[Tensor, "rows maps q_seq k_seq"],
        norms: Float[Tensor, "batch maps k_seq"],
        at: Layer,
        places: Places,
        rows: slice,
        strengths: Float[Tensor, "rows maps q_seq"],
        bins: Int[Tensor, "rows maps q_seq"],
        random: Int[Tensor, "rows maps q_seq"],
    ) -> None:
        """Offer the events of some rows that may be kept."""
        is_query = places.is_query[rows].unsqueeze(1)
        is_sampled = (random < self.sampled.limits[bins]) & is_query
        is_strongest = (-strengths < self.strongest.limits.view(-1, 1)) & is_query
        part, m, q = places_of = (is_sampled | is_strongest).nonzero(as_tuple=True)
        if not len(m):
            return
        b, head = part + rows.start, m // self.layer.num_softmaxes
        of_query = weights[places_of]
        k = (of_query * norms[b, m]).argmax(dim=-1, keepdim=True)
        factors = at.factors[b, m, q].abs()
        of_queries, of_keys = places.stretches(b, q, k := k.squeeze(1))
        steps = torch.arange(STRETCH, device=m.device)
        q_shown, k_shown = (
            (stretch[:, :1] + steps).clamp(max=side.tokens.shape[1] - 1)
            for stretch, side in ((of_queries, places.queries), (of_keys, places.keys))
        )
        entries = {
            "row": places.rows[b],
            "document": torch.full_like(b, -1) if places.documents is None else places.documents[b, q],
            "at": q,
            "key": k,
            "strength": strengths[places_of],
            "weight": of_query.gather(1, k.unsqueeze(1)).squeeze(1),
            "norm": norms[b, m, k] * factors,
            "of_queries": of_queries,
            "of_keys": of_keys,
            "query_tokens": places.queries.tokens[b.unsqueeze(1), q_shown],
            "key_tokens": places.keys.tokens[b.unsqueeze(1), k_shown],
            "key_token": places.keys.tokens[b, k],
            "weights": as_bytes(of_query.gather(1, k_shown)),
            "output": at.outputs[b, head, q].float(),
        }
        for kept, chosen, groups, scores in (
            (self.sampled, is_sampled, bins, random),
            (self.strongest, is_strongest, torch.arange(self.num_maps, device=m.device).view(-1, 1), -strengths),
        ):
            index = chosen[places_of].nonzero().squeeze(1)
            own = {name: field[index] for name, field in entries.items()}
            own |= {"group": groups.expand_as(bins)[places_of][index], "score": scores[places_of][index].double()}
            if kept is self.strongest:
                grid = part[index, None, None], m[index, None, None], q_shown[index, :, None], k_shown[index, None, :]
                own["map"] = as_bytes(weights[grid])
            kept.offer(own)


def as_bytes(weights: Float[Tensor, "..."]) -> Tensor:
    """Weights as whole numbers from 0 to 255, 255 √w: small ones can be told apart."""
    return (weights.clamp(0, 1).sqrt() * 255).round().to(torch.uint8)
