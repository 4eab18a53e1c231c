"""A pruned layer computes what the layer with those heads gated off computes, and is smaller."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from attention_cases import error
from torch import Tensor
from variants import ANY, BY_HAND, CAPPED, LEARNED, prepared, tokens

from tinyformer.analysis import map_names
from tinyformer.nn import (
    ALiBi,
    Attention,
    AttentionMask,
    BaseAttention,
    DifferentialAttention,
    LatentAttention,
    RotaryPosition,
    ShawPosition,
    T5Position,
    kernel_of_layer,
    prune_heads,
    resolve_backend,
)

D_MODEL, NUM_HEADS = 24, 6
CAUSAL = AttentionMask(causal=True)
SHARINGS: dict[str, Callable[..., BaseAttention]] = {
    "mha": partial(Attention, D_MODEL, NUM_HEADS),
    "gqa": partial(Attention, D_MODEL, NUM_HEADS, 2),
    "mqa": partial(Attention, D_MODEL, NUM_HEADS, 1),
    "mla": partial(LatentAttention, D_MODEL, NUM_HEADS, kv_rank=8),
    "differential": partial(DifferentialAttention, D_MODEL, NUM_HEADS, 2),
}
POSITIONS = {
    "none": (None, ANY),
    "rotary": (partial(RotaryPosition, 32), ANY),
    "alibi": (partial(ALiBi, NUM_HEADS), ANY),
    "t5": (partial(T5Position, NUM_HEADS, num_buckets=8, max_distance=10), LEARNED),
    "shaw": (partial(ShawPosition, max_distance=3), BY_HAND),
    "shaw-keys": (partial(ShawPosition, max_distance=3, values=False), LEARNED),
}
EXTRAS = {
    "plain": ({}, ANY),
    "bias": ({"bias": True}, ANY),
    "sink": ({"sink": True}, ANY),
    "gate": ({"gate": True}, ANY),
    "qk_norm": ({"qk_norm": True}, ANY),
    "general": ({"score": "general"}, ANY),
    "additive": ({"score": "additive"}, BY_HAND),
    "softcap": ({"softcap": 0.5}, CAPPED),
    "local_gaussian": ({"window": 4, "local_gaussian": True}, BY_HAND),
    "several": ({"bias": True, "sink": True, "gate": True, "qk_norm": True, "score": "general"}, ANY),
}
# Of two K/V heads the first serves heads 0 to 2, the second 3 to 5.
PRUNED = {
    "one": [1],
    "evenly": [0, 4],
    "a-group": [3, 4, 5],
    "unevenly": [0, 1, 4],
    "all-but-one": [0, 1, 2, 4, 5],
}


def make(sharing: str, position: str = "none", extra: str = "plain", **options: object) -> BaseAttention:
    """A layer in float64, where nothing but rounding is 1e-10."""
    options = {"position": POSITIONS[position][0], "backend": "eager"} | EXTRAS[extra][0] | options
    return prepared(partial(SHARINGS[sharing], **options)).double()


def factors_without(heads: list[int]) -> Tensor:
    """A gate that is closed for some heads."""
    return torch.ones(NUM_HEADS).index_fill_(0, torch.tensor(heads), 0)


def gated(attention: BaseAttention, heads: list[int]) -> BaseAttention:
    """A copy of the layer with some heads gated off."""
    closed = copy.deepcopy(attention)
    closed.head_gate.factors = factors_without(heads)
    return closed


def pruned(attention: BaseAttention, heads: list[int]) -> BaseAttention:
    """A copy of the layer without some heads."""
    smaller = copy.deepcopy(attention)
    prune_heads(smaller, heads)
    return smaller


X = tokens(2, 9, d_model=D_MODEL).double()
CASES = [
    (sharing, position, extra)
    for sharing in SHARINGS
    for position in POSITIONS
    for extra in EXTRAS
    # Shaw's values need heads that compare as many dimensions as they mix; without them, one sharing is as another.
    if position != ("shaw" if sharing in ("mla", "differential") else "shaw-keys")
]
SIMPLE = [case for case in CASES if case[1] == "none" or case[2] in ("plain", "several")]
# Each sharing, position and extra at least once, in the part of the grid that runs at every push.
DIAGONAL = [case for case in SIMPLE if case[0] in ("gqa", "differential")] + [
    ("mha", "none", "plain"),
    ("mqa", "alibi", "several"),
    ("mla", "rotary", "several"),
]


def ids(case: tuple[str, ...]) -> str:
    return "-".join(case)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in DIAGONAL else pytest.mark.nightly, id="-".join(case)) for case in CASES],
)
@torch.no_grad()
def test_pruned_is_gated(case):
    whole, x = make(*case), X[:1]
    # Groups are a matter of those that have several.
    names = PRUNED if case[0] in ("gqa", "differential") else ("one", "all-but-one")
    closed = [factors_without(PRUNED[name]) for name in names]
    whole.head_gate.factors = torch.stack([torch.ones(NUM_HEADS), *closed])
    open_, *expected = whole(x.expand(1 + len(closed), -1, -1), CAUSAL).split(1)
    whole.head_gate.factors = None
    for name, out in zip(names, expected, strict=True):
        assert error(pruned(whole, PRUNED[name])(x, CAUSAL), out) <= 1e-10, name
        assert error(open_, out) > 1e-2, name  # the heads that went did something


def learn(attention: BaseAttention) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradients of the input and all parameters."""
    inputs = {"x": X.clone().requires_grad_()} | dict(attention.named_parameters())
    out = attention(inputs["x"], CAUSAL)
    upstream = torch.linspace(0, 20, out.numel(), dtype=out.dtype).sin().view_as(out)
    gradients = torch.autograd.grad(out, list(inputs.values()), upstream, allow_unused=True, materialize_grads=True)
    return out.detach(), dict(zip(inputs, gradients, strict=True))


