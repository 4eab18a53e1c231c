"""A circuit of heads: found by their attention patterns, then kept alone or ablated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from tinyformer.analysis.context import AnalysisContext, Head, Trained, require_positive
from tinyformer.analysis.removal.ablation import MODES, ReplacementOf, gated
from tinyformer.batch import Batch
from tinyformer.errors import ArgumentError, require_choice
from tinyformer.measures.capture import capture_weights
from tinyformer.measures.formulas import repeated_tokens
from tinyformer.measures.table import MEASURES, PATTERNS, measure_layers
from tinyformer.nn import Transformer
from tinyformer.report.result import AnalysisResult
from tinyformer.tasks.task import TokenTask

THRESHOLDS = {"induction": 0.4, "previous_token": 0.5}
"""By measure, the threshold from which telemetry labels a head by default."""


@dataclass(eq=False)
class HeadCircuit:
    """Tests whether the heads with a known attention pattern suffice for a task, and whether the task needs them.

    Heads are found on random sequences that are repeated once (`repeated_tokens`), not on the evaluated split: a head
    belongs to the circuit if one of its measures reaches its threshold. The loss and the accuracy on the evaluated
    split are then computed for the whole model, for the circuit alone (every other head is ablated) and for the model
    without the circuit; and, to compare with, for as many random heads of each layer, kept alone and ablated. Few heads
    do most of the work in a trained model (Voita et al. 2019, arXiv 1905.09418). An induction circuit has a head that
    attends to the previous token and, in a later layer, one that attends to the token that followed an earlier
    occurrence of the query's token (Elhage et al. 2021, transformer-circuits.pub/2021/framework).
    """

    measures: Mapping[str, float] = field(default_factory=THRESHOLDS.copy)  # by name, the least of a head that is found
    mode: str = "zero"  # what replaces the output of an ablated head, see `HeadAblation`
    num_windows: int = 32
    num_sequences: int = 16
    period: int = 32  # random tokens before they repeat; less than half of the context
    num_draws: int = 8  # draws of random heads
    seed: int = 0  # of the random sequences and heads
    needs_gradient = False

    def __post_init__(self) -> None:
        if not self.measures:
            raise ArgumentError("measures", {}, "must name at least one measure", {"measures": THRESHOLDS})
        for name, least in self.measures.items():
            require_choice("measures", name, MEASURES | PATTERNS)
            if least <= 0:
                reason = "must be above 0, so that not every head belongs to the circuit"
                raise ArgumentError(f"measures.{name}", least, reason, {name: THRESHOLDS.get(name, 0.5)})
        require_choice("mode", self.mode, MODES)
        require_positive(self, "num_windows", "num_sequences", "period", "num_draws")

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        measured, heads = self._measured(context), context.active_heads
        found = [head for head in heads if any(measured[head][name] >= least for name, least in self.measures.items())]
        if not found:
            # Slightly below the largest values, so that these reach them after rounding.
            maxima = {name: max(values[name] for values in measured.values()) for name in self.measures}
            works = {"measures": {name: float(f"{0.995 * value:.3g}") for name, value in maxima.items()}}
            raise ArgumentError(
                "measures", dict(self.measures), f"none of the model's {len(heads)} heads reaches a threshold", works
            )
        generator = torch.Generator().manual_seed(self.seed)
        draws = [_as_many(heads, found, generator) for _ in range(self.num_draws)]
        kept: list[tuple[str, int | None, Sequence[Head]]] = [
            ("all heads", None, heads),
            ("circuit alone", None, found),
            ("without circuit", None, _without(heads, found)),
            *(("random heads alone", number, drawn) for number, drawn in enumerate(draws)),
            *(("without random heads", number, _without(heads, drawn)) for number, drawn in enumerate(draws)),
        ]
        replacement_of = MODES[self.mode](context)
        rows = [
            [name, draw, len(left), *_scores(context, _without(heads, left), replacement_of)]
            for name, draw, left in kept
        ]
        by_name = {name: [row[3:] for row in rows if row[0] == name] for name, *_ in kept}
        scores = {name: torch.tensor(of_sets, dtype=torch.float64) for name, of_sets in by_name.items()}
        means = {name: of_sets.mean(dim=0).tolist() for name, of_sets in scores.items()}
        relative = {
            head: max(values[name] / least for name, least in self.measures.items())
            for head, values in measured.items()
        }
        return AnalysisResult(
            scalars={
                "analysis/num_found": len(found),
                "analysis/num_heads": len(heads),
                **{
                    f"analysis/{name.replace(' ', '_')}/{kind}": value
                    for name, values in means.items()
                    for kind, value in zip(("loss", "accuracy"), values, strict=True)
                },
            },
            lines={
                "circuit": f"{len(found)} of {len(heads)} heads: "
                + ", ".join(context.head_title(*head) for head in found),
                **{f"  {name}": f"{accuracy:.1%} correct, loss {loss:.4f}" for name, (loss, accuracy) in means.items()},
            },
            tables={
                "circuit": (["heads", "draw", "num_heads", "loss", "accuracy"], rows),
                "circuit_heads": context.head_table(
                    [*self.measures, "found"],
                    {head: [*values.values(), head in found] for head, values in measured.items()},
                ),
            },
            figures={
                "circuit": context.head_grid(
                    relative,
                    f"Measure relative to its threshold; alone, heads from 1 on are right in "
                    f"{means['circuit alone'][1]:.1%}, the model without them in {means['without circuit'][1]:.1%}",
                    f"largest of {', '.join(f'{name} / {least:g}' for name, least in self.measures.items())}",
                )
            },
        )

    def _measured(self, context: AnalysisContext) -> dict[Head, dict[str, float]]:
        """The measures of `active_heads` on random sequences; the larger value for a head with two softmaxes."""
        network = context.network
        if not isinstance(network, Transformer) or not isinstance(context.task, TokenTask):
            reason = "analyses models that were trained with task=causal_lm or task=masked_lm"
            raise ArgumentError("analysis", "circuit", reason, {"analysis": "heads"})
        inputs, tokenizer = context.batches[0]["inputs"], context.tokenizer
        period = min(self.period, (inputs.shape[1] - len(tokenizer.around[0])) // 2)
        if period < 1:
            raise ArgumentError("period", self.period, "needs windows of at least 3 tokens, so that they can repeat")
        tokens = repeated_tokens(network.vocab_size, self.num_sequences, period, tokenizer, self.seed).to(inputs.device)
        with context.precision():
            maps = capture_weights(network, tokens, context.task.mask(cast(Batch, {"inputs": tokens})))
        values = measure_layers({name: (MEASURES | PATTERNS)[name] for name in self.measures}, maps, tokens)
        sizes = [layer.num_softmaxes for layer in context.layers]
        return {
            (index, head): {name: max(of[index][head * sizes[index] :][: sizes[index]]) for name, of in values.items()}
            for index, head in context.active_heads
        }


def _as_many(heads: Sequence[Head], found: Sequence[Head], generator: torch.Generator) -> list[Head]:
    """Random heads, as many in each layer as were found there."""
    drawn = []
    for layer in sorted({layer for layer, _ in heads}):
        of_layer = [head for head in heads if head[0] == layer]
        order = torch.randperm(len(of_layer), generator=generator).tolist()
        drawn += [of_layer[place] for place in order[: sum(at == layer for at, _ in found)]]
    return sorted(drawn)


def _without(heads: Sequence[Head], removed: Sequence[Head]) -> list[Head]:
    return [head for head in heads if head not in removed]


def _scores(context: AnalysisContext, removed: Sequence[Head], replacement_of: ReplacementOf) -> tuple[float, float]:
    """The loss in nats per target, and the accuracy, with some heads ablated."""
    sums: dict[str, Any] = {}
    for batch in context.batches:
        ablation = gated(context.network, removed, partial(replacement_of, batch))
        with torch.no_grad(), context.precision(), ablation:
            scored = context.task.score(context.network, batch)
        sums = {name: sums.get(name, 0.0) + score.cpu() for name, score in scored.items()}
    return float(sums["nats"] / sums["tokens"]), float(sums["top1"] / sums["tokens"])
