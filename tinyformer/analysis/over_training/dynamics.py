"""The dynamics of training: when each part of a network settles, and how its weights and their gradients change."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tinyformer.analysis.context import AnalysisContext, Trained, changed
from tinyformer.analysis.over_training.over_steps import events_of_snapshots, require_snapshots
from tinyformer.analysis.removal.redundancy import weights_by_head
from tinyformer.errors import require_choice
from tinyformer.files import finite
from tinyformer.measures.batches import queries_by_kind
from tinyformer.measures.capture import running_hooks
from tinyformer.measures.events import Event
from tinyformer.measures.formulas import effective_rank
from tinyformer.measures.points import forward_pass, matching, points_of
from tinyformer.nn import Attention, BaseAttention, Network
from tinyformer.nn.heads import KINDS, Address, layer_title
from tinyformer.report.charts import curves_by_step, first_told
from tinyformer.report.result import AnalysisResult

Activations: TypeAlias = Float[Tensor, "tokens features"]
Matrices: TypeAlias = Float[Tensor, "heads rows columns"]
PRECISION = torch.finfo(torch.float32).eps  # the relative precision of activations

SETTLED = 0.9  # the linear CKA with the last snapshot from which an activation has settled

POINTS = ("*attention.output_by_head", "*feed_forward.output", "*residual_post")

WEIGHTS = ("*attention.OV", "*attention.QK", "*feed_forward.*")

DIMENSIONS = {"": "seq", "encoder": "source_seq", "decoder": "seq", "cross": "seq"}  # of queries in `Point.shape`

LAYER = re.compile(r"\blayers\.(\d+)\.")

Series: TypeAlias = dict[tuple[str, str], dict[int, float]]
"""The values of a measure by step, for each name of a point or matrix and number of a head; "" for no head."""


def linear_cka(x: Activations, y: Activations) -> float:
    """H(x, y) / √(H(x, x) H(y, y)): 1 if y is x up to rotation, scale and offset, about 0 for independent activations.

    Centred kernel alignment (Kornblith et al. 2019, arXiv 1905.00414) with the unbiased estimate H of HSIC (Song et al.
    2012, JMLR 13), computed from xᵀ y. The biased estimate, ‖xᵀ y‖² of centred x and y, is above 0 even if x and y are
    independent (Nguyen et al. 2021, arXiv 2010.15327). nan for constant activations or fewer than four tokens.
    """
    n, (x, y) = len(x), map(centred, (x, y))
    if n < 4:
        return math.nan

    def hsic(x: Activations, y: Activations) -> Tensor:  # times n (n - 3)
        of_x, of_y = (of.square().sum(dim=1) for of in (x, y))
        diagonal = of_x.sum() * of_y.sum() / ((n - 1) * (n - 2)) - n / (n - 2) * of_x @ of_y
        return (x.mT @ y).square().sum() + diagonal

    return float(hsic(x, y) / (hsic(x, x) * hsic(y, y)).sqrt())


def centred(x: Activations) -> Activations:
    """The activations minus their mean over tokens, in double precision; zeros if they are constant up to rounding."""
    rest = x.double() - x.double().mean(dim=0)
    return rest if rest.norm() > PRECISION * x.double().norm() else torch.zeros_like(rest)


def reduced(left: Matrices, right: Matrices | None = None) -> Matrices:
    """Small matrices with the nonzero singular values of `left @ right`, by QR; `left` if `right` is None."""
    return left if right is None else torch.linalg.qr(left).R @ torch.linalg.qr(right.mT).R.mT


def rank(matrices: Matrices) -> Float[Tensor, " heads"]:
    """The effective rank (Σ σ²)² / Σ σ⁴, by the same definition as that of attention maps."""
    rows, columns = matrices.shape[1:]
    return effective_rank((matrices.mT if rows > columns else matrices).unsqueeze(0))


MEASURES: dict[str, tuple[str, Callable[..., Any]]] = {
    "cka": ("linear CKA", linear_cka),
    "rank": ("effective rank", rank),
    "norm": ("Frobenius norm", torch.linalg.matrix_norm),
}


Gradients: TypeAlias = Mapping[Any, Tensor] | None
Factors: TypeAlias = Callable[[Gradients], tuple[Tensor, ...]]
"""A function that returns a matrix for each head as one or two factors, or its gradient, given all gradients."""


@dataclass(eq=False)
class TrainingDynamics:
    """Training dynamics: measures of activations, weights and gradients at each snapshot of a training run.

    Linear CKA compares the activations at each snapshot with those at the last and at the previous snapshot. An
    activation has settled once CKA with the last snapshot stays at 0.9 or more; early layers tend to settle first
    (Raghu et al. 2017, arXiv 1706.05806). The effective rank and the norm are measured for matrices of weights, and for
    gradients of the sample's mean loss. The circuits of a head are OV = W_O W_V and QK = W_Qᵀ W_K (Elhage et al. 2021),
    without rotation, biases and norms; the gradient of a circuit A B is G_A B + A G_B, with the gradients of A and B.

    Args:
        points: names of `Model.points`, with `*` for any characters; by default `POINTS`.
        weights: names of modules, and `layers.0.attention.OV` or `QK` for the circuits of heads; by default `WEIGHTS`.
        measures: "cka" for activations; "rank" and "norm" for matrices.
        gradients: if True, gradients are measured, too.
    """

    points: str | Sequence[str] | None = None
    weights: str | Sequence[str] | None = None
    measures: Sequence[str] = ("cka", "rank", "norm")
    num_windows: int = 16
    gradients: bool = True
    reads_snapshots = True

    def __post_init__(self) -> None:
        for measure in self.measures:
            require_choice("measures", measure, MEASURES)
        self.needs_gradient = self.gradients

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        require_snapshots(context, "dynamics")
        events, measured = events_of_snapshots(context).events, self._measured(context)
        steps, num_parts = [step for step, _ in context.snapshots], len(context.address_columns)
        rows = [
            [step, *address_of(name)[-num_parts:], head, name, measure, finite(value)]
            for measure, series in measured.items()
            for (name, head), values in series.items()
            for step, value in values.items()
        ]
        found = AnalysisResult(lines={"dynamics": f"{len(steps)} snapshots, from step {steps[0]:,} to {steps[-1]:,}"})
        found.tables["dynamics"] = ["step", *context.address_columns, "head", "name", "measure", "value"], rows
        found.tables["dynamics_events"] = [of.name for of in fields(Event)], [list(astuple(of)) for of in events]
        found.lines["events"] = "; ".join(first_told(events)) or "none between these snapshots"
        _tell_settled(found, measured.get("cka_to_last", {}))
        for name, series in measured.items():
            measure = name.removeprefix("gradient_").partition("_to_")[0]
            panels = defaultdict[str, list[tuple[str, dict[int, float]]]](list)
            for (part, _), values in series.items():
                panels[LAYER.sub("", part)].append((title_of(part), values))
            found.figures[f"dynamics_{name}"] = curves_by_step(
                panels,
                name.replace(measure, MEASURES[measure][0]).replace("_", " "),
                "log" if measure == "norm" else "linear",
                {str(event): event.step for event in events},
            )
        return found

    def _measured(self, context: AnalysisContext) -> dict[str, Series]:
        """The values of each measure, such as "cka_to_last" and "gradient_rank"."""
        measured: dict[str, Series] = defaultdict(lambda: defaultdict(dict))
        last, before = self._activations(context, context.snapshots[-1].network()), dict[tuple[str, str], Tensor]()
        for step, read in context.snapshots:
            activations = self._activations(context, network := read())
            for which, others in (("last", last), ("previous", before)):
                for key, other in others.items():
                    measured[f"cka_to_{which}"][key][step] = linear_cka(activations[key], other)
            before = activations
            for name, key, value in self._of_matrices(context, network):
                measured[name][key][step] = value
        return measured

    def _activations(self, context: AnalysisContext, network: Network) -> dict[tuple[str, str], Tensor]:
        """The activations (`tokens features`) of the sample's tokens, without padding, by point and head."""
        points = {name: of for name, of in points_of(network).items() if of.shape[-1] not in ("seq", "source_seq")}
        names = chosen(points, self.points, POINTS, "points") if "cka" in self.measures else []
        parts, modules = defaultdict[tuple[str, str], list[Tensor]](list), modules_by_name(network)
        for batch in context.batches if names else ():
            is_token = {DIMENSIONS[kind]: mask for kind, mask in queries_by_kind(batch).items()}
            lengths = {dim: mask.sum(dim=1) for dim, mask in is_token.items()}
            with context.precision():
                found = forward_pass(network, partial(context.task.forward, network, batch), lengths, names)
            for name, value in found.activations.items():
                *_, heads, dim, _ = ("", *points[name].shape)
                x = value if isinstance(heads, str) else value.transpose(1, 2)
                x = (x[is_token[str(dim)]] if dim in is_token else x).float().cpu()
                layer: Any = modules.get(name.rpartition(".")[0])
                ids = layer.head_map.ids if heads == getattr(layer, "num_heads", None) else range(x.shape[1])
                for head, of_head in [("", x)] if isinstance(heads, str) else zip(ids, x.unbind(1), strict=True):
                    parts[name, str(head)].append(of_head)
        return {key: torch.cat(of_batches) for key, of_batches in parts.items()}

    def _of_matrices(self, context: AnalysisContext, network: Network) -> Iterator[tuple[str, tuple[str, str], float]]:
        """The measures of each matrix and of its gradient: the measure, the matrix, and the value."""
        measures, known = [name for name in self.measures if name != "cka"], matrices_of(network)
        names = chosen(known, self.weights, WEIGHTS, "weights") if measures else []
        gradients = gradients_of(context, network) if self.gradients and names else {}
        for name, (heads, factors) in ((name, known[name]) for name in names):
            for prefix, of in (("", factors(None)), *([("gradient_", factors(gradients))] if gradients else [])):
                for measure in measures:
                    for head, value in zip(heads, MEASURES[measure][1](reduced(*of)).tolist(), strict=True):
                        yield prefix + measure, (name, head), value


