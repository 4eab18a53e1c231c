from functools import partial

import pytest
import torch
from attention_cases import ON_CPU, error
from variants import make, tokens

from tinyformer.nn import Attention, AttentionMask, HeadGate, OutputGate

CAUSAL = AttentionMask(causal=True)


def sized(attention: Attention, seed: int = 0) -> Attention:
    """The same module with random parameters, biases included."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) * parameter.shape[-1] ** -0.5)
    return attention


# Ablated heads.


@pytest.mark.parametrize("backend", ON_CPU)
@torch.no_grad()
def test_an_ablated_head_is_its_columns_of_o_proj_zeroed(backend):
    make = partial(Attention, 32, 4, 2, bias=True, backend=backend, layer_index=1, num_layers=3)
    ablated, whole = (sized(make(ablated_heads=pairs)) for pairs in ([[1, 2], [0, 0], [2, 3]], []))
    assert ablated.head_gate.factors.tolist() == [1, 1, 0, 1]
    with torch.no_grad():
        whole.o_proj.weight[:, 16:24] = 0
    x, mask = tokens(2, 7), AttentionMask(causal=True)
    assert torch.equal(ablated(x, mask), whole(x, mask))


def test_an_ablated_head_learns_nothing_and_the_others_do():
    attention = sized(Attention(32, 4, ablated_heads=[[0, 1], [0, 3]]))
    attention(tokens(2, 7)).square().sum().backward()
    for proj in (attention.q_proj, attention.k_proj, attention.v_proj):
        by_head = proj.weight.grad.unflatten(0, (4, 8)).abs().amax(dim=(1, 2))
        assert (by_head == 0).tolist() == [False, True, False, True]


def test_the_gate_leaves_the_other_heads_alone():
    heads = torch.randn(2, 4, 5, 8)
    gated = HeadGate(4, [3])(heads)
    assert torch.equal(gated[:, :3], heads[:, :3])
    assert torch.count_nonzero(gated[:, 3]) == 0


def test_an_open_gate_is_the_same_tensor():
    heads = torch.randn(2, 4, 5, 8)
    assert HeadGate(4)(heads) is heads


def test_the_gate_is_no_part_of_the_weights():
    ablated, whole = Attention(32, 4, ablated_heads=[[0, 1]]), Attention(32, 4)
    assert ablated.state_dict().keys() == whole.state_dict().keys()
    ablated.load_state_dict(whole.state_dict())
    assert ablated.head_gate.factors.tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize(
    "pair", [[2, 0], [0, 4], [-1, 0], [0, -1], [0], [0, 1, 1]], ids=lambda pair: ",".join(map(str, pair))
)
def test_a_pair_that_is_no_head_is_refused_with_the_last_one(pair):
    with pytest.raises(ValueError, match=r"^attention\.ablated_heads holds") as caught:
        Attention(32, 4, ablated_heads=[[0, 0], pair], num_layers=2)
    assert str(pair) in str(caught.value)
    assert "[1, 3] is the last" in str(caught.value)
    assert Attention(32, 4, ablated_heads=[[1, 3]], num_layers=2, layer_index=1).head_gate.factors[3] == 0


@pytest.mark.parametrize("name", ["mla", "differential", "gate", "sink"])
def test_an_ablated_head_is_gone_from_every_variant(name):
    ablated, whole = make(name, ablated_heads=[[0, 2]]), make(name)
    with torch.no_grad():
        whole.o_proj.weight[:, 16:24] = 0
    assert torch.equal(ablated(tokens(), CAUSAL), whole(tokens(), CAUSAL))
    assert not torch.equal(ablated(tokens(), CAUSAL), make(name)(tokens(), CAUSAL))


# Gated outputs.


def test_each_token_gates_each_head_by_hand():
    gate = OutputGate(2, 2)
    with torch.no_grad():
        gate.proj.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, -2.0]]))
        gate.proj.bias.copy_(torch.tensor([0.0, 1.0]))
    x = torch.tensor([[[3.0, 0.5], [0.0, 2.0]]])
    # Head 0 has the logits 3 and 0, head 1 has 1 - 2 · 0.5 = 0 and 1 - 2 · 2 = -3.
    opening = torch.tensor([[[0.952574, 0.5], [0.5, 0.047426]]])
    heads = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]]])
    torch.testing.assert_close(gate(heads, x), heads * opening[..., None], rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_gate_stands_between_the_heads_and_their_projection():
    gated, plain = make("gate"), make("gqa")
    plain.load_state_dict(gated.state_dict(), strict=False)
    x, parts = tokens(), []
    for head in range(4):
        # One head alone, and all of its output times that head's opening.
        alone = make("gqa", ablated_heads=[[0, other] for other in range(4) if other != head])
        alone.load_state_dict(plain.state_dict())
        logits = x @ gated.output_gate.proj.weight[head] + gated.output_gate.proj.bias[head]
        parts.append(alone(x, CAUSAL) / (1 + torch.exp(-logits)).unsqueeze(-1))
    assert error(gated(x, CAUSAL), sum(parts)) <= 1e-5


@torch.no_grad()
def test_across_sequences_those_who_ask_gate():
    attention, context = make("gate"), tokens(seq=6, seed=4)
    out = attention(tokens(), context=context)
    with torch.no_grad():
        attention.output_gate.proj.bias -= 100
    assert out.shape == (3, 11, 32)
    assert attention(tokens(), context=context).abs().max() < 1e-20
