"""Pruned layers and models compute what those with closed gates compute, and are smaller.

`test_laws` prunes one head of four in every variant; here are groups of several and uneven groups, gradients, weights,
and whole models.
"""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch

from nn.variants import CAUSAL, error, factory, gqa, network, prepared, t5, tokens
from tinyformer.costs.network import cache_elements
from tinyformer.measures import map_names
from tinyformer.nn import (
    ALiBi,
    Attention,
    BaseAttention,
    Cache,
    DifferentialAttention,
    LatentAttention,
    Shared,
    ShawPosition,
    T5Position,
    Transformer,
    prune_heads,
)

D_MODEL, NUM_HEADS = 24, 6
X = tokens(2, 9, d_model=D_MODEL).double()
SHARINGS: dict[str, Callable[..., BaseAttention]] = {
    "mha": Attention,
    "gqa": partial(Attention, num_kv_heads=2),
    "mqa": partial(Attention, num_kv_heads=1),
    "mla": partial(LatentAttention, kv_rank=8),
    "differential": partial(DifferentialAttention, num_kv_heads=2),
}
SEVERAL = {"bias": True, "sink": True, "ssmax": True, "gate": True, "forget": True, "qk_norm": True, "score": "general"}
EXTRAS = {
    "several": SEVERAL,
    "alibi": SEVERAL | {"position": partial(ALiBi, NUM_HEADS)},
    "t5": SEVERAL | {"position": partial(T5Position, NUM_HEADS, num_buckets=8, max_distance=10)},
    "relative_keys": {"position": partial(ShawPosition, max_distance=3, values=False)},
    "additive": {"score": "additive", "window": 4, "local_gaussian": True},
    "shifted": {"convolution": "qkv", "shifted_keys": True},
}
MADE = [(sharing, extra) for sharing in SHARINGS for extra in EXTRAS if (sharing, extra) != ("mla", "shifted")]
PRUNED = {"a-group": [3, 4, 5], "unevenly": [0, 1, 4]}
"""Of two K/V heads the first serves heads 0 to 2, the second 3 to 5."""


def make(sharing: str, extra: str | None = None, **options: object) -> BaseAttention:
    """A layer in float64, with errors below 1e-10."""
    options = EXTRAS.get(extra, {}) | options
    return prepared(partial(SHARINGS[sharing], D_MODEL, NUM_HEADS, **options)).double()


def gated(attention: BaseAttention, heads: list[int]) -> BaseAttention:
    closed = copy.deepcopy(attention)
    closed.head_gate.factors = torch.ones(NUM_HEADS).index_fill_(0, torch.tensor(heads), 0)
    return closed


def pruned(attention: BaseAttention, heads: list[int]) -> BaseAttention:
    smaller = copy.deepcopy(attention)
    prune_heads(smaller, heads)
    return smaller


@pytest.mark.parametrize("group", PRUNED)
@pytest.mark.parametrize(("sharing", "extra"), MADE)
def test_pruned_heads_equal_closed_gates_in_output_gradient_and_maps(sharing, extra, group):
    whole, heads = make(sharing, extra), PRUNED[group]
    smaller, x = pruned(whole, heads), X.clone().requires_grad_()
    upstream = torch.linspace(0, 20, X.numel(), dtype=X.dtype).sin().view_as(X)
    expected = gated(whole, heads)(x, CAUSAL)
    expected_gradient = torch.autograd.grad(expected, x, upstream)[0]
    out = smaller(x, CAUSAL)
    assert error(out, expected) <= 1e-10
    assert error(torch.autograd.grad(out, x, upstream)[0], expected_gradient) <= 1e-9
    places = [map_names(whole).index(name) for name in map_names(smaller)]
    maps = [layer.maps_of_call(layer.inputs(X, CAUSAL), torch.tensor([8, 3])) for layer in (smaller, whole)]
    for ours, theirs in zip(*maps, strict=True):
        torch.testing.assert_close(ours, theirs[:, places], rtol=1e-10, atol=1e-10)


# A pruned layer.


@pytest.mark.parametrize("sharing", SHARINGS)
@torch.no_grad()
def test_pruned_twice_equals_pruned_at_once(sharing):
    whole = make(sharing, "alibi")
    for first, second in (([], [1]), ([1], [0, 4]), ([3, 4], [5])):
        once, twice = pruned(whole, first + second), pruned(pruned(whole, first), second)
        assert twice.head_map.ids == once.head_map.ids
        assert torch.equal(twice(X, CAUSAL), once(X, CAUSAL))
        assert all(map(torch.equal, twice.state_dict().values(), once.state_dict().values()))


# Whole models: two layers with 4 heads of 8 dimensions, in fp32.

PAIRS = [[0, 3], [1, 0], [1, 2], [1, 3], [0, 3]]
IDS = torch.randint(50, (2, 11), generator=torch.Generator().manual_seed(0))


def build(name: str, **options: object) -> Transformer:
    # The layers of one model share a table; two models do not.
    shared = partial(gqa, position=Shared(t5), sink=True, gate=True)
    return network(shared if name == "t5-shared" else factory(name), **options)


def close_gates(model: Transformer, pairs: list[list[int]]) -> Transformer:
    for index, layer in enumerate(model.attentions()):
        layer.head_gate.factors = torch.tensor([float([index, head] not in pairs) for head in range(4)])
    return model


@pytest.mark.parametrize("name", ["mqa", "mla", "differential", "alibi", "t5-shared"])
@torch.no_grad()
def test_a_pruned_model_equals_a_gated_one_decodes_and_is_rebuilt(name):
    smaller, cache = build(name), Cache(2)
    smaller.prune(PAIRS)
    out = smaller(IDS, CAUSAL)
    assert error(out, close_gates(build(name), PAIRS)(IDS, CAUSAL)) <= 1e-5
    parts = [smaller(chunk, CAUSAL, cache) for chunk in IDS.split([6, 1, 4], dim=1)]
    assert error(torch.cat(parts, dim=1), out) <= 1e-5
    assert cache.num_bytes == 2 * 11 * 4 * sum(cache_elements(layer) for layer in smaller.attentions())
    rebuilt = build(name, pruned_heads=PAIRS)
    for parameter in rebuilt.parameters():
        parameter.fill_(0.5)
    rebuilt.load_state_dict(smaller.state_dict(), strict=True)
    assert torch.equal(rebuilt(IDS, CAUSAL), out)
    assert rebuilt.pruned_heads() == smaller.pruned_heads() == [[0, 3], [1, 0], [1, 2], [1, 3]]


@torch.no_grad()
def test_ablated_heads_keep_their_numbers_after_pruning():
    pruned_heads, ablated = [[0, 1], [1, 0]], [[0, 2], [1, 3], [1, 0]]
    smaller = network(gqa)
    smaller.prune(pruned_heads)
    made = network(partial(gqa, ablated_heads=ablated), pruned_heads=pruned_heads)
    made.load_state_dict(smaller.state_dict())
    assert [layer.head_gate.factors.tolist() for layer in made.attentions()] == [[1, 0, 1], [1, 1, 0]]
    assert error(made(IDS, CAUSAL), close_gates(network(gqa), pruned_heads + ablated)(IDS, CAUSAL)) <= 1e-5
