"""The residual stream by depth, trained and untrained, with and without residual connections; accuracy by distance."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Int
from matplotlib.figure import Figure
from torch import Tensor

from tinyformer.analysis.context import AnalysisContext, Trained, changed
from tinyformer.data.batches.windows import IGNORED
from tinyformer.errors import ArgumentError
from tinyformer.measures.batches import pairs_of, without_padding
from tinyformer.measures.points import intervention
from tinyformer.nn import Encoder, EncoderDecoder, Network, ParallelBlock, Residual
from tinyformer.report.charts import lines
from tinyformer.report.result import AnalysisResult, Table
from tinyformer.tasks import CausalLM

RESIDUALS = ("attention_residual", "cross_attention_residual", "feed_forward_residual")
"""The attributes of a layer that hold its residual connections."""

ByDepth: TypeAlias = Mapping[tuple[str, ...], Sequence[tuple[float, ...]]]
"""Values at each depth from 0, by model: ("trained, with skips",) or, with two stacks, ("encoder", "trained, …")."""


def stacks_of(network: Network) -> dict[tuple[str, ...], Encoder]:
    """The stacks of layers by kind: ("encoder",) and ("decoder",), or () where there is one stack."""
    kinds = [("encoder",), ("decoder",)] if isinstance(network, EncoderDecoder) else [()]
    return dict(zip(kinds, network.stacks(), strict=True))


def residuals_of(layer: Any) -> dict[str, Residual]:
    """The residual connections of a layer, by their names in `RESIDUALS`."""
    return {name: getattr(layer, name) for name in RESIDUALS if hasattr(layer, name)}


def skips_of(layer: Any) -> dict[str, Residual]:
    """The residual connections whose skip passes by a sublayer; a parallel layer has one, which passes by both."""
    found = residuals_of(layer)
    return {"attention_residual": found["attention_residual"]} if isinstance(layer, ParallelBlock) else found


def without_skips(network: Network) -> AbstractContextManager[None]:
    """Remove all residual connections of a network inside the `with` statement."""
    layers = [layer for stack in network.stacks() for layer in stack.layers]
    return changed([residual for layer in layers for residual in skips_of(layer).values()], skip=0.0)


def stream_points(network: Network) -> list[list[str]]:
    """The points of the residual stream of each stack, see `points_of`: the embeddings, then each layer's output."""
    return [
        [
            ".".join([*kind, name])
            for name in ("embedding", *(f"layers.{i}.residual_post" for i in range(len(stack.layers))))
        ]
        for kind, stack in stacks_of(network).items()
    ]


def inputs_without_padding(context: AnalysisContext) -> list[tuple[Any, ...]]:
    """The arguments of forward passes without padding, each for one pair of texts or for windows of equal length."""
    if isinstance(context.network, EncoderDecoder):
        return [(pair.source, pair.target) for batch in context.batches for pair in pairs_of(batch)]
    return [(batch["inputs"], context.task.mask(batch)) for batch in without_padding(context.batches)]


def streams_without_padding(
    context: AnalysisContext, network: Network
) -> Iterator[tuple[tuple[Any, ...], list[list[Tensor]]]]:
    """The arguments of each pass on `inputs_without_padding`, and the residual stream of each stack by depth."""
    names = stream_points(network)
    for arguments in inputs_without_padding(context):
        with context.precision(), intervention(network, {}, list(itertools.chain(*names))) as captured:
            network(*arguments)
        yield arguments, [[captured[name][0] for name in of_stack] for of_stack in names]


def by_depth(context: AnalysisContext, measure: Callable[[Network], Sequence[Sequence[tuple[float, ...]]]]) -> ByDepth:
    """The results of `measure` in each stack, trained and untrained, with and without residual connections."""
    found: dict[str, Sequence[Sequence[tuple[float, ...]]]] = {}
    for name, network in context.networks().items():
        found[f"{name}, with skips"] = measure(network)
        with without_skips(network):
            found[f"{name}, without skips"] = measure(network)
    kinds = enumerate(stacks_of(context.network))
    return {(*kind, model): of_stacks[at] for at, kind in kinds for model, of_stacks in found.items()}


