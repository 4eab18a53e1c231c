"""Edges between the parts of a network, against networks computed by hand and single patches."""

from functools import partial

import pytest
import torch
from matplotlib.text import Annotation
from nn.model_cases import BLOCKS, make_transformer
from nn.variants import CONVOLVED, factory, network

from analysis.contexts import (
    CAPPED,
    CAUSAL,
    columns_of,
    loud_encoder_decoder,
    loud_transformer,
    make_context,
    pair_context,
)
from tinyformer.analysis import EdgeAttribution
from tinyformer.analysis.causes.edges import EdgeGraph
from tinyformer.analysis.causes.prompts import induction_pairs
from tinyformer.errors import ArgumentError
from tinyformer.nn import ParallelBlock, PostNormBlock, Residual, RMSNorm, RotaryPosition, SandwichBlock

ROTARY = {"position": False, "attention_position": partial(RotaryPosition, 16)}
HALVED = partial(Residual, branch=0.5)
NETWORKS = {
    "mha": partial(loud_transformer, bias=True, embedding_norm=True),
    "gqa_pruned": partial(loud_transformer, num_kv_heads=2, pruned_heads=[(0, 1)], attention_residual=HALVED),
    "mqa_rms": partial(loud_transformer, num_kv_heads=1, norm=RMSNorm, **ROTARY),
    "parallel": partial(loud_transformer, kind=ParallelBlock),
    "parallel_shared": partial(loud_transformer, kind=BLOCKS["shared"]),
    "mla": lambda: network(factory("mla+rotary+qk_norm")),
    "projection_norm": partial(loud_transformer, bias="qkv", qk_norm="projection", readout=CAPPED, **ROTARY),
    "differential": lambda: network(factory("gqa+differential+rotary+qk_norm")),
    "convolutions": lambda: network(factory("gqa+shifted_keys+convolution+rotary"), **CONVOLVED),
}


def of(make):
    context = make_context(make().double())
    return context, EdgeGraph(context), induction_pairs(context, 4)


def only(graph, *edges):
    kept = torch.zeros_like(graph.all)
    kept[tuple(torch.tensor(edges).T)] = True
    return kept


def added_by_nodes(context, prompts):
    """The vectors that each node adds to the stream."""
    _, found = prompts.run(context, capture=["embedding", "*added_by_head", "*feed_forward.output"])
    parts = [found["embedding"].unsqueeze(0)]
    for index, block in enumerate(context.network.encoder.layers):
        parts.append(block.attention_residual.branch * found[f"layers.{index}.attention.added_by_head"].transpose(0, 1))
        parts.append(found[f"layers.{index}.feed_forward.output"].unsqueeze(0))
    return torch.cat(parts)


def by_hand(graph, receiver, shift, x):
    """The logits if one receiver reads the stream plus a shift, given the embeddings."""
    network, name, part = graph.context.network, *receiver[:2]
    same = [each for each in graph.receivers if each.input == part and each.name[:7] == name[:7]]
    for index, block in enumerate(network.encoder.layers):
        attention, is_here = block.attention, name.startswith(f"layer {index}")
        normed = (block.convolved("attention", block.attention_norm(each), CAUSAL) for each in (x, x + shift))
        qkv, moved = map(attention.project, normed)
        if is_here and part:
            own, other = (getattr(each, part[0]).unflatten(1, (len(same), -1)) for each in (qkv, moved))
            is_head = (torch.arange(len(same)) == same.index(receiver))[:, None, None, None]
            qkv = qkv._replace(**{part[0]: torch.where(is_head, other, own).flatten(1, 2)})
        heads = attention.attend(qkv, CAUSAL, False)
        mid = block.attention_residual(x, attention.o_proj(heads.transpose(1, 2).flatten(-2)))
        read = x if isinstance(block, ParallelBlock) else mid
        normed = block.norms("feed_forward").input(read + shift if is_here and not part else read)
        x = block.feed_forward_residual(mid, block.transform(normed, CAUSAL))
    return network.readout(network.encoder.final_norm(x + shift if name == "logits" else x))


