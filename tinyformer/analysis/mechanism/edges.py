"""Edge attribution: what the parts of a network read from each other, and the fewest edges that keep a behaviour."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tinyformer.analysis.mechanism.prompts import Pairs, Prompts, facts_of_pairs, read_pairs
from tinyformer.analysis.pictures.charts import head_graph, lines
from tinyformer.analysis.relation_lines import NUM_RESAMPLES, compare
from tinyformer.analysis.subject import Findings, Losses, Subject, Text, Trained, require_positive
from tinyformer.errors import ArgumentError
from tinyformer.nn import PreNormBlock, Residual
from tinyformer.nn.heads import layer_title
from tinyformer.nn.residual import Stream

NUM_SIZES, NUM_DRAWS = 12, 4  # numbers of edges in the curve, and draws of random edges
NUM_PRINTED, NUM_DRAWN = 5, 60  # edges of a circuit that are printed and drawn

Kept = Bool[Tensor, "nodes receivers"]
Vectors = Float[Tensor, "_ batch seq d_model"]
Case: TypeAlias = tuple[Prompts, Stream, Mapping[str, Tensor]]
"""Clean prompts, their embeddings, and the activations of the corrupted prompts."""


class Receiver(NamedTuple):
    """What reads the residual stream: queries, keys or values of heads, or a part that has one input."""

    name: str
    input: str
    num_before: int  # nodes that write before it reads
    ends: Sequence[int]  # the nodes that are computed from what it reads


class EdgeGraph:
    """The nodes of a pre-norm network, and an edge from each to all that reads the residual stream later.

    Nodes are the embeddings, each head, each feed-forward network and the logits. Queries, keys and values of a head
    are read apart; keys and values that heads share are read once, for all of them. With z_u what u adds to the stream,
    the receiver v reads, before its norm,

    stream of the corrupted run + Σ_{u → v is kept} (z_u - z_u of the corrupted run)

    which is the stream if all edges are kept; an edge that is removed carries what it does in the corrupted run.

    Raises:
        ArgumentError: a part reads or writes something else.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        # The row of each node in a picture, and the number of a head.
        self.nodes: dict[str, tuple[str, int | None]] = {"embeddings": ("embeddings", None)}
        self.receivers: list[Receiver] = []
        # By point, its receivers, the point of the stream that they read, and how it follows from what each reads.
        self.readings: dict[str, tuple[slice, str, Callable[[Vectors], Tensor]]] = {}
        self.factors: dict[str, float] = {}  # of what is added, by point
        stack, *others = subject.network.stacks()
        if others:
            raise ArgumentError("network", type(subject.network).__name__, "has two stacks; edges are those within one")
        blocks: Any = stack.layers
        stream = "embedding"
        for index, (block, layer) in enumerate(zip(blocks, subject.layers, strict=True)):
            _require_readable(block)
            title, at, first, ids = layer_title((index,)), f"layers.{index}", len(self.nodes), layer.head_map.ids
            shared = [[h for h, kv in enumerate(layer.head_map.kv_heads) if kv == i] for i in range(layer.num_kv_heads)]
            for name, groups in {"queries": [[h] for h in range(len(ids))], "keys": shared, "values": shared}.items():
                ends = {f"{title} head {'/'.join(str(ids[h]) for h in of)}": [first + h for h in of] for of in groups}
                self._read(f"{at}.attention.{name}", name, ends, stream, partial(_project, block, name[0]))
            self.nodes |= {f"{title} head {head}": (title, head) for head in ids}
            self.factors[f"{at}.attention.added_by_head"] = block.attention_residual.branch
            network, norm = f"{title} feed-forward", partial(_normalise, block.feed_forward_norm)
            self._read(f"{at}.feed_forward.input", "", {network: [len(self.nodes)]}, f"{at}.residual_mid", norm)
            self.nodes[network] = network, None
            self.factors[f"{at}.feed_forward.output"] = block.feed_forward_residual.branch
            stream = f"{at}.residual_post"
        self._read("final_norm", "", {"logits": [len(self.nodes)]}, stream, partial(_normalise, stack.final_norm))
        self.nodes["logits"] = "logits", None
        numbers = torch.arange(len(self.nodes))
        self.all: Kept = numbers.unsqueeze(1) < torch.tensor([receiver.num_before for receiver in self.receivers])
        self.ends = torch.stack([torch.isin(numbers, torch.tensor(receiver.ends)) for receiver in self.receivers])

    def _read(
        self, point: str, input: str, ends: dict[str, list[int]], stream: str, compute: Callable[[Vectors], Tensor]
    ) -> None:
        first = len(self.receivers)
        self.receivers += [Receiver(name, input, len(self.nodes), of) for name, of in ends.items()]
        self.readings[point] = slice(first, len(self.receivers)), stream, compute

    def case(self, pairs: Pairs) -> Case:
        """What `run` needs of pairs."""
        streams = {stream for _, stream, _ in self.readings.values()}
        _, clean = pairs.clean.run(self.subject, capture=["embedding"])
        _, corrupted = pairs.corrupted.run(self.subject, capture=[*streams, *self.factors])
        return pairs.clean, clean["embedding"], corrupted

    def run(self, case: Case, kept: Kept, alpha: float = 1.0) -> tuple[Float[Tensor, " batch"], list[Vectors], Vectors]:
        """The scores with some edges kept, what receivers read, and what nodes add beyond the corrupted run.

        The embeddings are those of the corrupted prompts, moved towards those of the clean ones by a share alpha.
        """
        clean, embedding, corrupted = case
        embedding = torch.lerp(corrupted["embedding"], embedding, alpha).requires_grad_(torch.is_grad_enabled())
        added, inputs = [(embedding - corrupted["embedding"]).unsqueeze(0)], list[Vectors]()

        def read(point: str, _: Tensor) -> Tensor:
            receivers, stream, compute = self.readings[point]
            earlier = torch.cat(added)
            edges = kept[: len(earlier), receivers].to(earlier)
            inputs.append(corrupted[stream] + torch.einsum("ubsd,uv->vbsd", earlier, edges))
            return compute(inputs[-1])

        def add(point: str, output: Tensor) -> Tensor:
            change = self.factors[point] * (output - corrupted[point])
            added.append(change.transpose(0, 1) if change.ndim == 4 else change.unsqueeze(0))
            return output

        replaced = {point: partial(read, point) for point in self.readings}
        replaced |= {point: partial(add, point) for point in self.factors}
        scores, _ = clean.run(self.subject, replace={"embedding": embedding, **replaced})
        return scores, inputs, torch.cat(added)

    @torch.enable_grad()
    def attributions(self, parts: Sequence[Pairs], steps: int) -> Float[Tensor, "nodes receivers"]:
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
        """What each set of edges leaves of the difference between clean and corrupted scores, and that difference."""
        distinct, places = torch.stack([self.all & False, *sets, self.all]).unique(dim=0, return_inverse=True)
        runs = [torch.stack([self.run(case, kept)[0] for kept in distinct]) for case in map(self.case, parts)]
        corrupted, *scores, clean = torch.cat(runs, dim=1).double().cpu()[places]
        return [Losses(score - corrupted, clean - corrupted) for score in scores]

    def circuit(self, edges: Int[Tensor, "edges 2"]) -> Kept:
        """Those of some edges that are on a path from the embeddings to the logits: the others have no effect."""
        kept = torch.zeros_like(self.all)
        kept[tuple(edges.T)] = True
        reached, used = (torch.arange(len(self.nodes)) == node for node in (0, len(self.nodes) - 1))
        for _ in self.readings:  # as many as a path has edges, or more
            reached = reached | (self.ends & (kept & reached.unsqueeze(1)).any(dim=0).unsqueeze(1)).any(dim=0)
            used = used | (kept & (self.ends & used).any(dim=1)).any(dim=1)
        return kept & reached.unsqueeze(1) & (self.ends & used).any(dim=1)