def chosen(known: Mapping[str, Any], patterns: Any, default: Sequence[str], argument: str) -> list[str]:
    """The names in `known` that match `patterns`, the value of `argument`; if None, those that match `default`."""
    if patterns is not None:
        return list(matching(known, [patterns] if isinstance(patterns, str) else patterns, argument))
    return [name for name in known if any(fnmatchcase(name, pattern) for pattern in default)]


def modules_by_name(network: Network) -> dict[str, nn.Module]:
    """The modules by their names in `points_of`, which leave out the stack if there is only one."""
    stack = "encoder." if len(network.stacks()) == 1 else ""
    return {name.removeprefix(stack): module for name, module in network.named_modules()}


def matrices_of(network: Network) -> dict[str, tuple[list[str], Factors]]:
    """For each circuit and each weight matrix: the names of its heads ([""] if it has none), and its `Factors`."""

    def circuit(layer: BaseAttention, names: Sequence[str], gradients: Gradients) -> tuple[Tensor, ...]:
        a, b = (weights_by_head(layer)[name].double() for name in names)
        if gradients is None:
            return a.mT, b
        grad_a, grad_b = (weights_by_head(layer, gradients.__getitem__)[name].double() for name in names)
        return torch.cat([grad_a.mT, a.mT], dim=-1), torch.cat([b, grad_b], dim=-2)  # the factors of dA B + A dB

    def alone(weight: Tensor, gradients: Gradients) -> tuple[Tensor, ...]:
        return ((weight.detach() if gradients is None else gradients[weight]).double().cpu().unsqueeze(0),)

    matrices: dict[str, tuple[list[str], Factors]] = {}
    for name, module in modules_by_name(network).items():
        weight: Any = getattr(module, "weight", None)
        for which, parts in {"OV": ("W_O", "W_V"), "QK": ("W_Q", "W_K")}.items():
            if isinstance(module, Attention) and (which == "OV" or module.num_softmaxes == 1):
                matrices[f"{name}.{which}"] = [*map(str, module.head_map.ids)], partial(circuit, module, parts)
        if getattr(weight, "ndim", 0) == 2:
            matrices[name] = [""], partial(alone, weight)
    return matrices


