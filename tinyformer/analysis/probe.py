"""Measures of all heads on fixed inputs, fast enough to be computed during training."""

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from tinyformer.analysis.capture import CapturedMaps, LayerCall, attention_calls
from tinyformer.analysis.measures import MEASURES, PATTERNS, Measure, measure_layers, repeated_tokens
from tinyformer.batch import Batch
from tinyformer.nn import QKV, AttentionCall, AttentionMask, BaseAttention, Transformer
from tinyformer.tasks import Task


@dataclass(frozen=True)
class Probe:
    """An input, and the measures that are computed on it.

    Args:
        tokens: the input, on the network's device.
        mask: its attention mask.
        measures: measures by name.
    """

    tokens: Int[Tensor, "batch seq"]
    mask: AttentionMask
    measures: Mapping[str, Measure]


def make_probes(
    task: Task, windows: Batch, vocab_size: int, max_seq_len: int, num_sequences: int, period: int
) -> list[Probe]:
    """The probes of a model: `MEASURES` on windows of its data, `PATTERNS` on repeated random tokens.

    Args:
        task: the task that the model was trained for; it makes the attention masks.
        windows: windows without padding, see `fullest`.
        vocab_size: number of tokens in the vocabulary.
        max_seq_len: context length of the model. At 1 no sequence can repeat, and there are no `PATTERNS`.
        num_sequences: number of random sequences.
        period: number of random tokens that are repeated; at most half of the context length is used.
    """
    probes = [Probe(windows["inputs"], task.mask(windows), MEASURES)]
    period = min(period, max_seq_len // 2)
    if period:
        repeated = repeated_tokens(vocab_size, num_sequences, period).to(windows["inputs"].device)
        probes.append(Probe(repeated, task.mask({"inputs": repeated}), PATTERNS))
    return probes


@dataclass(frozen=True)
class HeadMeasures:
    """The measures of every head.

    Args:
        names: name of each map of each layer: `03`, or `03a` and `03b` where a head has two softmaxes.
        values: by measure, the value for each map of each layer; nan where the measure is not defined.
        layers: see `Network.layer_names`.
    """

    names: Sequence[Sequence[str]]
    values: Mapping[str, Sequence[Sequence[float]]]
    layers: Sequence[str]

    def scalars(self) -> dict[str, float]:
        """The finite values by name, such as `attention/layer_00/head_00/entropy`."""
        return {
            f"attention/{self.layers[layer]}/head_{head}/{name}": value
            for name, layers in self.values.items()
            for layer, values in enumerate(layers)
            for head, value in zip(self.names[layer], values, strict=True)
            if math.isfinite(value)
        }

    def table(self) -> tuple[list[str], list[list[int | str | float | None]]]:
        """Columns and rows, with one row for each head and one column for each measure.

        The first column is the kind of attention, such as "cross", where there are several.
        """
        rows: list[list[int | str | float | None]] = []
        for layer, heads in enumerate(self.names):
            kind, number = split_name(self.layers[layer])
            for index, head in enumerate(heads):
                values = (layers[layer][index] for layers in self.values.values())
                numbers = [value if math.isfinite(value) else None for value in values]
                rows.append([*([kind] if kind else []), number, head, *numbers])
        kinds = ["kind"] if any("/" in name for name in self.layers) else []
        return [*kinds, "layer", "head", *self.values], rows


@torch.no_grad()
def measure_heads(
    network: Transformer, probes: Sequence[Probe], rows: int, precision: AbstractContextManager[object]
) -> HeadMeasures:
    """The measures of several probes.

    Args:
        network: the model, in training or evaluation mode.
        probes: inputs whose measures have different names.
        rows: number of queries that are measured, see `capture_attention`.
        precision: context of the forward pass; the measures are computed in the precision of the attention weights.
    """
    values: dict[str, list[list[float]]] = {}
    captured = [CapturedMaps() for _ in probes]
    with precision:
        for maps, calls in zip(captured, _calls(network, probes), strict=True):
            maps.add(calls, rows)
    for probe, maps in zip(probes, captured, strict=True):
        values |= measure_layers(probe.measures, maps, probe.tokens)
    return HeadMeasures([map_names(layer) for layer in network.attentions()], values, network.layer_names())


def layer_label(layer: str) -> str:
    """A name of `Network.layer_names` for people: "layer 3", or "cross 3"."""
    kind, index = split_name(layer)
    return f"{kind or 'layer'} {index}"


def split_name(layer: str) -> tuple[str, int]:
    """The kind and the index in a name of `Network.layer_names`, such as ("cross", 3) of "cross/layer_03"."""
    kind, _, name = layer.rpartition("/")
    return kind, int(name.removeprefix("layer_"))


def _calls(network: Transformer, probes: Sequence[Probe]) -> list[list[LayerCall]]:
    """What each layer attends with, for each probe; in one forward pass where masks are causal only.

    A pass has hundreds of kernels, for whose launches a GPU waits. Padding behind a sequence changes nothing before it.
    """
    mask = AttentionMask(causal=True)
    if any(probe.mask != mask for probe in probes):
        return [attention_calls(network, probe.tokens, probe.mask) for probe in probes]
    longest = max(probe.tokens.shape[1] for probe in probes)
    padded = [F.pad(probe.tokens, (0, longest - probe.tokens.shape[1])) for probe in probes]
    calls = attention_calls(network, torch.cat(padded), mask)
    firsts = itertools.accumulate((len(tokens) for tokens in padded), initial=0)
    return [
        [(layer, _part(call, first, *probe.tokens.shape)) for layer, call in calls]
        for first, probe in zip(firsts, probes, strict=False)
    ]


def _part(call: AttentionCall, first: int, num_rows: int, seq: int) -> AttentionCall:
    """Some rows of a call, without the padding behind them."""
    return call._replace(qkv=QKV(*(part[first : first + num_rows, :, :seq] for part in call.qkv)))


def map_names(layer: BaseAttention) -> list[str]:
    """The name of each attention map of a layer: `03` for head 3, `03a` and `03b` where a head has two softmaxes."""
    letters = "ab" if layer.num_softmaxes > 1 else [""]
    return [f"{head:02d}{letter}" for head in layer.head_map.ids for letter in letters]


@torch.no_grad()
def capture_weights(
    network: Transformer, tokens: Int[Tensor, "batch seq"], mask: AttentionMask, rows: int | None = None
) -> CapturedMaps:
    """The exact attention weights of each layer, `batch maps rows seq`, in evaluation mode."""
    maps = CapturedMaps()
    maps.add(attention_calls(network, tokens, mask), rows)
    return maps
