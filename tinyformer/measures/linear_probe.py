"""A linear probe: what a linear classifier tells from vectors."""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

RESOLUTION = 2**-7  # of bfloat16, as a share of the root mean square of what a probe reads


@torch.no_grad()
def linear_probe(
    x: Float[Tensor, "samples d_model"], labels: Int[Tensor, " samples"], is_fit: Bool[Tensor, " samples"]
) -> float:
    """The share of right labels among the samples that do not fit the probe, of labels that occur in those that do.

    By linear discriminant analysis (Fisher 1936), the label with the largest xᵀ Σ⁻¹ μ - μᵀ Σ⁻¹ μ / 2 + ln π, where μ
    are the means of the labels, π their shares, and Σ the covariance within them: unlike logistic regression, as in
    Alain & Bengio 2016 (arXiv 1610.01644), it has a closed form. Σ includes noise of the size `RESOLUTION`, so that
    smaller differences count as lost. Of equal vectors, the most frequent label is predicted. nan without a test.
    """
    x = x.double()
    is_test = ~is_fit & torch.isin(labels, labels[is_fit])
    train, test = x[is_fit], x[is_test]
    if not len(test):
        return math.nan
    known, index, counts = labels[is_fit].unique(return_inverse=True, return_counts=True)
    centre = train.mean(dim=0)
    means = x.new_zeros(len(known), x.shape[1]).index_add_(0, index, train - centre) / counts.unsqueeze(-1)
    within = train - centre - means[index]
    noise = (RESOLUTION**2 * train.square().mean()).clamp(min=1e-30)
    covariance = within.mT @ within / len(train) + noise * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    weights = torch.linalg.solve(covariance, means.mT)
    bias = (counts / len(train)).log() - (means.mT * weights).sum(dim=0) / 2
    told = known[((test - centre) @ weights + bias).argmax(dim=-1)]
    return float((told == labels[is_test]).double().mean())
