"""What holds of attention whatever its numbers are, for every variant."""

from functools import partial

import pytest
import torch
from attention_cases import error
from hypothesis import given, settings
from hypothesis import strategies as st
from variants import (
    POSITIONED,
    VARIANTS,
    alibi,
    differential,
    documents,
    gqa,
    make,
    mha,
    mla,
    mqa,
    prepared,
    projected,
    rotary,
    shaw,
    shaw_keys,
    t5,
    tokens,
)

from tinyformer.nn import AttentionMask, BaseAttention, DifferentialAttention

CAUSAL = AttentionMask(causal=True)
NAMES = pytest.mark.parametrize("name", VARIANTS)
FEW = settings(max_examples=3, deadline=None, derandomize=True)


# `test_cells` shows that the backends agree; what must hold bit for bit is asked of each that works differently.


@NAMES
@FEW
@given(cut=st.integers(1, 10), seed=st.integers(0, 100))
@torch.no_grad()
def test_a_later_token_changes_nothing_before_it_bit_for_bit(name, cut, seed):
    x = tokens(seed=seed)
    changed = x.clone()
    changed[:, cut:] = 3 * tokens(seed=seed + 1)[:, cut:]
    for backend in {"eager", "flash", "flex"} & {"eager", *VARIANTS[name][1].evaluation}:
        attention = make(name, backend)
        before, after = attention(x, CAUSAL), attention(changed, CAUSAL)
        assert torch.equal(before[:, :cut], after[:, :cut]), backend
        assert not torch.equal(before[:, cut], after[:, cut]), backend


@NAMES
@FEW
@given(length=st.integers(1, 11), causal=st.booleans(), value=st.sampled_from([-30.0, 0.0, 1e4]))
@torch.no_grad()
def test_padding_is_seen_by_nobody_and_a_padded_row_is_the_short_row(name, length, causal, value):
    x, mask = tokens(batch=2), AttentionMask(causal, torch.tensor([length, 11]))
    changed = x.clone()
    changed[0, length:] = value
    attention = make(name, "auto")
    out, after = attention(x, mask), attention(changed, mask)
    assert torch.equal(out[0, :length], after[0, :length])
    assert torch.equal(out[1], after[1])
    assert error(out[:1, :length], attention(x[:1, :length], AttentionMask(causal))) <= 1e-5


@NAMES
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@torch.no_grad()
def test_documents_are_sequences_of_their_own(name, causal):
    # Their places count from the row's beginning, so this shows too that shifted positions change nothing.
    x, ids, attention = tokens(2), documents(2), make(name, "auto")
    out = attention(x, AttentionMask(causal, documents=ids))
    for row in range(2):
        for document in ids[row].unique():
            own = ids[row] == document
            alone = attention(x[row : row + 1, own], AttentionMask(causal))
            assert error(out[row : row + 1, own], alone) <= 1e-5, (row, document)


@NAMES
@FEW
@given(order=st.permutations(range(11)))
@torch.no_grad()
def test_permuted_tokens_give_permuted_outputs_where_nothing_tells_places_apart(name, order):
    attention, x = make(name, "auto"), tokens()
    difference = error(attention(x[:, order]), attention(x)[:, order])
    if not any(position in name for position in POSITIONED):
        assert difference <= 1e-5
    elif list(order) not in (list(range(11)), list(range(11))[::-1]):
        assert difference > 1e-4


POSITIONS = {"rotary": rotary, "alibi": alibi, "t5": t5, "shaw": shaw, "shaw-keys": shaw_keys}


@pytest.mark.parametrize("position", POSITIONS)
@FEW
@given(first=st.integers(0, 20), shift=st.integers(1, 20), causal=st.booleans())
@torch.no_grad()
def test_tokens_look_alike_wherever_they_stand(position, first, shift, causal):
    attention, x = prepared(partial(gqa, position=POSITIONS[position])), tokens(1, 5)

    def at(place: int) -> torch.Tensor:
        row = torch.cat([tokens(1, place, seed=2), x, tokens(1, 45 - place, seed=3)], dim=1)
        ids = torch.arange(50).ge(place).long() + torch.arange(50).ge(place + 5).long()
        return attention(row, AttentionMask(causal, documents=ids[None]))[:, place : place + 5]

    assert error(at(first + shift), at(first)) <= 1e-5


