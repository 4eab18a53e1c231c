"""The logit lens: what the residual stream would predict if it went to the readout after each layer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor, nn

from tinyformer.analysis.causes.prompts import exact_pass, read_text
from tinyformer.analysis.causes.tuned_lens import Stream, fit_translator
from tinyformer.analysis.context import AnalysisContext, Text, Trained, require_positive
from tinyformer.batch import IGNORED, Batch
from tinyformer.errors import ArgumentError
from tinyformer.measures.inputs import queries_by_kind, rows_of
from tinyformer.measures.intervals import Change, Losses
from tinyformer.nn import AttentionMask, Network
from tinyformer.report.charts import lines
from tinyformer.report.picture import Picture
from tinyformer.report.plots import word_table
from tinyformer.report.result import AnalysisResult
from tinyformer.tasks import Classification, MaskedLM, Seq2Seq, SpanExtraction

NUM_DRAWN = 48  # tokens in the picture of a text

MEASURES = {
    "nats": ("Loss of what the residual stream predicts, by depth", "nats per {}", "linear"),
    "kl": ("How far the model's output is from what the residual stream predicts", "KL(output ‖ lens), nats", "log"),
    "agreement": ("How often the residual stream predicts what the output does", "share of targets", "linear"),
}
"""What is measured at each depth, by its name in the table: title, y label and y scale of its chart."""

Lens: TypeAlias = Sequence[Callable[[Stream], Stream]]
"""What is done to the residual stream at each depth before the final norm and the readout."""


@dataclass(eq=False)
class LogitLens:
    """The logit lens: predictions of the residual stream at each depth, through the final norm and the readout.

    It is that of nostalgebraist 2020, "interpreting GPT: the logit lens"; of an encoder–decoder, of the decoder. The
    last depth is the model's output. A stream is not made to be read so early: what cannot be read from it may be there
    in other directions, and what can be read need not be used. The control is the untrained network, whose stream
    hardly changes by depth, so that its lens agrees with its output as well.

    Args:
        text: the text; a pair of texts for a classifier of pairs; the source of an encoder–decoder. By default, the
            targets of the evaluated split are measured, and the first of its windows is shown.
        target: the target of that source; by default what the model decodes.
        tuned: whether the tuned lens is fitted, too, see `fit_translator`: on every other window of the sample, while
            the rest measures both lenses.
    """

    text: Text | None = None
    target: str | None = None
    tuned: bool = False
    num_windows: int = 32
    num_resamples: int = 1000  # bootstrap resamples of the windows
    needs_gradient = False  # of the tuned lens, only the readout does

    def __post_init__(self) -> None:
        require_positive(self, "num_windows", "num_resamples")
        if self.target is not None and self.text is None:
            raise ArgumentError("target", self.target, "needs `text`, the source that it belongs to", {"target": None})

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        if isinstance(context.task, SpanExtraction):
            reason = "reads tokens or classes from the residual stream; a model for questions predicts neither"
            raise ArgumentError("analysis", "lens", reason, {"analysis": "residual"})
        rows = measured = rows_of(context.batches)
        lenses: dict[str, Lens] = {"logit lens": [nn.Identity()] * (1 + len(context.network.stacks()[-1].layers))}
        if self.tuned:
            if isinstance(context.task, Classification) or len(rows) < 2:
                reason = f"needs a model that predicts tokens, and two {context.row}s"
                raise ArgumentError("tuned", True, reason, {"tuned": False})
            measured = rows[1::2]
            lenses["tuned lens"] = fit_lens(context, rows[::2])
        if self.text is None:
            findings, shown, what = self._by_depth(context, measured, lenses), measured[0], f"the first {context.row}"
        else:
            findings, shown, what = (
                AnalysisResult(facts=context.facts_of_text(self.text)),
                self._read(context),
                "the text",
            )
        ids, mask_id = shown["inputs"][0].tolist(), context.tokenizer.mask_id
        place = ids.index(mask_id) if isinstance(context.task, MaskedLM) and mask_id in ids else -1
        for name, lens in lenses.items():
            cells, key = cells_of(context, shown, lens), name.replace(" ", "_")
            findings.tables[key] = [*cells[0]], [[*row] for of in cells for row in zip(*of.values(), strict=True)]
            findings.figures[key] = _table_of(cells, name.capitalize(), what)
            if self.text is not None:
                findings.lines |= _at_place(cells, name, place)
        return findings

    def _read(self, context: AnalysisContext) -> Batch:
        """The text with its targets."""
        is_scored = not isinstance(context.task, Classification | Seq2Seq)  # a label is not given, a target is read
        batch = read_text(context, cast(Text, self.text), self.target, is_scored=is_scored)
        ignored = {"labels": torch.full_like(batch["inputs"][:, 0], IGNORED)}
        return cast(Batch, batch | ignored if isinstance(context.task, Classification) else batch)

    def _by_depth(self, context: AnalysisContext, rows: Sequence[Batch], lenses: Mapping[str, Lens]) -> AnalysisResult:
        """The scores of each lens on the targets of some rows, with those of the untrained network's logit lens."""
        untrained = replace(context, network=context.networks()["untrained"])
        found = {name: measure(context, rows, lens, self.num_resamples) for name, lens in lenses.items()}
        found["untrained"] = measure(untrained, rows, lenses["logit lens"], self.num_resamples)
        each = [(name, depth, at) for name, depths in found.items() for depth, at in enumerate(depths)]
        sentences: dict[str, str] = {}
        figures: dict[str, Figure | Picture] = {}
        for depth, at in enumerate(found["logit lens"]):
            kl = f"{at['kl']:.3g}" + (f" (tuned {found['tuned lens'][depth]['kl']:.3g})" if self.tuned else "")
            same = f"{at['agreement']:.3g} (untrained {found['untrained'][depth]['agreement'].mean:.3g})"
            sentences[f"  {_title(depth, len(found['untrained']))}"] = f"{at['nats']:.3g}; {kl}; {same}"
        for of, (title, ylabel, yscale) in MEASURES.items():
            curves = {name: (range(len(depths)), [at[of].mean for at in depths]) for name, depths in found.items()}
            control = {"logit lens, untrained": curves.pop("untrained")}
            words = title, "layers", ylabel.format(context.task.unit), yscale
            figures[f"lens_{of}"] = lines(curves, *words, control)
        halves = f", while the tuned lens is fitted on {context.num_windows - len(rows)} others" * self.tuned
        return AnalysisResult(
            scalars={
                "analysis/loss": found["logit lens"][-1]["nats"].mean,
                **{
                    f"analysis/{name.replace(' ', '_')}/{depth}/{of}": at[of].mean
                    for name, depth, at in each
                    for of in at
                },
            },
            lines={
                "lens": f"over {len(rows)} {context.row}s{halves}: nats per {context.task.unit}; KL of the output from "
                "the lens; how often both predict the same [95 % intervals]:",
                **sentences,
            },
            tables={
                "lens": (
                    ["lens", "depth", *(f"{name}{end}" for name in MEASURES for end in ("", "_low", "_high"))],
                    [[name, depth, *(x for of in at.values() for x in astuple(of))] for name, depth, at in each],
                )
            },
            figures=figures,
        )


