"""Activation patching: the activations that carry an answer from one prompt into another."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from tinyformer.analysis.causes.prompts import PairAnalysis, Pairs, Prompts
from tinyformer.analysis.context import AnalysisContext, Head, Trained, largest
from tinyformer.analysis.removal.ablation import rank_correlation
from tinyformer.measures.intervals import Change, Losses, simultaneous
from tinyformer.measures.points import points_of
from tinyformer.report.charts import named_grid, token_grid
from tinyformer.report.result import AnalysisResult

NUM_PRINTED = 4  # sublayers that are printed
MAX_TOKENS = 2048  # tokens in a forward pass, in which each row is a prompt with one patched place

BY_TOKEN = re.compile(r"(\w+coder\.)?(embedding|layers\.\d+\.(residual_post|\w+\.output))")
"""The points that are patched at each token."""

BY_HEAD, PARTS = "output_by_head", {"pattern": "weights", "values": "values"}
"""The point at which heads are patched, and the points of their attention patterns and values."""

COLUMNS = [f"{way}{end}" for way in ("denoising", "noising") for end in ("", "_low", "_high", "_by_gradient")]


class Place(NamedTuple):
    """The activation of one head, or of one token, which is patched alone."""

    point: str
    what: str  # for a head: "output", or its change by the "pattern" or "values" alone; for a token: ""
    number: int  # index of the head, or of the token from the end: -1 is the last

    @property
    def stack(self) -> str:
        """The name of the point's stack; "" if there is only one stack."""
        return "".join(re.findall(r"^\w+coder", self.point))


Effects: TypeAlias = dict[Place, Float[Tensor, "*directions 2 pairs"]]
"""The change of each prompt's score when a place is patched: its exact value, then its estimate by gradients."""