def _require_readable(block: Any) -> None:
    """Refuse a block that does not add up what its parts write, or that has parts which read something else."""
    if type(block) is not PreNormBlock:
        reason = "must be a PreNormBlock: in others, what a part reads is no sum of what the earlier ones add"
        raise ArgumentError("block", type(block).__name__, reason)
    for name in ("attention_residual", "feed_forward_residual"):
        if type(residual := getattr(block, name)) is not Residual or residual.skip != 1:
            raise ArgumentError(name, residual, "must be a Residual with skip=1, which changes no earlier summand")
    if block.attention.output_gate is not None:
        reason = "must be False: a gate reads the stream beside queries, keys and values"
        raise ArgumentError("gate", True, reason, {"gate": False})


def _project(block: Any, part: str, vectors: Vectors) -> Float[Tensor, "batch heads seq dim"]:
    """Queries, keys or values, q, k or v: those of each head from the stream that it reads."""
    qkv = block.attention.project(block.attention_norm(vectors.flatten(0, 1)))
    of_all = getattr(qkv, part).unflatten(0, vectors.shape[:2]).unflatten(2, (len(vectors), -1))
    return of_all.diagonal(dim1=0, dim2=2).movedim(-1, 1).flatten(1, 2)


def _normalise(norm: nn.Module, vectors: Vectors) -> Stream:
    return norm(vectors.squeeze(0))