def streams_of(context: AnalysisContext, row: Batch) -> list[Stream]:
    """The residual stream of one row in the layers that predict: the embeddings, then the output of each layer."""
    stacks = context.network.stacks()
    names = ["embedding", *(f"layers.{index}.residual_post" for index in range(len(stacks[-1].layers)))]
    _, captured = exact_pass(context, row, capture=["decoder." * (len(stacks) > 1) + name for name in names])
    return [x[0].float() for x in captured.values()]


def log_probs(
    network: Network, x: Float[Tensor, "seq d_model"], mask: AttentionMask | None = None
) -> Float[Tensor, "places scores"]:
    """The predictions of a row's residual stream through the final norm and the readout: for each token, or one."""
    x = network.stacks()[-1].final_norm(x.unsqueeze(0).to(next(network.parameters()).dtype))
    return network.readout(x, mask).flatten(0, -2).float().log_softmax(dim=-1)


def downwards(context: AnalysisContext, row: Batch, lens: Lens) -> Iterator[Float[Tensor, "places scores"]]:
    """The `log_probs` of one row from the output down to the embeddings."""
    mask = context.task.mask(row)
    for translate, x in reversed([*zip(lens, streams_of(context, row), strict=True)]):
        with torch.no_grad():
            log_q = log_probs(context.network, translate(x), mask)
        yield log_q


def targets_of(row: Batch) -> Int[Tensor, " places"]:
    """The targets, or the label, of one row; `IGNORED` where it has none."""
    return row["labels"] if "labels" in row else row["targets"][0]


