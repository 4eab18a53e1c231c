"""Relations on many lines: how often a head attends from a word to the one that it belongs to, next to controls."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from tinyformer.analysis.context import AnalysisContext
from tinyformer.data import SETS, Line, make_lines
from tinyformer.data.sources.files import READERS, Layout, read_rows
from tinyformer.data.sources.text_paths import stem_and_format
from tinyformer.errors import ArgumentError
from tinyformer.measures.capture import capture_weights, head_label
from tinyformer.measures.events import TRAITS, Trait, head_labels
from tinyformer.measures.intervals import Change, Losses
from tinyformer.measures.probe import HeadMeasures
from tinyformer.measures.words import WordError, words_of
from tinyformer.nn import EncoderDecoder, Network, Transformer
from tinyformer.nn.heads import layer_title
from tinyformer.report.charts import head_grid
from tinyformer.report.result import AnalysisResult, naming_ablated

NUM_UNTRAINED = 5  # seeds of untrained weights
NUM_RESAMPLES = 1000  # bootstrap resamples of the lines
ALPHA = 0.05
CONTROLS = ("fixed_offset", "same_distances", "untrained")


class Placed(NamedTuple):
    """The tokens of a line, and the positions of its words; the query's are rows of the maps, the others columns."""

    ids: list[int]
    query: range
    key: range
    distractor: range

    def center(self, side: int) -> float:
        """The distance in tokens from the middle of the query to that of the key (2) or of the distractor (3)."""
        return (self[side][0] + self[side][-1] - self.query[0] - self.query[-1]) / 2


Group = tuple[Float[Tensor, "lines heads seq seq"], list[int]]
"""The maps of the lines of one length, and the lines' indices."""


class HeadRoles:
    """The label and the importance of each head."""

    columns = ("label", "importance")

    def __init__(self, measures: HeadMeasures, traits: Mapping[str, Trait] = TRAITS) -> None:
        self.measures, self.labels = measures, head_labels(measures.values, traits)
        self.importance = measures.values.get("importance")
        self._ranked = sorted((x for layer in self.importance or () for x in layer if not math.isnan(x)), reverse=True)

    def row(self, layer: int, head: int) -> list[Any]:
        return [self.labels[layer][head], self.importance and self.importance[layer][head]]

    def sentence(self, layer: int, head: int) -> str:
        label = self.labels[layer][head] or "no label"
        if not self.importance:
            return label
        value = self.importance[layer][head]
        return f"{label}; importance {value:.2g}, rank {1 + self._ranked.index(value)} of {len(self._ranked)}"


def read_columns(
    file: str, columns: Sequence[str], others: str = "", works: Mapping[str, str] | None = None
) -> list[Sequence[Any]]:
    """The rows of a .csv or .jsonl file that has some columns; `others` says what else could be named, if anything."""
    path = Path(file).expanduser()
    if not path.is_file() or stem_and_format(path)[1] not in {*READERS} - {".txt"}:
        reason = f"is no .csv or .jsonl file with the columns {', '.join(columns)}{others}"
        raise ArgumentError("file", file, reason, works)
    try:
        return [*read_rows(path, Layout(columns))]
    except ArgumentError as error:  # its argument, a column's name or a dialect, is none of the analysis
        reason = error.reason.removeprefix(f"{path} ").replace("no such column", f"no column {error.value}")
        raise ArgumentError("file", file, re.sub("; (for a file without|to read quot).*", "", reason)) from error


def read_lines(file: str) -> list[Line]:
    """The lines of one of `SETS`, or of a .csv or .jsonl file with the columns `text, query, key, distractor`."""
    if file in SETS:
        return make_lines(file)
    rows = read_columns(file, Line._fields, f", nor one of {', '.join(SETS)}", {"file": "verb_object"})
    for number, row in enumerate(rows, start=1):
        if not all(str(value or "").strip() for value in row):
            raise ArgumentError("file", file, f"row {number} lacks one of text, query, key and distractor")
    return [Line(*map(str, row)) for row in rows]


