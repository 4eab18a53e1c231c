"""Would a head matter? What the gradient says, without taking it away."""

from pathlib import Path

import torch
from torch import Tensor
from torchmetrics.functional.regression import spearman_corrcoef

from tinyformer.analysis.ablation import HeadAblation
from tinyformer.analysis.charts import head_grid
from tinyformer.analysis.subject import Findings, Subject, by_layer, check_windows, head_pairs
from tinyformer.nn import BaseAttention


def head_importance(subject: Subject) -> list[float]:
    """I_h = mean over windows of |∂L/∂g_h|, g_h the head's gate (Michel et al. 2019, arXiv 1905.10650, eq. 2).

    L is the mean loss of a window, in nats per token. One forward and one backward pass: each window has gates of its
    own, so that the gradient of the sum of their losses holds that of each.

    Returns:
        A number for each of `head_pairs`.
    """
    layers = subject.layers
    totals = [torch.zeros(layer.num_heads) for layer in layers]
    before = [layer.head_gate.factors for layer in layers]
    try:
        for batch in subject.batches:
            gates = [
                _gates(factors, len(batch["inputs"]), layer) for factors, layer in zip(before, layers, strict=True)
            ]
            for layer, gate in zip(layers, gates, strict=True):
                layer.head_gate.factors = gate
            with torch.enable_grad(), subject.precision():
                nats, targets = subject.nats(subject.network, batch)
                gradients = torch.autograd.grad((nats / targets.clamp(min=1)).sum(), gates)
            totals = [
                total + gradient.abs().sum(dim=0).cpu() for total, gradient in zip(totals, gradients, strict=True)
            ]
    finally:
        for layer, factors in zip(layers, before, strict=True):
            layer.head_gate.factors = factors
    num_windows = sum(len(batch["inputs"]) for batch in subject.batches)
    return (torch.cat(totals) / num_windows).tolist()


class HeadImportance:
    """The importance of each head by its gradient, and how well that ranks the heads.

    Args:
        num_windows: of the evaluated split.
        compare: also take each head away, and say how the two rankings correlate (Spearman's ρ).
        num_resamples: of that ablation's bootstrap.
    """

    needs_gradient = True

    def __init__(self, num_windows: int = 32, compare: bool = True, num_resamples: int = 1000) -> None:
        self.num_windows, self.compare = check_windows(num_windows), compare
        self.ablation = HeadAblation("zero", num_windows, num_resamples)

    def __call__(self, subject: Subject, folder: Path) -> Findings:
        layers, pairs = subject.layers, head_pairs(subject.layers)
        importance = head_importance(subject)
        ids = [[layer, layers[layer].head_ids[head]] for layer, head in pairs]
        order = sorted(range(len(pairs)), key=lambda index: -importance[index])
        findings = Findings(
            lines={
                "importance": "mean |gradient of the loss in the head's gate|, nats per token",
                **{f"  layer {ids[i][0]} head {ids[i][1]}": f"{importance[i]:.4f}" for i in order[:5]},
            },
            tables={
                "importance": (["layer", "head", "importance"], [[*i, v] for i, v in zip(ids, importance, strict=True)])
            },
            figures={
                "importance": head_grid(
                    by_layer(layers, importance),
                    [[str(head) for head in layer.head_ids] for layer in layers],
                    "Importance of each head: mean |∂ loss / ∂ gate|, nats per token",
                )
            },
        )
        if self.compare:
            ablation = self.ablation(subject, folder)
            columns, rows = findings.tables["importance"]
            changes = [row[4] for row in ablation.tables["heads"][1]]
            findings.tables["importance"] = (
                [*columns, "change"],
                [[*row, change] for row, change in zip(rows, changes, strict=True)],
            )
            rho = rank_correlation(importance, changes)
            findings.scalars["analysis/rank_correlation"] = rho
            findings.lines["rank correlation"] = (
                "none: it takes two heads" if rho is None else f"{rho:.3f} with the change of the loss without the head"
            )
        return findings


def rank_correlation(one: list[float], other: list[float]) -> float | None:
    """Spearman's ρ: 1 where both rank alike, -1 where in opposite order; None for fewer than two."""
    if len(one) < 2:
        return None
    return float(spearman_corrcoef(torch.tensor(one), torch.tensor(other)))


def _gates(factors: Tensor | None, num_windows: int, layer: BaseAttention) -> Tensor:
    """A gate for each window and head, as the head's is, that a gradient flows into."""
    device = layer.o_proj.weight.device
    as_they_are = torch.ones(layer.num_heads) if factors is None else factors
    return as_they_are.to(device).expand(num_windows, -1).clone().requires_grad_()