def gradients_of(context: AnalysisContext, network: Network) -> dict[Any, Tensor]:
    """The gradient of the sample's mean loss, in nats per target, with respect to each matrix of weights."""
    weights = [weight for weight in network.parameters() if weight.ndim == 2]
    totals, num_targets = [torch.zeros_like(weight) for weight in weights], 0
    for batch in context.batches:
        with torch.enable_grad(), context.precision(), running_hooks(network), changed(weights, requires_grad=True):
            nats, targets = context.task.nats(network, batch)
            gradients = torch.autograd.grad(nats.sum(), weights, materialize_grads=True)
        totals = [total + gradient for total, gradient in zip(totals, gradients, strict=True)]
        num_targets += int(targets.sum())
    return {weight: total / num_targets for weight, total in zip(weights, totals, strict=True)}


def address_of(name: str) -> Address:
    """The kind of attention (or the stack) and the layer in a name, each "" if the name does not contain it."""
    layer, stack = LAYER.search(name), name.partition(".")[0]
    kind = "cross" if ".cross_attention." in name else stack if stack in KINDS else ""
    return kind, int(layer[1]) if layer else ""


def title_of(name: str) -> str:
    """The layer that a name contains, such as "decoder layer 0"; a name without a layer is returned unchanged."""
    return layer_title(address_of(name)).strip() if LAYER.search(name) else name


def _tell_settled(found: AnalysisResult, similarities: Series) -> None:
    """Add the activations that settled first and last; `similarities` are their CKA with the last snapshot."""
    settled = defaultdict[str, dict[int, str]](dict)
    for (name, head), values in similarities.items():
        unsettled = max((step for step, value in values.items() if not value >= SETTLED), default=-1)
        for step in [step for step in values if step > unsettled][:1]:
            settled[LAYER.sub("", name)].setdefault(step, f"{title_of(name)}{f' head {head}' if head else ''}")
    for part, titles in settled.items():
        told = [f"{titles[step]} at {step:,}" for step in (min(titles), max(titles))]
        found.lines.setdefault("settled", f"from this step on, linear CKA with the last snapshot is {SETTLED} or more:")
        found.lines[f"  {part}"] = f"first {told[0]}, last {told[1]}" if len(titles) > 1 else f"all at {max(titles):,}"
        found.scalars[f"analysis/settled/{part}"] = max(titles)
