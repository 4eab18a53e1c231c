"""Gates: ablated heads, factors for each sequence, replacements, gradients, and gated outputs."""

from functools import partial

import pytest
import torch
from torch import nn

from nn.attention_cases import error
from nn.variants import alibi, gqa, make, network, tokens
from tinyformer.nn import Attention, AttentionMask, HeadGate, OutputGate

CAUSAL = AttentionMask(causal=True)


def heads_before_o_proj(attention: Attention, x: torch.Tensor) -> list[torch.Tensor]:
    """The outputs of the heads, as the output projection receives them."""
    inputs = []
    hook = attention.o_proj.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    attention(x, CAUSAL)
    hook.remove()
    return list(inputs[0].unflatten(-1, (4, -1)).unbind(-2))


@pytest.mark.parametrize("name", ["mha", "gqa", "mla", "differential", "gqa+gate", "sink", "relative"])
@torch.no_grad()
def test_a_closed_head_leaves_the_others_bit_for_bit(name):
    attention, x, head = make(name, "auto"), tokens(), 2
    before = heads_before_o_proj(attention, x)
    attention.head_gate.factors = torch.ones(4).index_fill_(0, torch.tensor(head), 0)
    after = heads_before_o_proj(attention, x)
    assert torch.count_nonzero(after[head]) == 0
    assert torch.count_nonzero(before[head]) > 0
    assert all(torch.equal(after[other], before[other]) for other in range(4) if other != head)


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


# Replacements of a head.

# Two sequences of two tokens, two heads of one dimension; head 1 is closed in both, head 0 half closed in the second.
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
def test_a_replacement_takes_the_place_of_a_closed_head(replacement, expected):
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
def test_the_output_gate_acts_between_heads_and_o_proj():
    gated, plain = make("gqa+gate"), make("gqa")
    plain.load_state_dict(gated.state_dict(), strict=False)
    x, parts = tokens(), []
    for head in range(4):
        # One head alone, its output multiplied by that head's gate.
        alone = make("gqa", ablated_heads=[[0, other] for other in range(4) if other != head])
        alone.load_state_dict(plain.state_dict())
        logits = x @ gated.output_gate.proj.weight[head] + gated.output_gate.proj.bias[head]
        parts.append(alone(x, CAUSAL) / (1 + torch.exp(-logits)).unsqueeze(-1))
    assert error(gated(x, CAUSAL), sum(parts)) <= 1e-5
