from functools import partial

import pytest
import torch
from attention_cases import ON_CPU, error
from torch import nn
from variants import alibi, gqa, make, network, tokens

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
    with pytest.raises(ValueError, match=r"^ablated_heads=") as caught:
        Attention(32, 4, ablated_heads=[[0, 0], pair], num_layers=2)
    assert str(caught.value) == (
        f"ablated_heads=[{pair}]: must hold [layer, head] pairs of a model with 2 layers of 4 heads; "
        "ablated_heads=[[1, 3]] works."
    )
    assert Attention(32, 4, ablated_heads=[[1, 3]], num_layers=2, layer_index=1).head_gate.factors[3] == 0


@pytest.mark.parametrize("name", ["mla", "differential", "gate", "sink"])
def test_an_ablated_head_is_gone_from_every_variant(name):
    ablated, whole = make(name, ablated_heads=[[0, 2]]), make(name)
    with torch.no_grad():
        whole.o_proj.weight[:, 16:24] = 0
    assert torch.equal(ablated(tokens(), CAUSAL), whole(tokens(), CAUSAL))
    assert not torch.equal(ablated(tokens(), CAUSAL), make(name)(tokens(), CAUSAL))


def heads_before_o_proj(attention: Attention, x: torch.Tensor) -> list[torch.Tensor]:
    """The output of each head, as the output projection is given it."""
    found = []
    hook = attention.o_proj.register_forward_pre_hook(lambda module, args: found.append(args[0]))
    attention(x, CAUSAL)
    hook.remove()
    return list(found[0].unflatten(-1, (4, -1)).unbind(-2))


@pytest.mark.parametrize("name", ["mha", "gqa", "mla", "differential", "gate", "sink", "shaw", "local_gaussian"])
@pytest.mark.parametrize("head", range(4))
@torch.no_grad()
def test_a_head_goes_and_the_others_stay_bit_for_bit(name, head):
    attention, x = make(name, "auto"), tokens()
    before = heads_before_o_proj(attention, x)
    attention.head_gate.factors = torch.ones(4).index_fill_(0, torch.tensor(head), 0)
    after, out = heads_before_o_proj(attention, x), attention(x, CAUSAL)
    assert torch.count_nonzero(after[head]) == 0
    assert torch.count_nonzero(before[head]) > 0
    assert all(torch.equal(after[other], before[other]) for other in range(4) if other != head)
    attention.head_gate.factors = None
    attention.o_proj.weight.unflatten(1, (4, -1))[:, head] = 0
    assert torch.equal(attention(x, CAUSAL), out)


# Factors of each sequence.


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("name", ["gqa", "mla", "differential", "gate", "t5", "sink+window"])
@torch.no_grad()
def test_each_sequence_has_factors_of_its_own(name, backend):
    attention, x = make(name, backend), tokens(4)
    factors = torch.tensor([[1.0, 0.0, 1.0, 1.0], [0.5, 2.0, 0.0, -1.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    attention.head_gate.factors = factors
    together = attention(x, CAUSAL)
    for row in range(4):
        attention.head_gate.factors = factors[row]
        assert error(together[row : row + 1], attention(x[row : row + 1], CAUSAL)) <= 1e-5
    assert torch.count_nonzero(together[2]) == 0
    attention.head_gate.factors = None
    assert error(together[3:], attention(x[3:], CAUSAL)) <= 1e-5


def test_factors_by_hand():
    gate = HeadGate(2)
    gate.factors = torch.tensor([[2.0, 0.5], [0.0, 1.0]])
    heads = torch.tensor([[[[1.0, 3.0]], [[2.0, 6.0]]], [[[5.0, 7.0]], [[4.0, 8.0]]]])  # two sequences of one token
    assert gate(heads).tolist() == [[[[2, 6]], [[1, 3]]], [[[0, 0]], [[4, 8]]]]


# What stands in for a head.

# Two sequences of two tokens, two heads of one dimension; head 1 is away in both, head 0 half away in the second.
HEADS = torch.tensor([[[[1.0], [3.0]], [[10.0], [30.0]]], [[[5.0], [7.0]], [[50.0], [70.0]]]])
FACTORS = torch.tensor([[1.0, 0.0], [0.5, 0.0]])


class Constant(nn.Module):
    def forward(self, heads):
        return torch.full_like(heads, 8)


@pytest.mark.parametrize(
    ("replacement", "expected"),
    [
        # Means: (1 + 3 + 5 + 7) / 4 = 4 and 40; 5 / 2 + 4 / 2.
        (lambda heads: heads.mean(dim=(0, 2), keepdim=True), [[[1, 3], [40, 40]], [[4.5, 5.5], [40, 40]]]),
        # The other sequence's: 5 / 2 + 1 / 2 and 7 / 2 + 3 / 2.
        (lambda heads: heads.flip(0), [[[1, 3], [50, 70]], [[3, 5], [10, 30]]]),
        (Constant(), [[[1, 3], [8, 8]], [[6.5, 7.5], [8, 8]]]),
        (None, [[[1, 3], [0, 0]], [[2.5, 3.5], [0, 0]]]),
    ],
    ids=["mean", "other-sequence", "module", "nothing"],
)
def test_something_stands_in_for_a_head(replacement, expected):
    gate = HeadGate(2)
    gate.factors, gate.replacement = FACTORS, replacement
    assert gate(HEADS).squeeze(-1).tolist() == expected


def test_nothing_stands_in_for_a_head_that_is_there():
    gate = HeadGate(2)
    gate.replacement = lambda heads: 0 / 0
    assert gate(HEADS) is HEADS


@torch.no_grad()
def test_a_mean_in_a_heads_place_is_its_mean_through_o_proj():
    attention, x = make("gqa"), tokens()
    heads = heads_before_o_proj(attention, x)
    heads[2] = heads[2].mean(dim=(0, 1), keepdim=True).expand_as(heads[2])
    attention.head_gate.factors = torch.tensor([1.0, 1.0, 0.0, 1.0])
    attention.head_gate.replacement = lambda heads: heads.mean(dim=(0, 2), keepdim=True)
    assert error(attention(x, CAUSAL), attention.o_proj(torch.cat(heads, dim=-1))) <= 1e-6


# The gradient of the factors, by which heads are ranked.


@pytest.mark.parametrize("backend", ["eager", "sdpa", "flash"])
@pytest.mark.parametrize("shape", [(4,), (3, 4)], ids=["shared", "each-sequence"])
@pytest.mark.parametrize("replaced", [False, True], ids=["zero", "mean"])
def test_the_gradient_of_the_gate_is_a_finite_difference(shape, backend, replaced):
    model = network(partial(gqa, position=alibi, backend=backend, sink=True)).double()
    gate = model.attentions()[0].head_gate
    gate.replacement = (lambda heads: heads.mean(dim=(0, 2), keepdim=True)) if replaced else None
    ids = torch.randint(50, (3, 7), generator=torch.Generator().manual_seed(0))

    def loss(factors):
        gate.factors = factors
        return model(ids, CAUSAL).logsumexp(dim=-1).square().mean()

    factors = torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    [gradient] = torch.autograd.grad(loss(factors), factors)
    with torch.no_grad():
        for index in range(factors.numel()):
            step = torch.zeros(factors.numel(), dtype=torch.float64).index_fill_(0, torch.tensor(index), 1e-5)
            difference = (loss(factors + step.view(shape)) - loss(factors - step.view(shape))) / 2e-5
            assert gradient.flatten()[index].item() == pytest.approx(difference.item(), rel=1e-6, abs=1e-9)
    assert (gradient.abs() > 1e-6).all()


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
