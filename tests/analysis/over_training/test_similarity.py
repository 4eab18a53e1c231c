"""Similarity of activations and measures of matrices: values by hand, invariances, and the definitions."""

from math import isnan

import pytest
import torch

from tinyformer.analysis.over_training.dynamics import linear_cka, rank

A, B = torch.tensor([[1, 1, -1, -1], [1, -1, 1, -1]]) / 2  # orthonormal, with mean 0


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def hsic(x, y):
    """The unbiased estimate by its definition, Song et al. 2012, equation 5."""
    n, (k, m) = len(x), (of @ of.T for of in (x, y))
    k, m = (of - of.diagonal().diag() for of in (k, m))
    return ((k * m).sum() + k.sum() * m.sum() / (n - 1) / (n - 2) - 2 / (n - 2) * (k @ m).sum()) / n / (n - 3)


def test_linear_cka_is_that_of_the_definition():
    # Of the kernels without diagonals: -4 + 16/6 - 4 for both, against 12 + 16/6 - 4 for each with itself.
    assert linear_cka(A[:, None], B[:, None]) == pytest.approx(-0.5)
    x, y = random(20, 5) + 3, random(20, 5) @ random(5, 7) + random(20, 7, seed=1)
    assert linear_cka(x, y) == pytest.approx(float(hsic(x, y) / (hsic(x, x) * hsic(y, y)).sqrt()))


def test_constant_activations_have_no_similarity():
    assert isnan(linear_cka(1 + 1e-8 * random(9, 2, seed=1), random(9, 2)))  # the precision of float32
    assert isnan(linear_cka(random(3, 1), random(3, 1)))  # nor has any with three tokens


@pytest.mark.parametrize(("sizes", "expected"), [([2, 1, 1], 36 / 18), ([5, 5, 5], 3), ([4, 2, 1], 441 / 273)])
def test_rank_by_hand(sizes, expected):
    turn, wide = torch.linalg.qr(random(3, 3)).Q, torch.linalg.qr(random(5, 3)).Q.T
    matrix = turn @ torch.diag(torch.tensor(sizes).double()) @ wide
    for matrices in (matrix.unsqueeze(0), matrix.T.unsqueeze(0)):
        assert float(rank(matrices)) == pytest.approx(expected)