def sliced(attention: BaseAttention, gradients: dict[str, Tensor], heads: list[int]) -> dict[str, Tensor]:
    """The gradients that a layer without some heads has: those that are left if the layer's weights are gradients."""
    other = copy.deepcopy(attention)
    other.load_state_dict({name: gradients[name] for name, _ in other.named_parameters()}, strict=True)
    return {"x": gradients["x"]} | {
        name: parameter.detach() for name, parameter in pruned(other, heads).named_parameters()
    }


@pytest.mark.nightly
@pytest.mark.parametrize("case", SIMPLE, ids=ids)
def test_what_is_left_learns_alike_on_every_backend(case):
    able = [POSITIONS[case[1]][1], EXTRAS[case[2]][1]]
    training = {"eager"}.union(set.intersection(*(set(part.training) for part in able)))
    evaluation = training.union(set.intersection(*(set(part.evaluation) for part in able)))
    whole = make(*case)
    for name in ("evenly", "unevenly"):
        heads = PRUNED[name]
        expected, all_gradients = learn(gated(whole, heads))
        left = sliced(whole, all_gradients, heads)
        # Nothing of what went had a gradient, so all of it is in what is left.
        total, total_left = (sum(g.square().sum() for g in found.values()) for found in (all_gradients, left))
        assert total_left.item() == pytest.approx(total.item(), rel=1e-10)
        smaller = pruned(whole, heads)
        for backend in evaluation:
            smaller.backend = backend
            if backend not in training:
                with torch.no_grad():
                    assert error(smaller(X, CAUSAL), expected) <= 1e-10, (name, backend)
                continue
            out, gradients = learn(smaller)
            assert error(out, expected) <= 1e-10, (name, backend)
            assert gradients.keys() == left.keys()
            for key, gradient in gradients.items():
                assert error(gradient, left[key]) <= 1e-9, (name, backend, key)


# What a pruned layer is.


def test_the_weights_of_a_head_by_hand():
    """Three of six heads of 4 dimensions go; heads 0 to 2 read K/V head 0, which stays, heads 3 to 5 head 1, too."""
    whole = make("gqa", extra="several")
    smaller = pruned(whole, [0, 2, 5])
    rows = [4, 5, 6, 7, 12, 13, 14, 15, 16, 17, 18, 19]  # of heads 1, 3 and 4
    state, left = whole.state_dict(), smaller.state_dict()
    assert torch.equal(left["q_proj.weight"], state["q_proj.weight"][rows])
    assert torch.equal(left["q_proj.bias"], state["q_proj.bias"][rows])
    assert torch.equal(left["o_proj.weight"], state["o_proj.weight"][:, rows])
    for name in ("output_gate.proj.weight", "output_gate.proj.bias", "sink", "score.weight"):
        assert torch.equal(left[name], state[name][[1, 3, 4]])
    for name in ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias", "o_proj.bias", "q_norm.weight"):
        assert torch.equal(left[name], state[name])
    assert left.keys() == state.keys()
    assert (smaller.num_heads, smaller.num_kv_heads, smaller.head_map.ids) == (3, 2, [1, 3, 4])
    assert smaller.head_map.kv_heads == [0, 1, 1]
    # For each head 4 queries and 4 columns of o_proj of 24, 4 biases, 24 + 1 of its gate, a sink, 4 x 4 of its score.
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in (whole, smaller)]
    assert sizes[0] - sizes[1] == 3 * (4 * 24 + 4 * 24 + 4 + 25 + 1 + 16)