def patch(context: AnalysisContext, own: Prompts, other: Prompts, points: Sequence[str]) -> tuple[Tensor, Effects]:
    """The scores of the `own` prompts, and their changes when activations of the `other` prompts replace their own.

    Each change is also estimated by (other - own) · ∂ score / ∂ own, all in one backward pass (Nanda 2023, attribution
    patching; Kramár et al. 2024, arXiv 2403.00745).
    """
    with torch.enable_grad():
        scores, before = own.run(context, capture=points, gradients=True)
        gradients = torch.autograd.grad(scores.sum(), [before[point] for point in points], materialize_grads=True)
    parts = [point.replace(BY_HEAD, part) for point in points if point.endswith(BY_HEAD) for part in PARTS.values()]
    _, after = other.run(context, capture=[*points, *parts])
    scores, effects, num_rows = scores.detach(), Effects(), max(1, MAX_TOKENS // own.batch["inputs"].shape[1])

    def added(point: str, at_own: Tensor, new: Tensor) -> Float[Tensor, "prompts places"]:
        """The effect of each place alone on the scores; no forward pass is run if both activations are equal."""
        patched = scores.unsqueeze(1).repeat(1, new.shape[1])
        differing = (at_own != new).flatten(2).any(dim=2).nonzero()
        for some in differing.split(num_rows) if len(differing) else ():  # `split` of an empty tensor gives a part
            rows, places = some.unbind(dim=1)
            value = at_own[rows]
            value[range(len(rows)), places] = new[rows, places]
            patched[rows, places], _ = own.rows(rows).run(context, replace={point: value})
        return patched - scores.unsqueeze(1)

    for point, gradient in zip(points, gradients, strict=True):
        at_own = before[point].detach()
        new = {"output" if point.endswith(BY_HEAD) else "": after[point]}
        for what, part in PARTS.items() if "output" in new else ():
            name = point.replace(BY_HEAD, part)
            new[what] = own.run(context, capture=point, replace={name: after[name]})[1][point]
        for what, value in new.items():
            estimate = (gradient * (value - at_own)).flatten(2).sum(dim=2)
            both = torch.stack([added(point, at_own, value), estimate]).double().cpu()
            for number in range(both.shape[2]):
                effects[Place(point, what, number if what else number - both.shape[2])] = both[:, :, number]
    return scores.double().cpu(), effects


def patch_pairs(
    context: AnalysisContext, groups: Sequence[Pairs], points: Sequence[str]
) -> tuple[Float[Tensor, " pairs"], Effects]:
    """Clean minus corrupted scores; and how much of the difference each place restores and destroys, in logits.

    Tokens are counted from the end; tokens that the shortest group lacks are left out.
    """
    differences, effects = [], []
    for group in groups:
        corrupted, restored = patch(context, group.corrupted, group.clean, points)
        clean, destroyed = patch(context, group.clean, group.corrupted, points)
        differences.append(clean - corrupted)
        effects.append({place: torch.stack([effect, -destroyed[place]]) for place, effect in restored.items()})
    common = [place for place in effects[0] if all(place in of_group for of_group in effects)]
    return torch.cat(differences), {place: torch.cat([of[place] for of in effects], dim=-1) for place in common}


class Share(NamedTuple):
    """The mean effects of a place, with intervals (nan for a single pair), and their estimates by gradients."""

    restores: Change
    destroys: Change
    estimates: tuple[float, float]

    @property
    def most(self) -> float:
        return max(self.restores.mean, self.destroys.mean)

    def row(self) -> list[float]:
        """The values of `COLUMNS`."""
        both = zip(self[:2], self.estimates, strict=True)
        return [value for change, estimate in both for value in (*astuple(change), estimate)]

    def __str__(self) -> str:
        return f"restores {self.restores}, destroys {self.destroys}"


Shares: TypeAlias = Mapping[Place, Share]


def shares_of(effects: Effects, of: Float[Tensor, " pairs"], num_resamples: int) -> Shares:
    """Mean effects divided by the mean of `of`, which has a value per pair; all intervals hold simultaneously."""
    every, none = torch.stack([*effects.values()]), Losses(torch.zeros_like(of), of)
    exact = [Losses(effect, of) for effect in every[:, :, 0].flatten(0, 1)]
    changes = simultaneous(exact, [none] * len(exact), num_resamples)
    if len(of) == 1:
        changes = [Change(change.mean, math.nan, math.nan) for change in changes]
    estimates = (every[:, :, 1].sum(dim=2) / of.sum()).tolist()
    both = zip(effects, changes[::2], changes[1::2], estimates, strict=True)
    return {place: Share(*share) for place, *share in both}


@dataclass(eq=False)
class ActivationPatching(PairAnalysis):
    """Activation patching: activations that restore or destroy an answer when moved between two prompts.

    Denoising runs the corrupted prompt with one activation of the clean prompt; noising, the opposite. The score of a
    prompt is the logit of the clean answer minus the logit of the corrupted answer, and

        restored = (patched - corrupted) / (clean - corrupted)    by denoising: whether an activation is enough
        destroyed = (clean - patched) / (clean - corrupted)       by noising: whether it is needed

    (Vig et al. 2020, arXiv 2004.12265; Meng et al. 2022, arXiv 2202.05262; Heimersheim & Nanda 2024, arXiv 2404.15255).
    Each share is a ratio of means over pairs. At each token, the residual stream and each sublayer's output are
    patched. For each head, three outputs are patched in, each at all tokens together: that of the other prompt, and
    two with only the pattern or the values of that prompt. Values that heads share are patched for one head at a time.

    The printed lines name a head if the interval of what its output restores, or of what it destroys, is wholly above
    `margin`. The control is the untrained network, with effects in the same unit. If clean and corrupted scores do not
    differ more than in the untrained network, effects are in logits instead of shares, and no head is named.

    Args:
        num_resamples: the number of bootstrap resamples of the pairs; for the pairs see `PairAnalysis`.
        margin: the smallest share with which a head is named.
    """

    num_resamples: int = 1000
    margin: float = 0.1

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        groups, points = self.pairs(context), points_of(context.network)
        gates = {layer.head_gate: index for index, layer in enumerate(context.layers)}
        layers = {name: gates[point.module] for name, point in points.items() if point.module in gates}
        difference, effects = patch_pairs(context, groups, [*filter(BY_TOKEN.fullmatch, points), *layers])
        by_chance, control = patch_pairs(replace(context, network=context.untrained()), groups, [*layers])
        found, words, is_share = self.result(context, groups, difference, by_chance)
        heads = {at: (layers[at.point], at.number) for at in effects if at.what}
        heads = {at: head for at, head in heads.items() if head in context.active_heads}
        of = difference if is_share else torch.ones_like(difference)
        patched = Patched(
            context,
            groups,
            heads,
            shares_of({at: effect for at, effect in effects.items() if not at.what}, of, self.num_resamples),
            shares_of({at: effects[at] for at in heads}, of, self.num_resamples),
            shares_of({at: control[at] for at in heads}, of, self.num_resamples),
            "share of clean minus corrupted" if is_share else "logits",
        )
        kind = "as shares of it" if is_share else "in logits, as it is not clearly above that of untrained weights"
        found.lines["patching"] = f"{words}; effects {kind}:"
        patched.add_tokens(found)
        patched.add_heads(found, self.margin if is_share else math.inf)
        patched.add_estimates(found)
        return found


@dataclass(frozen=True)
class Patched:
    """The effects of patching each place; each method adds some of these effects to a result."""

    context: AnalysisContext
    groups: Sequence[Pairs]
    heads: Mapping[Place, Head]
    of_tokens: Shares
    of_heads: Shares
    untrained: Shares  # of the heads
    unit: str

    def add_tokens(self, found: AnalysisResult) -> None:
        """Add the effects by token: lines for the largest effects of sublayers, a table and a figure for each stack."""
        shares, labels = self.of_tokens, _labels(self.context, self.groups)
        sublayers = {place: share.most for place, share in shares.items() if place.point.endswith("output")}
        for place in largest(sublayers, NUM_PRINTED):
            position, token = labels[place.stack, place.number]
            found.lines[f"  {_title(place.point)}, token {position} {token}"] = str(shares[place])
        for stack in dict.fromkeys(place.stack for place in shares):
            name = "source_tokens" if stack == "encoder" else "tokens"
            places = {place: labels[stack, place.number] for place in shares if place.stack == stack}
            rows = [[place.point, *label, *shares[place].row()] for place, label in places.items()]
            found.tables[name] = ["point", "position", "token", *COLUMNS], rows
            # The stream first, as papers print it, then the output of each kind of sublayer.
            ordered = sorted(places, key=lambda place: place.point.split(".")[-2] if "output" in place.point else "")
            cells = {(_title(place.point), *places[place]): shares[place].restores.mean for place in ordered}
            found.figures[name] = token_grid(cells, "What each token restores in the corrupted prompt", self.unit)

    def add_heads(self, found: AnalysisResult, margin: float) -> None:
        """Add the effects by head: lines for heads above a margin, tables (trained and untrained), and a figure."""
        outputs = largest({at: self.of_heads[at].most for at in self.heads if at.what == "output"})
        named, by_chance = (
            [at for at in outputs if max(of[at].restores.low, of[at].destroys.low) > margin]
            for of in (self.of_heads, self.untrained)
        )
        found.scalars |= {"analysis/named_heads": len(named), "analysis/untrained_named_heads": len(by_chance)}
        found.lines["heads"] = (
            f"{len(named)} of {len(outputs)} named: the whole interval is above the margin (one pair has no interval)"
        )
        for at in named or outputs[:1]:
            parts = {what: self.of_heads[at._replace(what=what)] for what in PARTS}
            alone = (f"; its {what} alone {of[0].mean:+.3f}, {of[1].mean:+.3f}" for what, of in parts.items())
            found.lines[f"  {self.context.head_title(*self.heads[at])}"] = f"{self.of_heads[at]}{''.join(alone)}"
        most = max(self.untrained[at].most for at in outputs)
        found.lines["untrained weights"] = f"{len(by_chance)} heads named, the largest effect is {most:+.4f}"
        columns, cells = [*self.context.address_columns, "head", "what", *COLUMNS], {}
        for name, shares in {"heads": self.of_heads, "untrained_heads": self.untrained}.items():
            rows = ([*self.context.head_address(*head), at.what, *shares[at].row()] for at, head in self.heads.items())
            found.tables[name] = columns, [*rows]
        for field, verb in enumerate(Share._fields[:2]):
            for at, head in self.heads.items():
                layer, number = self.context.head_title(*head).split(" head ")
                cells[f"{layer} {at.what}", f"head {number}\n{verb}"] = self.of_heads[at][:2][field].mean
        title = "What each head restores in the corrupted prompt, and destroys in the clean one"
        found.figures["heads"] = named_grid(cells, title, self.unit)

    def add_estimates(self, found: AnalysisResult) -> None:
        """Add the correlation of the exact effects with their estimates by gradients."""
        for name, shares in {"heads": self.of_heads, "tokens": self.of_tokens}.items():
            exact = [change.mean for share in shares.values() for change in share[:2]]
            estimates = [estimate for share in shares.values() for estimate in share.estimates]
            r = float(torch.corrcoef(torch.tensor([exact, estimates]))[0, 1])
            rho = rank_correlation(exact, estimates)
            found.scalars |= {f"analysis/gradient/{name}/r": r, f"analysis/gradient/{name}/rho": rho}
            found.lines[f"{name} by gradient"] = f"r = {r:.3f}, ρ = {rho:.3f} with the exact effects"


def _title(point: str) -> str:
    """A point in words: "encoder layer 0 cross-attention"."""
    words = point.replace("layers.", "layer ").replace("residual_post", "residual stream").removesuffix(".output")
    return words.replace(".", " ").replace("_", "-")


def _labels(context: AnalysisContext, groups: Sequence[Pairs]) -> dict[tuple[str, int], tuple[int, str]]:
    """For each stack and token index: the position, and the prompts' tokens there or, if more than two, their role."""
    keys = [side.keys(context, row) for of in groups for side in of[:2] for row in range(len(side.answers))]
    labels = {}
    for stack in keys[0]:
        number = min(len(strings[stack]) for strings in keys)
        for index in range(-number, 0):
            tokens = dict.fromkeys(strings[stack][index] for strings in keys)
            role = groups[0].roles[index] if groups[0].roles else "…"
            position = index if len(groups) > 1 else number + index
            labels[stack, index] = position, "/".join(tokens) if len(tokens) <= 2 else role
    return labels
