"""The logit lens and the tuned lens: predictions that are read from the residual stream after each layer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.analysis.causes.prompts import exact_pass, read_text
from tinyformer.analysis.context import AnalysisContext, Text, Trained
from tinyformer.data.batches.windows import IGNORED, Batch
from tinyformer.errors import ArgumentError
from tinyformer.measures.batches import queries_by_kind, rows_of
from tinyformer.measures.intervals import Change, Losses
from tinyformer.nn import AttentionMask, Network
from tinyformer.report.charts import lines
from tinyformer.report.picture import Picture
from tinyformer.report.plots import word_table
from tinyformer.report.result import AnalysisResult
from tinyformer.tasks import Classification, MaskedLM, Seq2Seq, SpanExtraction

NUM_DRAWN = 48  # tokens in the picture of a text
NUM_STEPS, TOLERANCE = 150, 1e-6  # of the tuned lens: most steps, and the gain in nats below which it ends
MAX_SCORES = 2**24  # log-probabilities that the fit holds at once: 64 MB in fp32
SMALLEST = 1e-4  # the smallest variance that the fit scales to 1, as a share of the largest

MEASURES = {
    "nats": ("Loss of the residual stream's predictions, by depth", "nats per {}", "linear"),
    "kl": ("Divergence of the model's output from the residual stream's predictions", "KL(output ‖ lens), nats", "log"),
    "agreement": ("How often the residual stream predicts the same as the output", "share of targets", "linear"),
}
"""The measures at each depth, by their names in the table: title, y label and y scale of their charts."""

Stream: TypeAlias = Float[Tensor, "tokens d_model"]
Lens: TypeAlias = Sequence[Callable[[Stream], Stream]]
"""For each depth, the map of the residual stream that comes before the final norm and the readout."""
Scores: TypeAlias = Sequence[Mapping[str, Change]]
"""The `MEASURES` at each depth."""


class Cell(NamedTuple):
    """The prediction at a depth and a token; its fields are the columns of the table."""

    depth: int
    position: int
    token: str
    predicted: str
    probability: float
    target: str  # the prediction of the output if no target is given
    given: bool  # True if a target is given
    target_probability: float
    rank: int  # of the target


@dataclass(eq=False)
class LogitLens:
    """The logit lens: predictions of the residual stream at each depth, through the final norm and the readout.

    The method is that of nostalgebraist 2020, "interpreting GPT: the logit lens", applied to the decoder of an
    encoder–decoder. The last depth is the model's output. The readout was not trained for earlier depths: information
    that the lens does not show may be in other directions, and information that it shows need not be used. The control
    is the untrained network. Its stream hardly changes by depth, so its predictions are nearly the same at all depths.

    Args:
        text: the text; a pair of texts for a classifier of pairs; the source of an encoder–decoder. By default, the
            targets of the evaluated split are measured, and its first window is shown.
        target: the target of that source; by default what the model decodes.
        tuned: if True, the tuned lens is fitted, too, see `fit_translator`, on every other window of the sample; both
            lenses are then measured on the remaining windows.
    """

    text: Text | None = None
    target: str | None = None
    tuned: bool = False
    num_windows: int = 32
    num_resamples: int = 1000  # bootstrap resamples of the windows
    needs_gradient = False  # the tuned lens needs gradients of the readout only

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        context.task.require_loss()
        if isinstance(context.task, SpanExtraction):
            reason = "predicts tokens or classes from the residual stream; span extraction has neither"
            raise ArgumentError("analysis", "lens", reason, {"analysis": "residual"})
        rows = rows_of(context.batches)
        lenses: dict[str, Lens] = {"logit lens": [nn.Identity()] * (1 + len(context.network.stacks()[-1].layers))}
        if self.tuned:
            lenses["tuned lens"], rows = fit_lens(context, rows[::2]), rows[1::2]
        if self.text is None:
            untrained = replace(context, network=context.networks()["untrained"])
            scores = {name: measure(context, rows, lens, self.num_resamples) for name, lens in lenses.items()}
            scores["untrained"] = measure(untrained, rows, lenses["logit lens"], self.num_resamples)
            found, row, what = _by_depth(context, len(rows), scores), rows[0], f"the first {context.row}"
        else:
            found, what = AnalysisResult(facts=context.facts_of_text(self.text)), "the text"
            is_scored = not isinstance(context.task, Classification | Seq2Seq)  # no label; targets are in the batch
            row = read_text(context, self.text, self.target, is_scored=is_scored)
        for name, lens in lenses.items():
            cells, key = cells_of(context, row, lens), name.replace(" ", "_")
            found.tables[key] = [*Cell._fields], [[*cell] for at in cells for cell in at]
            found.figures[key] = _picture(cells, name.capitalize(), what)
            found.lines |= {} if self.text is None else _at_place(context, row, cells, name)
        return found


def streams_of(context: AnalysisContext, row: Batch) -> list[Stream]:
    """The residual stream of one row in the last stack: the embeddings, then the output of each layer."""
    stacks = context.network.stacks()
    names = ["embedding", *(f"layers.{index}.residual_post" for index in range(len(stacks[-1].layers)))]
    _, captured = exact_pass(context, row, capture=["decoder." * (len(stacks) > 1) + name for name in names])
    return [x[0].float() for x in captured.values()]


def log_probs(network: Network, x: Stream, mask: AttentionMask | None = None) -> Float[Tensor, "places scores"]:
    """The log-probabilities that final norm and readout give at each place of a row; a classifier has one place."""
    x = network.stacks()[-1].final_norm(x.unsqueeze(0).to(next(network.parameters()).dtype))
    return network.readout(x, mask).flatten(0, -2).float().log_softmax(dim=-1)


@torch.no_grad()
def predictions(context: AnalysisContext, row: Batch, lens: Lens) -> list[Float[Tensor, "places scores"]]:
    """The `log_probs` of one row at each depth."""
    mask, streams = context.task.mask(row), streams_of(context, row)
    return [log_probs(context.network, translate(x), mask) for translate, x in zip(lens, streams, strict=True)]


def targets_of(row: Batch) -> Int[Tensor, " places"]:
    """The targets, or the label, of one row; `IGNORED` at tokens without a target."""
    if "targets" in row:
        return row["targets"][0]
    return row.get("labels", torch.tensor([IGNORED], device=row["inputs"].device))


def measure(context: AnalysisContext, rows: Sequence[Batch], lens: Lens, num_resamples: int) -> Scores:
    """The means of `MEASURES` over the targets at each depth, with their 95 % intervals over the rows."""
    sums = []
    for row in rows:
        is_target = (targets := targets_of(row)) != IGNORED
        *_, p = depths = [log_q[is_target] for log_q in predictions(context, row, lens)]
        of_row = [
            (
                F.nll_loss(log_q, targets[is_target], reduction="sum"),
                F.kl_div(log_q, p, reduction="sum", log_target=True),
                (log_q.argmax(dim=-1) == p.argmax(dim=-1)).sum(),
            )
            for log_q in depths
        ]
        sums.append([[float(x) for x in at] for at in of_row])
    counts = torch.tensor([float((targets_of(row) != IGNORED).sum()) for row in rows]).double()
    return [
        {name: Losses(of, counts).with_interval(num_resamples) for name, of in zip(MEASURES, at, strict=True)}
        for at in torch.tensor(sums).double().permute(1, 2, 0)
    ]


def cells_of(context: AnalysisContext, row: Batch, lens: Lens) -> list[list[Cell]]:
    """The predictions after each token of one row, or after the text of a classifier, by depth."""
    is_token, tokens = [*queries_by_kind(row).values()][-1][0].cpu(), context.tokenizer.token_strings
    read, names = tokens(row["inputs"][0].cpu()[is_token]), tokens(range(context.network.vocab_size))
    if isinstance(context.task, Classification):
        is_token, read, names = torch.ones(1, dtype=torch.bool), ["(text)"], context.task.labels
    log_q = torch.stack([of.cpu()[is_token] for of in predictions(context, row, lens)])
    highest, predicted = log_q.max(dim=-1)
    given = targets_of(row).cpu()[is_token]
    targets = given.where(given != IGNORED, predicted[-1]).expand_as(predicted)
    of_targets = log_q.gather(2, targets.unsqueeze(2))
    ranks, of_targets = 1 + (log_q > of_targets).sum(dim=2), of_targets.squeeze(2)
    columns = predicted, highest.exp(), targets, (given != IGNORED).expand_as(targets), of_targets.exp(), ranks
    return [
        [
            Cell(depth, position, token, names[best], probability, names[target], *others)
            for position, (token, best, probability, target, *others) in enumerate(zip(read, *at, strict=True))
        ]
        for depth, at in enumerate(zip(*(column.tolist() for column in columns), strict=True))
    ]


def fit_lens(context: AnalysisContext, rows: Sequence[Batch]) -> Lens:
    """The tuned lens, see `fit_translator`, fitted on the targets of some rows; its last map is the identity."""
    of_rows = [[x[targets_of(row) != IGNORED] for x in streams_of(context, row)] for row in rows]
    *streams, output = (torch.cat(of_depth) for of_depth in zip(*of_rows, strict=True))
    return [*(fit_translator(x, output, partial(log_probs, context.network)) for x in streams), nn.Identity()]


def fit_translator(
    x: Stream, output: Stream, log_probs: Callable[[Stream], Float[Tensor, "tokens vocab_size"]]
) -> nn.Linear:
    """The map x + A x + b with the smallest mean KL(p ‖ q), the tuned lens (Belrose et al. 2023, arXiv 2303.08112).

    L-BFGS (Liu and Nocedal 1989) finds A and b on all tokens, from A = 0. A is learned for the whitened stream: this
    takes a quarter of the steps if the scales of the stream's directions differ by orders of magnitude.

    Args:
        x: the residual stream at some depth.
        output: the residual stream after the last layer, of the same tokens.
        log_probs: computes log-probabilities from a stream: log p from the output, log q from the mapped stream.
    """
    mean = x.mean(dim=0)
    variances, directions = torch.linalg.eigh((x - mean).T @ (x - mean) / len(x))
    whitening = directions / variances.clamp(min=SMALLEST * float(variances[-1])).sqrt()
    factor = x.new_zeros(whitening.shape, requires_grad=True)
    shift = x.new_zeros(mean.shape, requires_grad=True)
    rows = max(1, MAX_SCORES // log_probs(x[:1]).shape[-1])
    parts = [*zip(x.split(rows), ((x - mean) @ whitening).split(rows), output.split(rows), strict=True)]
    optimizer = torch.optim.LBFGS(
        [factor, shift], max_iter=NUM_STEPS, tolerance_change=TOLERANCE, line_search_fn="strong_wolfe"
    )

    def divergence() -> Tensor:
        optimizer.zero_grad()
        total = x.new_zeros(())
        for part, white, last in parts:
            with torch.no_grad():
                p = log_probs(last)
            q = log_probs(part + white @ factor + shift)
            mean_of_part = F.kl_div(q, p, reduction="sum", log_target=True) / len(x)
            mean_of_part.backward(inputs=[factor, shift])
            total += mean_of_part.detach()
        return total

    with torch.enable_grad():
        optimizer.step(divergence)
    added = (whitening @ factor).detach()
    translator = nn.utils.skip_init(nn.Linear, *added.shape, device=x.device, dtype=x.dtype).requires_grad_(False)
    translator.weight.copy_(torch.eye(len(added)).to(added) + added.T)
    translator.bias.copy_(shift.detach() - mean @ added)
    return translator


def _by_depth(context: AnalysisContext, num_rows: int, scores: Mapping[str, Scores]) -> AnalysisResult:
    """The result with the scores on `num_rows` rows: those of each lens, and of the untrained network's logit lens."""
    each = [(name, depth, at) for name, depths in scores.items() for depth, at in enumerate(depths)]
    halves = f", while the tuned lens is fitted on {context.num_windows - num_rows} others" * ("tuned lens" in scores)
    found = AnalysisResult({"analysis/loss": scores["logit lens"][-1]["nats"].mean})
    found.scalars |= {
        f"analysis/{name.replace(' ', '_')}/{depth}/{of}": at[of].mean for name, depth, at in each for of in MEASURES
    }
    found.lines["lens"] = (
        f"over {num_rows} {context.row}s{halves}: nats per {context.task.unit}; KL of the output from "
        "the lens; how often both predict the same [95 % intervals]:"
    )
    for depth, at in enumerate(scores["logit lens"]):
        tuned = "".join(f" (tuned {of[depth]['kl']:.3g})" for name, of in scores.items() if name == "tuned lens")
        same = f"{at['agreement']:.3g} (untrained {scores['untrained'][depth]['agreement'].mean:.3g})"
        title = _title(depth, len(scores["untrained"]))
        found.lines[f"  {title}"] = f"{at['nats']:.3g}; {at['kl']:.3g}{tuned}; {same}"
    columns = ["lens", "depth", *(f"{name}{end}" for name in MEASURES for end in ("", "_low", "_high"))]
    found.tables["lens"] = columns, [[*of, *(x for change in at.values() for x in astuple(change))] for *of, at in each]
    for of, (title, ylabel, yscale) in MEASURES.items():
        curves = {name: (range(len(depths)), [at[of].mean for at in depths]) for name, depths in scores.items()}
        control = {"logit lens, untrained": curves.pop("untrained")}
        found.figures[f"lens_{of}"] = lines(curves, title, "layers", ylabel.format(context.task.unit), yscale, control)
    return found