def prefers(key: Tensor, distractor: Tensor) -> Tensor:
    """1 where the weight to the key is larger, 0 where the one to the distractor, ½ where both are the same."""
    return torch.where(torch.isclose(key, distractor, atol=0), 0.5, (key > distractor).double())


class RelationLines:
    """The share of lines in which each head prefers the key to its distractor, and the controls.

    A head prefers the key if the mean weight from the query's tokens to the key's is above that to the distractor's;
    the mean over tokens, not the sum, so that longer words have no advantage.
    """

    def __init__(self, context: AnalysisContext, file: str, lines: Sequence[Line], predicting: bool) -> None:
        if isinstance(context.network, EncoderDecoder):
            reason = "reads lines of one text; a model of task=seq2seq takes a text and pairs of words"
            raise ArgumentError("file", file, reason, {"file": None})
        self.context, self.file = context, file
        self.placed = [self._place(number, line, predicting) for number, line in enumerate(lines, start=1)]
        self.groups, seen = self._maps(context.network)
        if len(seen) < 4:
            reason = f"the query sees both words in {len(seen)} of {len(lines)} lines, and 4 are needed; a causal "
            reason += "model sees no later words, and one that is trained with task=masked_lm does"
            raise ArgumentError("file", file, reason)
        self.halves = seen[::2], seen[1::2]

    def _place(self, number: int, line: Line, predicting: bool) -> Placed:
        context, longest = self.context, self.context.network.max_seq_len
        try:
            ids = context.tokens_of(line.text)
            words = words_of(ids, context.tokenizer, [line.text])
            sides = (words.predicted() if predicting else words, words, words)
            runs = [side.find(phrase) for side, phrase in zip(sides, line[1:], strict=True)]
        except (WordError, ArgumentError) as error:
            raise ArgumentError("file", self.file, f"line {number}: {error.reason}") from None
        if len(ids) > longest:
            reason = f"line {number} has {len(ids)} tokens; at most {longest} fit into the context of the model"
            raise ArgumentError("file", self.file, reason)
        return Placed(ids, *(side.tokens(run[0], run[-1]) for side, run in zip(sides, runs, strict=True)))

    def _maps(self, network: Network) -> tuple[list[Group], list[int]]:
        """The maps of lines of equal length together, and the lines whose query sees both words in some layer."""
        of_length: dict[int, list[int]] = defaultdict(list)
        for index, line in enumerate(self.placed):
            of_length[len(line.ids)].append(index)
        groups, seen, device = [], [], self.context.batches[0]["inputs"].device
        for group in of_length.values():
            tokens = torch.tensor([self.placed[index].ids for index in group], device=device)
            with self.context.precision():
                maps = capture_weights(cast(Transformer, network), tokens, self.context.task.mask({"inputs": tokens}))
            groups.append((torch.cat([weights.float().cpu() for weights in maps], dim=1), group))
            visible = torch.stack([layer.logits[0, 0].cpu() > -torch.inf for layer in maps.layers]).any(dim=0)
            for index in group:
                query, key, distractor = map(list, self.placed[index][1:])
                seen += [index] if visible[query][:, key + distractor].all() else []
        return groups, sorted(seen)

    def preferred(self, groups: Sequence[Group]) -> Float[Tensor, "lines heads"]:
        """The preference of each head in each line, see `prefers`."""
        found = {}
        for maps, indices in groups:
            for weights, index in zip(maps, indices, strict=True):
                query, key, distractor = map(list, self.placed[index][1:])
                rows = weights[:, query].mean(dim=1)
                found[index] = prefers(*(rows[:, side].mean(dim=1) for side in (key, distractor)))
        return torch.stack([found[index] for index in range(len(found))])

    def elsewhere(self, index: int) -> Float[Tensor, " heads"]:
        """The mean preference of each head from other words at the same distances in all lines; nan if there are none.

        They have as many tokens, so that a preference for a distance, or for longer words, is the same here.
        """
        line, (before, after) = self.placed[index], map(len, self.context.tokenizer.around)
        first, last = (of(side[at] for side in line[1:]) for of, at in ((min, 0), (max, -1)))
        total, number = torch.tensor(0.0, dtype=torch.double), 0
        for maps, indices in self.groups:
            shifts = range(before - first, maps.shape[-1] - after - last)
            if not shifts:
                continue
            query, key, distractor = (torch.tensor(shifts)[:, None] + torch.tensor(side) for side in line[1:])
            weights = (maps[:, :, query[:, :, None], side[:, None]].mean(dim=(-1, -2)) for side in (key, distractor))
            own = torch.tensor([(self.placed[of].query[0], self.placed[of].query[-1]) for of in indices])
            others = (query[:, -1] < own[:, :1]) | (query[:, 0] > own[:, 1:])
            total = total + (prefers(*weights) * others[:, None]).sum(dim=(0, 2))
            number += int(others.sum())
        return total / number if number else torch.full((self.groups[0][0].shape[1],), math.nan, dtype=torch.double)

    def best_offset(self) -> tuple[int, Float[Tensor, " tested"]]:
        """The best rule "whichever is nearer to k tokens from the query", and what it prefers in the tested half."""
        longest = max(len(line.ids) for line in self.placed)
        offsets = sorted(range(-longest, longest + 1), key=abs)  # of equally good rules, the nearest
        near = [[[-abs(line.center(side) - k) for line in self.placed] for k in offsets] for side in (2, 3)]
        by_rule = prefers(*torch.tensor(near))
        best = int(by_rule[:, self.halves[0]].mean(dim=1).argmax())
        return offsets[best], by_rule[best, self.halves[1]]

    def untrained(self) -> Float[Tensor, " tested"]:
        """The preference of the untrained network's best head in the tested half; of several seeds, the largest."""
        assert self.context.untrained is not None
        found = []
        for seed in range(NUM_UNTRAINED):
            preferred = self.preferred(self._maps(self.context.untrained(seed))[0])
            found.append(preferred[self.halves[1], self.choose(preferred)])
        return max(found, key=lambda of_lines: float(of_lines.mean()))

    def choose(self, preferred: Float[Tensor, "lines heads"]) -> int:
        """The head that prefers the key most often in the first half; no ablated one."""
        flags = [flag for layer in self.context.layers for flag in layer.ablated_maps()]
        return int(preferred[self.halves[0]].mean(dim=0).masked_fill(torch.tensor(flags), -1).argmax())


