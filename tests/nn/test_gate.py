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


def heads_before_o_proj(attention: Attention, x: torch.Tensor) -> list[torch.Tensor]:
    """The output of each head, as the output projection is given it."""
    found = []
    hook = attention.o_proj.register_forward_pre_hook(lambda module, args: found.append(args[0]))
    attention(x, CAUSAL)
    hook.remove()
    return list(found[0].unflatten(-1, (4, -1)).unbind(-2))


@pytest.mark.parametrize("name", ["mha", "gqa", "mla", "differential", "gqa+gate", "sink", "relative"])
@torch.no_grad()
def test_a_head_goes_and_the_others_stay_bit_for_bit(name):
    attention, x, head = make(name, "auto"), tokens(), 2
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


@pytest.mark.parametrize(("name", "backend"), [("gqa", "flash"), ("differential", "sdpa"), ("sink+window", "flex")])
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


# The gradient of the factors, by which heads are ranked.


@pytest.mark.parametrize(("shape", "replaced", "backend"), [((4,), False, "flash"), ((3, 4), True, "eager")])
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
    gated, plain = make("gqa+gate"), make("gqa")
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
    attention, context = make("gqa+gate"), tokens(seq=6, seed=4)
    out = attention(tokens(), context=context)
    with torch.no_grad():
        attention.output_gate.proj.bias -= 100
    assert out.shape == (3, 11, 32)
    assert attention(tokens(), context=context).abs().max() < 1e-20
