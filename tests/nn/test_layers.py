"""Norms, residual connections, gates, the readout of a class and the loss of a vocabulary: each is its formula.

Feed-forward networks, norms and readouts of tokens are those of models in `tests/interop`.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nn.model_cases import randomised
from tinyformer.nn import (
    Attention,
    AttentionMask,
    ClassReadout,
    HeadGate,
    OutputGate,
    Residual,
    vocabulary_cross_entropy,
)
from tinyformer.nn.heads import without_own_value
from tinyformer.nn.readout import IGNORED, TargetNats, padded_scores


def test_residual_is_skip_x_plus_branch_f_added_before_it_is_rounded():
    x, update = torch.randn(2, 3, 4).bfloat16(), torch.randn(2, 3, 4)
    for scales, skip, branch in (
        ({}, 1, 1),
        ({"skip": 0, "branch": 0.5}, 0, 0.5),
        ({"skip": [1, 0, 2], "branch": [0, 1, 0.5], "layer_index": 2, "num_layers": 3}, 2, 0.5),
    ):
        assert torch.equal(Residual(**scales)(x, update), (skip * x.float() + branch * update).bfloat16())


# Gates. Two sequences of two tokens, two heads of one dimension; head 1 is closed in both, head 0 half closed in one.

HEADS = torch.tensor([[[[1.0], [3.0]], [[10.0], [30.0]]], [[[5.0], [7.0]], [[50.0], [70.0]]]])


def test_a_replacement_takes_the_place_of_a_closed_head():
    gate = HeadGate(2)
    gate.factors = torch.tensor([[1.0, 0.0], [0.5, 0.0]])
    assert gate(HEADS).squeeze(-1).tolist() == [[[1, 3], [0, 0]], [[2.5, 3.5], [0, 0]]]
    gate.replacement = lambda heads: heads.mean(dim=(0, 2), keepdim=True)
    # Means: (1 + 3 + 5 + 7) / 4 = 4 and 40; 5 / 2 + 4 / 2.
    assert gate(HEADS).squeeze(-1).tolist() == [[[1, 3], [40, 40]], [[4.5, 5.5], [40, 40]]]


def test_each_token_gates_each_head():
    gate, x = randomised(OutputGate(input_dim=3, num_heads=2)), torch.randn(2, 2, 3)
    opening = (x @ gate.proj.weight.T + gate.proj.bias).sigmoid()
    torch.testing.assert_close(gate(HEADS, x), HEADS * opening.transpose(1, 2)[..., None])
    of_elements, wide = randomised(OutputGate(input_dim=3, num_heads=2, width=5)), torch.randn(2, 2, 2, 5)
    opening = of_elements.proj(x).sigmoid()
    for head in range(2):
        expected = wide[:, head] * opening[..., 5 * head : 5 * head + 5]
        torch.testing.assert_close(of_elements(wide, x)[:, head], expected)


@pytest.mark.parametrize("pooling", ["cls", "mean", "attention"])
def test_a_class_is_read_from_the_real_tokens(pooling):
    readout, x = randomised(ClassReadout(nn.Embedding(11, 6), ["a", "b", "c"], pooling)), torch.randn(2, 4, 6)
    mask, pooled = AttentionMask(lengths=torch.tensor([4, 3])), []
    for tokens in (x[0], x[1, :3]):
        weights = torch.ones(len(tokens)) / len(tokens)
        if pooling == "attention":  # additive attention with one query
            weights = (torch.tanh(readout.pooling.key_proj(tokens)) @ readout.pooling.query.weight[0]).softmax(0)
        pooled.append(tokens[0] if pooling == "cls" else weights @ tokens)
    expected = readout.proj(torch.stack(pooled))
    torch.testing.assert_close(readout(x, mask), expected)
    torch.testing.assert_close(readout(x)[0], expected[0])
    x[1, 3] = torch.nan  # padding that is not finite harms no text
    torch.testing.assert_close(readout(x, mask), expected)


# Cross-entropy over a vocabulary, against PyTorch's own of all scores at once.

VOCAB_SIZE = 101


def case(ignored=(), bias=True):
    torch.manual_seed(0)
    x, weight, number = (torch.randn(*sizes).double().requires_grad_() for sizes in ((2, 15, 8), (101, 8), (101,)))
    targets = torch.randint(VOCAB_SIZE, (2, 15))
    targets[:, list(ignored)] = IGNORED
    return x, weight, targets, number if bias else None


def result(function, x, weight, targets, bias):
    loss = function(x, weight, targets, bias)
    return [loss, *torch.autograd.grad(loss, [x, weight] if bias is None else [x, weight, bias])]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("rows", [1, 7, 20, 30])
def test_parts_come_to_the_whole(rows, bias):
    def reference(x, weight, targets, bias):
        logits = F.linear(x, weight, bias).flatten(0, 1)
        return F.cross_entropy(2 * torch.tanh(logits / 2), targets.flatten())

    ours, given = partial(vocabulary_cross_entropy, max_logits=rows * VOCAB_SIZE, softcap=2.0), case((0, 3, 14), bias)
    torch.testing.assert_close(result(ours, *given), result(reference, *given))


class Made(TorchDispatchMode):
    """The number of elements of the largest tensor that was made, and the rows of each product that gives scores."""

    elements, rows = 0, ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        if func is torch.ops.aten.addmm.default:
            self.rows = (*self.rows, len(made))
        return made


@pytest.mark.parametrize(
    ("allowed", "parts"), [(30, [30]), (28, [26, 2, 2, 2, 2]), (20, [10] * 5), (12, [6] * 9), (1, [1] * 59)]
)
def test_scores_beyond_those_allowed_are_computed_in_parts_and_again_in_the_backward_pass(allowed, parts):
    given = case()
    with Made() as made:
        vocabulary_cross_entropy(*given, max_logits=allowed * VOCAB_SIZE).backward()
    assert made.rows == tuple(parts)
    assert made.elements == max(*parts, 8) * VOCAB_SIZE  # 8 of the weight's gradient


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
def test_rows_of_zeros_change_no_score(bias):
    x, weight, _, bias = case(bias=bias)
    inputs = [x, weight] if bias is None else [x, weight, bias]
    scores = [padded_scores(x, weight, bias)[..., :VOCAB_SIZE], F.linear(x, weight, bias)]
    torch.testing.assert_close(*scores)
    pull = torch.randn_like(scores[0])
    torch.testing.assert_close(*(torch.autograd.grad(score, inputs, pull) for score in scores))
    with Made() as made:
        padded_scores(x, weight, bias)
    assert made.elements == 30 * 128


def test_nats_of_compiled_code_and_their_gradient_are_those_of_cross_entropy():
    x, weight, targets, _ = case((0, 3, 14))
    targets = targets.flatten()
    scores = padded_scores(x, weight).flatten(0, 1)
    reference = F.cross_entropy(scores[:, :VOCAB_SIZE], targets, reduction="none")
    nats, _ = TargetNats.apply(scores, targets, VOCAB_SIZE)
    torch.testing.assert_close(nats, reference)
    pull = torch.randn_like(nats)
    torch.testing.assert_close(
        *(torch.autograd.grad(each, [x, weight], pull, retain_graph=True) for each in (nats, reference))
    )


def test_exclusive_attention_removes_the_own_value_as_in_transformers():
    from transformers.models.neomme.modeling_neomme import NeoMMEExclusiveSelfAttention

    theirs = NeoMMEExclusiveSelfAttention(SimpleNamespace(num_attention_heads=4, num_key_value_heads=2))
    nn.init.constant_(theirs.alpha, 50.0)  # tanh(50) = 1
    layer, x = randomised(Attention(32, 4, 2, exclusive=True)), torch.randn(2, 7, 32, requires_grad=True)
    plain, mask = Attention(32, 4, 2), AttentionMask(causal=True)
    plain.load_state_dict(layer.state_dict())
    qkv = plain.inputs(x, mask).qkv
    expected = theirs(plain.attend(qkv, mask, is_cross=False).transpose(1, 2), qkv.v)
    outputs = layer(x, mask), layer.o_proj(expected.flatten(-2))
    gradients = [torch.autograd.grad(output, x, x.detach())[0] for output in outputs]
    for pair in (outputs, gradients):
        torch.testing.assert_close(*pair, atol=1e-5, rtol=1e-5)
    v = torch.randn(1, 2, 5, 32).bfloat16()  # of tokens that see themselves alone
    assert without_own_value(v, v).abs().max() <= 1e-6
