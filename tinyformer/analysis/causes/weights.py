"""Heads by their weights alone: the tokens that they match and promote, and their composition with earlier heads."""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from tinyformer.analysis.context import AnalysisContext, Head, Trained, largest
from tinyformer.analysis.removal.redundancy import weights_by_head
from tinyformer.errors import ArgumentError, require_at_most
from tinyformer.nn import Attention, BaseAttention, Block, LayerNorm, Network, RMSNorm, TokenReadout
from tinyformer.nn.block import Norms
from tinyformer.nn.heads import layer_title
from tinyformer.nn.layers import weight_of
from tinyformer.nn.maps import is_own
from tinyformer.nn.position import RelativePosition
from tinyformer.nn.projections import ProjectionNorm
from tinyformer.report.charts import head_graph
from tinyformer.report.result import AnalysisResult

NUM_PRINTED, MAX_EDGES = 3, 16  # heads, writers and tokens that are printed, and edges in the picture
ENTRIES = 2**24  # the most entries of a vocabulary × vocabulary matrix that are held at once
SIDES = {"K": "keys", "Q": "queries", "V": "values"}  # what a later head computes, by the name of the composition

Projection: TypeAlias = Float[Tensor, "heads width d_model"]
Vocabulary: TypeAlias = Float[Tensor, "vocab_size d_model"]
Scores: TypeAlias = Mapping[str, Mapping[Any, float]]  # by circuit or composition, and by head or pair of heads


@dataclass(eq=False)
class HeadWeights:
    """The circuits of each head, and the composition of each two heads, from the weights without any input.

    After Elhage et al. 2021 (transformer-circuits.pub/2021/framework), with embeddings E and unembeddings U:

    - OV = E W_V W_O U gives the tokens that a head promotes for each token that it attends to. QK = E W_Q W_Kᵀ Eᵀ gives
      the tokens that each token attends to. If positions rotate by R_Δ, QK_Δ = E W_Q R_Δ W_Kᵀ Eᵀ is QK for keys Δ
      tokens back. Σλ / Σ|λ| over the eigenvalues λ is 1 if each token promotes itself ("copying") or attends to equal
      tokens ("matching"), and -1 if it suppresses or avoids them. `tokens.csv` has the largest and smallest entries.
    - The composition of an earlier head with a later one is ‖W_OV W‖ / (‖W_OV‖ ‖W‖) in Frobenius norms. W_OV is that of
      the earlier head, and W is the later head's W_QK (Q-composition), W_QKᵀ (K) or W_OV (V), without rotation.

    As in TransformerLens, the linear part of norms is folded into the weights, and U has mean 0 over the vocabulary,
    which does not change the softmax. Circuits leave out factors that depend on the token (the division by its norm, an
    output gate), biases, added position embeddings, feed-forward networks between heads, and a softcap of the readout.

    A score is beyond chance if it exceeds a limit below which all scores of 95 % of untrained networks stay. It is the
    95 % quantile of a Gumbel distribution, which describes maxima, with the mean and the variance of the largest scores
    of untrained networks. Each stack's self-attention is analysed; only a stack with linear logits has OV circuits.

    Args:
        distances: distances of query and key in tokens, for rotary positions; no other positions enter the circuits.
        num_tokens: the number of largest, and of smallest, entries of each circuit in the table.
        num_untrained: the number of untrained networks, with the seeds that follow the model's own.
    """

    distances: Sequence[int] = (0, 1, 2, 4, 8)
    num_tokens: int = 10
    num_untrained: int = 20
    num_windows = 1  # the sample is not used
    needs_gradient = needs_loss = False

    @torch.no_grad()
    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        if any(map(rotates, context.layers)):
            require_at_most(context.network.max_seq_len - 1, {"distances": [0, 1]}, distances=max(self.distances))
        heads, seeds = context.active_heads, range(1, self.num_untrained + 1)
        trained = scores_of(context.network, self.distances, heads)
        untrained = [scores_of(context.untrained(seed), self.distances, heads) for seed in seeds]
        chances = {name: Chance.of([scores[name] for scores in untrained]) for name in trained}
        limits = f"95 % of untrained networks stay below each limit, estimated from {self.num_untrained}"
        found = AnalysisResult(lines={"weights": f"no input is used; {limits}"})
        if trained.keys() & SIDES:
            _add_compositions(found, context, trained, chances)
        self._add_circuits(found, context, trained, chances)
        for name, scores in trained.items():
            found.scalars[f"analysis/{name}/largest"] = max(scores.values())
            found.scalars[f"analysis/{name}/beyond_chance"] = chances[name].num_beyond(scores)
        return found

    def _add_circuits(
        self, found: AnalysisResult, context: AnalysisContext, trained: Scores, chances: Mapping[str, "Chance"]
    ) -> None:
        """Add the score of each circuit, and its largest and smallest entries."""
        rows, told = list[list[Any]](), dict[Any, str]()
        for circuit in circuits(folded_stacks(context.network), self.distances):
            for head in (head for head in trained[circuit.name] if head[0] == circuit.layer):
                place, sentences = [*context.head_address(*head), circuit.name], []
                for end, entries in circuit.extremes(head[1], self.num_tokens).items():
                    pairs = [context.tokenizer.token_strings(pair) for _, *pair in entries]
                    rows += [[*place, end, *pair, value] for pair, (value, *_) in zip(pairs, entries, strict=True)]
                    sentences.append(f"{end} " + ", ".join(map(" → ".join, pairs[:NUM_PRINTED])))
                told[circuit.name, head] = "; ".join(sentences)
        found.tables["tokens"] = [*context.address_columns, "head", "circuit", "end", "from", "to", "entry"], rows
        names = sorted(trained.keys() - SIDES, key=lambda name: (name[:2], len(name), name))
        meaning = "OV is 1 if each token promotes itself where it is attended to, QK if each attends to equal tokens"
        found.lines["scores"] = f"from -1 to 1: {meaning}"
        for name in names:
            found.lines[name] = chances[name].sentence(trained[name], "heads")
            for head in largest(trained[name], NUM_PRINTED):
                title = f"  {name} of {context.head_title(*head)}"
                found.lines[title] = f"{trained[name][head]:+.3f}; {told[name, head]}"
        columns = [f"{name}{kind}" for name in names for kind in ("", "_untrained", "_limit")]
        heads = trained[names[-1]]  # the heads of an encoder have no OV
        values = {head: [x for name in names for x in (trained[name].get(head), *chances[name])] for head in heads}
        found.tables["circuits"] = context.head_table(columns, values)
        title = f"{names[0]} ({'copying' if names[0] == 'OV' else 'matching'}): {found.lines[names[0]]}"
        found.figures["circuits"] = context.head_grid(trained[names[0]], title, "Σλ / Σ|λ|", diverging=True)