# Weights.


@NAMES
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@torch.no_grad()
def test_the_weights_mix_the_values_into_the_output(name, causal):
    attention, x = make(name, "auto"), tokens()
    mask = AttentionMask(causal, torch.tensor([11, 6, 0]))
    weights, values = attention.weights(x, mask), attention.project(x)[2]
    values = values.repeat_interleave(4 // values.shape[1], dim=1)
    if "differential" in name:
        first, second = (weights[:, half::2] @ values for half in (0, 1))
        heads = attention.head_norm(first - attention.factor() * second) * (1 - attention.lambda_init)
    else:
        heads = weights @ values
    if name == "shaw":
        heads = heads + attention.position.mix(11, 11)(weights)
    if attention.output_gate is not None:
        heads = attention.output_gate(heads, x)
    assert error(attention(x, mask), projected(attention.head_gate(heads), attention)) <= 1e-5
    sums = weights.sum(-1)
    real = torch.cat([sums[0], sums[1, :, :6]], dim=-1)
    assert torch.count_nonzero(sums[2]) == 0
    if "sink" in name or "local_gaussian" in name:
        assert (real < 1).all()
    else:
        torch.testing.assert_close(real, torch.ones_like(real))


# Sharing keys and values.


def repeated_state(attention: BaseAttention, sizes: dict[str, int], group: int) -> dict[str, torch.Tensor]:
    """The weights with the heads of keys and values repeated; `sizes` are those of a head."""
    state = dict(attention.state_dict())
    for name, size in sizes.items():
        state[name] = state[name].unflatten(0, (-1, size)).repeat_interleave(group, dim=0).flatten(0, 1)
    return state


SHARED_OPTIONS = {
    "plain": {},
    "rotary+qk_norm": {"position": rotary, "qk_norm": True},
    "alibi+sink": {"position": alibi, "sink": True},
    "t5": {"position": t5},
    "shaw": {"position": shaw},
    "general": {"score": "general"},
    "additive": {"score": "additive"},
    "softcap+gate": {"softcap": 0.5, "gate": True},
    "local_gaussian": {"window": 4, "local_gaussian": True},
}


@pytest.mark.parametrize("options", SHARED_OPTIONS.values(), ids=SHARED_OPTIONS)
@pytest.mark.parametrize("shared", [gqa, mqa], ids=["gqa", "mqa"])
@torch.no_grad()
def test_grouped_queries_are_multi_head_with_repeated_keys_and_values(shared, options):
    grouped, whole = prepared(partial(shared, **options)), mha(**options)
    whole.load_state_dict(repeated_state(grouped, {"k_proj.weight": 8, "v_proj.weight": 8}, 4 // grouped.num_kv_heads))
    assert error(grouped(tokens(), CAUSAL), whole(tokens(), CAUSAL)) <= 1e-5


@torch.no_grad()
def test_differential_attention_shares_keys_and_values_alike():
    grouped, whole = prepared(differential), DifferentialAttention(32, 4)
    whole.load_state_dict(repeated_state(grouped, {"k_proj.weight": 8, "v_proj.weight": 8}, 2))
    assert error(grouped(tokens(), CAUSAL), whole(tokens(), CAUSAL)) <= 1e-5


# Windows.


@pytest.mark.parametrize("factory", [gqa, mla, differential], ids=["gqa", "mla", "differential"])
@pytest.mark.parametrize("backend", ["eager", "sdpa", "flash", "flex"])
@torch.no_grad()
def test_a_window_as_long_as_the_sequence_is_none(factory, backend):
    whole = prepared(partial(factory, backend=backend))(tokens(), CAUSAL)
    for window, is_none in ((11, True), (50, True), (10, False)):
        out = prepared(partial(factory, backend=backend, window=window))(tokens(), CAUSAL)
        assert (error(out, whole) <= 1e-6) == is_none
    whole = prepared(partial(factory, backend=backend))(tokens())
    for window, is_none in ((21, True), (20, False)):  # ten on both sides
        out = prepared(partial(factory, backend=backend, window=window))(tokens())
        assert (error(out, whole) <= 1e-6) == is_none


# Every switch does something, and every parameter learns.

SWITCHES = {
    "num_kv_heads": {"num_kv_heads": 2},
    "head_dim": {"head_dim": 12},
    "qk_norm": {"qk_norm": True},
    "bias": {"bias": True},
    "dot": {"score": "dot"},
    "general": {"score": "general"},
    "additive": {"score": "additive"},
    "window": {"window": 3},
    "window-pattern": {"window": [4, None]},
    "softcap": {"softcap": 0.5},
    "sink": {"sink": True},
    "gate": {"gate": True},
    "ablated_heads": {"ablated_heads": [[0, 1]]},
    "rotary": {"position": rotary},
    "alibi": {"position": alibi},
    "t5": {"position": t5},
    "shaw": {"position": shaw},
    "shaw-keys": {"position": shaw_keys},
}


@pytest.mark.parametrize("options", SWITCHES.values(), ids=SWITCHES)
@torch.no_grad()
def test_every_switch_changes_the_output(options):
    plain, switched = prepared(mha), prepared(partial(mha, **options))
    ours, theirs = switched.state_dict(), plain.state_dict()
    # The same weights wherever both have them.
    switched.load_state_dict(
        {n: theirs[n] if theirs.get(n, w).shape == w.shape and n in theirs else w for n, w in ours.items()}
    )
    assert error(switched(tokens(), CAUSAL), plain(tokens(), CAUSAL)) > 1e-3


SECOND_SWITCHES = {
    "local_gaussian": ({"window": 4}, {"local_gaussian": True}, mha),
    "layer_index": ({}, {"layer_index": 1, "num_layers": 2}, differential),
    "q_rank": ({}, {"q_rank": 10}, mla),
    "rope_head_dim": ({}, {"rope_head_dim": 6}, mla),
    "kv_rank": ({}, {"kv_rank": 20}, mla),
    "values": ({"position": shaw_keys}, {"position": shaw}, mha),
    "max_distance": ({"position": shaw}, {"position": partial(shaw, max_distance=2)}, mha),
    "t5-max_distance": ({"position": t5}, {"position": partial(t5, max_distance=6)}, mha),
    "rotary-base": ({"position": rotary}, {"position": partial(rotary, base=100.0)}, mha),
}


@pytest.mark.parametrize(("both", "options", "factory"), SECOND_SWITCHES.values(), ids=SECOND_SWITCHES)
@torch.no_grad()
def test_every_switch_of_a_part_changes_the_output(both, options, factory):
    plain, switched = prepared(partial(factory, **both)), prepared(partial(factory, **(both | options)))
    ours, theirs = switched.state_dict(), plain.state_dict()
    switched.load_state_dict(
        {n: theirs[n] if n in theirs and theirs[n].shape == w.shape else w for n, w in ours.items()}
    )
    assert error(switched(tokens(), CAUSAL), plain(tokens(), CAUSAL)) > 1e-3


@NAMES
def test_every_parameter_learns(name):
    attention = make(name, "auto")
    # A causal mask has T5 use all buckets; without one, Shaw all distances.
    (attention(tokens()).square().sum() + attention(tokens(), CAUSAL).square().sum()).backward()
    for key, parameter in attention.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        rows = parameter.grad.flatten(1).abs().amax(1) if parameter.dim() > 1 else parameter.grad.abs()
        learns = rows > 0
        if "ablated" in name and key != "o_proj.weight":  # head 1 is away; its pair shares keys and values
            learns = learns | (key == "q_proj.weight") & (torch.arange(len(rows)) // 8 == 1)
        assert learns.all(), key


def test_distinct_layers_hold_distinct_parameters():
    for name in VARIANTS:
        first, second = (VARIANTS[name][0](layer_index=i, num_layers=2) for i in range(2))
        assert not {id(module) for module in first.modules()} & {id(module) for module in second.modules()}, name
        ours = {parameter.data_ptr() for parameter in first.parameters()}
        assert not ours & {parameter.data_ptr() for parameter in second.parameters()}, name


def test_head_dim_stands_on_its_own_in_every_sharing():
    for factory in (mha, mla, differential):
        assert factory(head_dim=12).o_proj.weight.shape == (32, 48)
        assert prepared(partial(factory, head_dim=12))(tokens()).shape == (3, 11, 32)