def measure(context: AnalysisContext, rows: Sequence[Batch], lens: Lens, num_resamples: int) -> list[dict[str, Change]]:
    """The means of `MEASURES` over the targets at each depth, with their 95 % intervals over the rows."""
    of_rows, counts = [], [float((targets_of(row) != IGNORED).sum()) for row in rows]
    for row in rows:
        is_target = (targets := targets_of(row)) != IGNORED
        depths = [log_q[is_target] for log_q in downwards(context, row, lens)]
        p, sums = depths[0], []
        for log_q in reversed(depths):
            nats = F.nll_loss(log_q, targets[is_target], reduction="sum")
            kl = F.kl_div(log_q, p, reduction="sum", log_target=True)
            sums.append([float(nats), float(kl), float((log_q.argmax(dim=-1) == p.argmax(dim=-1)).sum())])
        of_rows.append(sums)
    by_depth, targets = torch.tensor(of_rows).double().permute(1, 2, 0), torch.tensor(counts).double()
    return [
        {name: Losses(of, targets).with_interval(num_resamples) for name, of in zip(MEASURES, at, strict=True)}
        for at in by_depth
    ]


def fit_lens(context: AnalysisContext, rows: Sequence[Batch]) -> Lens:
    """The tuned lens of the targets of some rows, see `fit_translator`; the output stays as it is."""
    of_rows = [[x[targets_of(row) != IGNORED] for x in streams_of(context, row)] for row in rows]
    *streams, output = (torch.cat(of_depth) for of_depth in zip(*of_rows, strict=True))
    return [*(fit_translator(x, output, partial(log_probs, context.network)) for x in streams), nn.Identity()]


def cells_of(context: AnalysisContext, row: Batch, lens: Lens) -> list[dict[str, Sequence[Any]]]:
    """The predictions after each token of one row, or after the text of a classifier: a table for each depth.

    In place of a target that is not given stands what the output predicts.
    """
    is_token, tokens = [*queries_by_kind(row).values()][-1][0].cpu(), context.tokenizer.token_strings
    read, names = tokens(row["inputs"][0].cpu()[is_token]), tokens(range(context.network.vocab_size))
    if isinstance(context.task, Classification):
        is_token, read, names = torch.ones(1, dtype=torch.bool), ["(text)"], context.task.labels
    cells: list[dict[str, Sequence[Any]]] = []
    targets = given = targets_of(row).cpu()[is_token]
    for log_q in (found.cpu()[is_token] for found in downwards(context, row, lens)):
        highest, predicted = log_q.max(dim=-1)
        targets = given.where(given != IGNORED, predicted if not cells else targets)
        of_targets = log_q.gather(1, targets.unsqueeze(1))
        at_depth = {
            "depth": [len(lens) - 1 - len(cells)] * len(read),
            "position": range(len(read)),
            "token": read,
            "predicted": [names[index] for index in predicted.tolist()],
            "probability": highest.exp().tolist(),
            "target": [names[index] for index in targets.tolist()],
            "given": (given != IGNORED).tolist(),
            "target_probability": of_targets.squeeze(1).exp().tolist(),
            "rank": (1 + (log_q > of_targets).sum(dim=1)).tolist(),
        }
        cells.append(at_depth)
    return cells[::-1]


def _table_of(cells: Sequence[Mapping[str, Sequence[Any]]], name: str, what: str) -> Picture:
    """The picture of what `cells_of` returns, with the output on top."""
    total = len(cells[0]["token"])
    drawn = {column: [of[column][:NUM_DRAWN] for of in reversed(cells)] for column in cells[0]}
    extent = f"the first {NUM_DRAWN} of {total:,} tokens of {what}" if total > NUM_DRAWN else what
    targets = zip(drawn["target"][0], drawn["given"][0], strict=True)
    return word_table(
        drawn["predicted"],
        drawn["probability"],
        [[rank == 1 for rank in ranks] for ranks in drawn["rank"]],
        [_title(depth, len(cells)) for depth in reversed(range(len(cells)))],
        {"target": [name if given else f"({name})" for name, given in targets], "token": drawn["token"][0]},
        f"{name}: what the residual stream predicts, on {extent}",
        "probability of the prediction; framed where it is the target (in brackets: the output's, for want of one)",
    )


def _at_place(cells: Sequence[Mapping[str, Sequence[Any]]], name: str, place: int) -> dict[str, str]:
    """The predictions at one token, by depth, as lines of the summary."""
    token, target = (cells[-1][column][place] for column in ("token", "target"))
    lines = {name: f'prediction at "{token}", its probability, and the rank of "{target}":'}
    for depth, of in enumerate(cells):
        predicted, probability, rank = (of[column][place] for column in ("predicted", "probability", "rank"))
        lines[f"  {name}, {_title(depth, len(cells))}"] = f'"{predicted}" {probability:.1%}, rank {rank}'
    return lines


def _title(depth: int, number: int) -> str:
    """The depth of a stream of which there is a number."""
    return {1: "1 layer", number - 1: "output", 0: "embedding"}.get(depth, f"{depth} layers")
