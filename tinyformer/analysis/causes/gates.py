"""Causal head gating: gates on all heads at once, learned under pressure to keep heads and to remove them."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim.lr_scheduler import LinearLR

from tinyformer.analysis.context import AnalysisContext, Head, Trained, every_second
from tinyformer.analysis.removal.ablation import gates_on, head_importance, losses_without, rank_correlation
from tinyformer.measures.intervals import CHANGE_COLUMNS, bootstrap
from tinyformer.report.result import AnalysisResult

LEARNING_RATE, LAST_FACTOR = 0.5, 0.02  # Adam's, for logits; its last value is this factor times the first
LARGEST_LOGIT = 6.0  # gates lie between 0.0025 and 0.9975, where their gradient is still large enough to learn
LEAST_KEPT, LEAST_NEEDED = 0.5, 0.1  # the smallest g⁺, and the smallest g⁻, with which a head is kept

ROLES = ("facilitating", "interfering", "irrelevant")
SCORES = ("facilitation", "interference", "irrelevance")
"""The score of each role, see `HeadGating`."""

Gates: TypeAlias = Float[Tensor, "fits 2 heads"]
"""The gates g⁺ and g⁻ of each head in each fit, see `HeadGating`."""

Effects: TypeAlias = Sequence[Sequence[float]]
"""For each head the `CHANGE_COLUMNS` of its ablation, and its importance."""


def learned_gates(
    context: AnalysisContext,
    logits: Float[Tensor, " heads"],
    pressure: float,
    counts: Float[Tensor, " windows"],
    num_steps: int,
) -> Float[Tensor, " heads"]:
    """The logits z that minimise L(σ(z)) - pressure · Σ z, by Adam with `logits` as initial values.

    L is the loss with gates σ(z), in nats per target; `counts` are the weights of the windows in L.
    """
    logits = logits.clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], LEARNING_RATE)
    schedule = LinearLR(optimizer, 1.0, LAST_FACTOR, num_steps)
    layers = context.network.attentions()
    sizes = [layer.num_heads for layer in layers]
    of_batches = counts.split([len(batch["inputs"]) for batch in context.batches])
    for _ in range(num_steps):
        gradient, num_targets = torch.zeros_like(logits), counts.new_zeros(())
        for batch, own in zip(context.batches, of_batches, strict=True):
            with torch.enable_grad(), context.precision(), gates_on(layers, logits.sigmoid().split(sizes)):
                nats, targets = context.task.nats(context.network, batch)
                gradient += torch.autograd.grad((own * nats).sum(), logits)[0]
            num_targets += (own * targets).sum()
        logits.grad = gradient / num_targets - pressure
        optimizer.step()
        schedule.step()
        logits.data.clamp_(-LARGEST_LOGIT, LARGEST_LOGIT)
    return logits.detach()


@dataclass(eq=False)
class HeadGating:
    """Causal head gating: the roles of heads, which facilitate the task, interfere with it, or are irrelevant.

    With frozen weights, gates g in (0, 1) on all heads at once minimise L(g) ∓ λ Σ_h σ⁻¹(g_h) (Nam et al. 2025, arXiv
    2505.13737). g⁺, with -λ, keeps every head that does no harm; g⁻, with +λ, keeps only heads that the model needs.

    - A head's scores are facilitation g⁻, interference 1 - g⁺ and irrelevance g⁺ (1 - g⁻). It is interfering if g⁺ is
      below 1/2; otherwise facilitating if g⁻ is at least 0.1, else irrelevant. If the model needs a head, g⁻ still
      falls below 1, until the loss grows by λ per unit of log-odds; g⁻ falls below 1/2 if half of the head's output is
      enough. If the model does not need a head, g⁻ falls to its lower bound.
    - Each fit starts from random gates, which it first learns with λ = 0, on its own bootstrap resample of windows 1,
      3, 5, …. A head whose role differs between fits is `varying`: its role depends on the other heads that are kept,
      or its effect is close to the margin.
    - On windows 2, 4, 6, …, the loss is measured with only the heads with g⁺ ≥ 1/2 (`harmless`), and with only those
      with g⁻ ≥ 0.1 (`needed`). Ablation and importance use these windows, too. The control is the untrained network.

    Args:
        margin: 4 λ, in nats per target. If L is linear in a gate, a head with a smaller effect is irrelevant, since
            ∂g/∂σ⁻¹(g) = g (1 - g) is at most 1/4.
        num_steps: steps of Adam in each of the three stages of a fit, with λ = 0, -λ and +λ.
    """

    num_windows: int = 32
    margin: float = 0.01
    num_fits: int = 5
    num_steps: int = 60
    num_resamples: int = 1000  # bootstrap resamples of the windows, for the changes of the loss
    seed: int = 0  # for the initial gates and the windows of the fits
    needs_gradient = True

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        heads, learning, measured = context.active_heads, every_second(context, 0), every_second(context, 1)
        gates, control = (self._gates(replace(learning, network=of), heads) for of in context.networks().values())
        base, *without = losses_without(measured, [[], *([head] for head in heads)])
        changes = [after.change_from(base, self.num_resamples).row(base) for after in without]
        importance = head_importance(measured)
        effects = [[*change, importance[head]] for head, change in zip(heads, changes, strict=True)]
        found = AnalysisResult({"analysis/loss": context.losses().mean})
        self._add_roles(found, context, gates, effects, judged(control)[1])
        found.lines["rounded"] = measured.describe_losses(base)
        for index, (kind, least) in enumerate({"harmless": LEAST_KEPT, "needed": LEAST_NEEDED}.items()):
            fits = gates[:, index].tolist()
            removed = [[head for head, gate in zip(heads, fit, strict=True) if gate < least] for fit in fits]
            nats = torch.stack([losses.nats for losses in losses_without(measured, removed)]).mean(dim=0)
            change = replace(base, nats=nats).change_from(base, self.num_resamples)
            kept = len(heads) - statistics.fmean(map(len, removed))
            found.scalars |= {f"analysis/{kind}_heads": kept, f"analysis/{kind}_change": change.mean}
            found.lines[f"  {kind} heads"] = f"{change} with {kept:.1f} of {len(heads)}"
        _add_correlations(found, judged(gates)[0].mean(dim=1), effects)
        return found

    def _add_roles(
        self, found: AnalysisResult, context: AnalysisContext, gates: Gates, effects: Effects, of_control: list[str]
    ) -> None:
        """Add the scores, verdict and effects of each head, and the verdict on each head of the untrained network."""
        scores, verdicts = judged(gates)
        heads, means = context.active_heads, scores.mean(dim=1)
        spans = torch.stack([means, scores.amin(dim=1), scores.amax(dim=1)], dim=1).flatten(0, 1).T.tolist()
        bounds = [f"{name}{bound}" for name in SCORES for bound in ("", "_lowest", "_highest")]
        found.tables["gate_scores"] = context.head_table(bounds, dict(zip(heads, spans, strict=True)))
        each = zip(verdicts, gates.mean(dim=0).T.tolist(), effects, of_control, strict=True)
        rows = [[verdict, *pair, *effect, untrained] for verdict, pair, effect, untrained in each]
        columns = ["verdict", "g+", "g-", *CHANGE_COLUMNS, "importance", "untrained"]
        found.tables["gates"] = context.head_table(columns, dict(zip(heads, rows, strict=True)))
        title = "The role of each head by its gates: 1 facilitating, 0 irrelevant, -1 interfering"
        roles = dict(zip(heads, (means[0] - means[1]).tolist(), strict=True))
        found.figures["gates"] = context.head_grid(roles, title, "facilitation - interference", diverging=True)
        titles = [context.head_title(*head) for head in heads]
        found.lines["gates"] = f"number of heads with the same role in all {self.num_fits} fits (untrained):"
        for verdict in (*ROLES, "varying"):
            names = [title for title, own in zip(titles, verdicts, strict=True) if own == verdict]
            number = of_control.count(verdict)
            found.scalars |= {f"analysis/{verdict}": len(names), f"analysis/untrained_{verdict}": number}
            found.lines[f"  {verdict}"] = f"{len(names)} ({number}){': ' * bool(names)}{', '.join(names)}"

    def _gates(self, context: AnalysisContext, heads: Sequence[Head]) -> Gates:
        device, size, fits = context.batches[0]["inputs"].device, context.num_windows, []
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.num_fits):
            counts = bootstrap(size, 1, generator)[0].bincount(minlength=size).float().to(device)
            logits = torch.rand(len(context.heads), generator=generator).logit().to(device)
            free = learned_gates(context, logits, 0.0, counts, self.num_steps)
            pressures = self.margin / 4, -self.margin / 4
            fits.append(torch.stack([learned_gates(context, free, each, counts, self.num_steps) for each in pressures]))
        return torch.stack(fits).sigmoid()[..., [context.heads.index(head) for head in heads]].cpu()


def judged(gates: Gates) -> tuple[Float[Tensor, "3 fits heads"], list[str]]:
    """The `SCORES` of each head in each fit, from g⁺ and g⁻, and the verdict on each head."""
    kept, needed = gates.unbind(dim=1)
    scores, is_facilitating = torch.stack([needed, 1 - kept, kept * (1 - needed)]), needed >= LEAST_NEEDED
    indices = torch.where(kept < LEAST_KEPT, 1, torch.where(is_facilitating, 0, 2))
    roles = [{ROLES[role] for role in of_head} for of_head in indices.T.tolist()]
    return scores, [of_head.pop() if len(of_head) == 1 else "varying" for of_head in roles]


def _add_correlations(found: AnalysisResult, scores: Float[Tensor, "3 heads"], effects: Effects) -> None:
    """Add the rank correlation of each of `SCORES` with the effect of ablation, and with importance."""
    others = {"ablation": CHANGE_COLUMNS.index("change"), "importance": -1}
    for other, column in others.items() if len(effects) > 1 else ():
        values = [effect[column] for effect in effects]
        rhos = {name: rank_correlation(own, values) for name, own in zip(SCORES, scores.tolist(), strict=True)}
        found.scalars |= {f"analysis/{name}/{other}": rho for name, rho in rhos.items()}
        found.lines[f"rank correlation with {other}"] = ", ".join(f"{name} {rho:.3f}" for name, rho in rhos.items())