@pytest.mark.parametrize(
    ("sharing", "heads", "kv_heads", "kv_index"),
    [
        ("mha", [1, 4], 4, None),
        ("gqa", [0, 4], 2, None),
        ("gqa", [1], 2, [0, 0, 1, 1, 1]),
        ("gqa", [3, 4, 5], 1, None),
        ("gqa", [0, 3, 4, 5], 1, None),
        ("gqa", [0, 1, 3, 4], 2, None),
        ("mqa", [0, 5], 1, None),
        ("mla", [2], 5, None),
        ("differential", [3, 4, 5], 1, None),
        ("differential", [4, 5], 2, [0, 0, 0, 1]),
    ],
)
def test_a_kv_head_goes_with_the_last_that_reads_it(sharing, heads, kv_heads, kv_index):
    smaller = pruned(make(sharing), heads)
    assert smaller.num_heads == 6 - len(heads)
    assert smaller.num_kv_heads == kv_heads
    assert smaller.v_proj.weight.shape[0] == kv_heads * 4 == smaller.v_proj.out_features
    assert smaller.q_proj.out_features == len(smaller.q_proj.weight)
    assert smaller.o_proj.in_features == 4 * smaller.num_heads == smaller.o_proj.weight.shape[1]
    kv_buffer = smaller.head_map._kv_index
    assert (None if kv_buffer is None else kv_buffer.tolist()) == kv_index


def test_heads_keep_their_numbers():
    smaller = pruned(make("gqa"), [0, 4])
    assert smaller.head_map.ids == [1, 2, 3, 5]
    assert map_names(smaller) == ["01", "02", "03", "05"]
    assert map_names(pruned(make("differential"), [0, 1, 2, 4])) == ["03a", "03b", "05a", "05b"]
    assert map_names(make("differential"))[:3] == ["00a", "00b", "01a"]
    maps = smaller.maps(X, CAUSAL)
    torch.testing.assert_close(maps.weights, make("gqa").maps(X, CAUSAL).weights[:, [1, 2, 3, 5]])


@torch.no_grad()
def test_the_gate_of_each_sequence_is_pruned_with_its_heads():
    whole = make("gqa")
    whole.head_gate.factors = torch.tensor([[1.0, 0.0, 2.0, 1.0, 0.5, 3.0], [1.0, 0.0, -1.0, 0.0, 4.0, 1.0]])
    smaller = pruned(whole, [1])
    assert smaller.head_gate.factors.tolist() == [[1, 2, 1, 0.5, 3], [1, -1, 0, 4, 1]]
    assert error(smaller(X, CAUSAL), whole(X, CAUSAL)) <= 1e-10


@pytest.mark.parametrize("backend", ["eager", "sdpa", "flash"])
@pytest.mark.parametrize("sharing", SHARINGS)
def test_the_kernel_of_uneven_groups_is_found(sharing, backend):
    smaller = pruned(make(sharing, backend=backend), [0, 1, 4])
    expected = smaller(X, CAUSAL)
    assert resolve_backend(smaller, "cpu", torch.float64, CAUSAL).name == backend
    assert kernel_of_layer(smaller, "cpu", torch.float64, CAUSAL) == ("eager" if backend == "eager" else "flash")
    assert torch.equal(smaller(X, CAUSAL), expected)


@pytest.mark.parametrize("case", [case for case in SIMPLE if case[2] == "several"], ids=ids)
@torch.no_grad()
def test_the_maps_of_those_that_are_left(case):
    whole, rows = make(*case), torch.tensor([8, 3])
    for heads in ([0, 4], [0, 1, 4]):
        smaller = pruned(whole, heads)
        places = [map_names(whole).index(name) for name in map_names(smaller)]
        for found, expected in zip(smaller.maps(X, CAUSAL, rows=rows), whole.maps(X, CAUSAL, rows=rows), strict=True):
            torch.testing.assert_close(found, expected[:, places], rtol=1e-10, atol=1e-10)