def _picture(cells: Sequence[Sequence[Cell]], name: str, what: str) -> Picture:
    """The table of predictions, with the output in the top row; correct predictions are framed."""
    total, drawn = len(cells[0]), [at[:NUM_DRAWN] for at in reversed(cells)]
    extent = f"the first {NUM_DRAWN} of {total:,} tokens of {what}" if total > NUM_DRAWN else what
    targets = [cell.target if cell.given else f"({cell.target})" for cell in drawn[0]]
    return word_table(
        [[cell.predicted for cell in at] for at in drawn],
        [[cell.probability for cell in at] for at in drawn],
        [[cell.rank == 1 for cell in at] for at in drawn],
        [_title(depth, len(cells)) for depth in reversed(range(len(cells)))],
        {"target": targets, "token": [cell.token for cell in drawn[0]]},
        f"{name}: what the residual stream predicts, on {extent}",
        "probability of the prediction; framed if it is the target (in brackets: no target, the output's prediction)",
    )


def _at_place(context: AnalysisContext, row: Batch, cells: Sequence[Sequence[Cell]], name: str) -> dict[str, str]:
    """The predictions by depth at the masked token (if there is none, the last token), as lines of the summary."""
    ids, mask_id = row["inputs"][0].tolist(), context.tokenizer.mask_id
    at = ids.index(mask_id) if isinstance(context.task, MaskedLM) and mask_id in ids else -1
    last = cells[-1][at]
    lines = {name: f'prediction at "{last.token}", its probability, and the rank of "{last.target}":'}
    for cell in (of_depth[at] for of_depth in cells):
        told = f'"{cell.predicted}" {cell.probability:.1%}, rank {cell.rank}'
        lines[f"  {name}, {_title(cell.depth, len(cells))}"] = told
    return lines


def _title(depth: int, number: int) -> str:
    """The title of a depth, given the number of depths: "embedding", "2 layers", …, "output"."""
    return {1: "1 layer", number - 1: "output", 0: "embedding"}.get(depth, f"{depth} layers")
