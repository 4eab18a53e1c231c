"""Relations between words: how much each head attends from one word of a text to another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from tinyformer.analysis.context import AnalysisContext, Text, Trained
from tinyformer.analysis.texts.maps import HeadMaps, Shown
from tinyformer.analysis.texts.relation_lines import NUM_UNTRAINED, HeadRoles, RelationLines, analyse_lines, read_lines
from tinyformer.errors import ArgumentError, argument_path
from tinyformer.measures.capture import head_label, map_names, map_title
from tinyformer.measures.words import Words, merge_words, words_of
from tinyformer.nn import AttentionMaps, EncoderDecoder
from tinyformer.nn.heads import layer_title
from tinyformer.report.plots import measure_maps
from tinyformer.report.result import AnalysisResult

NUM_PRINTED = 3  # number of heads that are printed for each pair of words


class Related(NamedTuple):
    """The attention of a head from one word to another."""

    weight: float  # summed over the key word's tokens, averaged over the query word's tokens
    rank: int  # of the weight among the words that the query word sees, 1 for the largest
    num_words: int  # number of words that the query word sees
    uniform: float  # the weight if each token attended evenly to all visible tokens; 0 if the mask hides the key word


@dataclass(eq=False)
class HeadRelations:
    """The attention of each head from one word of a text to another, for each of several pairs (`relations.csv`).

    The weight to a word is the sum over its tokens, and the weight from a word is the mean over its tokens (Clark et
    al. 2019, arXiv 1906.04341, section 4.1). Next to each weight are its rank among the words that the query sees, and
    the weight of even attention to the tokens that the query sees. Ablated heads are left out. The control `untrained`
    is the largest weight of any head of five untrained networks: a weight that is no larger needs no training.
    The text is preceded by the token that starts a document, as in training and in `Model.attention`.

    In an encoder–decoder, a pair is a word of the target and a word of the source, and the heads are those of
    cross-attention; the query of a target token is the position that predicts it.
    If `file` is given, not `text`, the preferences of heads in many lines are counted instead; see `RelationLines`.

    Args:
        pairs: the query word and the key word of each pair, as in `[["it", "animal"]]`, or phrases, such as "jumps
            over". If a word occurs several times, `it:2` is its second occurrence.
        file: a .csv or .jsonl file with the columns `text, query, key, distractor`.
        predicting: if True, the query of a word is the token before, which predicts the word in a causal model.
        importance: if True, the heads' importance is computed, which needs gradients.
    """

    text: Text | None = None  # the text, or the source
    pairs: Sequence[Any] | None = None
    target: str | None = None  # the target of the source; by default what the model decodes
    file: str | None = None
    predicting: bool = False
    importance: bool = True
    num_windows: int = 16  # windows for the labels and importance of heads
    needs_loss = False

    def __post_init__(self) -> None:
        self.needs_gradient = self.importance
        if self.file is not None:
            self.lines = read_lines(self.file)
        elif not self.pairs or not all(map(_is_pair, self.pairs)):
            reason = "must hold pairs of words of `text`, each a query and its key"
            raise ArgumentError("pairs", self.pairs, reason, {"pairs": [["river", "bank"]]})

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        if self.file is not None:
            relation = RelationLines(context, self.file, self.lines, self.predicting)
            return analyse_lines(relation, HeadRoles(context, self.importance))
        assert context.untrained is not None
        if isinstance(context.network, EncoderDecoder):
            context.network.cross_attentions()  # raises an error for layers without heads
        kind = context.kinds[-1]  # "cross" in an encoder–decoder
        shown, queries, keys = self._read(context, kind)
        untrained = (context.untrained(seed) for seed in range(NUM_UNTRAINED))
        with context.precision():
            maps = [shown.capture(network)[kind].layers for network in (context.network, *untrained)]
        pairs = dict.fromkeys((str(query), str(key)) for query, key in self.pairs or ())
        found = {pair: [self._related(of_network, queries, keys, pair) for of_network in maps] for pair in pairs}
        result = report(context, found, HeadRoles(context, self.importance))
        result.facts = context.facts_of_text(cast(Text, self.text))
        return result

    def _read(self, context: AnalysisContext, kind: str) -> tuple[Shown, Words, Words]:
        """The maps of the whole text, or pair, and the words of the queries and of the keys of a kind of attention."""
        given = {"text": cast(Text, self.text)} | ({} if self.target is None else {"target": self.target})
        for argument, text in given.items():
            number, longest = len(context.tokens_of(text, argument=argument)), context.network.max_seq_len
            if number > longest:
                reason = f"has {number} tokens; at most {longest} fit into the context of the model"
                raise ArgumentError(argument, text, reason)
        shown = HeadMaps(self.text, self.target, context.network.max_seq_len).shown(context)
        queries, keys = (words_of(ids, context.tokenizer, list(given.values())) for ids in shown.ids[kind])
        return shown, queries.predicted() if self.predicting and not kind else queries, keys

    def _related(
        self, maps: Sequence[AttentionMaps], queries: Words, keys: Words, pair: tuple[str, str]
    ) -> list[Related]:
        with argument_path(passed={"asked": "pairs"}):
            query, key = queries.find(pair[0]), keys.find(pair[1])
        sides = queries.joined(query), keys.joined(key)
        found = [related for of_layer in maps for related in relate(of_layer, *sides, query[0], key[0])]
        if not any(related.uniform for related in found):
            later = "comes later in the text; a model that is trained with task=masked_lm sees both directions"
            hidden = later if query[0] < key[0] else "is outside of the window of every layer"
            raise ArgumentError("pairs", [list(pair)], f"{pair[0]} does not see {pair[1]}, which {hidden}")
        return found


def relate(maps: AttentionMaps, queries: Words, keys: Words, query: int, key: int) -> list[Related]:
    """The attention of each head of a layer from the word `query` of `queries` to the word `key` of `keys`."""
    visible = (maps.logits[0, 0] > -torch.inf).double()  # the mask is the same for all heads
    even = merge_words(visible / visible.sum(dim=-1, keepdim=True).clamp(min=1), queries, keys)[query]
    weights = merge_words(maps.weights[0].double(), queries, keys)[:, query]
    ranks = 1 + (weights > weights[:, key : key + 1]).sum(dim=-1)
    values = zip(weights[:, key].tolist(), ranks.tolist(), strict=True)
    return [Related(weight, rank, int((even > 0).sum()), float(even[key])) for weight, rank in values]


def report(
    context: AnalysisContext, found: Mapping[tuple[str, str], Sequence[Sequence[Related]]], roles: HeadRoles
) -> AnalysisResult:
    """The result on each pair of words, in the heads of the trained network and of untrained networks.

    In an encoder–decoder, only the heads of cross-attention are included: the last of `map_addresses`.
    """
    layers = [layer for layer, kind in zip(context.layers, context.kinds, strict=True) if kind in ("", "cross")]
    names, ablated = zip(*((map_names(layer), layer.ablated_maps()) for layer in layers), strict=True)
    first = len(roles.rows) - sum(map(len, names))
    addresses, active = context.map_addresses[first:], [at for at, flag in enumerate(chain(*ablated)) if not flag]
    lines = {"relations": "weight from the first word to the second, and its rank among visible words"}
    rows, weights, meanings = list[list[Any]](), {}, {}
    for pair, (trained, *controls) in found.items():
        title = " → ".join(pair)
        chances = [max(of[at].weight for at in active) for of in controls]
        meanings[title] = f"uniform {max(of.uniform for of in trained):.3f}, untrained at most {max(chances):.3f}"
        remaining = (of.weight for of in trained)
        weights[title] = [list(islice(remaining, len(of_layer))) for of_layer in names]
        for at in active:
            weight, rank, num_words, uniform = trained[at]
            seen = [weight, rank if uniform else None, num_words, uniform, max(chances)]
            rows.append([*pair, *addresses[at], *seen, *roles.rows[first + at]])
        for at in sorted(active, key=lambda at: -trained[at].weight)[:NUM_PRINTED]:
            weight, rank, num_words, uniform = trained[at]
            sentence = f"{weight:.4f}, rank {rank} of {num_words}; uniform {uniform:.4f}; {roles.sentence(first + at)}"
            lines[f"  {title}: {map_title(addresses[at])}"] = sentence
        in_best = f"in the best head, {NUM_UNTRAINED} seeds"
        lines[f"  {title}: untrained"] = f"{min(chances):.4f} to {max(chances):.4f} {in_best}"
    picture = measure_maps(
        weights,
        [list(map(head_label, layer)) for layer in names],
        "Attention from word to word",
        [layer_title(address) for address in context.addresses[-len(layers) :]],
        ablated=ablated,
        limits=(0.0, 1.0),
        meanings=meanings,
    )
    columns = ["query", "key", *context.address_columns, "head", "weight", "rank", "num_words", "uniform", "untrained"]
    table = [*columns, *roles.columns], rows
    return AnalysisResult(lines=lines, tables={"relations": table}, figures={"relations": picture})


def _is_pair(pair: Any) -> bool:
    """Return True if a value is a pair of words, which may be numbers: YAML reads 2024 as one."""
    return isinstance(pair, list | tuple) and len(pair) == 2 and all(type(word) in (str, int) for word in pair)