@pytest.mark.parametrize("name", NETWORKS)
def test_attributions_are_slopes_by_hand_and_removed_edges_steps(name):
    """All attributions, and one edge into each receiver, with a score of moved inputs and the changes of nodes."""
    context, graph, pairs = of(NETWORKS[name])
    clean, corrupted = (added_by_nodes(context, side) for side in (pairs.clean, pairs.corrupted))
    changes, steps = corrupted - clean, 2

    def score(v, shift, alpha):
        embedding = corrupted[0] + alpha * (clean[0] - corrupted[0])
        return pairs.clean.score(by_hand(graph, graph.receivers[v], shift, embedding))

    slopes, sets, exact = torch.zeros(graph.all.shape, dtype=torch.float64), [], []
    for v, (_, _, before, _) in enumerate(graph.receivers):
        for step in range(1, steps + 1):
            shift = torch.zeros_like(changes[0], requires_grad=True)
            (slope,) = torch.autograd.grad(score(v, shift, step / steps).mean(), shift)
            slopes[:before, v] += (changes[:before] * slope).sum(dim=(1, 2, 3)) / steps
        sets.append(graph.all & ~only(graph, (v % before, v)))
        exact.append(score(v, changes[v % before], 1).detach())
    base, whole = (side.run(graph.context)[0] for side in (pairs.corrupted, pairs.clean))
    left = torch.stack([each.nats for each in graph.left([pairs], [graph.all & False, graph.all, *sets])])
    removed = torch.stack([base, whole, *exact]) - base
    for found, expected in ((graph.attributions([pairs], steps), slopes), (left, removed)):
        assert (found - expected).abs().max() <= 1e-9 * expected.abs().max()
    assert (left[0] == 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_a_circuit_has_the_edges_on_paths_and_the_others_change_nothing(seed):
    _, graph, pairs = of(NETWORKS["gqa_pruned"])
    keys = {name: [list(graph.nodes)[end] for end in ends] for name, part, _, ends in graph.receivers if part == "keys"}
    assert keys["layer 0 head 2/3"] == ["layer 0 head 2", "layer 0 head 3"]
    edges = graph.all.nonzero()[torch.randperm(70, generator=torch.Generator().manual_seed(seed))[:20]].tolist()

    def paths(node):
        ends = ((u, v, end) for u, v in edges for end in graph.receivers[v].ends if u == node)
        yield from ([(u, v), *rest] for u, v, end in ends for rest in paths(end))
        yield from [[]] if node == len(graph.nodes) - 1 else []

    circuit = graph.circuit(torch.tensor(edges))
    on_paths = {edge for path in paths(0) for edge in path}
    assert {*map(tuple, circuit.nonzero().tolist())} == on_paths
    assert 0 < len(on_paths) < 20
    some, of_circuit = graph.left([pairs], [only(graph, *edges), circuit])
    torch.testing.assert_close(some.nats, of_circuit.nats, rtol=0, atol=1e-9)


def induction():
    """Head 1 of layer 0 adds the token before to the stream; head 2 of layer 1 looks there for its own, and copies."""
    network = make_transformer(d_model=180, num_heads=3, tied=False)
    generator = torch.Generator().manual_seed(0)
    token, position, before, after, _ = torch.eye(180).split([50, 16, 50, 50, 14])
    first, second = (block.attention for block in network.encoder.layers)
    with torch.no_grad():
        for weight in network.parameters():
            weight.normal_(0, 0.01, generator=generator) if weight.ndim == 2 else None
        network.encoder.token_embedding.weight += token
        network.encoder.position.embedding.weight += position
        network.readout.proj.weight += 10 * after
        for layer, rows, *parts, output in (
            (first, slice(60, 120), position[1:], position[:15], token, before),
            (second, slice(120, 180), token, before, token, after),
        ):
            for proj, part in zip((layer.q_proj, layer.k_proj, layer.v_proj), parts, strict=True):
                proj.weight[rows][: len(part)] += part
            layer.o_proj.weight[:, rows][:, :50] += output.T
    return network.eval()


def test_the_circuit_of_induction_by_hand_is_found_and_untrained_weights_have_none():
    analysis, context = EdgeAttribution(num_pairs=8, share=0.8), make_context(induction())
    found, graph = analysis(context), EdgeGraph(context)
    edges = {(*edge,): is_in for *edge, _, is_in in found.tables["edges"][1]}
    circuit = [("embeddings", "layer 0 head 1", "values"), ("layer 0 head 1", "layer 1 head 2", "keys")]
    assert [edge for edge in edges if edges[edge]] == [*circuit, ("layer 1 head 2", "logits", "")]
    assert found.lines["  heads"] == "layer 0 head 1, layer 1 head 2"
    assert found.lines["circuit"].startswith("3 of 75 edges keep ")
    assert found.lines["attribution"].endswith("negative if it supports the answer, positive if it opposes it")
    kept = {edge: graph.all.clone() for edge in edges if edges[edge]}
    for at, edge in zip(graph.all.nonzero().tolist(), edges, strict=True):
        kept.get(edge, graph.all.clone())[*at] = False  # of the circuit, all edges but one
    without = graph.left([induction_pairs(context, 8)], [*kept.values()])
    values = {(*edge,): value for *edge, value, _ in found.tables["edges"][1]}
    assert all(values[edge] < 0 and left.mean < 0.5 for edge, left in zip(kept, without, strict=True))
    assert found.facts == {"pairs": "8 of random tokens that repeat"}
    curve = {(draw, size): measured for draw, size, *measured in found.tables["faithfulness"][1]}
    on_paths, share, low, high = curve[None, 3]
    assert (on_paths, share) == (3, found.scalars["analysis/faithfulness"])
    assert 0.8 <= low < share < high <= 1.2
    _, measuring = analysis._halves([induction_pairs(context, 8)])
    (left,) = graph.left(measuring, [only(graph, *graph.all.nonzero()[torch.tensor([*edges.values()])].tolist())])
    assert left.mean == pytest.approx(share, rel=1e-5)
    assert (curve[None, 2], curve[None, 75], curve[4, 75]) == ([0] * 4, [75, 1, 1, 1], [75, 1, 1, 1])
    assert found.scalars["analysis/random_faithfulness"] == curve[1, 3][1] == 0
    texts = found.figures["circuit"].axes[0].texts
    assert {text.get_text() for text in texts} - {""} == {"embeddings", "1", "2", "logits"}
    assert sum(isinstance(text, Annotation) for text in texts) == 3
    none = EdgeAttribution(num_pairs=8)(make_context(make_transformer()))
    assert none.lines["circuit"].startswith("none: ")
    assert not any(columns_of(none.tables["edges"])["in_circuit"])


REFUSED = {
    "block='PostNormBlock': must be a PreNormBlock": partial(loud_transformer, kind=PostNormBlock),
    "block='SandwichBlock': must be a PreNormBlock": partial(loud_transformer, kind=SandwichBlock),
    "feed_forward_residual=": partial(loud_transformer, feed_forward_residual=partial(Residual, 0.5)),
    **{
        f"{gate}=True: must be False": partial(loud_transformer, **{gate: True}) for gate in ("gate", "forget", "ssmax")
    },
    "network='EncoderDecoder': has two stacks": loud_encoder_decoder,
}


@pytest.mark.parametrize("message", REFUSED)
def test_networks_whose_edges_are_no_summands_are_refused(message):
    with pytest.raises(ArgumentError, match=message):
        EdgeAttribution()((pair_context if "stacks" in message else make_context)(REFUSED[message]()))
