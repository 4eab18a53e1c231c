"""Cross-attention as an alignment: whether a head attends most to the source token that the decoder copies."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tinyformer.analysis.context import AnalysisContext, Trained
from tinyformer.data import TextTokenizer
from tinyformer.errors import ArgumentError
from tinyformer.measures.batches import TokenPair, pairs_of
from tinyformer.measures.capture import capture_pair, map_names, map_title
from tinyformer.measures.words import words_of
from tinyformer.nn import EncoderDecoder
from tinyformer.report.result import AnalysisResult, naming_ablated

Copied = list[tuple[int, int]]
"""For each copied token, the row of cross-attention that predicts it and its position in the source."""

CopyingPair = tuple[TokenPair, Copied]


@dataclass(eq=False)
class CrossAlignment:
    """The share of copied tokens for which a head of the cross-attention attends most to the token in the source.

    Bahdanau et al. 2014 (arXiv 1409.0473, figure 3) inspect alignments by eye; here they are counted. A word of the
    target, such as a number or a name, counts as copied if it occurs once in the target and once in the source, with
    as many tokens; each of its tokens then has a known token in the source. A head hits a copied token if, in the row
    that predicts this token, the largest weight is on that source token. The best head is chosen on one half of the
    pairs and tested on the other, for the trained and the untrained network.
    """

    num_windows: int = 200  # half of the pairs choose the head
    min_length: int = 2  # characters of a copied word
    needs_gradient = False

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        if not isinstance(context.network, EncoderDecoder):
            reason = "analyses the cross-attention of models that were trained with task=seq2seq"
            raise ArgumentError("analysis", "alignment", reason, {"analysis": "heads"})
        halves = self._halves(context)
        cross = enumerate(context.network.cross_attentions())
        heads = [(number, name) for number, layer in cross for name in map_names(layer)]
        columns, rows = ["model", "layer", "head", "choosing", "tested", "chosen"], list[list[Any]]()
        ablated, best, shares = [], {}, {}
        for name, network in context.networks().items():
            assert isinstance(network, EncoderDecoder)
            choosing, tested = (_hits(context, network, half) for half in halves)
            flags = [flag for layer in network.cross_attentions() for flag in layer.ablated_maps()]
            chosen = int(torch.tensor(choosing).masked_fill(torch.tensor(flags), -1).argmax())
            table = enumerate(zip(heads, choosing, tested, strict=True))
            rows += [[name, *head, *of_head, index == chosen] for index, (head, *of_head) in table]
            best[name], shares[name] = chosen, tested
            ablated += flags
        first, others = (f"{sum(len(copied) for _, copied in half)} of {len(half)}" for half in halves)
        title = f"Copied tokens that heads of the cross-attention hit, of {others.partition(' ')[0]}"
        return AnalysisResult(
            scalars={f"analysis/{name}/copied_tokens_hit": shares[name][at] for name, at in best.items()},
            lines={
                "alignment": f"share of copied tokens that the best head hits, chosen on {first} pairs, tested on "
                f"{others} others",
                **{
                    f"  {name}": f"{shares[name][at]:.1%} by {map_title(('cross', *heads[at]))}"
                    for name, at in best.items()
                },
            },
            tables={"alignment": naming_ablated(columns, rows, ablated)},
            figures={"alignment": context.map_grid(shares["trained"], title, "share of copied tokens", "cross")},
        )

    def _halves(self, context: AnalysisContext) -> tuple[list[CopyingPair], list[CopyingPair]]:
        """The pairs of the sample with a copied word: those that choose the head, and those that test it."""
        pairs = [
            (pair, copied)
            for batch in context.batches
            for pair in pairs_of(batch)
            if (copied := copied_tokens(pair, context.tokenizer, self.min_length))
        ]
        halves = pairs[::2], pairs[1::2]
        if not halves[1]:
            reason = f"needs at least two pairs with a copied word, and the sample has {len(pairs)}"
            raise ArgumentError("num_windows", self.num_windows, reason, {"num_windows": 10 * self.num_windows})
        return halves


def copied_tokens(pair: TokenPair, tokenizer: TextTokenizer, min_length: int = 2) -> Copied:
    """The tokens of the words that a target copies from its source, see `CrossAlignment`."""
    places, rows = (_once(ids[0].tolist(), tokenizer) for ids in (pair.source, pair.predicted))
    copied: Copied = []
    for name, own in rows.items():
        source = places.get(name, [])
        if len(own) == len(source) and len(name) >= min_length and any(map(str.isalnum, name)):
            copied += zip(own, source, strict=True)
    return copied


def _once(ids: Sequence[int], tokenizer: TextTokenizer) -> dict[str, list[int]]:
    """For each word that occurs once, the positions of its tokens except white space and special tokens."""
    words = words_of(ids, tokenizer)
    is_text = [token not in tokenizer.special_ids and bool(tokenizer.decode([token]).strip()) for token in ids]
    counts = Counter(words.names)
    return {
        name: [place for place in words.tokens(index) if is_text[place]]
        for index, name in enumerate(words.names)
        if counts[name] == 1
    }


def _hits(context: AnalysisContext, network: EncoderDecoder, pairs: Sequence[tuple[TokenPair, Copied]]) -> list[float]:
    """For each map of the cross-attention, the share of copied tokens that it hits."""
    found = []
    for pair, copied in pairs:
        with context.precision():
            layers = capture_pair(network, pair)["cross"].layers
        rows, places = (torch.tensor(side) for side in zip(*copied, strict=True))
        found.append(torch.cat([layer.weights[0].cpu()[:, rows].argmax(dim=-1) == places for layer in layers]))
    return torch.cat(found, dim=-1).double().mean(dim=-1).tolist()