def _add_compositions(
    found: AnalysisResult, context: AnalysisContext, trained: Scores, chances: Mapping[str, "Chance"]
) -> None:
    """Add the composition scores of each later head with each earlier head."""
    rows, beyond = list[list[Any]](), dict[tuple[str, Any, Any], float]()
    for name, side in SIDES.items():
        scores, chance, writers = trained[name], chances[name], defaultdict[Head, list[str]](list)
        found.lines[f"{name}-composition"] = chance.sentence(scores, "pairs")
        for writer, reader in largest(scores):
            score, address = scores[writer, reader], (*context.head_address(*writer), *context.head_address(*reader))
            difference, is_beyond = score - chance.mean, score > chance.limit
            rows.append([name, *address, score, chance.mean, difference, is_beyond])
            if is_beyond:
                beyond[f"{name}-composition", writer, reader] = difference
            writers[reader].append(f"{context.head_title(*writer)}: {score:.3f}{'' if is_beyond else ' (chance)'}")
        for reader, told in itertools.islice(writers.items(), NUM_PRINTED):
            found.lines[f"  {side} of {context.head_title(*reader)}"] = f"from {', '.join(told[:NUM_PRINTED])}"
    columns = [f"{name}_{side}" for side in ("writer", "reader") for name in (*context.address_columns, "head")]
    found.tables["composition"] = ["composition", *columns, "score", "untrained", "difference", "beyond_chance"], rows
    heads = dict.fromkeys(itertools.chain(*trained["Q"]))
    names = {head: (layer_title(context.addresses[head[0]]), context.head_address(*head)[-1]) for head in heads}
    drawn = [(*edge, beyond[edge]) for edge in largest(beyond, MAX_EDGES)]
    title = f"Composition of heads: {len(drawn)} of the {len(beyond)} compositions beyond chance, of {len(rows)}"
    found.figures["composition"] = head_graph(names, drawn, title)


class Chance(NamedTuple):
    """The mean of the scores of untrained networks, and the limit of chance, see `HeadWeights`."""

    mean: float
    limit: float

    @classmethod
    def of(cls, controls: Sequence[Mapping[Any, float]]) -> "Chance":
        maxima = [max(scores.values()) for scores in controls]
        scale = math.sqrt(6) / math.pi * statistics.stdev(maxima)
        limit = statistics.fmean(maxima) - scale * (np.euler_gamma + math.log(-math.log(0.95)))
        return cls(statistics.fmean(itertools.chain(*(scores.values() for scores in controls))), limit)

    def num_beyond(self, scores: Mapping[Any, float]) -> int:
        return sum(score > self.limit for score in scores.values())

    def sentence(self, scores: Mapping[Any, float], what: str) -> str:
        controls = f"untrained {self.mean:.3f}, limit {self.limit:.3f}"
        return f"{self.num_beyond(scores)} of {len(scores)} {what} beyond chance; {controls}"


