"""Relations between words: how much each head attends from one word of a text to another."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tinyformer.analysis.context import AnalysisContext, Text, Trained, refuse_target, require_positive
from tinyformer.analysis.texts.maps import of_sample, with_controls, with_importance
from tinyformer.analysis.texts.relation_lines import NUM_UNTRAINED, HeadRoles, RelationLines, analyse_lines, read_lines
from tinyformer.errors import ArgumentError
from tinyformer.measures.capture import attention_calls, capture_pair, head_label, map_names
from tinyformer.measures.words import WordError, Words, merge_words, words_of
from tinyformer.nn import AttentionMaps, BaseAttention, EncoderDecoder, Transformer
from tinyformer.nn.heads import Address, layer_title
from tinyformer.report.plots import measure_maps
from tinyformer.report.result import AnalysisResult
from tinyformer.tasks import Seq2Seq

NUM_PRINTED = 3  # number of heads that are printed for each pair of words


class Related(NamedTuple):
    """The attention of the heads of a layer from one word to another."""

    weights: Float[Tensor, " maps"]  # summed over the tokens of the key word, averaged over those of the query word
    ranks: Int[Tensor, " maps"]  # of the weight among the words that the query word sees, 1 for the largest
    num_words: int  # that the query word sees
    uniform: float  # the weight if each token attended evenly to all that it sees; 0 if the mask hides the key word


class Read(NamedTuple):
    """The attention of a model on a text, or from a target to its source."""

    layers: Sequence[BaseAttention]
    addresses: Sequence[Address]
    capture: Callable[[Any], Sequence[AttentionMaps]]  # of a network, the maps of each of its layers
    queries: Words  # that attend
    keys: Words  # that are attended to


@dataclass(eq=False)
class HeadRelations:
    """The attention of each head from one word of a text to another, for each of several pairs (`relations.csv`).

    The weight to a word is the sum over its tokens, that from a word the mean over its tokens (Clark et al. 2019, arXiv
    1906.04341, section 4.1). Each weight comes with its rank among the words that the query sees, and with the weight
    of even attention on the tokens that it sees. Ablated heads are left out. The control `untrained` is the largest
    weight of any head of five untrained networks: a weight that these reach, too, needs no training.

    The text is preceded by the token that starts a document, as in training and in `Model.attention`.

    In an encoder–decoder, a pair is a word of the target and a word of the source, and the heads are those of
    cross-attention; the query of a target token is the one that predicts it.

    With `file` in place of a text, relations are counted on many lines, next to controls; see `RelationLines`.

    Args:
        pairs: the query word and the key word of each pair, as in `[["it", "animal"]]`, or phrases, such as "jumps
            over". If a word occurs several times, `it:2` is its second occurrence.
        file: a .csv or .jsonl file with the columns `text, query, key, distractor`.
        predicting: whether the query of a word is the token before it, which predicts it in a causal model.
        importance: whether to compute the heads' importance, which needs gradients.
    """

    text: Text | None = None  # the text, or the source
    pairs: Sequence[Any] | None = None
    target: str | None = None  # the target of the source; by default what the model decodes
    file: str | None = None
    predicting: bool = False
    importance: bool = True
    num_windows: int = 16  # of which labels and importance of heads are computed

    def __post_init__(self) -> None:
        require_positive(self, "num_windows")
        self.needs_gradient = self.importance
        if self.file is not None:
            self.lines = read_lines(self.file)
            for name in ("text", "pairs", "target"):
                if (value := getattr(self, name)) is not None:
                    raise ArgumentError(name, value, f"`file`={self.file} has the texts and their words", {name: None})
            return
        works = {"text": "The bank by the river", "pairs": [["river", "bank"]]}
        if not self.text or "".join(self.text).isspace():
            raise ArgumentError("text", self.text, "must be the text that has the words of `pairs`", works)
        if not self.pairs or not all(map(_is_pair, self.pairs)):
            reason = "must hold pairs of words of `text`, the query and the key"
            raise ArgumentError("pairs", self.pairs, reason, {"pairs": works["pairs"]})

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        if self.file is not None:
            relation = RelationLines(context, self.file, self.lines, self.predicting)
            return analyse_lines(relation, self.lines, self._roles(context))
        read = self._pair(context) if isinstance(context.network, EncoderDecoder) else self._text(context)
        first = len(context.layers) - len(read.layers)  # the layers of cross-attention come last
        pairs = dict.fromkeys((str(query), str(key)) for query, key in self.pairs or ())
        assert context.untrained is not None
        with context.precision(), torch.no_grad():
            maps = [read.capture(context.network)]
            maps += [read.capture(context.untrained(seed)) for seed in range(NUM_UNTRAINED)]
        found = {pair: [self._related(read, of_network, pair) for of_network in maps] for pair in pairs}
        roles = self._roles(context)
        names, ablated = zip(*((map_names(layer), layer.ablated_maps()) for layer in read.layers), strict=True)
        living = [(layer, head) for layer, flags in enumerate(ablated) for head, flag in enumerate(flags) if not flag]
        rows: list[list[Any]] = []
        weights, meanings = {}, {}
        lines = {"relations": "weight from a word to another, and its rank among the words that are seen"}
        for pair, (of_layers, *controls) in found.items():
            title, uniform = " → ".join(pair), max(related.uniform for related in of_layers)
            chances = [max(float(of[layer].weights[head]) for layer, head in living) for of in controls]
            meanings[title] = f"uniform {uniform:.3f}, untrained at most {max(chances):.3f}"
            weights[title] = [[math.nan] * len(heads) for heads in names]
            printed = []
            for layer, head in living:
                related, name, address = of_layers[layer], names[layer][head], read.addresses[layer]
                weight, rank = float(related.weights[head]), int(related.ranks[head])
                weights[title][layer][head] = weight
                seen = [rank if related.uniform else None, related.num_words, related.uniform, max(chances)]
                rows.append([*pair, *address, name, weight, *seen, *roles.row(first + layer, head)])
                sentence = f"{weight:.4f}, rank {rank} of {related.num_words}; uniform {related.uniform:.4f}; "
                sentence += roles.sentence(first + layer, head)
                printed.append((weight, f"  {title}: {layer_title(address)} head {head_label(name)}", sentence))
            largest = sorted(printed, key=lambda line: -line[0])[:NUM_PRINTED]
            lines |= {heading: sentence for _, heading, sentence in largest}
            in_best = f"in the best head, {NUM_UNTRAINED} seeds"
            lines[f"  {title}: untrained"] = f"{min(chances):.4f} to {max(chances):.4f} {in_best}"
        if not isinstance(context.network, EncoderDecoder):
            lines["many texts"] = "one shows little; analysis.file=subject_verb in its place tests 200, with intervals"
        picture = measure_maps(
            weights,
            [list(map(head_label, layer)) for layer in names],
            "Attention from word to word",
            [layer_title(address) for address in read.addresses],
            ablated=ablated,
            limits=(0.0, 1.0),
            meanings=meanings,
        )
        columns = ["query", "key", *context.address_columns, "head", "weight", "rank", "num_words", "uniform"]
        return AnalysisResult(
            lines=lines,
            tables={"relations": ([*columns, "untrained", *roles.columns], rows)},
            figures={"relations": picture},
            facts=context.facts_of_text(cast(Text, self.text)),
        )

    def _roles(self, context: AnalysisContext) -> HeadRoles:
        measures, traits, _ = with_controls(context, of_sample(context))
        return HeadRoles(with_importance(context, measures) if self.importance else measures, traits)

    def _related(self, read: Read, maps: Sequence[AttentionMaps], pair: tuple[str, str]) -> list[Related]:
        query, key = self._find(read.queries, pair, 0), self._find(read.keys, pair, 1)
        sides = read.queries.joined(query), read.keys.joined(key)
        found = [relate(of_layer, *sides, query[0], key[0]) for of_layer in maps]
        if not any(related.uniform for related in found):
            hidden, works = "is outside of the window of every layer", None
            if query[0] < key[0]:
                hidden = "comes later in the text; a model that is trained with task=masked_lm sees both directions"
                works = {"pairs": [list(reversed(pair))]}
            raise ArgumentError("pairs", [list(pair)], f"{pair[0]} does not see {pair[1]}, which {hidden}", works)
        return found

    def _find(self, words: Words, pair: tuple[str, str], side: int) -> range:
        try:
            return words.find(pair[side])
        except WordError as error:
            works = [error.works if place == side else word for place, word in enumerate(pair)]
            raise ArgumentError("pairs", [list(pair)], error.reason, {"pairs": [works]}) from None

    def _text(self, context: AnalysisContext) -> Read:
        refuse_target(self.target)
        text = cast(Text, self.text)
        _encode(context, "text", text, sum(map(len, context.tokenizer.around)))
        ids = context.tokens_of(text)
        tokens = torch.tensor([ids], device=context.batches[0]["inputs"].device)
        words, mask = words_of(ids, context.tokenizer, [text]), context.task.mask({"inputs": tokens})

        def capture(network: Transformer) -> list[AttentionMaps]:
            return [layer.maps_of_call(call) for layer, call in attention_calls(network, tokens, mask)]

        return Read(context.layers, context.addresses, capture, words.predicted() if self.predicting else words, words)

    def _pair(self, context: AnalysisContext) -> Read:
        network = cast(EncoderDecoder, context.network)
        num_special = cast(Seq2Seq, context.task).special_tokens.around(context.tokenizer).num_added
        source = _encode(context, "text", cast(Text, self.text), num_special)
        layers = network.cross_attentions()
        target = None if self.target is None else _encode(context, "target", self.target, num_special)
        pair = context.pair_of(source, target, network.max_seq_len)
        texts = [text for text in (self.text, self.target) if text is not None]
        queries, keys = (words_of(ids[0].tolist(), context.tokenizer, texts) for ids in (pair.predicted, pair.source))
        addresses = [("cross", index) for index in range(len(layers))]
        return Read(layers, addresses, lambda network: capture_pair(network, pair)["cross"].layers, queries, keys)


def _encode(context: AnalysisContext, argument: str, text: Text, num_special: int) -> list[int]:
    """The tokens of a text, without the special tokens around it, with which they must fit into the context."""
    ids = context.tokens_of(text, around=False, argument=argument)
    longest = context.network.max_seq_len - num_special
    if len(ids) > longest:
        reason = f"has {len(ids)} tokens; at most {longest} fit into the context of the model"
        raise ArgumentError(argument, text, reason, {argument: context.tokenizer.decode(ids[:longest])})
    return ids


def relate(maps: AttentionMaps, queries: Words, keys: Words, query: int, key: int) -> Related:
    """The attention of the heads of a layer from the word `query` of `queries` to the word `key` of `keys`."""
    visible = (maps.logits[0, 0] > -torch.inf).double()  # the mask is the same for all heads
    even = merge_words(visible / visible.sum(dim=-1, keepdim=True).clamp(min=1), queries, keys)[query]
    weights = merge_words(maps.weights[0].double(), queries, keys)[:, query]
    larger = weights > weights[:, key : key + 1]
    return Related(weights[:, key], 1 + larger.sum(dim=-1), int((even > 0).sum()), float(even[key]))


def _is_pair(pair: Any) -> bool:
    """Return True if a value is a pair of words, which may be numbers: YAML reads 2024 as one."""
    return isinstance(pair, list | tuple) and len(pair) == 2 and all(type(word) in (str, int) for word in pair)
