"""A circuit of heads: found by their attention patterns, then kept alone or ablated."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch

from tinyformer.analysis.context import AnalysisContext, Head, Trained
from tinyformer.analysis.removal.ablation import MODES, ablations
from tinyformer.data.batches.windows import Batch
from tinyformer.errors import ArgumentError, require_choice
from tinyformer.measures.capture import capture_weights
from tinyformer.measures.formulas import repeated_tokens
from tinyformer.measures.table import MEASURES, PATTERNS, measure_layers
from tinyformer.nn import Transformer
from tinyformer.report.result import AnalysisResult
from tinyformer.tasks.task import TokenTask

THRESHOLDS = {"induction": 0.4, "previous_token": 0.5}
"""By measure, the smallest value with which telemetry labels a head by default."""

Measured: TypeAlias = Mapping[Head, Mapping[str, float]]
"""For each active head, the values of its measures by name."""


@dataclass(eq=False)
class HeadCircuit:
    """A test of whether the heads with a known attention pattern suffice for a task, and whether it needs them.

    Heads are found on random sequences that are repeated once (`repeated_tokens`), not on the evaluated split: a head
    belongs to the circuit if one of its measures reaches its threshold. The loss and the accuracy on the evaluated
    split are then computed for the whole model, for the circuit alone (every other head is ablated) and for the model
    without the circuit. The control has random heads, as many in each layer, in place of the circuit. Few heads do
    most of the work in a trained model (Voita et al. 2019, arXiv 1905.09418). An induction circuit has a head that
    attends to the previous token and, in a later layer, one that attends to the token that followed an earlier
    occurrence of the query's token (Elhage et al. 2021, transformer-circuits.pub/2021/framework).
    """

    measures: Mapping[str, float] = field(default_factory=THRESHOLDS.copy)  # thresholds by measure
    mode: str = "zero"  # what replaces the output of an ablated head, see `HeadAblation`
    num_windows: int = 32
    num_sequences: int = 16
    period: int = 32  # random tokens before they repeat; less than half of the context
    num_draws: int = 8  # draws of random heads
    seed: int = 0  # for the random sequences and heads
    needs_gradient = False

    def __post_init__(self) -> None:
        for name in self.measures:
            require_choice("measures", name, MEASURES | PATTERNS)
        require_choice("mode", self.mode, MODES)

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        measured, heads = self._measured(context), context.active_heads
        found, generator = self._found(measured), torch.Generator().manual_seed(self.seed)
        draws = [_as_many(heads, found, generator) for _ in range(self.num_draws)]
        kept: list[tuple[str, int | None, Sequence[Head]]] = [
            ("all heads", None, heads),
            ("circuit alone", None, found),
            ("without circuit", None, _without(heads, found)),
            *(("random heads alone", number, drawn) for number, drawn in enumerate(draws)),
            *(("without random heads", number, _without(heads, drawn)) for number, drawn in enumerate(draws)),
        ]
        removed = ablations(context, self.mode, [_without(heads, left) for *_, left in kept])
        scores = [_scores(context, ablation) for ablation in removed]
        rows = [[name, draw, len(left), *of] for (name, draw, left), of in zip(kept, scores, strict=True)]
        return self._result(context, measured, found, rows)

    def _measured(self, context: AnalysisContext) -> Measured:
        """The measures of `active_heads` on random sequences; a head with two softmaxes has the larger value."""
        network = context.network
        if not isinstance(network, Transformer) or not isinstance(context.task, TokenTask):
            reason = "analyses models that were trained with task=causal_lm or task=masked_lm"
            raise ArgumentError("analysis", "circuit", reason, {"analysis": "heads"})
        inputs, tokenizer = context.batches[0]["inputs"], context.tokenizer
        period = min(self.period, (inputs.shape[1] - len(tokenizer.around[0])) // 2)
        tokens = repeated_tokens(network.vocab_size, self.num_sequences, period, tokenizer, self.seed).to(inputs.device)
        with context.precision():
            maps = capture_weights(network, tokens, context.task.mask(cast(Batch, {"inputs": tokens})))
        values = measure_layers({name: (MEASURES | PATTERNS)[name] for name in self.measures}, maps, tokens)
        sizes = [layer.num_softmaxes for layer in context.layers]
        return {
            (index, head): {name: max(of[index][head * sizes[index] :][: sizes[index]]) for name, of in values.items()}
            for index, head in context.active_heads
        }

    def _found(self, measured: Measured) -> list[Head]:
        """The heads of the circuit: those with at least one measure that reaches its threshold."""
        relative = self._relative(measured)
        if found := [head for head, value in relative.items() if value >= 1]:
            return found
        share = f"{max(relative.values()):.0%}"
        reason = f"none of the model's {len(measured)} heads reaches a threshold; the nearest has {share} of it"
        raise ArgumentError("measures", dict(self.measures), reason)

    def _relative(self, measured: Measured) -> dict[Head, float]:
        """The largest ratio of a measure to its threshold, for each head."""
        thresholds = self.measures.items()
        return {head: max(of[name] / least for name, least in thresholds) for head, of in measured.items()}

    def _result(
        self, context: AnalysisContext, measured: Measured, found: Sequence[Head], rows: list[list[Any]]
    ) -> AnalysisResult:
        """Return the heads' measures, and loss and accuracy by set of heads; the lines average over random draws."""
        means = {}
        for name in dict.fromkeys(row[0] for row in rows):
            scores = torch.tensor([row[3:] for row in rows if row[0] == name], dtype=torch.float64)
            means[name] = scores.mean(dim=0).tolist()
        of_heads = {head: [*values.values(), head in found] for head, values in measured.items()}
        title = "Largest ratio of a measure to its threshold; heads with at least 1 are the circuit"
        label = f"largest of {', '.join(f'{name} / {least:g}' for name, least in self.measures.items())}"
        titles = ", ".join(context.head_title(*head) for head in found)
        return AnalysisResult(
            scalars={
                "analysis/num_found": len(found),
                "analysis/num_heads": len(measured),
                **{
                    f"analysis/{name.replace(' ', '_')}/{kind}": value
                    for name, values in means.items()
                    for kind, value in zip(("loss", "accuracy"), values, strict=True)
                },
            },
            lines={
                "circuit": f"{len(found)} of {len(measured)} heads: {titles}",
                **{f"  {name}": f"{accuracy:.1%} correct, loss {loss:.4f}" for name, (loss, accuracy) in means.items()},
            },
            tables={
                "circuit": (["heads", "draw", "num_heads", "loss", "accuracy"], rows),
                "circuit_heads": context.head_table([*self.measures, "found"], of_heads),
            },
            figures={"circuit": context.head_grid(self._relative(measured), title, label)},
        )


def _as_many(heads: Sequence[Head], found: Sequence[Head], generator: torch.Generator) -> list[Head]:
    """Draw random heads, in each layer as many as `found` has in that layer."""
    drawn = []
    for layer in sorted({layer for layer, _ in heads}):
        of_layer = [head for head in heads if head[0] == layer]
        order = torch.randperm(len(of_layer), generator=generator).tolist()
        drawn += [of_layer[place] for place in order[: sum(at == layer for at, _ in found)]]
    return sorted(drawn)


def _without(heads: Sequence[Head], removed: Sequence[Head]) -> list[Head]:
    return [head for head in heads if head not in removed]


def _scores(context: AnalysisContext, ablation: Callable[[Batch], AbstractContextManager[None]]) -> tuple[float, float]:
    """The loss in nats per target, and the accuracy, with some heads ablated."""
    sums = Counter[str]()
    for batch in context.batches:
        with torch.no_grad(), context.precision(), ablation(batch):
            scores = context.task.score(context.network, batch)
        sums.update({name: score.cpu() for name, score in scores.items()})
    return float(sums["nats"] / sums["tokens"]), float(sums["top1"] / sums["tokens"])
