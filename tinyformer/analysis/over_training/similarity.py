"""Similarity of two sets of activations; effective rank and sparsity of matrices."""

import math
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from tinyformer.measures.formulas import effective_rank

Activations: TypeAlias = Float[Tensor, "tokens features"]
Matrices: TypeAlias = Float[Tensor, "heads rows columns"]
PRECISION = torch.finfo(torch.float32).eps  # of activations, relative to the largest


def linear_cka(x: Activations, y: Activations) -> float:
    """H(x, y) / √(H(x, x) H(y, y)): 1 if y is x up to rotation, scale and offset, about 0 for independent activations.

    Centred kernel alignment (Kornblith et al. 2019, arXiv 1905.00414) with the unbiased estimate H of HSIC (Song et al.
    2012, JMLR 13), by products of features: the biased one, ‖xᵀ y‖² of centred x and y, is above 0 for independent ones
    (Nguyen et al. 2021, arXiv 2010.15327). nan for constant activations and for fewer than four tokens.
    """
    n, (x, y) = len(x), map(centred, (x, y))
    if n < 4:
        return math.nan

    def hsic(x: Activations, y: Activations) -> Tensor:  # times n (n - 3)
        of_x, of_y = (of.square().sum(dim=1) for of in (x, y))
        diagonal = of_x.sum() * of_y.sum() / ((n - 1) * (n - 2)) - n / (n - 2) * of_x @ of_y
        return (x.mT @ y).square().sum() + diagonal

    return float(hsic(x, y) / (hsic(x, x) * hsic(y, y)).sqrt())


def pwcca(x: Activations, y: Activations) -> float:
    """Σ α ρ / Σ α over the canonical correlations ρ of x and y: 1 if x is a linear map of y; nan if one is constant.

    Projection-weighted CCA (Morcos et al. 2018, arXiv 1806.05759, §3.2): α = Σ_j |⟨h, x_j⟩|, where h is the canonical
    variate in x, of norm 1, and x_j the features of x. With no more tokens than features, it is 1 for any x and y.
    """
    x, y, bases = centred(x), centred(y), []
    for of in (x, y):
        u, sizes, _ = torch.linalg.svd(of, full_matrices=False)
        bases.append(u[:, sizes > sizes.amax() * max(of.shape) * PRECISION])
    rotation, correlations, _ = torch.linalg.svd(bases[0].mT @ bases[1], full_matrices=False)
    weights = (rotation.mT @ bases[0].mT @ x).abs().sum(dim=1)
    return float((weights * correlations).sum() / weights.sum())


def centred(x: Activations) -> Activations:
    """The activations with mean 0, in double precision; zeros if they differ by less than `PRECISION`."""
    rest = x.double() - x.double().mean(dim=0)
    return rest if rest.norm() > PRECISION * x.double().norm() else torch.zeros_like(rest)


def reduced(left: Matrices, right: Matrices | None = None) -> Matrices:
    """Small matrices with the singular values of `left @ right` but those that must be 0, by QR; or `left` alone."""
    return left if right is None else torch.linalg.qr(left).R @ torch.linalg.qr(right.mT).R.mT


def rank(matrices: Matrices) -> Float[Tensor, " heads"]:
    """The effective rank (Σ σ²)² / Σ σ⁴, by the same definition as that of attention maps."""
    rows, columns = matrices.shape[1:]
    return effective_rank((matrices.mT if rows > columns else matrices).unsqueeze(0))


def gini(matrices: Matrices) -> Float[Tensor, " heads"]:
    """The Gini index 1 - 2 Σ_k |w|_k (N - k + ½) / (N Σ |w|) of the N entries in ascending order.

    0 if all have the same size, 1 - 1/N if a single one is not 0 (Hurley & Rickard 2009, arXiv 0811.4706).
    """
    entries = matrices.flatten(1).abs().sort(dim=1).values
    n = entries.shape[1]
    return 1 - 2 * (entries @ (torch.arange(n, 0, -1).to(entries) - 0.5)) / (n * entries.sum(dim=1))


def hoyer(matrices: Matrices) -> Float[Tensor, " heads"]:
    """(√N - ‖w‖₁ / ‖w‖₂) / (√N - 1) of the N entries (Hoyer 2004, JMLR 5), with the extremes 0 and 1 as in `gini`."""
    entries, root = matrices.flatten(1), math.sqrt(matrices[0].numel())
    return (root - entries.norm(p=1, dim=1) / entries.norm(dim=1)) / (root - 1)
