"""The reach of a model: its accuracy by the distance of the earlier occurrence of the token that it reads."""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tinyformer.analysis.context import Trained, require_positive
from tinyformer.batch import IGNORED
from tinyformer.errors import ArgumentError
from tinyformer.report.charts import lines
from tinyformer.report.result import AnalysisResult
from tinyformer.tasks import CausalLM


@dataclass(eq=False)
class AccuracyByDistance:
    """The accuracy of the next token by the distance to the last earlier occurrence of the token that is read.

    On `data=recall` the token read is a key, and the distance is that from the query to its pair (Arora et al. 2023,
    arXiv 2312.04927). To compare with, `copied` is the accuracy of the token after that occurrence: 1 on recall; on a
    text, what an induction head alone would reach. Targets whose input has not occurred before are left out.
    """

    width: int = 4  # tokens of distance that share a row of the table
    num_windows: int = 256
    needs_gradient = False

    def __post_init__(self) -> None:
        require_positive(self, "width", "num_windows")

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
        if not len(distance):
            raise ArgumentError("num_windows", context.num_windows, "have no target whose input has occurred before")
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
            "Accuracy of the next token by the distance to an earlier occurrence of the token read",
            "distance, tokens",
            "accuracy",
            baselines={"copying what followed it": (first, copies)},
        )
        return AnalysisResult(
            lines={"accuracy": ", ".join(told), "  copying": f"{near[4]:.1%} and {far[4]:.1%}"},
            tables={"distance": (["first", "last", "targets", "accuracy", "copied"], rows)},
            figures={"distance": chart},
        )


def by_target(
    inputs: Int[Tensor, "batch seq"], targets: Int[Tensor, "batch seq"], predicted: Int[Tensor, "batch seq"]
) -> tuple[Int[Tensor, " targets"], Bool[Tensor, " targets"], Bool[Tensor, " targets"]]:
    """For each target whose input has occurred before: the distance, and whether prediction and copy are right."""
    place = torch.arange(inputs.shape[1], device=inputs.device)
    is_same = (inputs.unsqueeze(2) == inputs.unsqueeze(1)) & (place < place.unsqueeze(1))
    last = torch.where(is_same, place, -1).amax(dim=2)
    counted = (targets != IGNORED) & (last >= 0)
    copied = inputs.gather(1, last + 1)
    return (place - last)[counted], (predicted == targets)[counted], (copied == targets)[counted]
