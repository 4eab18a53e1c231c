"""Norms, feed-forward networks, residual connections, gates, readouts and their loss: each is its formula."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tinyformer.batch import IGNORED
from tinyformer.nn import (
    AttentionMask,
    ClassReadout,
    FeedForward,
    GatedFeedForward,
    HeadGate,
    LayerNorm,
    MaskedTokenReadout,
    OutputGate,
    Residual,
    RMSNorm,
    TokenReadout,
    vocabulary_cross_entropy,
)
from tinyformer.nn.vocabulary import _most_logits, padded_scores


def randomised(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


# Norms.


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize(("eps", "eps_of_layer", "eps_of_rms"), [({}, 1e-5, 1e-6), ({"eps": 3.0}, 3.0, 3.0)])
def test_norms_are_torchs(bias, eps, eps_of_layer, eps_of_rms):
    layer_norm, rms_norm = randomised(LayerNorm(16, bias=bias, **eps)), randomised(RMSNorm(16, **eps))
    x = 0.01 * torch.randn(2, 5, 16) + 1e-3
    assert (layer_norm.bias is not None) == bias
    torch.testing.assert_close(layer_norm(x), F.layer_norm(x, [16], layer_norm.weight, layer_norm.bias, eps_of_layer))
    torch.testing.assert_close(rms_norm(x), F.rms_norm(x, [16], rms_norm.weight, eps_of_rms))


def test_rms_norm_takes_bf16_beside_fp32_weights_without_a_warning():
    norm, x = RMSNorm(16), torch.randn(2, 5, 16).bfloat16()
    assert torch.equal(norm(x), norm(x.float()))
    assert norm.bfloat16()(x).dtype == torch.bfloat16


# Feed-forward networks.

FORMULAS = {
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: torch.where(x > 0, x, 0.0),
    "relu2": lambda x: torch.where(x > 0, x * x, 0.0),
    "silu": lambda x: x / (1 + torch.exp(-x)),
}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("activation", FORMULAS)
def test_feed_forward_networks_are_their_formulas(activation, bias):
    plain, gated = (randomised(kind(8, 12, activation, bias)) for kind in (FeedForward, GatedFeedForward))
    assert (plain.up_proj.bias is not None) == (gated.gate_proj.bias is not None) == bias
    x, f = torch.randn(2, 3, 8), FORMULAS[activation]
    torch.testing.assert_close(plain(x), plain.down_proj(f(plain.up_proj(x))), rtol=1e-4, atol=1e-4)
    expected = gated.down_proj(f(gated.gate_proj(x)) * gated.up_proj(x))
    torch.testing.assert_close(gated(x), expected, rtol=1e-4, atol=1e-4)


# Residual connections.

X, UPDATE = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[10.0, 20.0]]])


SCALES = {
    "default": ({}, [11.0, 22.0]),
    "no connection": ({"skip": 0}, [10.0, 20.0]),
    "both": ({"skip": -2.0, "branch": 0.5}, [3.0, 6.0]),
    "a list": ({"skip": [1, 0, 3], "branch": [0, 1, 0.5], "layer_index": 2, "num_layers": 3}, [8.0, 16.0]),
}


@pytest.mark.parametrize(("scales", "expected"), SCALES.values(), ids=SCALES)
def test_residual_is_skip_x_plus_branch_f(scales, expected):
    assert Residual(**scales)(X, UPDATE).flatten().tolist() == expected


def test_the_residual_stream_keeps_its_dtype():
    x, update = torch.randn(2, 3, 4).bfloat16(), torch.randn(2, 3, 4)
    assert torch.equal(Residual()(x, update), (x.float() + update).bfloat16())  # added before it is rounded


# Gates. Two sequences of two tokens, two heads of one dimension; head 1 is closed in both, head 0 half closed in one.

HEADS = torch.tensor([[[[1.0], [3.0]], [[10.0], [30.0]]], [[[5.0], [7.0]], [[50.0], [70.0]]]])
FACTORS = torch.tensor([[1.0, 0.0], [0.5, 0.0]])


@pytest.mark.parametrize(
    ("replacement", "expected"),
    [
        # Means: (1 + 3 + 5 + 7) / 4 = 4 and 40; 5 / 2 + 4 / 2.
        (lambda heads: heads.mean(dim=(0, 2), keepdim=True), [[[1, 3], [40, 40]], [[4.5, 5.5], [40, 40]]]),
        # The other sequence's: 5 / 2 + 1 / 2 and 7 / 2 + 3 / 2.
        (lambda heads: heads.flip(0), [[[1, 3], [50, 70]], [[3, 5], [10, 30]]]),
        (None, [[[1, 3], [0, 0]], [[2.5, 3.5], [0, 0]]]),
    ],
    ids=["mean", "other sequence", "nothing"],
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
    torch.testing.assert_close(gate(HEADS[:1], x), HEADS[:1] * opening[..., None], rtol=0, atol=1e-5)


# Readouts.


@pytest.mark.parametrize("tied", [True, False])
def test_scores_are_products_with_the_embeddings_or_a_matrix_of_their_own(tied):
    embedding, x = nn.Embedding(11, 4), torch.randn(2, 3, 4)
    readout = TokenReadout(embedding, tied=tied, bias=True, scaled=True)
    assert (readout.proj.weight is embedding.weight) == tied
    torch.testing.assert_close(readout(x), x / 2 @ readout.proj.weight.T + readout.proj.bias)


def test_berts_readout_has_a_layer_of_its_own_and_a_bias_for_each_token():
    embedding, x = nn.Embedding(11, 4), torch.randn(2, 3, 4)
    readout = randomised(MaskedTokenReadout(embedding, norm=RMSNorm, activation="silu"))
    hidden = F.rms_norm(F.silu(readout.dense(x)), [4], readout.norm.weight, 1e-6)
    torch.testing.assert_close(readout(x), hidden @ embedding.weight.T + readout.proj.bias)


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
    """The loss and its gradients."""
    loss = function(x, weight, targets, bias)
    return [loss, *torch.autograd.grad(loss, [x, weight] if bias is None else [x, weight, bias])]


def reference(x, weight, targets, bias):
    return F.cross_entropy(F.linear(x, weight, bias).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("ignored", [(), (0, 3, 14)], ids=["all", "some"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("rows", [1, 7, 30])
def test_parts_come_to_the_whole(rows, bias, ignored):
    ours, given = partial(vocabulary_cross_entropy, max_logits=rows * VOCAB_SIZE), case(ignored, bias)
    torch.testing.assert_close(result(ours, *given), result(reference, *given))


def test_nothing_to_predict_costs_nothing():
    x, weight, targets, bias = case(range(15))
    loss, *gradients = result(vocabulary_cross_entropy, x, weight, targets, bias)
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that was made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


@pytest.mark.parametrize(("allowed", "most"), [(10**9, 30), (10 * VOCAB_SIZE, 10)])
def test_no_more_scores_are_held_than_allowed_in_both_passes(allowed, most):
    given = case()
    with Largest() as made:
        vocabulary_cross_entropy(*given, max_logits=allowed).backward()
    assert made.elements == most * VOCAB_SIZE


@pytest.mark.parametrize(("gigabytes", "logits"), [(24, 250_000_000), (96, 1_000_000_000)])
def test_a_gpu_with_more_memory_takes_fewer_parts(monkeypatch, gigabytes, logits):
    properties = SimpleNamespace(total_memory=gigabytes * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert _most_logits(torch.device("cuda")) == logits


def test_few_bits_are_widened_before_they_are_summed():
    x, weight, targets, _ = (tensor if tensor.dtype == torch.long else tensor.bfloat16() for tensor in case())
    loss = vocabulary_cross_entropy(x, weight, targets)
    assert loss.dtype == torch.float32
    scores = F.linear(x, weight).flatten(0, 1).float()
    torch.testing.assert_close(loss, F.cross_entropy(scores, targets.flatten()))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
def test_rows_of_zeros_change_no_score(bias):
    x, weight, _, bias = case(bias=bias)
    inputs = [x, weight] if bias is None else [x, weight, bias]
    scores = [function(x, weight, bias) for function in (padded_scores, F.linear)]
    torch.testing.assert_close(*scores)
    pull = torch.randn_like(scores[0])
    torch.testing.assert_close(*(torch.autograd.grad(score, inputs, pull) for score in scores))
    with Largest() as made:
        padded_scores(x, weight, bias)
    assert made.elements == 30 * 128
