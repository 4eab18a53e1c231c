"""Cross-entropy over a vocabulary, against PyTorch's own of all scores at once."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tinyformer.batch import IGNORED
from tinyformer.nn import vocabulary_cross_entropy
from tinyformer.nn.vocabulary import _most_logits, padded_scores

VOCAB_SIZE = 101


def case(ignored=(), bias=True):
    torch.manual_seed(0)
    x = torch.randn(2, 15, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCAB_SIZE, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(VOCAB_SIZE, (2, 15))
    targets[:, list(ignored)] = IGNORED
    number = torch.randn(VOCAB_SIZE, dtype=torch.float64, requires_grad=True) if bias else None
    return x, weight, targets, number


def result(function, x, weight, targets, bias):
    """The loss and its gradients."""
    inputs = [tensor for tensor in (x, weight, bias) if tensor is not None]
    loss = function(x, weight, targets, bias)
    return [loss, *torch.autograd.grad(loss, inputs)]


def reference(x, weight, targets, bias):
    return F.cross_entropy(F.linear(x, weight, bias).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("ignored", [(), (0, 3, 14)], ids=["all", "some"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("rows", [1, 7, 30])
def test_parts_come_to_the_whole(rows, bias, ignored):
    given = case(ignored, bias)

    def ours(*arguments):
        return vocabulary_cross_entropy(*arguments, max_logits=rows * VOCAB_SIZE)

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


def test_no_more_scores_are_held_than_allowed_in_both_passes():
    given = case()
    with Largest() as whole:
        vocabulary_cross_entropy(*given, max_logits=10**9).backward()
    assert whole.elements == 30 * VOCAB_SIZE
    with Largest() as parts:
        vocabulary_cross_entropy(*given, max_logits=10 * VOCAB_SIZE).backward()
    assert parts.elements == 10 * VOCAB_SIZE


def test_a_gpu_with_more_memory_takes_fewer_parts(monkeypatch):
    for gigabytes, expected in ((24, 250_000_000), (96, 1_000_000_000)):
        properties = SimpleNamespace(total_memory=gigabytes * 10**9)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=properties: found)
        assert _most_logits(torch.device("cuda")) == expected


def test_few_bits_are_widened_before_they_are_summed():
    x, weight, targets, _ = (tensor if tensor.dtype == torch.long else tensor.bfloat16() for tensor in case())
    loss = vocabulary_cross_entropy(x, weight, targets)
    assert loss.dtype == torch.float32
    scores = F.linear(x, weight).flatten(0, 1).float()
    torch.testing.assert_close(loss, F.cross_entropy(scores, targets.flatten()))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
def test_rows_of_zeros_change_no_score(bias):
    x, weight, _, bias = case(bias=bias)
    inputs = [tensor for tensor in (x, weight, bias) if tensor is not None]
    scores = [function(x, weight, bias) for function in (padded_scores, F.linear)]
    torch.testing.assert_close(*scores)
    pull = torch.randn_like(scores[0])
    torch.testing.assert_close(*(torch.autograd.grad(score, inputs, pull) for score in scores))
    with Largest() as made:
        padded_scores(x, weight, bias)
    assert made.elements == 30 * 128