class Layer(NamedTuple):
    """The projections of a layer's heads; its norms and the scale of its residual branch are folded in."""

    at: int  # in `AnalysisContext.layers`
    attention: BaseAttention
    q: Projection
    k: Projection
    v: Projection
    o: Projection

    @classmethod
    def of(cls, at: int, block: Any) -> "Layer":
        require_linear(block)
        layer, norms, device = block.attention, block.norms("attention"), block.attention.o_proj.weight.device
        weights = {name: weight.to(device, torch.float64) for name, weight in weights_by_head(layer).items()}
        q, k, v = (folded(norms.input, weights[name]) for name in ("W_Q", "W_K", "W_V"))
        q = q.mT * by_head(layer.q_norm, range(layer.num_heads))
        k = (k.mT * by_head(layer.k_norm, layer.head_map.kv_heads)).mT
        q = layer.transform_queries(q.unsqueeze(0)).squeeze(0).mT
        o = normed(norms.output, block.attention_residual.branch * weights["W_O"])
        return cls(at, layer, q, k, v, centred(norms.input, o))


Stack: TypeAlias = tuple[list[Layer], Vocabulary, Vocabulary | None]
"""Layers of the same residual stream, embeddings, and unembeddings if logits of tokens are linear in the stream."""


class Circuit(NamedTuple):
    """The circuit S Aᵀ B Tᵀ of each head of a layer, with a row for each token of S and a column for each token of T.

    OV has embeddings S, unembeddings T, A = W_V and B = W_Oᵀ. QK has embeddings S and T, A = W_Q and B = W_K.
    """

    name: str
    layer: int
    a: Projection  # A
    b: Projection  # B
    source: Vocabulary  # S
    target: Vocabulary  # T
    between: Float[Tensor, "d_model d_model"]  # Tᵀ S, the same for all layers

    def eigenvalue_scores(self) -> Float[Tensor, " heads"]:
        """Σλ / Σ|λ| over the eigenvalues λ of each head's circuit, found from a small matrix with the same λ."""
        eigenvalues = torch.linalg.eigvals(self.b @ self.between @ self.a.mT)
        return (eigenvalues.real.sum(dim=-1) / eigenvalues.abs().sum(dim=-1)).nan_to_num()  # 0 for a head of zeros

    def extremes(self, head: int, count: int) -> dict[str, list[tuple[float, int, int]]]:
        """The largest ("most") and smallest ("least") entries of a head, each with its value, row and column."""
        left, right = (self.source @ self.a[head].mT).float(), (self.b[head] @ self.target.mT).float()
        width, found = right.shape[1], dict[str, list[Any]](most=[], least=[])
        for first in range(0, len(left), step := max(1, ENTRIES // width)):
            block = (left[first : first + step] @ right).flatten()
            for end, known in found.items():
                values, places = block.topk(min(count, len(block)), largest=end == "most")
                rows, columns = (first + places // width).tolist(), (places % width).tolist()
                known.extend(zip(values.tolist(), rows, columns, strict=True))
        return {end: sorted(known, reverse=end == "most")[:count] for end, known in found.items()}


def scores_of(network: Network, distances: Sequence[int], heads: Sequence[Head]) -> Scores:
    """The circuit scores of some heads, and the composition scores of all pairs of them."""
    found, stacks = defaultdict[str, dict[Any, float]](dict), [*folded_stacks(network)]
    for circuit in circuits(stacks, distances):
        of_layer = circuit.eigenvalue_scores()
        found[circuit.name] |= {head: of_layer[head[1]].item() for head in heads if head[0] == circuit.layer}
    for earlier, later in (pair for layers, *_ in stacks for pair in itertools.combinations(layers, 2)):
        of_layers = [[head for head in heads if head[0] == layer.at] for layer in (earlier, later)]
        for name, scores in composition(earlier, later).items():
            found[name] |= {(a, b): scores[a[1], b[1]].item() for a, b in itertools.product(*of_layers)}
    return {name: scores for name, scores in found.items() if scores}


def folded_stacks(network: Network) -> Iterator[Stack]:
    """The stacks of a network, norms folded in, in double precision."""
    network.require_heads_everywhere()
    stacks, attentions, readout = network.stacks(), network.attentions(), network.readout
    for stack in stacks:
        layers = [Layer.of(attentions.index(block.attention), block) for block in list[Any](stack.layers)]
        u = None
        if type(readout) is TokenReadout and stack is stacks[-1]:
            (logits,) = readout.features(readout.proj.weight.double().unsqueeze(0))
            u = folded(stack.final_norm, logits - logits.mean(dim=0))
        yield layers, normed(stack.embedding_norm, stack.embedding_scale * stack.token_embedding.weight.double()), u


def require_linear(block: Any) -> None:
    """Raise an error for a block whose heads are not products of weight matrices on one residual stream."""
    layer, residual = block.attention, block.attention_residual
    norms = block.norms("attention") if isinstance(block, Block) else Norms()
    inner = [norm for norm in norms if not isinstance(norm, LayerNorm | RMSNorm | nn.Identity)]
    is_normalised = not isinstance(block, Block) or block.ends_normalised
    is_cut = not (residual.skip and block.feed_forward_residual.skip)
    mixes_tokens = layer.sums or getattr(block, "attention_convolution", None)
    for is_refused, part, reason in (
        (type(layer) is not Attention, layer, "has heads that are no products of W_Q, W_K, W_V and W_O"),
        (is_own(layer.score) or layer.score.compare, layer.score, "is no product of query and key"),
        (is_normalised, block, "normalises the residual stream between any two heads"),
        (inner, inner and inner[0], "cannot be folded into weights"),
        (is_cut, residual, "with skip=0 leaves no path between heads"),
        (layer.forget, layer, "with forget=true adds to its scores a decay by the tokens between query and key"),
        (layer.exclusive, layer, "with exclusive=true removes a direction that depends on the token"),
        (mixes_tokens, layer, "with a convolution or shifted_keys has heads that read several tokens at once"),
        (layer.reads_side_inputs, layer, "with value_residual or value_embedding has values that are no product"),
    ):
        if is_refused:
            raise ArgumentError("analysis", "weights", f"{type(part).__name__} {reason}", {"analysis": "heads"})


def circuits(stacks: Iterable[Stack], distances: Sequence[int]) -> Iterator[Circuit]:
    """The QK circuits of each layer and, if token logits are linear in the residual stream, its OV circuits."""
    for layers, e, u in stacks:
        if u is not None:
            between = u.mT @ e
            yield from (Circuit("OV", layer.at, layer.v, layer.o, e, u, between) for layer in layers)
        between = e.mT @ e
        for layer in layers:
            names = {f"QK_{distance}": distance for distance in distances} if rotates(layer.attention) else {"QK": 0}
            for name, distance in names.items():
                q, k = rotated(layer.attention, layer.q, distance), rotated(layer.attention, layer.k, 0)
                yield Circuit(name, layer.at, q, k, e, e, between)


def composition(earlier: Layer, later: Layer) -> dict[str, Float[Tensor, "heads later_heads"]]:
    """The composition of each later head with each earlier one, by the names of `SIDES`; see `HeadWeights`."""
    # R a with bᵀ = Q R has the norm of bᵀ a, also before a product from the right, since QᵀQ = 1.
    writes, found = torch.linalg.qr(earlier.v.mT).R @ earlier.o, {}
    for name, a, b in (("Q", later.q, later.k), ("K", later.k, later.q), ("V", later.v, later.o)):
        reads = torch.linalg.qr(b.mT).R @ a
        norms = torch.outer(*(torch.linalg.matrix_norm(part) for part in (writes, reads)))
        found[name] = (torch.linalg.matrix_norm(writes.unsqueeze(1) @ reads.mT) / norms).nan_to_num()
    return found


def rotates(layer: BaseAttention) -> bool:
    """Return True if positions rotate queries and keys."""
    return type(layer.position).rotate is not RelativePosition.rotate


def rotated(layer: BaseAttention, projection: Projection, position: int) -> Projection:
    """A projection to queries or keys, followed by the rotation for a position."""
    columns = projection.permute(2, 0, 1).unsqueeze(2)  # a batch of one token for each dimension of the stream
    return layer.position.rotate(columns, position).squeeze(2).permute(1, 2, 0)


def folded(norm: nn.Module, weights: Tensor) -> Tensor:
    """The weights that follow a norm, multiplied by the linear part of the norm."""
    return centred(norm, weights * weight_of(norm))


def by_head(norm: nn.Module, heads: Sequence[int]) -> Tensor:
    """The weight of a norm of queries or keys, as a factor for the dimensions of some of its heads."""
    weight = weight_of(norm)
    return weight.unflatten(0, (norm.num_heads, 1, -1))[[*heads]] if isinstance(norm, ProjectionNorm) else weight


def normed(norm: nn.Module, weights: Tensor) -> Tensor:
    """The weights that come before a norm, multiplied by the linear part of the norm."""
    return centred(norm, weights) * weight_of(norm)


def centred(norm: nn.Module, weights: Tensor) -> Tensor:
    """The weights, with mean 0 over d_model if the norm subtracts the mean."""
    return weights - weights.mean(dim=-1, keepdim=True) if isinstance(norm, LayerNorm) else weights