def depth_table(context: AnalysisContext, measured: ByDepth, *columns: str) -> Table:
    """A table with a row for each stack, model and depth."""
    return [*context.address_columns[:-1], "model", "depth", *columns], [
        [*model, depth, *of_depth] for model, values in measured.items() for depth, of_depth in enumerate(values)
    ]


def depth_scalar(model: Sequence[str], name: str) -> str:
    """The name of a scalar for one of the models in `by_depth`: "analysis/encoder/trained_with_skips/…"."""
    return "/".join(["analysis", *model, name]).replace(", ", "_").replace(" ", "_")


def depth_charts(
    measured: ByDepth, charts: Mapping[str, tuple[str, str, str]], controls: ByDepth | None = None
) -> dict[str, Figure]:
    """For each stack, a chart over depth of each value; `charts` maps names to titles, y labels and y scales.

    `controls` are drawn in grey.
    """
    drawn = {}
    for kind, (index, (name, words)) in itertools.product({at[:-1]: 0 for at in measured}, enumerate(charts.items())):
        series, baselines = (
            {
                at[-1]: (range(len(values)), [of_depth[index] for of_depth in values])
                for at, values in of.items()
                if at[:-1] == kind
            }
            for of in (measured, controls or {})
        )
        title, ylabel, yscale = words
        xlabel = f"layers of the {kind[0]}" if kind else "layers"
        drawn["_".join([*kind, name])] = lines(series, title, xlabel, ylabel, yscale, baselines)
    return drawn


@dataclass(eq=False)
class AccuracyByDistance:
    """The accuracy of the next token by the distance from the input token to its last earlier occurrence.

    On `data=recall`, the input token is a key that occurs earlier in a key–value pair (Arora et al. 2023, arXiv
    2312.04927). The control `copied` is the accuracy of copying the token that followed the last occurrence, as an
    induction head does; it is 1 on recall. Targets whose input token has not occurred before are left out.
    """

    width: int = 4  # tokens of distance that share a row of the table
    num_windows: int = 256
    needs_gradient = False

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        if not isinstance(context.task, CausalLM):
            reason = "analyses models that predict the next token, as with task=causal_lm"
            raise ArgumentError("analysis", "distance", reason, {"analysis": "residual"})
        parts = []
        for batch in context.batches:
            with torch.no_grad(), context.precision():
                predicted = context.task.logits(context.network, batch).argmax(dim=-1)
            parts.append(by_target(batch["inputs"], batch["targets"], predicted))
        distance, hit, copied = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
        bins = (distance - 1) // self.width
        counts = zip(*(bins.bincount(of).tolist() for of in (None, hit, copied)), strict=True)
        rows = [
            [self.width * at + 1, self.width * (at + 1), total, hits / total, copies / total]
            for at, (total, hits, copies) in enumerate(counts)
            if total
        ]
        near, far = rows[0], rows[-1]
        told = [f"{row[3]:.1%} of {row[2]:,} targets at {row[0]} to {row[1]} tokens" for row in (near, far)]
        first, accuracy, copies = ([row[at] for row in rows] for at in (0, 3, 4))
        chart = lines(
            {"model": (first, accuracy)},
            "Accuracy of the next token by the distance to an earlier occurrence of the input token",
            "distance, tokens",
            "accuracy",
            baselines={"copying the token after it": (first, copies)},
        )
        return AnalysisResult(
            lines={"accuracy": ", ".join(told), "  copying": f"{near[4]:.1%} and {far[4]:.1%}"},
            tables={"distance": (["first", "last", "targets", "accuracy", "copied"], rows)},
            figures={"distance": chart},
        )


def by_target(
    inputs: Int[Tensor, "batch seq"], targets: Int[Tensor, "batch seq"], predicted: Int[Tensor, "batch seq"]
) -> tuple[Int[Tensor, " targets"], Bool[Tensor, " targets"], Bool[Tensor, " targets"]]:
    """For each target whose input has occurred before: the distance, and whether prediction and copy are correct."""
    place = torch.arange(inputs.shape[1], device=inputs.device)
    is_same = (inputs.unsqueeze(2) == inputs.unsqueeze(1)) & (place < place.unsqueeze(1))
    last = torch.where(is_same, place, -1).amax(dim=2)
    counted = (targets != IGNORED) & (last >= 0)
    copied = inputs.gather(1, last + 1)
    return (place - last)[counted], (predicted == targets)[counted], (copied == targets)[counted]