@dataclass(eq=False)
class EdgeAttribution:
    """Edge attribution patching with integrated gradients, and the smallest circuit that keeps a behaviour.

    The behaviour is the difference in the score L, the logit of `answer` minus that of `against`, between clean and
    corrupted prompts. The attribution of an edge u → v estimates what L changes by if that edge is removed:

    (z_u corrupted - z_u clean) · mean_{α = 1/steps, …, 1} ∂L/∂(what v reads)

    where the embeddings are corrupted + α (clean - corrupted) (Hanna et al. 2024, arXiv 2403.17806); one step is that
    of Syed et al. 2023 (arXiv 2310.10348). A circuit has the edges of the largest attributions, of either sign. Its
    faithfulness is the share of the behaviour that is left when all others are really removed, see `EdgeGraph`.

    Args:
        clean: a prompt; by default, with `corrupted`, random tokens that begin to repeat, see `read_pairs`.
        corrupted: a prompt of as many tokens that calls for another answer.
        answer: the token (or label) after the clean prompt; by default what the model predicts.
        against: the one after the corrupted prompt, likewise.
        file: a .csv or .jsonl file with the columns clean, corrupted, answer and against, in place of the two prompts.
        num_pairs: pairs of random tokens.
        batch_size: pairs in a forward pass, which holds a copy of the stream for each receiver.
        steps: gradients in the mean.
        share: the faithfulness that the circuit must have on half of the pairs; it is measured on the other half.
        seed: of the random tokens, the halves and the random edges.
    """

    clean: Text | None = None
    corrupted: Text | None = None
    answer: str | None = None
    against: str | None = None
    file: str | None = None
    num_pairs: int = 64
    batch_size: int = 16
    steps: int = 5
    share: float = 0.85
    seed: int = 0
    num_windows = 1  # the prompts are no windows
    needs_gradient = False  # of the kernels: `exact_pass` uses its own

    def __post_init__(self) -> None:
        require_positive(self, "num_pairs", "batch_size", "steps")
        if not 0 < self.share <= 1:
            raise ArgumentError("share", self.share, "must be above 0 and at most 1", {"share": 0.85})

    def __call__(self, model: Trained, folder: Path = Path()) -> Findings:
        subject = model.sample(self.num_windows)
        graph, texts = EdgeGraph(subject), (self.clean, self.corrupted, None, self.answer, self.against)
        groups = read_pairs(subject, *texts, self.file, self.num_pairs, self.seed)
        choosing, measuring = self._halves(groups)
        attributions, edges = graph.attributions(choosing, self.steps), graph.all.nonzero()
        ranked = edges[attributions[graph.all].abs().argsort(descending=True, stable=True)]
        untrained = EdgeGraph(replace(subject, network=subject.untrained()))
        pairs = choosing if measuring is choosing else [*choosing, *measuring]
        found, by_chance = (of.left(pairs, [of.all])[0].targets for of in (graph, untrained))
        apart, apart_untrained = compare(found), compare(by_chance)
        title = groups[0].clean.title(subject) if len(found) == 1 else f"{len(found)} pairs"
        findings = Findings(facts=facts_of_pairs(subject, self.clean, self.corrupted, self.file, len(found)))
        findings.scalars = {"analysis/difference": apart.mean, "analysis/untrained_difference": apart_untrained.mean}
        findings.lines = {
            "edges": f"{title}: clean minus corrupted {apart} logits; untrained {apart_untrained}",
            "circuit": "none: the difference is not clearly above what untrained weights give",
        }
        circuit = graph.all & False
        if min(apart.low, compare(found, by_chance).low) > 0:
            size = self._smallest(graph, choosing, ranked)
            circuit = graph.circuit(ranked[:size])
            self._measure(graph, measuring, ranked, size, findings)
            _describe(graph, attributions, [edge for edge in ranked.tolist() if circuit[*edge]], findings)
        names = [*graph.nodes]
        rows = [
            [names[u], *graph.receivers[v][:2], float(attributions[u, v]), bool(circuit[u, v])]
            for u, v in edges.tolist()
        ]
        findings.tables["edges"] = ["from", "to", "input", "attribution", "in_circuit"], rows
        return findings

    def _halves(self, pairs: Sequence[Pairs]) -> list[list[Pairs]]:
        """The pairs that edges are chosen on, and those that they are measured on, in batches; a single one is both."""
        sizes = [len(of_length.clean.answers) for of_length in pairs]
        numbers = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(self.seed)).split(sizes)
        halves = [
            [
                Pairs(of_length.clean.rows(rows), of_length.corrupted.rows(rows))
                for of_length, number in zip(pairs, numbers, strict=True)
                for rows in (number % 2 == half).nonzero().flatten().split(self.batch_size)
                if len(rows)
            ]
            for half in range(2)
        ]
        return [half or halves[0] for half in halves]

    def _smallest(self, graph: EdgeGraph, parts: Sequence[Pairs], ranked: Int[Tensor, "edges 2"]) -> int:
        """The number of edges from which the share is left, by bisection within the first step of the curve."""
        enough, below, sizes = len(ranked), 0, _sizes(len(ranked))
        while enough - below > 1:
            size = next((size for size in sizes if below < size < enough), (below + enough) // 2)
            (left,) = graph.left(parts, [graph.circuit(ranked[:size])])
            below, enough = (below, size) if left.mean >= self.share else (size, enough)
        return enough

    def _measure(
        self, graph: EdgeGraph, parts: Sequence[Pairs], ranked: Int[Tensor, "edges 2"], chosen: int, findings: Findings
    ) -> None:
        """The faithfulness of the first edges, and of as many random ones."""
        sizes, generator = sorted({*_sizes(len(ranked)), chosen}), torch.Generator().manual_seed(self.seed)
        orders = [ranked, *(ranked[torch.randperm(len(ranked), generator=generator)] for _ in range(NUM_DRAWS))]
        sets = {(draw, size): graph.circuit(order[:size]) for draw, order in enumerate(orders) for size in sizes}
        kept = {
            at: losses.change_from(Losses(0 * losses.nats, losses.targets), NUM_RESAMPLES)
            for at, losses in zip(sets, graph.left(parts, [*sets.values()]), strict=True)
        }
        random = {size: sum(kept[draw, size].mean for draw in range(1, len(orders))) / NUM_DRAWS for size in sizes}
        found, number = kept[0, chosen], int(sets[0, chosen].sum())
        findings.scalars |= {
            "analysis/circuit_edges": number,
            "analysis/faithfulness": found.mean,
            "analysis/random_faithfulness": random[chosen],
        }
        findings.lines["circuit"] = (
            f"{number} of {len(ranked)} edges keep {found:z.1%} of that; {chosen} random edges {random[chosen]:z.1%}"
        )
        findings.tables["faithfulness"] = (
            ["random_draw", "edges", "on_paths", "faithfulness", "low", "high"],
            [
                [draw or None, size, int(sets[draw, size].sum()), change.mean, change.low, change.high]
                for (draw, size), change in kept.items()
            ],
        )
        findings.figures["faithfulness"] = lines(
            {"edges with the largest attributions": (sizes, [kept[0, size].mean for size in sizes])},
            "Share of the behaviour that is left when all other edges are removed",
            "number of edges",
            "faithfulness",
            baselines={"random edges": (sizes, [*random.values()])},
            marked=(chosen, found.mean, "circuit"),
        )


def _sizes(number: int) -> list[int]:
    """Numbers of edges up to all, evenly spaced on a logarithmic scale."""
    return sorted({round(number ** (step / (NUM_SIZES - 1))) for step in range(NUM_SIZES)})


def _describe(
    graph: EdgeGraph, attributions: Float[Tensor, "nodes receivers"], edges: Sequence[list[int]], findings: Findings
) -> None:
    """The heads of a circuit and its first edges in words, and its picture."""
    names = [*graph.nodes]
    used = {names[u] for u, _ in edges} | {"logits"}
    heads = [name for name, (_, number) in graph.nodes.items() if name in used and number is not None]
    findings.lines["  heads"] = ", ".join(heads) or "none"
    for u, v in edges[:NUM_PRINTED]:
        name, input, *_ = graph.receivers[v]
        findings.lines[f"  {names[u]} → {name} {input}".rstrip()] = f"{attributions[u, v]:+.3f}"
    arrows = [
        (graph.receivers[v].input or "feed-forward or logits", names[u], names[end], abs(float(attributions[u, v])))
        for u, v in edges[:NUM_DRAWN]
        for end in graph.receivers[v].ends
        if names[end] in used
    ]
    title = f"Circuit of {len(edges)} edges{f', of which {NUM_DRAWN} are drawn' * (len(edges) > NUM_DRAWN)}"
    nodes = {name: node for name, node in graph.nodes.items() if name in used}
    findings.figures["circuit"] = head_graph(nodes, arrows, f"{title}, as wide as their attribution")
