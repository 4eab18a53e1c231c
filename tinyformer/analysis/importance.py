"""The importance of each head, estimated from the gradient of the loss without ablating it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinyformer.analysis.ablation import head_changes
from tinyformer.analysis.subject import Findings, Subject, Trained, head_pairs, living_heads, naming_ablated
from tinyformer.errors import require_at_least
from tinyformer.nn import BaseAttention

MEANING = "mean |∂ loss / ∂ gate|"
"""The definition of importance in figures and tables."""


def head_importance(subject: Subject) -> list[float]:
    """I_h = mean over windows of |∂L/∂g_h|, where g_h is the head's gate (Michel et al. 2019, arXiv 1905.10650, eq. 2).

    L is the mean loss of a window, in nats per target. Each window has its own gates, so one forward and one backward
    pass give the gradients of all windows of a batch.

    Returns:
        The importance of each of `head_pairs`.
    """
    layers = subject.layers
    totals = [torch.zeros(layer.num_heads) for layer in layers]
    before = [layer.head_gate.factors for layer in layers]
    try:
        for batch in subject.batches:
            gates = [_open_gates(layer, len(batch["inputs"])) for layer in layers]
            for layer, factors, gate in zip(layers, before, gates, strict=True):
                # An ablated head stays ablated, and its gate has no gradient.
                layer.head_gate.factors = gate if factors is None else factors * gate
            with torch.enable_grad(), subject.precision():
                nats, targets = subject.task.nats(subject.network, batch)
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
    """The importance of each head by gradient, and optionally its rank correlation with ablation.

    Args:
        num_windows: number of windows, examples or pairs, drawn at random from the evaluated split.
        compare: whether to also ablate each head, and report the rank correlation of importance and loss change
            (Spearman's ρ).

    Raises:
        ArgumentError: a number is below 1.
    """

    needs_gradient = True

    def __init__(self, num_windows: int = 32, compare: bool = True) -> None:
        require_at_least(1, {"num_windows": 32}, num_windows=num_windows)
        self.num_windows, self.compare = num_windows, compare

    def __call__(self, model: Trained, folder: Path = Path()) -> Findings:
        subject = model.sample(self.num_windows)
        layers, pairs, values = subject.layers, head_pairs(subject.layers), head_importance(subject)
        living, importance = living_heads(layers), dict(zip(pairs, values, strict=True))
        columns, ablated = [*subject.address_columns, "head", "importance"], [pair not in living for pair in pairs]
        rows: list[list[Any]] = [[*subject.head_address(*pair), value] for pair, value in importance.items()]
        ranked = sorted(living, key=lambda pair: -importance[pair])
        findings = Findings(
            lines={
                "importance": f"{MEANING}, nats per {subject.task.unit}",
                **{f"  {subject.head_title(*pair)}": f"{importance[pair]:.4f}" for pair in ranked[:5]},
            },
            figures={
                "importance": subject.head_grid(
                    values, "Importance of each head", f"{MEANING}, nats per {subject.task.unit}"
                )
            },
        )
        if self.compare:
            changes = dict(zip(pairs, head_changes(subject), strict=True))
            columns, rows = [*columns, "change"], [[*row, changes[pair]] for row, pair in zip(rows, pairs, strict=True)]
            rho = rank_correlation([importance[pair] for pair in living], [changes[pair] for pair in living])
            findings.scalars["analysis/rank_correlation"] = rho
            findings.lines["rank correlation"] = (
                "none: needs at least two heads"
                if rho is None
                else f"{rho:.3f} with the loss change of ablating the head"
            )
        findings.tables["importance"] = naming_ablated(columns, rows, ablated)
        return findings


def rank_correlation(x: list[float], y: list[float]) -> float | None:
    """Spearman's ρ: 1 for the same order, -1 for the opposite order; None for fewer than two values."""
    if len(x) < 2:
        return None
    # Takes a second to import, which the other analyses need not pay.
    from torchmetrics.functional.regression import spearman_corrcoef  # noqa: PLC0415

    return float(spearman_corrcoef(torch.tensor(x), torch.tensor(y)))
