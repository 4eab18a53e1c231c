"""Gates by hand: factors of each sequence, replacements of heads, and gated outputs; the laws close them."""

import pytest
import torch
from torch import nn

from tinyformer.nn import AttentionMask, HeadGate, OutputGate

CAUSAL = AttentionMask(causal=True)


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
