"""Every head over all the data: each number of `analysis=atlas` against loops over rows without padding."""

import math
import string
from collections import Counter
from dataclasses import replace

import pytest
import torch
from model.models import causal, masked, model, translator

from analysis.contexts import all_rows, columns_of, make_context, pair_context, stored
from tinyformer.analysis import HeadAtlas
from tinyformer.analysis.atlas.events import NUM_STRONGEST, SplitEvents
from tinyformer.analysis.atlas.snippets import events_of
from tinyformer.analysis.atlas.tally import CLASSES, Smallest, priorities
from tinyformer.measures.points import forward_pass


def of_windows(some, padded=False, documents=False, batch_size=4):
    context = make_context(some.network, num_windows=12, padded=padded, batch_size=batch_size)
    batches = context.batches
    if documents:  # two in each window
        of = (torch.arange(8) >= 3).long()
        batches = [batch | {"documents": of.repeat(len(batch["inputs"]), 1)} for batch in batches]
    return replace(context, batches=batches, split=lambda: batches, task=some.task, tokenizer=some._tokenizer)


def of_pairs():
    context = pair_context(translator().network)
    first, second = context.batches
    batches = [first, second | {"rows": second["rows"] + len(first["rows"])}]
    return replace(context, split=lambda: batches)


SUBJECTS = {
    "grouped queries": lambda: of_windows(causal(num_kv_heads=2)),
    "forgetting": lambda: of_windows(model("gqa+forget+alibi+window")),
    "rotary, sink, gate, QK-norm": lambda: of_windows(model("gqa+rotary+sink+gate+qk_norm")),
    "window": lambda: of_windows(causal(window=3)),
    "documents": lambda: of_windows(causal(), documents=True),
    "padding": lambda: of_windows(causal(), padded=True),
    "masked tokens": lambda: of_windows(masked(), padded=True),
    "ablated": lambda: of_windows(causal(ablated_heads=[[0, 1]])),
    "encoder–decoder": of_pairs,
}


@torch.no_grad()
def rows_by_hand(context, number):
    """For each row of a split: weights and strengths of each query and key of a layer, and the tokens of both sides."""
    layer, (*kind, index) = context.layers[number], context.addresses[number]
    stack = "".join(kind).replace("cross", "decoder")
    part = ".".join(filter(None, [stack, f"layers.{index}", "cross_attention" if kind == ["cross"] else "attention"]))
    capture = [f"{part}.{point}" for point in ("weights", "values", "output_by_head")]
    writes = layer.o_proj.weight.unflatten(1, (layer.num_heads, -1)).transpose(0, 1)
    for batch in all_rows(context):
        lengths = {"seq": torch.tensor([batch["inputs"].shape[1]])}
        lengths["source_seq"] = torch.tensor([batch.get("source", batch["inputs"]).shape[1]])
        forward = lambda batch=batch: context.task.forward(context.network, batch)  # noqa: E731
        activations = forward_pass(context.network, forward, lengths, capture)[1]
        weights, values, outputs = (activations[name][0] for name in capture)
        values = values[layer.head_map.kv_heads]
        mixed = weights @ values
        factors = (mixed * outputs).sum(dim=-1) / mixed.square().sum(dim=-1)  # of gates, and 0 of an ablated head
        norms = torch.einsum("hdv,hkv->hkd", writes, values).norm(dim=-1)
        strengths = weights * norms.unsqueeze(1) * factors.abs().unsqueeze(-1)
        inputs = batch["inputs"][0].tolist()
        source = batch["source"][0].tolist() if "source" in batch else inputs
        keys = source if stack == "encoder" or kind == ["cross"] else inputs
        queries = batch["targets"][0].tolist() if kind == ["cross"] else keys
        yield weights, strengths, queries, keys, batch.get("documents", torch.zeros(1, len(keys)))[0].tolist()


def classes_of(context, kind, query, key, queries, keys, documents):
    """The classes that a key is in for a query."""
    texts = [context.tokenizer.token_strings([token])[0] for token in keys]
    is_first = key == 0 or documents[key] != documents[key - 1]
    if is_first:
        yield "first"
    if keys[key] not in context.tokenizer.special_ids and texts[key] in string.punctuation:
        yield "punctuation"
    if is_first or texts[key - 1].endswith("⏎"):
        yield "line_start"
    if queries[query] == keys[key] and (kind == "cross" or query != key):
        yield "same_token"
    if kind != "cross" and key == query - 1:
        yield "previous"


