"""Measures of all heads of an encoder–decoder on fixed pairs of a source and a target."""

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from tinyformer.analysis.measures.capture import CapturedMaps, attention_calls
from tinyformer.analysis.measures.cross_measures import CROSS_MEASURES
from tinyformer.analysis.measures.measures import MEASURES, combine_inputs, measure_layers
from tinyformer.analysis.measures.probe import HeadMeasures, ablated_maps
from tinyformer.batch import IGNORED, Batch
from tinyformer.data import PairTokens, TextTokenizer
from tinyformer.generation.beam_search import Beam, beam_search
from tinyformer.nn import EncoderDecoder

OF_KIND = {"encoder": MEASURES, "decoder": MEASURES, "cross": CROSS_MEASURES}
"""The measures of each kind of attention."""


class Axes(NamedTuple):
    """The tokens of an attention map.

    Attributes:
        queries: token strings of the rows.
        keys: token strings of the columns.
    """

    queries: Sequence[str]
    keys: Sequence[str]


class TokenPair(NamedTuple):
    """A source and a target, without padding.

    Attributes:
        source: token ids, with the special tokens around the text, see `PairTokens`.
        target: the token ids that the decoder reads.
        predicted: the token ids that the decoder predicts: the target shifted by one, with `eos` at its end.
    """

    source: Int[Tensor, "1 source_seq"]
    target: Int[Tensor, "1 seq"]
    predicted: Int[Tensor, "1 seq"]

    @classmethod
    def of(cls, source: Sequence[int], target: Sequence[int], tokens: PairTokens, num_tokens: int) -> "TokenPair":
        """The pair of two texts, each cut to `num_tokens` tokens, special tokens included."""
        sides = tokens.source(source, num_tokens), tokens.inputs(target), tokens.predicted(target)
        return cls(*(torch.tensor([ids[:num_tokens]]) for ids in sides))

    def to(self, device: torch.device) -> "TokenPair":
        """The pair on a device."""
        return TokenPair(*(ids.to(device) for ids in self))


def pairs_of(batch: Batch) -> list[TokenPair]:
    """The pairs of a batch, each without its padding."""
    lengths = zip(batch["source_lengths"].tolist(), (batch["targets"] != IGNORED).sum(dim=1).tolist(), strict=True)
    return [
        TokenPair(
            batch["source"][row : row + 1, :source],
            batch["inputs"][row : row + 1, :target],
            batch["targets"][row : row + 1, :target],
        )
        for row, (source, target) in enumerate(lengths)
    ]


def decoded_pair(
    network: EncoderDecoder, source: Sequence[int], tokens: PairTokens, beam: Beam, num_tokens: int | None = None
) -> TokenPair:
    """A source with the target that the model finds for it, on the network's device.

    Each has at most `num_tokens` tokens, special tokens included; by default as many as the context holds.
    """
    device = network.encoder.token_embedding.weight.device
    num_tokens = min(num_tokens or network.max_seq_len, network.max_seq_len)
    ids = torch.tensor([tokens.source(source, num_tokens)], device=device)
    lengths = torch.tensor([ids.shape[1]], device=device)
    (target,) = beam_search(network, ids, lengths, tokens, beam, num_tokens)
    return TokenPair.of(source, target, tokens, num_tokens).to(device)


@torch.no_grad()
def capture_pair(network: EncoderDecoder, pair: TokenPair) -> dict[str, CapturedMaps]:
    """The exact attention weights of each layer, by the kind of attention, in evaluation mode."""
    calls = iter(attention_calls(network, pair.source, pair.target))
    captured: dict[str, CapturedMaps] = {}
    for kind, layers in network.attentions_by_kind().items():
        captured[kind] = CapturedMaps()
        captured[kind].add([next(calls) for _ in layers])
    return captured


def sides_of(kind: str) -> tuple[str, str]:
    """The titles of the axes of a map of queries and keys."""
    return ("Queries (target)", "Keys (source)") if kind == "cross" else ("Queries", "Keys")


def axes_of_pair(pair: TokenPair, tokenizer: TextTokenizer) -> dict[str, Axes]:
    """The tokens of queries and keys of each kind of attention.

    A query of cross-attention is labelled with the token that is predicted there, which is the one that a head aligns
    with the source (Bahdanau et al. 2014, arXiv 1409.0473, figure 3).
    """
    source, target, predicted = (tokenizer.token_strings(ids[0].tolist()) for ids in pair)
    return {"encoder": Axes(source, source), "decoder": Axes(target, target), "cross": Axes(predicted, source)}


def measure_pairs(
    network: EncoderDecoder, pairs: Sequence[TokenPair], precision: AbstractContextManager[object]
) -> HeadMeasures:
    """The measures of every head, combined over the pairs by `Measure.combine`; nan for other kinds of attention.

    Each pair has a forward pass of its own, since the lengths differ and padding would be measured.
    """
    found = defaultdict[str, list[dict[str, list[list[float]]]]](list)
    with precision:
        for pair in pairs:
            for kind, maps in capture_pair(network, pair).items():
                tokens = pair.source if kind == "encoder" else pair.target
                found[kind].append(measure_layers(OF_KIND[kind], maps, tokens))
    kinds = network.attentions_by_kind()
    measured = dict.fromkeys(name for measures in OF_KIND.values() for name in measures)
    values = {name: [[math.nan] * len(maps) for maps in ablated_maps(network)] for name in measured}
    first = 0
    for kind, layers in kinds.items():
        for name, of_layers in combine_inputs(OF_KIND[kind], found[kind], [1] * len(pairs)).items():
            values[name][first : first + len(layers)] = of_layers
        first += len(layers)
    return HeadMeasures.of(network, values)
