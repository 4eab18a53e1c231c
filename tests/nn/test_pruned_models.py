"""A model without some of its heads computes what it computes with them gated off, and is made again as such.

Two layers with 4 heads of 8 dimensions, in fp32.
"""

import copy
from functools import partial

import pytest
import torch
from attention_cases import error
from variants import VARIANTS, gqa, network, t5

from tinyformer.analysis.costs import cache_elements
from tinyformer.nn import AttentionMask, Cache, Shared, Transformer
from tinyformer.nn.prune import prune_model

CAUSAL = AttentionMask(causal=True)
NAMES = ("mha", "gqa", "mqa", "mla", "differential", "alibi", "shaw", "additive", "local_gaussian", "t5-shared")
PAIRS = {"one": [[0, 1]], "a-group": [[0, 0], [0, 1]], "both-layers": [[0, 3], [1, 0], [1, 2], [1, 3], [0, 3]]}
IDS = torch.randint(50, (2, 11), generator=torch.Generator().manual_seed(0))


def build(name: str, **options: object) -> Transformer:
    # The layers of one model share a table, not those of two.
    shared = partial(gqa, position=Shared(t5), sink=True, gate=True)
    return network(shared if name == "t5-shared" else VARIANTS[name][0], **options)


def smaller_than(model: Transformer, pairs: list[list[int]]) -> Transformer:
    smaller = copy.deepcopy(model)
    prune_model(smaller.attentions(), pairs)
    return smaller


@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_pruned_model_is_a_gated_one_and_decodes(name, pairs):
    whole = build(name)
    smaller = smaller_than(whole, pairs)
    for index, layer in enumerate(whole.attentions()):
        layer.head_gate.factors = torch.tensor([float([index, head] not in pairs) for head in range(4)])
    out = smaller(IDS, CAUSAL)
    assert error(out, whole(IDS, CAUSAL)) <= 1e-5
    cache, parts = Cache(2), []
    for chunk in IDS.split([6, 1, 4], dim=1):
        parts.append(smaller(chunk, CAUSAL, cache))
    assert error(torch.cat(parts, dim=1), out) <= 1e-5


@pytest.mark.parametrize(
    ("name", "pairs", "share"),
    [
        ("mha", PAIRS["one"], 7 / 8),
        ("mha", PAIRS["both-layers"], 4 / 8),
        ("gqa", PAIRS["one"], 1),
        ("gqa", PAIRS["a-group"], 3 / 4),
        ("gqa", PAIRS["both-layers"], 3 / 4),
        ("mqa", PAIRS["both-layers"], 1),
        ("mla", PAIRS["both-layers"], 1),
        ("differential", PAIRS["a-group"], 3 / 4),
        ("t5-shared", PAIRS["a-group"], 3 / 4),
    ],
)
@torch.no_grad()
def test_the_cache_shrinks_by_the_kv_heads_that_went(name, pairs, share):
    whole, caches = build(name), (Cache(2), Cache(2))
    smaller = smaller_than(whole, pairs)
    for model, cache in zip((whole, smaller), caches, strict=True):
        model(IDS, CAUSAL, cache)
    before, after = (cache.num_bytes for cache in caches)
    assert after == share * before
    assert after == 2 * 11 * 4 * sum(cache_elements(layer) for layer in smaller.attentions())


@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_model_made_without_heads_takes_the_weights_of_a_pruned_one(name, pairs):
    smaller = smaller_than(build(name), pairs)
    made = build(name, pruned_heads=pairs)
    for parameter in made.parameters():
        parameter.fill_(0.5)
    state = smaller.state_dict()
    assert {key: tensor.shape for key, tensor in made.state_dict().items()} == {k: t.shape for k, t in state.items()}
    made.load_state_dict(state, strict=True)
    assert torch.equal(made(IDS, CAUSAL), smaller(IDS, CAUSAL))
    assert [layer.head_map.ids for layer in made.attentions()] == [layer.head_map.ids for layer in smaller.attentions()]
    assert state.keys() == build(name).state_dict().keys()


@torch.no_grad()
def test_ablated_heads_are_numbered_as_before_pruning():
    pairs, ablated = [[0, 1], [1, 0]], [[0, 2], [1, 3], [1, 0]]
    whole = network(gqa)
    made = network(partial(gqa, ablated_heads=ablated), pruned_heads=pairs)
    made.load_state_dict(smaller_than(whole, pairs).state_dict())
    assert [layer.head_gate.factors.tolist() for layer in made.attentions()] == [[1, 0, 1], [1, 1, 0]]
    for index, closed in enumerate(([1, 2], [0, 3])):
        whole.attentions()[index].head_gate.factors = torch.ones(4).index_fill_(0, torch.tensor(closed), 0)
    assert error(made(IDS, CAUSAL), whole(IDS, CAUSAL)) <= 1e-5