def holm(p_values: Float[Tensor, " tests"]) -> Float[Tensor, " tests"]:
    """p-values corrected for the number of tests (Holm 1979)."""
    ordered, order = p_values.sort()
    factors = torch.arange(len(ordered), 0, -1, dtype=ordered.dtype)
    return torch.empty_like(ordered).scatter(0, order, (ordered * factors).clamp(max=1).cummax(dim=0).values)


def compare(values: Float[Tensor, " lines"], control: Float[Tensor, " lines"] | float = 0.0) -> Change:
    """The mean of values, less a control on the same lines, with its bootstrap interval over the lines."""
    differences = values - control
    differences = differences[~differences.isnan()]
    if not len(differences):
        return Change(math.nan, math.nan, math.nan)
    ones, zeros = torch.ones_like(differences), torch.zeros_like(differences)
    return Losses(differences, ones).change_from(Losses(zeros, ones), NUM_RESAMPLES)


def verdict(head: str, number: int, share: Change, controls: Mapping[str, Change], unbeaten: Sequence[str]) -> str:
    """The result of the lines in one sentence; `unbeaten` are controls that the head does not exceed beyond doubt."""
    beside = ", ".join(f"{name} {100 * of.mean:.0f}" for name, of in controls.items())
    figures = f"{100 * share.mean:.0f} % of {number} lines ({100 * share.low:.0f} to {100 * share.high:.0f}; {beside})"
    if not unbeaten:
        return f"{head} links query to key in {figures}"
    return f"no head does better than {' or '.join(unbeaten)}: the best, {head}, prefers the key in {figures}"


