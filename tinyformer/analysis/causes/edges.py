"""Edge attribution: the effect of each edge between parts of a network, and the fewest edges that keep a behaviour."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tinyformer.analysis.causes.prompts import PairAnalysis, Pairs, Prompts
from tinyformer.analysis.context import AnalysisContext, Trained
from tinyformer.analysis.texts.relation_lines import NUM_RESAMPLES
from tinyformer.errors import ArgumentError
from tinyformer.measures.intervals import Losses
from tinyformer.nn import AttentionMask, ParallelBlock, PreNormBlock, Residual
from tinyformer.nn.heads import layer_title
from tinyformer.nn.layers import Stream
from tinyformer.report.charts import head_graph, lines
from tinyformer.report.result import AnalysisResult

NUM_SIZES, NUM_DRAWS = 12, 4  # points of the curve, and draws of random edges
NUM_PRINTED, NUM_DRAWN = 5, 60  # edges of a circuit that are printed and drawn

Edges = Int[Tensor, "edges 2"]
Kept = Bool[Tensor, "nodes receivers"]
Attributions = Float[Tensor, "nodes receivers"]
Vectors = Float[Tensor, "_ batch seq d_model"]
Compute: TypeAlias = Callable[[Vectors], Tensor]
Case: TypeAlias = tuple[Prompts, Stream, Mapping[str, Tensor]]
"""Clean prompts, their embeddings, and the activations of the corrupted prompts."""


class Receiver(NamedTuple):
    """A function of the residual stream: queries, keys or values of heads, a feed-forward network, or the logits."""

    name: str
    input: str
    num_before: int  # number of nodes that add to its input
    ends: Sequence[int]  # the nodes that are computed from it


class EdgeGraph:
    """The nodes of a pre-norm or parallel network, and an edge from each node to every later receiver of the stream.

    Nodes are the embeddings, each head, each feed-forward network and the logits. Queries, keys and values of a head
    are separate receivers; heads that share keys and values have one receiver for them. If the node u adds z_u to the
    stream, the input of the receiver v, before its norm, is

    stream of the corrupted run + Σ_{u → v is kept} (z_u - z_u of the corrupted run)

    If all edges are kept, this sum is the stream itself; a removed edge carries the z_u of the corrupted run. An error
    is raised for a network whose parts are connected in another way.
    """

    def __init__(self, context: AnalysisContext) -> None:
        self.context = context
        self.nodes: dict[str, tuple[str, int | None]] = {"embeddings": ("embeddings", None)}  # row, head
        self.receivers: list[Receiver] = []
        # By point: its receivers, the point of the stream that is their input, and the function of this input.
        self.readings: dict[str, tuple[slice, str, Compute]] = {}
        self.factors: dict[str, float] = {}  # the scale with which a point is added to the stream
        stack, *others = context.network.stacks()
        if others:
            raise ArgumentError("network", type(context.network).__name__, "has two stacks; edges are within one stack")
        context.network.require_heads_everywhere()
        blocks: Any = stack.layers
        stream = "embedding"
        for index, (block, layer) in enumerate(zip(blocks, context.layers, strict=True)):
            _require_readable(block)
            title, at, first, ids = layer_title((index,)), f"layers.{index}", len(self.nodes), layer.head_map.ids
            shared = [[h for h, kv in enumerate(layer.head_map.kv_heads) if kv == i] for i in range(layer.num_kv_heads)]
            for name, groups in {"queries": [[h] for h in range(len(ids))], "keys": shared, "values": shared}.items():
                ends = {f"{title} head {'/'.join(str(ids[h]) for h in of)}": [first + h for h in of] for of in groups}
                self._read(f"{at}.attention.{name}", name, ends, stream, partial(_project, block, name[0]))
            heads = {f"{title} head {head}": (title, head) for head in ids}
            if not isinstance(block, ParallelBlock):  # in it, the network reads what the heads read
                self.nodes |= heads
                stream = f"{at}.residual_mid"
            network, read = f"{title} feed-forward", partial(_input, block, "feed_forward")
            self._read(f"{at}.feed_forward.input", "", {network: [first + len(ids)]}, stream, read)
            self.nodes |= heads | {network: (network, None)}
            self.factors[f"{at}.attention.added_by_head"] = block.attention_residual.branch
            self.factors[f"{at}.feed_forward.output"] = block.feed_forward_residual.branch
            stream = f"{at}.residual_post"
        self._read("final_norm", "", {"logits": [len(self.nodes)]}, stream, stack.final_norm)
        self.nodes["logits"] = "logits", None
        numbers = torch.arange(len(self.nodes))
        self.all: Kept = numbers.unsqueeze(1) < torch.tensor([receiver.num_before for receiver in self.receivers])
        number = int(self.all.sum())  # of edges; the sizes of circuits are evenly spaced on a logarithmic scale
        self.sizes = sorted({round(number ** (step / (NUM_SIZES - 1))) for step in range(NUM_SIZES)})
        self.ends = torch.stack([torch.isin(numbers, torch.tensor(receiver.ends)) for receiver in self.receivers])

    def _read(self, point: str, input: str, ends: dict[str, list[int]], stream: str, compute: Compute) -> None:
        first = len(self.receivers)
        self.receivers += [Receiver(name, input, len(self.nodes), of) for name, of in ends.items()]
        self.readings[point] = slice(first, len(self.receivers)), stream, compute

    def case(self, pairs: Pairs) -> Case:
        """The input of `run` for some pairs: clean prompts, their embeddings, and activations of the corrupted run."""
        streams = {stream for _, stream, _ in self.readings.values()}
        _, clean = pairs.clean.run(self.context, capture=["embedding"])
        _, corrupted = pairs.corrupted.run(self.context, capture=[*streams, *self.factors])
        return pairs.clean, clean["embedding"], corrupted

    def run(self, case: Case, kept: Kept, alpha: float = 1.0) -> tuple[Float[Tensor, " batch"], list[Vectors], Vectors]:
        """The scores with some edges kept, the receivers' inputs, and for each node, z_u minus the corrupted run's z_u.

        The embeddings are interpolated between both prompts: corrupted + alpha (clean - corrupted).
        """
        clean, embedding, corrupted = case
        embedding = torch.lerp(corrupted["embedding"], embedding, alpha).requires_grad_(torch.is_grad_enabled())
        added, inputs = [(embedding - corrupted["embedding"]).unsqueeze(0)], list[Vectors]()

        def read(point: str, _: Tensor) -> Tensor:
            receivers, stream, compute = self.readings[point]
            earlier = torch.cat(added)
            edges = kept[: len(earlier), receivers].to(earlier)
            inputs.append(corrupted[stream] + torch.einsum("ubsd,uv->vbsd", earlier, edges))
            return compute(inputs[-1] if ".attention." in point else inputs[-1].squeeze(0))

        def add(point: str, output: Tensor) -> Tensor:
            change = self.factors[point] * (output - corrupted[point])
            added.append(change.transpose(0, 1) if change.ndim == 4 else change.unsqueeze(0))
            return output

        replaced = {point: partial(read, point) for point in self.readings}
        replaced |= {point: partial(add, point) for point in self.factors}
        scores, _ = clean.run(self.context, replace={"embedding": embedding, **replaced})
        return scores, inputs, torch.cat(added)

    @torch.enable_grad()
    def attributions(self, parts: Sequence[Pairs], steps: int) -> Attributions:
        """The attribution of each edge, a mean over pairs; see `EdgeAttribution`."""
        total = torch.zeros(self.all.shape, dtype=torch.float64)
        for case in map(self.case, parts):
            for step in range(steps, 0, -1):
                scores, inputs, added = self.run(case, self.all, step / steps)
                if step == steps:
                    clean = added.detach()
                gradients = torch.cat(torch.autograd.grad(scores.sum(), inputs))
                total[:-1] -= torch.einsum("ubsd,vbsd->uv", clean, gradients).cpu() / steps
        return (total / sum(len(pairs.clean.answers) for pairs in parts)).where(self.all, 0.0)

    @torch.no_grad()
    def left(self, parts: Sequence[Pairs], sets: Sequence[Kept]) -> list[Losses]:
        """For each set of kept edges, `Losses` whose mean is (score - corrupted) / (clean - corrupted)."""
        distinct, places = torch.stack([self.all & False, *sets, self.all]).unique(dim=0, return_inverse=True)
        runs = [torch.stack([self.run(case, kept)[0] for kept in distinct]) for case in map(self.case, parts)]
        corrupted, *scores, clean = torch.cat(runs, dim=1).double().cpu()[places]
        return [Losses(score - corrupted, clean - corrupted) for score in scores]

    def circuit(self, edges: Edges) -> Kept:
        """The given edges that are on a path from the embeddings to the logits; the other edges have no effect."""
        kept = torch.zeros_like(self.all)
        kept[tuple(edges.T)] = True
        reached, used = (torch.arange(len(self.nodes)) == node for node in (0, len(self.nodes) - 1))
        for _ in self.readings:  # at least as many steps as a path has edges
            reached = reached | (self.ends & (kept & reached.unsqueeze(1)).any(dim=0).unsqueeze(1)).any(dim=0)
            used = used | (kept & (self.ends & used).any(dim=1)).any(dim=1)
        return kept & reached.unsqueeze(1) & (self.ends & used).any(dim=1)


def _require_readable(block: Any) -> None:
    """Raise an error for a block with parts whose input is not the plain sum of all earlier outputs."""
    if type(block) not in (PreNormBlock, ParallelBlock):
        reason = "must be a PreNormBlock or a ParallelBlock: in others, a norm acts on the sum of the heads' outputs"
        raise ArgumentError("block", type(block).__name__, reason)
    for name in ("attention_residual", "feed_forward_residual"):
        residual = getattr(block, name)
        if type(residual) is not Residual or residual.scale != 1 or residual.reads_side_inputs:
            reason = "must be a Residual with skip=1 and embedding=false, which keeps earlier outputs unchanged"
            raise ArgumentError(name, residual, reason)
    block.attention.refuse_mixed_values(
        "has values of the first layer or of tokens, and the graph has no edges for them"
    )
    if block.attention.ssmax is not None:
        reason = "must be False: it scales queries by the number of visible keys, and edges have queries without a mask"
        raise ArgumentError("ssmax", True, reason, {"ssmax": False})
    for name, gate in (("gate", block.attention.output_gate), ("forget", block.attention.forget)):
        if gate is not None:
            reason = "must be False: a gate also reads the residual stream, and the graph has no edges to gates"
            raise ArgumentError(name, True, reason, {name: False})


def _input(block: Any, sublayer: str, x: Stream) -> Stream:
    """The input of a sublayer, computed from the residual stream x by its norm and, if it has one, its convolution."""
    return block.convolved(sublayer, block.norms(sublayer).input(x), AttentionMask())


def _project(block: Any, part: str, vectors: Vectors) -> Float[Tensor, "batch heads seq dim"]:
    """The queries ("q"), keys ("k") or values ("v") of heads; `vectors` has a separate input for each head."""
    qkv = block.attention.project(_input(block, "attention", vectors.flatten(0, 1)))
    of_all = getattr(qkv, part).unflatten(0, vectors.shape[:2]).unflatten(2, (len(vectors), -1))
    return of_all.diagonal(dim1=0, dim2=2).movedim(-1, 1).flatten(1, 2)


@dataclass(eq=False)
class EdgeAttribution(PairAnalysis):
    """Edge attribution patching with integrated gradients, and the smallest circuit that keeps a behaviour.

    The behaviour is the difference in the score L, the logit of `answer` minus that of `against`, between clean and
    corrupted prompts. The attribution of an edge u → v estimates the change of L if that edge is removed:

    (z_u corrupted - z_u clean) · mean_{α = 1/steps, …, 1} ∂L/∂(input of v)

    where the embeddings are corrupted + α (clean - corrupted) (Hanna et al. 2024, arXiv 2403.17806); with one step, the
    method is that of Syed et al. 2023 (arXiv 2310.10348). A circuit has the edges with the largest |attribution|. Its
    faithfulness is the share of the behaviour that is left when all other edges are really removed, see `EdgeGraph`.

    Args:
        batch_size: the number of pairs in a forward pass, which holds a copy of the stream for each receiver.
        steps: the number of gradients in the mean.
        share: the least faithfulness of the circuit on half of the pairs; the other half gives the reported value.
    """

    batch_size: int = 16
    steps: int = 5
    share: float = 0.85

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ArgumentError("share", self.share, "must be above 0 and at most 1", {"share": 0.85})

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        graph, groups = EdgeGraph(context), self.pairs(context)
        choosing, measuring = self._halves(groups)
        attributions, edges = graph.attributions(choosing, self.steps), graph.all.nonzero()
        ranked = edges[attributions[graph.all].abs().argsort(descending=True, stable=True)]
        untrained = EdgeGraph(replace(context, network=context.untrained()))
        pairs = choosing if measuring is choosing else [*choosing, *measuring]
        found, by_chance = (of.left(pairs, [of.all])[0].targets for of in (graph, untrained))
        result, words, is_clear = self.result(context, groups, found, by_chance)
        meaning = "estimates the change of clean minus corrupted if the edge is removed"
        result.lines |= {
            "edges": words,
            "attribution": f"{meaning}: negative if it supports the answer, positive if it opposes it",
            "circuit": "none: the difference is not clearly above that of untrained weights",
        }
        circuit = graph.all & False
        if is_clear:
            size = self._smallest(graph, choosing, ranked)
            circuit = graph.circuit(ranked[:size])
            self._measure(graph, measuring, ranked, size, result)
            _describe(graph, attributions, [edge for edge in ranked.tolist() if circuit[*edge]], result)
        names, values, kept = [*graph.nodes], attributions.tolist(), circuit.tolist()
        rows = [[names[u], *graph.receivers[v][:2], values[u][v], kept[u][v]] for u, v in edges.tolist()]
        result.tables["edges"] = ["from", "to", "input", "attribution", "in_circuit"], rows
        return result

    def _halves(self, groups: Sequence[Pairs]) -> list[list[Pairs]]:
        """The batches of pairs for choosing edges, and the batches for measuring them; a single pair is in both."""
        sizes = [len(pairs.clean.answers) for pairs in groups]
        numbers = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(self.seed)).split(sizes)
        halves: tuple[list[Pairs], list[Pairs]] = [], []
        for half, (pairs, of_pairs) in itertools.product((0, 1), zip(groups, numbers, strict=True)):
            rows = (of_pairs % 2 == half).nonzero().flatten()
            parts = rows.split(self.batch_size) if len(rows) else ()
            halves[half].extend(Pairs(*(side.rows(part) for side in pairs[:2])) for part in parts)
        return [half or halves[0] for half in halves]

    def _smallest(self, graph: EdgeGraph, parts: Sequence[Pairs], ranked: Edges) -> int:
        """Find the smallest n such that the first n `ranked` edges keep `share`: try `graph.sizes`, then bisect."""
        enough, below = len(ranked), 0
        while enough - below > 1:
            size = next((size for size in graph.sizes if below < size < enough), (below + enough) // 2)
            (left,) = graph.left(parts, [graph.circuit(ranked[:size])])
            below, enough = (below, size) if left.mean >= self.share else (size, enough)
        return enough

    def _measure(
        self, graph: EdgeGraph, parts: Sequence[Pairs], ranked: Edges, chosen: int, found: AnalysisResult
    ) -> None:
        """Add the faithfulness of the first n `ranked` edges, for several n, and of n random edges."""
        sizes, generator = sorted({*graph.sizes, chosen}), torch.Generator().manual_seed(self.seed)
        orders = [ranked, *(ranked[torch.randperm(len(ranked), generator=generator)] for _ in range(NUM_DRAWS))]
        sets = {(draw, size): graph.circuit(order[:size]) for draw, order in enumerate(orders) for size in sizes}
        kept = {
            at: losses.with_interval(NUM_RESAMPLES)
            for at, losses in zip(sets, graph.left(parts, [*sets.values()]), strict=True)
        }
        random = {size: sum(kept[draw, size].mean for draw in range(1, len(orders))) / NUM_DRAWS for size in sizes}
        share, number = kept[0, chosen], int(sets[0, chosen].sum())
        found.scalars |= {"analysis/circuit_edges": number, "analysis/faithfulness": share.mean}
        found.scalars["analysis/random_faithfulness"] = random[chosen]
        words = f"{share:z.1%} of the difference; {chosen} random edges {random[chosen]:z.1%}"
        found.lines["circuit"] = f"{number} of {len(ranked)} edges keep {words}"
        rows = [[draw or None, size, int(sets[draw, size].sum()), *astuple(of)] for (draw, size), of in kept.items()]
        found.tables["faithfulness"] = ["random_draw", "edges", "on_paths", "faithfulness", "low", "high"], rows
        title = "Share of the behaviour that is left when all other edges are removed"
        curve = {"edges with the largest attributions": (sizes, [kept[0, size].mean for size in sizes])}
        baseline = {"random edges": (sizes, [*random.values()])}
        labels, mark = ("number of edges", "faithfulness"), (chosen, share.mean, "circuit")
        found.figures["faithfulness"] = lines(curve, title, *labels, baselines=baseline, marked=mark)


def _describe(graph: EdgeGraph, values: Attributions, edges: Sequence[list[int]], found: AnalysisResult) -> None:
    """Add lines with the heads and the first of the `edges` of a circuit, and the circuit's figure."""
    names, arrows = [*graph.nodes], list[tuple[str, str, str, float]]()
    used = {names[u] for u, _ in edges} | {"logits"}
    nodes = {name: node for name, node in graph.nodes.items() if name in used}
    heads = [name for name, (_, number) in nodes.items() if number is not None]
    found.lines["  heads"] = ", ".join(heads) or "none"
    for at, (u, v) in enumerate(edges[:NUM_DRAWN]):
        (name, input, _, ends), value = graph.receivers[v], float(values[u, v])
        if at < NUM_PRINTED:
            found.lines[f"  {names[u]} → {name} {input}".rstrip()] = f"{value:+.3f}"
        kind = input or "feed-forward or logits"
        arrows += [(kind, names[u], names[end], abs(value)) for end in ends if names[end] in used]
    title = f"Circuit of {len(edges)} edges{f', of which {NUM_DRAWN} are drawn' * (len(edges) > NUM_DRAWN)}"
    found.figures["circuit"] = head_graph(nodes, arrows, f"{title}, with the attribution as width")
