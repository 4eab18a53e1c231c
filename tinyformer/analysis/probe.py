"""Measures of all heads on fixed text, quick enough to be taken while a model trains."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from tinyformer.analysis.capture import CapturedMaps, capture_attention
from tinyformer.analysis.measures import Measure, measure_layers
from tinyformer.nn import AttentionMask, Transformer


@dataclass(frozen=True)
class Probe:
    """A text, and what is measured on it.

    Args:
        tokens: of the text, on the network's device.
        mask: who may attend to whom in it.
        measures: by name.
    """

    tokens: Int[Tensor, "batch seq"]
    mask: AttentionMask
    measures: Mapping[str, Measure]


@dataclass(frozen=True)
class HeadMeasures:
    """What was measured of each head.

    Args:
        names: of each layer's maps: `03`, or `03a` and `03b` where a head has two softmaxes.
        values: by measure, the number for each map of each layer; nan where there is none.
    """

    names: Sequence[Sequence[str]]
    values: Mapping[str, Sequence[Sequence[float]]]

    def scalars(self) -> dict[str, float]:
        """Each number under its name, such as `attention/layer_00/head_00/entropy`."""
        return {
            f"attention/layer_{layer:02d}/head_{head}/{name}": value
            for name, layers in self.values.items()
            for layer, values in enumerate(layers)
            for head, value in zip(self.names[layer], values, strict=True)
            if math.isfinite(value)
        }

    def table(self) -> tuple[list[str], list[list[int | str | float | None]]]:
        """Columns and rows: a row for each head, a column for each measure."""
        rows: list[list[int | str | float | None]] = []
        for layer, heads in enumerate(self.names):
            for index, head in enumerate(heads):
                numbers = (layers[layer][index] for layers in self.values.values())
                rows.append([layer, head, *(number if math.isfinite(number) else None for number in numbers)])
        return ["layer", "head", *self.values], rows


def measure_heads(
    network: Transformer, probes: Sequence[Probe], rows: int, precision: AbstractContextManager[object]
) -> HeadMeasures:
    """All measures of some probes.

    Args:
        network: in any mode.
        probes: texts with measures of different names.
        rows: how many queries are measured, sampled alike every time; all where a text has no more.
        precision: in which the network computes; measuring itself keeps the weights' own.
    """
    with precision:
        captured = [capture_weights(network, probe.tokens, probe.mask, rows) for probe in probes]
    values: dict[str, list[list[float]]] = {}
    for probe, maps in zip(probes, captured, strict=True):
        values |= measure_layers(dict(probe.measures), maps, probe.tokens)
    return HeadMeasures([layer.map_names for layer in network.attentions()], values)


def capture_weights(
    network: Transformer, tokens: Int[Tensor, "batch seq"], mask: AttentionMask, rows: int | None = None
) -> CapturedMaps:
    """The exact weights of each layer, `batch maps rows seq`, with the model in evaluation mode."""
    was_training = network.training
    network.eval()
    try:
        with capture_attention(network, rows) as maps, torch.no_grad():
            network.encoder(tokens, mask)  # what is read from it would cost the most where the vocabulary is large
    finally:
        network.train(was_training)
    return maps