@pytest.mark.parametrize("name", SUBJECTS)
def test_events_distributions_and_shares_are_those_of_loops(name):
    context = SUBJECTS[name]()
    split = SplitEvents(context, seed=0)
    for number, of in enumerate(split.layers):
        rows, kind = list(rows_by_hand(context, number)), context.kinds[number]
        for head, kept in enumerate(events_of(of)):
            if of.layer.ablated()[head]:
                continue
            best, entropies, on, at_offset, seen, seen_in = {}, [], Counter(), Counter(), Counter(), Counter()
            for row, (weights, strengths, queries, keys, documents) in enumerate(rows):
                for query in range(len(queries)):
                    key = int(strengths[head, query].argmax())
                    best[row, query, key] = float(strengths[head, query, key])
                    entropies.append(-sum(w * math.log(w) for w in weights[head, query].tolist() if w))
                    for key in range(len(keys)):
                        weight, offset = float(weights[head, query, key]), key - query
                        if weight:
                            at_offset[offset] += weight
                            seen[offset] += 1
                        for each in classes_of(context, kind, query, key, queries, keys, documents):
                            on[each] += weight
                            seen_in[each, offset] += bool(weight)
            ranked = sorted(best.values(), reverse=True)
            assert float(of.strength[head]) == pytest.approx(sum(ranked), rel=1e-4)
            assert int(of.counts[head].sum()) == of.tally.num_queries == len(best)
            strengths = [best[tuple(place)] for place in kept["place"][:, [0, 2, 3]].tolist()]
            assert strengths[:NUM_STRONGEST] == pytest.approx(ranked[:NUM_STRONGEST], rel=1e-4)
            deciles = (kept["group"] % 11 - 1).tolist()
            sampled = [pair for pair in zip(strengths, deciles, strict=True) if pair[1] >= 0]
            for strength, decile in sampled:  # all that share a bin, 2 % wide, are in the decile of its middle one
                below = [sum(other < strength * by for other in ranked) / len(ranked) for by in (0.95, 1.05)]
                assert 10 * below[0] - 0.1 <= decile + 1
                assert decile <= 10 * below[1] + 0.1
            assert max(Counter(decile for _, decile in sampled).values()) <= 5 < len(sampled)
            width = split.limits["entropy"][1] / 32
            bins = Counter(min(31, int(max(0.0, value) / width)) for value in entropies)
            counted = of.tally.histograms[0, head].tolist()
            assert sum(abs(counted[at] - bins[at]) for at in range(32)) <= 2  # of values at the edge of a bin
            for each, (share, expected) in zip(CLASSES, of.tally.shares()[:, head].tolist(), strict=True):
                if kind == "cross" and each == "previous":
                    continue
                by_offset = sum(at_offset[o] * seen_in[each, o] / seen[o] for o in seen if seen[o])
                assert (share, expected) == pytest.approx((on[each] / len(best), by_offset / len(best)), abs=1e-5), each


def test_a_short_document_is_shown_whole_and_nothing_of_others():
    (entries, *_) = events_of(SplitEvents(of_windows(causal(), documents=True), seed=0).layers[0])
    stretches, places = (entries[name].tolist() for name in ("stretches", "place"))
    for (begin, end, *_), (_, _, query, *_) in zip(stretches, places, strict=True):
        assert (begin, end) == ((0, 3) if query < 3 else (3, 8))


def test_the_size_of_batches_changes_nothing_and_what_is_kept_is_bounded():
    kept = [events_of(SplitEvents(of_windows(causal(), batch_size=size), seed=3).layers[1]) for size in (1, 5)]
    for one, other in zip(*kept, strict=True):
        assert torch.equal(one["place"], other["place"])
        torch.testing.assert_close(one["output"], other["output"])
    context = of_windows(causal())
    long = replace(context, split=lambda: context.batches * 40)
    assert all(len(of["group"]) <= 70 for of in events_of(SplitEvents(long, seed=0).layers[0]))


def test_a_reservoir_is_a_uniform_sample():
    counts = torch.zeros(50)
    for seed in range(500):
        sample = Smallest(1, 5, torch.device("cpu"))
        for part in torch.arange(50).split(7):
            sample.offer({"group": torch.zeros_like(part), "score": priorities(seed, part).double(), "item": part})
        counts[sample.kept()["item"]] += 1
    assert counts.sum() == 2500
    assert float(((counts - 50).square() / 50).sum()) < 85.4  # χ² with 49 degrees of freedom, p = 0.001


def test_findings_and_the_page(tmp_path):
    context = of_windows(causal(), padded=True)
    findings = HeadAtlas(num_windows=4, num_tokens=8)(context, tmp_path)
    data = stored(tmp_path / "atlas.html")
    events = columns_of(findings.tables["events"])
    assert events["strength"][0] == pytest.approx(events["weight"][0] * events["norm"][0], rel=1e-4)
    shown, tokens = data["heads"][0]["events"]["snippets"][0], data["events"]["tokens"]
    assert tokens[shown["queries"][shown["query"]]] == events["query"][0]
    assert (shown["decile"], shown["strength"]) == (None, pytest.approx(events["strength"][0], rel=1e-4))
    table = columns_of(findings.tables["atlas"])
    points = sorted(line.get_xydata()[0].tolist() for line in findings.figures["atlas"].axes[0].lines)
    assert points == sorted(map(list, zip(table["entropy_share"], table["strength"], strict=True)))


def test_in_mixed_precision_strengths_are_those_of_fp32_up_to_its_rounding():
    exact = of_windows(causal())
    mixed = replace(exact, precision=lambda: torch.autocast("cpu", torch.bfloat16))
    for one, other in zip(SplitEvents(exact, 0).layers, SplitEvents(mixed, 0).layers, strict=True):
        torch.testing.assert_close(other.strength, one.strength, rtol=0.01, atol=0)
