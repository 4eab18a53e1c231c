"""Would a head matter? What the gradient says, without taking it away."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinyformer.analysis.ablation import head_changes
from tinyformer.analysis.charts import head_grid
from tinyformer.analysis.subject import Findings, Subject, at_least_one, by_layer, head_pairs
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
            gates = [_open_gates(layer, len(batch["inputs"])) for layer in layers]
            for layer, factors, gate in zip(layers, before, gates, strict=True):
                # A head that is taken away already stays so, and its gate moves nothing.
                layer.head_gate.factors = gate if factors is None else factors * gate
            with torch.enable_grad(), subject.precision():
                nats, targets = subject.nats(subject.network, batch)
                gradients = torch.autograd.grad((nats / targets.clamp(min=1)).sum(), gates)
            totals = [total + each.abs().sum(dim=0).cpu() for total, each in zip(totals, gradients, strict=True)]
    finally:
        for layer, factors in zip(layers, before, strict=True):
            layer.head_gate.factors = factors
    num_windows = sum(len(batch["inputs"]) for batch in subject.batches)
    return (torch.cat(totals) / num_windows).tolist()


def _open_gates(layer: BaseAttention, num_windows: int) -> Tensor:
    return torch.ones(num_windows, layer.num_heads, device=layer.o_proj.weight.device, requires_grad=True)


class HeadImportance:
    """The importance of each head by its gradient, and how well that ranks the heads.

    Args:
        num_windows: of the evaluated split.
        compare: also take each head away, and say how the two rankings correlate (Spearman's ρ).
    """

    needs_gradient = True

    def __init__(self, num_windows: int = 32, compare: bool = True) -> None:
        self.num_windows, self.compare = at_least_one("num_windows", num_windows, 32), compare

    def __call__(self, subject: Subject, folder: Path) -> Findings:
        layers, importance = subject.layers, head_importance(subject)
        rows: list[list[Any]] = [
            [layer, layers[layer].head_ids[head], value]
            for (layer, head), value in zip(head_pairs(layers), importance, strict=True)
        ]
        findings = Findings(
            lines={
                "importance": f"mean |gradient of the loss in the head's gate|, nats per {subject.unit}",
                **{f"  layer {row[0]} head {row[1]}": f"{row[2]:.4f}" for row in sorted(rows, key=lambda r: -r[2])[:5]},
            },
            tables={"importance": (["layer", "head", "importance"], rows)},
            figures={
                "importance": head_grid(
                    by_layer(layers, importance),
                    [[str(head) for head in layer.head_ids] for layer in layers],
                    f"Importance of each head: mean |∂ loss / ∂ gate|, nats per {subject.unit}",
                )
            },
        )
        if self.compare:
            changes = head_changes(subject)
            rho = rank_correlation(importance, changes)
            findings.tables["importance"] = (
                ["layer", "head", "importance", "change"],
                [[*row, change] for row, change in zip(rows, changes, strict=True)],
            )
            findings.scalars["analysis/rank_correlation"] = rho
            findings.lines["rank correlation"] = (
                "none: it takes two heads" if rho is None else f"{rho:.3f} with the change of the loss without the head"
            )
        return findings


def rank_correlation(one: list[float], other: list[float]) -> float | None:
    """Spearman's ρ: 1 where both rank alike, -1 where in opposite order; None for fewer than two."""
    if len(one) < 2:
        return None
    # It takes a second to import, which the other analyses need not wait for.
    from torchmetrics.functional.regression import spearman_corrcoef  # noqa: PLC0415

    return float(spearman_corrcoef(torch.tensor(one), torch.tensor(other)))
