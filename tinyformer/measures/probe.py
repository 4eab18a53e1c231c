"""Measures of all heads on fixed inputs, fast enough to be computed during training."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from tinyformer.data import TextTokenizer
from tinyformer.data.batches.windows import Batch
from tinyformer.files import finite
from tinyformer.measures.batches import TokenPair
from tinyformer.measures.capture import CapturedMaps, capture_pair, capture_weights, map_names
from tinyformer.measures.events import TRAITS, Trait, head_labels
from tinyformer.measures.formulas import repeated_tokens
from tinyformer.measures.table import (
    CROSS_MEASURES,
    MEASURES,
    PATTERNS,
    WHOLE,
    Measure,
    combine_inputs,
    measure_layers,
)
from tinyformer.nn import AttentionMaps, AttentionMask, EncoderDecoder, Network, Transformer
from tinyformer.nn.heads import Address
from tinyformer.tasks import Task


@dataclass(frozen=True)
class Probe:
    """An input on the network's device, its attention mask, and the measures that are computed on it."""

    tokens: Int[Tensor, "batch seq"]
    mask: AttentionMask
    measures: Mapping[str, Measure]


def make_probes(
    task: Task, windows: Sequence[Batch], tokenizer: TextTokenizer, vocab_size: int, max_seq_len: int, *sizes: int
) -> list[Probe]:
    """The probes of a model: `MEASURES` on windows without padding, `PATTERNS` on `repeated_tokens`.

    `sizes` are the number and the largest period of the repeated sequences; a very short context has no such sequences.
    """
    probes = [Probe(batch["inputs"], task.mask(batch), MEASURES) for batch in windows]
    num_sequences, period = sizes
    period = min(period, (max_seq_len - len(tokenizer.around[0])) // 2)
    if period > 0:
        repeated = repeated_tokens(vocab_size, num_sequences, period, tokenizer).to(probes[0].tokens.device)
        probes.append(Probe(repeated, task.mask({"inputs": repeated}), PATTERNS))
    return probes


@dataclass(frozen=True)
class HeadMeasures:
    """The values of all measures for every head."""

    names: Sequence[Sequence[str]]  # name of each map of each layer, see `map_names`
    values: Mapping[str, Sequence[Sequence[float]]]  # by measure, the value of each map of each layer, or nan
    addresses: Sequence[Address]  # see `Network.layer_addresses`
    ablated: Sequence[Sequence[bool]]  # see `ablated_maps`; the measures of such maps are not defined

    @classmethod
    def of(cls, network: Network, values: Mapping[str, Sequence[Sequence[float]]]) -> "HeadMeasures":
        names = [map_names(layer) for layer in network.attentions()]
        whole = {
            name: [[of if math.isnan(of) else round(of) for of in layer] for layer in layers]
            for name, layers in values.items()
            if name in WHOLE
        }
        return cls(names, {**values, **whole}, network.layer_addresses(), ablated_maps(network))

    def scalars(self) -> dict[str, float]:
        """The finite values by name, such as `attention/cross/layer_00/head_00/entropy`."""
        layers = ["/".join([*map(str, kind), f"layer_{index:02d}"]) for *kind, index in self.addresses]
        return {
            f"attention/{layers[layer]}/head_{head}/{measure}": value
            for measure, by_layer in self.values.items()
            for layer, values in enumerate(by_layer)
            for head, value in zip(self.names[layer], values, strict=True)
            if math.isfinite(value)
        }

    def table(self, traits: Mapping[str, Trait] = TRAITS) -> tuple[list[str], list[list[int | str | float | None]]]:
        """Columns and rows: one row for each head, one column for each measure, and the label, see `head_labels`.

        In an encoder–decoder, the first column is the kind of attention, such as "cross".
        """
        rows: list[list[int | str | float | None]] = []
        labels = head_labels(self.values, traits)
        for layer, heads in enumerate(self.names):
            for index, head in enumerate(heads):
                values = (by_layer[layer][index] for by_layer in self.values.values())
                numbers = map(finite, values)
                label = "ablated" if self.ablated[layer][index] else labels[layer][index]
                rows.append([*self.addresses[layer], head, *numbers, label])
        kinds = ["kind"] if len(self.addresses[0]) > 1 else []
        return [*kinds, "layer", "head", *self.values, "label"], rows


@torch.no_grad()
def measure_heads(
    network: Transformer,
    probes: Sequence[Probe],
    rows: int,
    precision: AbstractContextManager[object],
    costly: bool = True,
    random: int | None = None,
) -> HeadMeasures:
    """The measures of all heads on several probes, from `rows` queries of each; nan where a measure is not defined.

    The values of probes with the same measures are combined, weighted by the numbers of sequences. The forward pass is
    under the context `precision`; measures have the precision of the attention weights. `costly=False` leaves out
    costly measures, see `Measure`. Given a seed `random`, the measures are computed on `random_maps`.
    """
    captured = []
    with precision:
        for probe in probes:
            captured.append(maps := capture_weights(network, probe.tokens, probe.mask, rows))
            if random is not None:
                random_maps(maps, random)
    alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, probe in enumerate(probes):
        alike[tuple(probe.measures)].append(number)
    values: dict[str, list[list[float]]] = {}
    for numbers in alike.values():
        of_probe = probes[numbers[0]].measures
        measures = {name: measure for name, measure in of_probe.items() if costly or not measure.is_costly}
        of_inputs = [measure_layers(measures, captured[number], probes[number].tokens) for number in numbers]
        values |= combine_inputs(measures, of_inputs, [len(probes[number].tokens) for number in numbers])
    return HeadMeasures.of(network, values)


def measure_pairs(
    network: EncoderDecoder,
    pairs: Sequence[TokenPair],
    precision: AbstractContextManager[object],
    random: int | None = None,
) -> HeadMeasures:
    """The measures of every head, combined over the pairs by `Measure.combine`; nan if a measure does not apply.

    Given a seed `random`, the measures are computed on `random_maps`. Each pair has a separate forward pass, without
    padding, which would affect the measures.
    """
    of_kinds: dict[str, list[dict[str, list[list[float]]]]] = defaultdict(list)
    with precision:
        for pair in pairs:
            for kind, maps in capture_pair(network, pair).items():
                if random is not None:
                    random_maps(maps, random)
                tokens = pair.source if kind == "encoder" else pair.target
                of_kinds[kind].append(measure_layers(_measures_of(kind), maps, tokens))
    values = {name: [[math.nan] * len(maps) for maps in ablated_maps(network)] for name in MEASURES | CROSS_MEASURES}
    first = 0
    for kind, layers in network.attentions_by_kind().items():
        for name, of_layers in combine_inputs(_measures_of(kind), of_kinds[kind], [1] * len(pairs)).items():
            values[name][first : first + len(layers)] = of_layers
        first += len(layers)
    return HeadMeasures.of(network, values)


def random_maps(maps: CapturedMaps, seed: int = 0) -> None:
    """Replace captured weights with random weights, whose only pattern is the mask: a control for measures.

    Each row is drawn from the flat Dirichlet distribution over its visible keys: all distributions are equally likely.
    """
    generator = torch.Generator().manual_seed(seed)
    for index, layer in enumerate(maps.layers):
        drawn = torch.empty(layer.logits.shape).exponential_(generator=generator).log().to(layer.logits)
        logits = drawn.masked_fill(layer.logits == -torch.inf, -torch.inf)
        maps[index] = logits.softmax(dim=-1).nan_to_num()  # zeros for a query without visible keys
        maps.layers[index] = AttentionMaps(maps[index], logits)


def _measures_of(kind: str) -> dict[str, Measure]:
    return CROSS_MEASURES if kind == "cross" else MEASURES


def ablated_maps(network: Network) -> list[list[bool]]:
    """A flag for each map of each layer, True if the map's head is ablated."""
    return [layer.ablated_maps() for layer in network.attentions()]