def analyse_lines(relation: RelationLines, lines: Sequence[Line], roles: HeadRoles) -> AnalysisResult:
    """The preferences of heads for the keys of lines; a head is chosen on one half of them and tested on the other."""
    context, name = relation.context, Path(relation.file).stem
    found = relation.preferred(relation.groups)
    choosing, tested = (found[half] for half in relation.halves)
    elsewhere = torch.stack([relation.elsewhere(index) for index in relation.halves[1]])
    (offset, by_offset), chosen = relation.best_offset(), relation.choose(found)
    own, number = tested[:, chosen], len(tested)
    controls = {
        f"a fixed offset of {offset:+d} tokens" if offset else "the nearer of both words": by_offset,
        "other words at the same distances": elsewhere[:, chosen],
        f"untrained weights (best of {NUM_UNTRAINED} seeds)": relation.untrained(),
    }
    share, of_controls = compare(own), {control: compare(values) for control, values in controls.items()}
    unbeaten = [control for control, values in controls.items() if not compare(own, values).low > 0]
    mean = (tested - elsewhere).nanmean(dim=0)
    errors = ((tested - elsewhere - mean).square().nanmean(dim=0).clamp(min=1e-18) / number).sqrt()
    p_values = holm(torch.special.ndtr(-mean / errors))

    names, addresses, ablated = roles.measures.names, roles.measures.addresses, roles.measures.ablated
    maps = [(layer, head) for layer, heads in enumerate(names) for head in range(len(heads))]
    flags = [flag for of_layer in ablated for flag in of_layer]
    rows: list[list[Any]] = []
    for at, (layer, head) in enumerate(maps):
        of, same = compare(tested[:, at]), compare(elsewhere[:, at])
        shares = [float(choosing[:, at].mean()), of.mean, of.low, of.high, same.mean, float(p_values[at])]
        rows.append([*addresses[layer], names[layer][head], *shares, at == chosen, *roles.row(layer, head)])
    columns = ["head", "choosing", "tested", "low", "high", "same_distances", "p_value", "chosen", *roles.columns]
    layer, head = maps[chosen]
    title = f"{layer_title(addresses[layer])} head {head_label(names[layer][head])}"
    equal = [at for at, index in enumerate(relation.halves[1]) if len({*map(len, relation.placed[index][2:])}) == 1]
    better = sum(bool(p < ALPHA) and not flag for p, flag in zip(p_values, flags, strict=True))
    used = sorted([*relation.halves[0], *relation.halves[1]])
    unseen = f"; in {len(lines) - len(used)} the query does not see both words" * (len(used) < len(lines))
    return AnalysisResult(
        scalars={
            "analysis/relation/preferred": share.mean,
            **{f"analysis/relation/{key}": of.mean for key, of in zip(CONTROLS, of_controls.values(), strict=True)},
            "analysis/relation/exceeds_controls": int(not unbeaten),
        },
        lines={
            "relation": f"{name}: {len(choosing)} lines choose the head, {number} others test it{unseen}",
            "  verdict": verdict(title, number, share, of_controls, unbeaten),
            f"  {title}": roles.sentence(layer, head),
            **{f"  {control}": f"{of.mean:.1%} [{of.low:.1%}, {of.high:.1%}]" for control, of in of_controls.items()},
            "  words of equal length": f"{compare(own[equal]).mean:.1%} of {len(equal)} lines" if equal else "none",
            "  all heads": f"{better} of {len(maps) - sum(flags)} prefer the key more often than other words at "
            f"the same distances (z test, p < {ALPHA} with Holm's correction for all heads)",
        },
        tables={
            "relations": naming_ablated([*context.address_columns, *columns], rows, flags),
            "relation_lines": (
                ["line", *Line._fields, "choosing", "preferred"],
                [[at + 1, *lines[at], at in relation.halves[0], float(found[at, chosen])] for at in used],
            ),
        },
        figures={
            "relations": head_grid(
                [of_layer.tolist() for of_layer in tested.mean(dim=0).split([len(of_layer) for of_layer in names])],
                [list(map(head_label, of_layer)) for of_layer in names],
                f"{name}: lines in which a head prefers the key, of {number}",
                layers=addresses,
                label="share of lines",
                ablated=ablated,
            )
        },
        facts={fact: value for fact, value in context.facts.items() if fact != "data"} | {"lines": name},
    )
