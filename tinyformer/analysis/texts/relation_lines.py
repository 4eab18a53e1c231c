"""Relations in many lines: how often a head attends from a word to its related word, compared with controls."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tinyformer.analysis.context import AnalysisContext
from tinyformer.analysis.texts.maps import of_sample, with_controls, with_importance
from tinyformer.data import SETS, Line, make_lines
from tinyformer.data.sources.files import READERS, Layout, read_rows
from tinyformer.data.sources.text_paths import stem_and_format
from tinyformer.errors import ArgumentError
from tinyformer.measures.capture import capture_weights, map_title
from tinyformer.measures.events import head_labels
from tinyformer.measures.intervals import Change, Losses
from tinyformer.measures.probe import ablated_maps
from tinyformer.measures.words import words_of
from tinyformer.nn import Network, Transformer
from tinyformer.report.result import AnalysisResult, Table, naming_ablated

NUM_UNTRAINED = 5  # seeds of untrained weights
NUM_RESAMPLES = 1000  # bootstrap resamples of the lines
ALPHA = 0.05
CONTROLS = ("fixed_offset", "same_distances", "untrained")


class Placed(NamedTuple):
    """A line's token ids, and its words' positions in maps: `query` in rows, `key` and `distractor` in columns."""

    ids: list[int]
    query: range
    key: range
    distractor: range

    def center(self, side: int) -> float:
        """The distance in tokens from the middle of the query to that of `side`, which is 2 (key) or 3 (distractor)."""
        return (self[side][0] + self[side][-1] - self.query[0] - self.query[-1]) / 2


class HeadRoles:
    """The label, and optionally the importance, of each of `AnalysisContext.map_addresses`, as columns of a table."""

    columns = ("label", "importance")

    def __init__(self, context: AnalysisContext, importance: bool) -> None:
        measures, traits, _ = with_controls(context, of_sample(context))
        measures = with_importance(context, measures) if importance else measures
        labels = [*chain(*head_labels(measures.values, traits))]
        values = chain(*measures.values.get("importance", [[None] * len(labels)]))
        self.rows = list(zip(labels, values, strict=True))
        self._ranked = sorted((of for _, of in self.rows if of is not None and not math.isnan(of)), reverse=True)

    def sentence(self, at: int) -> str:
        label, value = self.rows[at]
        named = label or "no label"
        if value is None:
            return named
        return f"{named}; importance {value:.2g}, rank {1 + self._ranked.index(value)} of {len(self._ranked)}"


def read_columns(file: str, columns: Sequence[str], others: str = "") -> list[Sequence[Any]]:
    """The rows of a .csv or .jsonl file with the given columns; the error for any other file ends with `others`."""
    path = Path(file).expanduser()
    if not path.is_file() or stem_and_format(path)[1] not in {*READERS} - {".txt"}:
        reason = f"is no .csv or .jsonl file with the columns {', '.join(columns)}{others}"
        raise ArgumentError("file", file, reason)
    try:
        return [*read_rows(path, Layout(columns))]
    except ArgumentError as error:  # its argument, a column or a dialect, is no argument of the analysis
        reason = error.reason.removeprefix(f"{path} ").replace("no such column", f"no column {error.value}")
        raise ArgumentError("file", file, re.sub("; (for a file without|to read quot).*", "", reason)) from error


def read_lines(file: str) -> list[Line]:
    """The lines of one of `SETS`, or of a .csv or .jsonl file with the columns `text, query, key, distractor`."""
    if file in SETS:
        return make_lines(file)
    rows = read_columns(file, Line._fields, f", nor one of {', '.join(SETS)}")
    return [Line(*(str(value or "") for value in row)) for row in rows]


def prefers(key: Tensor, distractor: Tensor) -> Tensor:
    """1 where the weight to the key is larger, 0 where the weight to the distractor is, ½ where both are equal."""
    return torch.where(torch.isclose(key, distractor, atol=0), 0.5, (key > distractor).double())


class RelationLines:
    """The share of lines in which each head prefers the key to its distractor, and the controls.

    A head prefers the key if the mean weight from the query's tokens to the key's tokens is above the mean weight to
    the distractor's tokens. Weights are averaged over tokens, not summed, so that longer words have no advantage.
    """

    def __init__(self, context: AnalysisContext, file: str, lines: Sequence[Line], predicting: bool) -> None:
        self.context, self.file, self.lines = context, file, lines
        self.placed = [self._place(number, line, predicting) for number, line in enumerate(lines, start=1)]
        self.maps, seen = self._maps(context.network)
        if len(seen) < 4:
            reason = f"the query sees both words in {len(seen)} of {len(lines)} lines, and 4 are needed; a causal "
            reason += "model sees no later words, a model that is trained with task=masked_lm does"
            raise ArgumentError("file", file, reason)
        self.halves = seen[::2], seen[1::2]
        self.is_ablated = [*chain(*ablated_maps(context.network))]

    def _place(self, number: int, line: Line, predicting: bool) -> Placed:
        context, longest = self.context, self.context.network.max_seq_len
        try:
            ids = context.tokens_of(line.text)
            words = words_of(ids, context.tokenizer, [line.text])
            sides = (words.predicted() if predicting else words, words, words)
            runs = [side.find(phrase) for side, phrase in zip(sides, line[1:], strict=True)]
        except ArgumentError as error:
            raise ArgumentError("file", self.file, f"line {number}: {error.reason}") from None
        if len(ids) > longest:
            reason = f"line {number} has {len(ids)} tokens; at most {longest} fit into the context of the model"
            raise ArgumentError("file", self.file, reason)
        return Placed(ids, *(side.tokens(run[0], run[-1]) for side, run in zip(sides, runs, strict=True)))

    def _maps(self, network: Network) -> tuple[Float[Tensor, "lines heads seq seq"], list[int]]:
        """The maps of each line, padded with zeros; and the lines whose query sees key and distractor in some layer."""
        longest, device = max(len(line.ids) for line in self.placed), self.context.batches[0]["inputs"].device
        of_length: dict[int, list[int]] = defaultdict(list)
        for index, line in enumerate(self.placed):
            of_length[len(line.ids)].append(index)
        found, seen = dict[int, Tensor](), []
        for length, group in of_length.items():
            tokens = torch.tensor([self.placed[index].ids for index in group], device=device)
            with self.context.precision():
                maps = capture_weights(cast(Transformer, network), tokens, self.context.task.mask({"inputs": tokens}))
            padded = F.pad(torch.cat([of.float().cpu() for of in maps], dim=1), (0, longest - length) * 2)
            found |= dict(zip(group, padded, strict=True))
            visible = torch.stack([layer.logits[0, 0].cpu() > -torch.inf for layer in maps.layers]).any(dim=0)
            for index in group:
                query, key, distractor = map(list, self.placed[index][1:])
                seen += [index] if visible[query][:, key + distractor].all() else []
        return torch.stack([found[index] for index in range(len(found))]), sorted(seen)

    def preferred(self, maps: Float[Tensor, "lines heads seq seq"]) -> Float[Tensor, "lines heads"]:
        """The preference of each head in each line, see `prefers`."""
        found = []
        for weights, line in zip(maps, self.placed, strict=True):
            query, key, distractor = map(list, line[1:])
            rows = weights[:, query].mean(dim=1)
            found.append(prefers(*(rows[:, side].mean(dim=1) for side in (key, distractor))))
        return torch.stack(found)

    def elsewhere(self, index: int) -> Float[Tensor, " heads"]:
        """For each head, its mean preference if the positions of a line's three words are shifted by one offset.

        The preference is measured in the map of every line, but not where a shift meets the query of the map's line. A
        head that merely prefers a distance, or longer words, has the same preference here. nan if no shift is possible.
        """
        line, (before, after) = self.placed[index], map(len, self.context.tokenizer.around)
        first, last = (of(side[at] for side in line[1:]) for of, at in ((min, 0), (max, -1)))
        shifts = torch.arange(before - first, max(before - first, self.maps.shape[-1] - after - last))
        query, key, distractor = (shifts[:, None] + torch.tensor(side) for side in line[1:])
        weights = (self.maps[:, :, query[:, :, None], side[:, None]].mean(dim=(-1, -2)) for side in (key, distractor))
        places = torch.tensor([[of.query[0], of.query[-1], len(of.ids) - after] for of in self.placed])
        begin, end, length = places.T.unsqueeze(-1)
        others = ((query[:, -1] < begin) | (query[:, 0] > end)) & (last + shifts < length)
        return (prefers(*weights) * others[:, None]).sum(dim=(0, 2)) / others.sum()

    def best_offset(self) -> tuple[int, Float[Tensor, " tested"]]:
        """The best k for the rule "the word nearer to k tokens from the query", and its choice in each tested line."""
        longest = max(len(line.ids) for line in self.placed)
        offsets = sorted(range(-longest, longest + 1), key=abs)  # of equally good offsets, the smallest
        near = [[[-abs(line.center(side) - k) for line in self.placed] for k in offsets] for side in (2, 3)]
        by_rule = prefers(*torch.tensor(near))
        best = int(by_rule[:, self.halves[0]].mean(dim=1).argmax())
        return offsets[best], by_rule[best, self.halves[1]]

    def untrained(self) -> Float[Tensor, " tested"]:
        """The preferences of the best untrained head when tested; of several seeds, those with the largest mean."""
        assert self.context.untrained is not None
        found = []
        for seed in range(NUM_UNTRAINED):
            preferred = self.preferred(self._maps(self.context.untrained(seed))[0])
            found.append(preferred[self.halves[1], self.choose(preferred)])
        return max(found, key=lambda of_lines: float(of_lines.mean()))

    def choose(self, preferred: Float[Tensor, "lines heads"]) -> int:
        """The active head that prefers the key most often in the first half."""
        return int(preferred[self.halves[0]].mean(dim=0).masked_fill(torch.tensor(self.is_ablated), -1).argmax())

    def controls(self, elsewhere: Float[Tensor, " tested"]) -> dict[str, Float[Tensor, " tested"]]:
        """The preferences of the controls in the tested half, by name; `elsewhere` is one of them."""
        offset, by_offset = self.best_offset()
        return {
            f"a fixed offset of {offset:+d} tokens" if offset else "the nearer of both words": by_offset,
            "other words at the same distances": elsewhere,
            f"untrained weights (best of {NUM_UNTRAINED} seeds)": self.untrained(),
        }


def holm(p_values: Float[Tensor, " tests"]) -> Float[Tensor, " tests"]:
    """p-values corrected for the number of tests (Holm 1979)."""
    ordered, order = p_values.sort()
    factors = torch.arange(len(ordered), 0, -1, dtype=ordered.dtype)
    return torch.empty_like(ordered).scatter(0, order, (ordered * factors).clamp(max=1).cummax(dim=0).values)


def compare(values: Float[Tensor, " lines"], control: Float[Tensor, " lines"] | float = 0.0) -> Change:
    """The mean of values minus a control on the same lines, with its bootstrap interval over the lines."""
    differences = values - control
    differences = differences[~differences.isnan()]
    if not len(differences):
        return Change(math.nan, math.nan, math.nan)
    return Losses(differences, torch.ones_like(differences)).with_interval(NUM_RESAMPLES)


def p_values(differences: Float[Tensor, "lines heads"]) -> Float[Tensor, " heads"]:
    """p-values of the z test that a head's mean difference is above 0, with Holm's correction for all heads."""
    mean = differences.nanmean(dim=0)
    errors = ((differences - mean).square().nanmean(dim=0).clamp(min=1e-18) / len(differences)).sqrt()
    return holm(torch.special.ndtr(-mean / errors))


def analyse_lines(relation: RelationLines, roles: HeadRoles) -> AnalysisResult:
    """The preferences of heads for the keys of lines; one half of the lines chooses a head, the other half tests it."""
    context, name = relation.context, Path(relation.file).stem
    found = relation.preferred(relation.maps)
    tested, chosen = found[relation.halves[1]], relation.choose(found)
    elsewhere = torch.stack([relation.elsewhere(index) for index in relation.halves[1]])
    own, controls = tested[:, chosen], relation.controls(elsewhere[:, chosen])
    share, of_controls = compare(own), {control: compare(values) for control, values in controls.items()}
    unbeaten = [control for control, values in controls.items() if not compare(own, values).low > 0]
    p, title = p_values(tested - elsewhere), map_title(context.map_addresses[chosen])
    used, number = sorted(chain(*relation.halves)), len(relation.placed)
    is_active = ~torch.tensor(relation.is_ablated)
    better = f"{int((p < ALPHA)[is_active].sum())} of {int(is_active.sum())}"
    unseen = f"; in {number - len(used)} the query does not see both words" * (len(used) < number)
    picture = f"{name}: share of {len(own)} lines in which a head prefers the key"
    return AnalysisResult(
        scalars={
            "analysis/relation/preferred": share.mean,
            **{f"analysis/relation/{key}": of.mean for key, of in zip(CONTROLS, of_controls.values(), strict=True)},
            "analysis/relation/exceeds_controls": int(not unbeaten),
        },
        lines={
            "relation": f"{name}: {len(used) - len(own)} lines choose the head, {len(own)} others test it{unseen}",
            "  verdict": verdict(title, len(own), share, of_controls, unbeaten),
            f"  {title}": roles.sentence(chosen),
            **{f"  {control}": f"{of.mean:.1%} [{of.low:.1%}, {of.high:.1%}]" for control, of in of_controls.items()},
            "  all heads": f"{better} prefer the key more often than other words at the same distances "
            f"(z test, p < {ALPHA} with Holm's correction for all heads)",
        },
        tables={
            "relations": head_table(relation, roles, found, elsewhere, p, chosen),
            "relation_lines": (
                ["line", *Line._fields, "choosing", "preferred"],
                [[at + 1, *relation.lines[at], at in relation.halves[0], float(found[at, chosen])] for at in used],
            ),
        },
        figures={"relations": context.map_grid(tested.mean(dim=0).tolist(), picture, "share of lines")},
        facts={fact: value for fact, value in context.facts.items() if fact != "data"} | {"lines": name},
    )


def head_table(
    relation: RelationLines, roles: HeadRoles, found: Tensor, elsewhere: Tensor, p: Tensor, chosen: int
) -> Table:
    """A row for each head: its preference for the key in each half, and for shifted words, see `elsewhere`."""
    context, (choosing, tested) = relation.context, (found[half] for half in relation.halves)
    rows = []
    for at, address in enumerate(context.map_addresses):
        of, same = compare(tested[:, at]), compare(elsewhere[:, at])
        shares = [float(choosing[:, at].mean()), of.mean, of.low, of.high, same.mean, float(p[at])]
        rows.append([*address, *shares, at == chosen, *roles.rows[at]])
    columns = ["head", "choosing", "tested", "low", "high", "same_distances", "p_value", "chosen", *roles.columns]
    return naming_ablated([*context.address_columns, *columns], rows, relation.is_ablated)


def verdict(head: str, number: int, share: Change, controls: Mapping[str, Change], unbeaten: Sequence[str]) -> str:
    """The result of the lines in one sentence; `unbeaten` are controls that the head does not exceed significantly."""
    others = ", ".join(f"{name} {100 * of.mean:.0f}" for name, of in controls.items())
    figures = f"{100 * share.mean:.0f} % of {number} lines ({100 * share.low:.0f} to {100 * share.high:.0f}; {others})"
    if not unbeaten:
        return f"{head} links query to key in {figures}"
    return f"no head does better than {' or '.join(unbeaten)}: the best, {head}, prefers the key in {figures}"
