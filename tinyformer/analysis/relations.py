"""Relations between words: how much each head attends from one word of a text to another."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tinyformer.analysis.measures.capture import attention_calls
from tinyformer.analysis.measures.pair_probe import TokenPair, capture_pair, decoded_pair
from tinyformer.analysis.measures.probe import map_names
from tinyformer.analysis.pictures.plots import measure_maps
from tinyformer.analysis.subject import Findings, Subject, Text, Trained
from tinyformer.analysis.words import Words, merge_words, words_of
from tinyformer.errors import ArgumentError
from tinyformer.nn import AttentionMaps, BaseAttention, EncoderDecoder, Transformer
from tinyformer.nn.heads import Address, layer_title
from tinyformer.tasks import Seq2Seq

NUM_PRINTED = 3
"""Number of heads that are printed for each pair of words."""


class Related(NamedTuple):
    """The attention of the heads of a layer from one word to another.

    Attributes:
        weights: the weight, summed over the tokens of the key word and averaged over those of the query word.
        ranks: the rank of the weight among the words that the query word sees, 1 for the largest.
        num_words: number of words that the query word sees.
        uniform: the weight if each token attended evenly to all tokens that it sees; 0 if the mask hides the key word.
    """

    weights: Float[Tensor, " maps"]
    ranks: Int[Tensor, " maps"]
    num_words: int
    uniform: float


class Read(NamedTuple):
    """The attention of a model on a text, or from a target to its source.

    Attributes:
        layers: the attention layers.
        addresses: their addresses, see `Subject.addresses`.
        maps: their maps.
        queries: the words that attend.
        keys: the words that are attended to.
    """

    layers: Sequence[BaseAttention]
    addresses: Sequence[Address]
    maps: Sequence[AttentionMaps]
    queries: Words
    keys: Words


class HeadRelations:
    """The attention of each head from one word of a text to another, for each of several pairs (`relations.csv`).

    The weight to a word is the sum over its tokens, that from a word the mean over its tokens (Clark et al. 2019, arXiv
    1906.04341, section 4.1). Each weight comes with its rank among the words that the query sees, and with the weight
    of even attention on the tokens that it sees. Ablated heads are left out.

    The text is preceded by the token that starts a document, as in training and in `Model.attention`.

    In an encoder–decoder, a pair is a word of the target and a word of the source, and the heads are those of
    cross-attention; the query of a target token is the one that predicts it.

    Args:
        text: the text, or the source.
        pairs: the query word and the key word of each pair, as in `[["it", "animal"]]`. If a word occurs several times,
            `it:2` is its second occurrence.
        target: the target of the source; by default what the model decodes.

    Raises:
        ArgumentError: there is no text, or no pair, or a pair is not two words.
    """

    needs_gradient = False
    num_windows = 1

    def __init__(self, text: Text | None = None, pairs: Sequence[Any] | None = None, target: str | None = None) -> None:
        works = {"text": "The bank by the river", "pairs": [["river", "bank"]]}
        if not text or "".join(text).isspace():
            raise ArgumentError("text", text, "must be the text that has the words of `pairs`", works)
        if not pairs or not all(map(_is_pair, pairs)):
            reason = "must hold pairs of words of `text`, the query and the key"
            raise ArgumentError("pairs", pairs, reason, {"pairs": works["pairs"]})
        self.text, self.target = text, target
        self.pairs = list(dict.fromkeys((str(query), str(key)) for query, key in pairs))

    def __call__(self, model: Trained, folder: Path = Path()) -> Findings:
        subject = model.sample(self.num_windows)
        read = self._pair(subject) if isinstance(subject.network, EncoderDecoder) else self._text(subject)
        found = {pair: self._related(read, pair) for pair in self.pairs}
        names, ablated = zip(*((map_names(layer), layer.ablated_maps()) for layer in read.layers), strict=True)
        living = [(layer, head) for layer, of in enumerate(ablated) for head, flag in enumerate(of) if not flag]
        weights = {" → ".join(pair): [[float("nan")] * len(heads) for heads in names] for pair in self.pairs}
        rows: list[list[Any]] = []
        lines = {"relations": "weight from a word to another, and its rank among the words that are seen"}
        for pair, of_layers in found.items():
            ranked = []
            for layer, head in living:
                related, name = of_layers[layer], names[layer][head]
                weight, rank = float(related.weights[head]), int(related.ranks[head])
                weights[" → ".join(pair)][layer][head] = weight
                seen = [rank, related.num_words] if related.uniform else [None, related.num_words]
                rows.append([*pair, *read.addresses[layer], name, weight, *seen, related.uniform])
                title = f"{layer_title(read.addresses[layer])} head {name.removeprefix('0')}"
                ranked.append((weight, f"  {' → '.join(pair)}: {title}", rank, related))
            for weight, title, rank, related in sorted(ranked, key=lambda one: -one[0])[:NUM_PRINTED]:
                lines[title] = f"{weight:.4f}, rank {rank} of {related.num_words}; uniform {related.uniform:.4f}"
        columns = ["query", "key", *subject.address_columns, "head", "weight", "rank", "num_words", "uniform"]
        meanings = {
            " → ".join(pair): f"uniform {max(related.uniform for related in of_layers):.3f}"
            for pair, of_layers in found.items()
        }
        labels = [layer_title(address) for address in read.addresses]
        heads = [[name.removeprefix("0") for name in layer] for layer in names]
        title = "Attention from word to word"
        picture = measure_maps(weights, meanings, heads, title, labels, ablated=ablated, limits=(0.0, 1.0))
        return Findings(
            lines=lines,
            tables={"relations": (columns, rows)},
            figures={"relations": picture},
            facts=subject.facts_of_text(self.text),
        )

    def _related(self, read: Read, pair: tuple[str, str]) -> list[Related]:
        """The attention of each layer from one word to another.

        Raises:
            ArgumentError: a word is not in its text or is ambiguous, or every layer's mask hides the key.
        """
        query, key = self._find(read.queries, pair, 0), self._find(read.keys, pair, 1)
        found = [relate(maps, read.queries, read.keys, query, key) for maps in read.maps]
        if not any(related.uniform for related in found):
            hidden = f"{pair[0]} does not see {pair[1]}, which "
            if query < key:
                hidden += "comes later in the text; a model that is trained with task=masked_lm sees both directions"
            else:
                hidden += "is outside of the window of every layer"
            raise ArgumentError("pairs", [list(pair)], hidden, {"pairs": [[pair[1], pair[0]]]} if query < key else None)
        return found

    def _find(self, words: Words, pair: tuple[str, str], side: int) -> int:
        """The index of a word.

        Raises:
            ArgumentError: it is not in the text, or it occurs several times and has no number.
        """
        asked = pair[side]
        name, _, number = asked.rpartition(":")
        if asked in words.names or not number.isdecimal():
            name, number = asked, ""
        places = [index for index, word in enumerate(words.names) if word == name]
        if len(places) == 1 and not number:
            return places[0]
        if number and 1 <= int(number) <= len(places):
            return places[int(number) - 1]
        if places:
            times = f"{len(places)} times: {name}:1 to {name}:{len(places)}" if len(places) > 1 else "once"
            reason, name = f"the text has {name} {times}", name if len(places) == 1 else f"{name}:1"
        else:
            known = shorten(" ".join(words.names), 200, placeholder=" …")
            reason = f"{name} is not a word of the text, whose words are {known}"
            (name,) = difflib.get_close_matches(name, words.names, 1) or words.names[:1]
        works = [name if place == side else word for place, word in enumerate(pair)]
        raise ArgumentError("pairs", [list(pair)], reason, {"pairs": [works]})

    def _text(self, subject: Subject) -> Read:
        """The maps of the text.

        Raises:
            ArgumentError: the text has more tokens than the model's context, or there is a target.
        """
        if self.target is not None:
            reason = "a model of one text has no target; one that is trained with task=seq2seq has"
            raise ArgumentError("target", self.target, reason, {"target": None})
        self._encode(subject, "text", self.text, sum(map(len, subject.tokenizer.around)))
        ids = subject.tokens_of(self.text)
        network = cast(Transformer, subject.network)
        tokens = torch.tensor([ids], device=subject.batches[0]["inputs"].device)
        with subject.precision():
            calls = attention_calls(network, tokens, subject.task.mask({"inputs": tokens}))
            maps = [layer.maps_of_call(call) for layer, call in calls]
        words = words_of(ids, subject.tokenizer)
        return Read(subject.layers, subject.addresses, maps, words, words)

    def _pair(self, subject: Subject) -> Read:
        """The cross-attention of the source and its target.

        Raises:
            ArgumentError: a text has more tokens than the model's context.
        """
        network, task = cast(EncoderDecoder, subject.network), cast(Seq2Seq, subject.task)
        tokens, length = task.special_tokens.around(subject.tokenizer), network.max_seq_len
        source, layers = self._encode(subject, "text", self.text, tokens.num_added), network.cross_attentions()
        with subject.precision():
            if self.target is None:
                pair = decoded_pair(network, source, tokens, task.beam)
            else:
                target = self._encode(subject, "target", self.target, tokens.num_added)
                pair = TokenPair.of(source, target, tokens, length).to(subject.batches[0]["inputs"].device)
            maps = capture_pair(network, pair)["cross"].layers
        predicted, read = (words_of(ids[0].tolist(), subject.tokenizer) for ids in (pair.predicted, pair.source))
        return Read(layers, [("cross", index) for index in range(len(layers))], maps, predicted, read)

    def _encode(self, subject: Subject, argument: str, text: Text, num_special: int) -> list[int]:
        """The tokens of a text, without the special tokens around it.

        Raises:
            ArgumentError: with the special tokens, there are more than the model's context holds.
        """
        ids = subject.tokens_of(text, around=False, argument=argument)
        longest = subject.network.max_seq_len - num_special
        if len(ids) > longest:
            reason = f"has {len(ids)} tokens; at most {longest} fit into the context of the model"
            raise ArgumentError(argument, text, reason, {argument: subject.tokenizer.decode(ids[:longest])})
        return ids


def relate(maps: AttentionMaps, queries: Words, keys: Words, query: int, key: int) -> Related:
    """The attention of the heads of a layer from the word `query` of `queries` to the word `key` of `keys`."""
    visible = (maps.logits[0, 0] > -torch.inf).double()  # the mask is the same for all heads
    even = merge_words(visible / visible.sum(dim=-1, keepdim=True).clamp(min=1), queries, keys)[query]
    weights = merge_words(maps.weights[0].double(), queries, keys)[:, query]
    larger = weights > weights[:, key : key + 1]
    return Related(weights[:, key], 1 + larger.sum(dim=-1), int((even > 0).sum()), float(even[key]))


def _is_pair(pair: Any) -> bool:
    """Whether a value is a pair of words, which may be numbers: YAML reads 2024 as one."""
    return isinstance(pair, list | tuple) and len(pair) == 2 and all(type(word) in (str, int) for word in pair)
