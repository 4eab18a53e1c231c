"""Measures of all heads of an encoder–decoder on fixed pairs of a source and a target."""

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from tinyformer.analysis.capture import CapturedMaps, attention_calls
from tinyformer.analysis.cross_measures import CROSS_MEASURES
from tinyformer.analysis.measures import MEASURES, measure_layers
from tinyformer.analysis.probe import HeadMeasures, map_names
from tinyformer.nn import EncoderDecoder

OF_KIND = {"encoder": MEASURES, "decoder": MEASURES, "cross": CROSS_MEASURES}
"""The measures of each kind of attention."""


class TokenPair(NamedTuple):
    """A source and a target, without padding.

    Attributes:
        source: token ids, with the `eos` at the end.
        target: token ids, with the `eos` at the beginning, as the decoder reads them.
    """

    source: Int[Tensor, "1 source_seq"]
    target: Int[Tensor, "1 seq"]

    def to(self, device: torch.device) -> "TokenPair":
        """The pair on a device."""
        return TokenPair(self.source.to(device), self.target.to(device))


def capture_pair(network: EncoderDecoder, pair: TokenPair) -> dict[str, CapturedMaps]:
    """The exact attention weights of each layer, by the kind of attention, in evaluation mode."""
    calls = iter(attention_calls(network, *pair))
    captured = {kind: CapturedMaps() for kind in OF_KIND}
    for kind, layers in network.attentions_by_kind().items():
        captured[kind].add([next(calls) for _ in layers])
    return captured


def measure_pairs(
    network: EncoderDecoder, pairs: Sequence[TokenPair], precision: AbstractContextManager[object]
) -> HeadMeasures:
    """The measures of every head, each a mean over the pairs for which it is defined.

    A measure of another kind of attention is nan.

    Each pair is a forward pass of its own, since their lengths differ, and padding would be measured.

    Args:
        network: the model, in training or evaluation mode.
        pairs: sources and targets, on the network's device.
        precision: context of the forward passes.
    """
    found: dict[str, dict[str, list[list[list[float]]]]] = {kind: defaultdict(list) for kind in OF_KIND}
    with precision:
        for pair in pairs:
            for kind, maps in capture_pair(network, pair).items():
                tokens = pair.source if kind == "encoder" else pair.target
                for name, of_layers in measure_layers(OF_KIND[kind], maps, tokens).items():
                    found[kind][name].append(of_layers)
    kinds = network.attentions_by_kind()
    names = [map_names(layer) for layers in kinds.values() for layer in layers]
    measured = dict.fromkeys(name for measures in OF_KIND.values() for name in measures)
    values = {name: [[math.nan] * len(heads) for heads in names] for name in measured}
    first = 0
    for kind, layers in kinds.items():
        for name, of_pairs in found[kind].items():
            for index in range(len(layers)):
                of_layer = torch.tensor([of_pair[index] for of_pair in of_pairs])
                values[name][first + index] = of_layer.nanmean(dim=0).tolist()
        first += len(layers)
    return HeadMeasures(names, values, network.layer_names())
