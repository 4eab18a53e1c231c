"""What each measure says about weights that one can follow by hand."""

import math

import pytest
import torch

from tinyformer.analysis import MEASURES

# One head, three tokens: looks at itself; half before, half itself; 1/4, 1/4, 1/2.
THREE = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.25, 0.25, 0.5]])
# The last two of four positions.
OFFSET = torch.tensor([[0.1, 0.2, 0.7, 0.0], [0.4, 0.3, 0.2, 0.1]])


def measure(name, weights):
    return MEASURES[name](weights.expand(1, 1, *weights.shape)).item()


def entropy(*weights):
    return -sum(w * math.log(w) for w in weights)


ENTROPY = (entropy(0.1, 0.2, 0.7) + entropy(0.4, 0.3, 0.2, 0.1)) / 2


@pytest.mark.parametrize(
    ("name", "three", "offset"),
    [
        ("entropy", (entropy(0.5, 0.5) + entropy(0.25, 0.25, 0.5)) / 3, ENTROPY),
        ("distance", (0 + 0.5 + 0.25 * 2 + 0.25) / 3, ((0.1 * 2 + 0.2) + (0.4 * 3 + 0.3 * 2 + 0.2)) / 2),
        ("first_token", (1 + 0.5 + 0.25) / 3, (0.1 + 0.4) / 2),
        ("previous_token", (0.5 + 0.25) / 2, (0.2 + 0.2) / 2),
        ("self", (1 + 0.5 + 0.5) / 3, (0.7 + 0.1) / 2),
    ],
)
def test_by_hand(name, three, offset):
    assert measure(name, THREE) == pytest.approx(three, rel=1e-6)
    assert measure(name, OFFSET) == pytest.approx(offset, rel=1e-6)


def test_uniform_causal_weights():
    seq = 16
    weights = torch.tril(torch.ones(seq, seq)) / torch.arange(1, seq + 1).unsqueeze(-1)
    rows = range(1, seq + 1)
    assert measure("entropy", weights) == pytest.approx(sum(map(math.log, rows)) / seq)
    assert measure("distance", weights) == pytest.approx(sum((k - 1) / 2 for k in rows) / seq)
    assert measure("first_token", weights) == pytest.approx(sum(1 / k for k in rows) / seq)
    assert measure("self", weights) == pytest.approx(sum(1 / k for k in rows) / seq)
    assert measure("previous_token", weights) == pytest.approx(sum(1 / k for k in rows if k > 1) / (seq - 1))


@pytest.mark.parametrize(
    ("shift", "expected"),
    [
        (0, {"entropy": 0, "distance": 0, "self": 1, "previous_token": 0, "first_token": 1 / 4}),
        # The first token has none before it and looks at itself.
        (1, {"entropy": 0, "distance": 3 / 4, "self": 1 / 4, "previous_token": 1, "first_token": 2 / 4}),
    ],
    ids=["itself", "the-one-before"],
)
def test_a_head_that_looks_at_one_place(shift, expected):
    weights = torch.eye(4)[(torch.arange(4) - shift).clamp(min=0)]
    assert {name: measure(name, weights) for name in MEASURES} == pytest.approx(expected)


def test_a_head_that_looks_ahead_has_a_distance_too():
    weights = torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    assert measure("distance", weights) == pytest.approx(2 / 3)


@pytest.mark.parametrize("name", MEASURES)
def test_heads_are_kept_apart_and_the_batch_averaged(name):
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(3, 4, 6, 6, generator=generator).softmax(dim=-1)
    together = MEASURES[name](weights)
    assert together.shape == (4,)
    for head in range(4):
        alone = [MEASURES[name](weights[b : b + 1, head : head + 1]).item() for b in range(3)]
        assert together[head].item() == pytest.approx(sum(alone) / 3, rel=1e-5)


@pytest.mark.parametrize("name", [name for name in MEASURES if name != "previous_token"])
def test_the_last_queries_count_as_in_the_whole(name):
    """The mean over all rows is that over the first rows and over the last, by their number."""
    weights = torch.rand(1, 2, 8, 8, generator=torch.Generator().manual_seed(0)).tril()
    weights = weights / weights.sum(-1, keepdim=True)
    first = MEASURES[name](weights[:, :, :5, :5])
    last = MEASURES[name](weights[:, :, 5:])
    torch.testing.assert_close((5 * first + 3 * last) / 8, MEASURES[name](weights))


def test_entropy_is_between_zero_and_the_log_of_the_keys():
    weights = torch.rand(2, 3, 5, 5, generator=torch.Generator().manual_seed(0)).softmax(-1)
    values = MEASURES["entropy"](weights)
    assert (values > 0).all()
    assert (values < math.log(5)).all()
