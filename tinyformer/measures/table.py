"""The measures of attention heads: formula, explanation and colour limits; and their values for captured maps."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Int
from torch import Tensor

from tinyformer.measures import formulas
from tinyformer.measures.capture import CapturedMaps
from tinyformer.nn import AttentionMaps

MEAN = partial(torch.nanmean, dim=0)  # the mean over the rows for which a measure is defined


@dataclass(frozen=True)
class Measure:
    """A measure of the heads of stacked layers."""

    compute: Callable[[AttentionMaps, Tensor, Tensor], Tensor]  # from maps, positions of queries, and tokens
    meaning: str  # the meaning in a few words, with the unit, for pictures
    explanation: str  # the meaning in a sentence, for the atlas
    limits: Callable[[int], tuple[float, float]] = lambda num_keys: (0.0, 1.0)  # of colours, by number of keys
    combine: Callable[[Tensor], Tensor] = MEAN  # the value of several inputs, which are stacked in the first dimension
    is_costly: bool = False  # whether telemetry computes it only at validation, since it launches many kernels
    is_whole: bool = False  # whether its values are whole numbers
    needs: str = "more tokens"  # what an input needs for the measure to be defined


MEASURES: dict[str, Measure] = {
    "entropy": Measure(
        lambda maps, rows, tokens: formulas.entropy(maps.weights),
        "entropy, nats",
        "Entropy of the attention weights, in nats: 0 for attention on one token, ln n for n equal weights.",
        limits=lambda num_keys: (0.0, math.log(num_keys)),
    ),
    "entropy_share": Measure(
        lambda maps, rows, tokens: formulas.entropy_share(maps.weights, (maps.logits > -torch.inf).sum(dim=-1)),
        "entropy, share of its maximum",
        "Entropy divided by its maximum: 0 for attention on one token, 1 for equal attention on all.",
    ),
    "distance": Measure(
        lambda maps, rows, tokens: formulas.distance(maps.weights, rows),
        "mean distance, tokens",
        "Mean distance between a query and the keys that it attends to, in tokens.",
        limits=lambda num_keys: (0.0, (num_keys - 1) / 2),  # a causal head on the first token
    ),
    "first_token": Measure(
        lambda maps, rows, tokens: formulas.first_token(maps.weights),
        "share on the first token",
        "Share of attention on the first token of the text; near 1 in an attention sink.",
    ),
    "previous_token": Measure(
        lambda maps, rows, tokens: formulas.previous_token(maps.weights, rows),
        "share on the previous token",
        "Share of attention on the token just before the query.",
    ),
    "self": Measure(
        lambda maps, rows, tokens: formulas.self_attention(maps.weights, rows),
        "share on the token itself",
        "Share of attention on the query's own token.",
    ),
    "near": Measure(
        lambda maps, rows, tokens: formulas.near(maps.weights, rows),
        f"share within {formulas.REACH} tokens",
        f"Share of attention on keys at most {formulas.REACH} tokens away from the query.",
    ),
    "vertical": Measure(
        lambda maps, rows, tokens: formulas.vertical(maps.weights),
        "largest share on one token",
        "Share of attention on the one key, other than the first, that receives most of it.",
        is_costly=True,
    ),
    "block": Measure(
        lambda maps, rows, tokens: formulas.block(*maps, rows),
        "overlap with two blocks",
        "Overlap with a map of two blocks in which attention is even: 1 for such a map.",
        is_costly=True,
    ),
    "offset_share": Measure(
        lambda maps, rows, tokens: formulas.offset_share(*maps, rows),
        "largest share at one offset",
        "Share of attention at the one offset, such as the next token, that receives most of it; the token itself and "
        "the previous token are excluded.",
        is_costly=True,
    ),
    "offset": Measure(
        lambda maps, rows, tokens: formulas.offset(*maps, rows),
        "offset with the largest share, tokens",
        "The offset that receives most attention: 1 for the next token, -3 for the third before the query.",
        limits=lambda num_keys: (-num_keys / 2, num_keys / 2),
        combine=lambda values: values.nanmedian(dim=0).values,  # an offset that occurs
        is_costly=True,
        is_whole=True,
    ),
    "segment_vertical": Measure(
        lambda maps, rows, tokens: formulas.segment_vertical(maps.weights),
        "share on stripes of segments",
        f"Share of attention that {formulas.SEGMENT} or more consecutive queries give to one key other than the first, "
        "in the quarter of the queries where this share is largest.",
        is_costly=True,
    ),
    "horizontal": Measure(
        lambda maps, rows, tokens: formulas.horizontal(*maps),
        "evenness of few queries",
        "How much more evenly a few queries attend to their keys than the queries around them; 0 if all are alike.",
        is_costly=True,
    ),
    "phrases": Measure(
        lambda maps, rows, tokens: formulas.phrases(*maps, rows),
        "overlap with short blocks",
        f"Overlap with blocks of 2 to {formulas.LONGEST_PHRASE} tokens in which attention is even: 1 for such a map.",
        is_costly=True,
        needs="a map of all queries",
    ),
    "largest_logit": Measure(
        lambda maps, rows, tokens: formulas.largest_logit(maps.logits),
        "largest logit",
        "Largest logit before the softmax; it keeps growing before training diverges.",
        limits=lambda num_keys: (0.0, 50.0),
        combine=partial(torch.amax, dim=0),
    ),
    "rank": Measure(
        lambda maps, rows, tokens: formulas.effective_rank(maps.weights),
        "effective rank of the map",
        "Effective rank of the map: 1 if all queries attend to the same keys, n for n different keys.",
        limits=lambda num_keys: (1.0, float(num_keys)),
    ),
    "similarity": Measure(
        lambda maps, rows, tokens: formulas.nearest_head(maps.weights),
        "cosine with the most similar head",
        "Cosine similarity to the most similar other head of the layer: 1 for the same map.",
        needs="two heads in a layer",
    ),
    "mean_similarity": Measure(
        lambda maps, rows, tokens: formulas.mean_similarity(maps.weights),
        "mean cosine with the other heads",
        "Mean cosine similarity to the other heads of the layer: 1 if all have the same map.",
        is_costly=True,
        needs="two heads in a layer",
    ),
}
"""The measures for any text, by the last part of the logged name, such as `attention/layer_00/head_00/entropy`."""

PATTERNS: dict[str, Measure] = {
    "induction": Measure(
        lambda maps, rows, tokens: formulas.induction(maps.weights, tokens, rows),
        "share on tokens that followed the same token before",
        "Share of attention on tokens that followed earlier occurrences of the query's token, if there are any.",
        needs="a token that repeats",
    ),
    "duplicate_token": Measure(
        lambda maps, rows, tokens: formulas.duplicate_token(maps.weights, tokens, rows),
        "share on earlier occurrences of the same token",
        "Share of attention on earlier occurrences of the query's token, over queries whose token occurred before.",
        needs="a token that repeats",
    ),
}
"""The measures that are computed on `repeated_tokens`, by name."""

CROSS_MEASURES: dict[str, Measure] = {
    "entropy": MEASURES["entropy"],
    "entropy_share": MEASURES["entropy_share"],
    "diagonal_distance": Measure(
        lambda maps, rows, tokens: formulas.diagonal_distance(maps.weights),
        "mean distance from the diagonal",
        "Mean distance from the diagonal, as a share of the source: 0 for an even pace.",
    ),
    "monotonicity": Measure(
        lambda maps, rows, tokens: formulas.monotonicity(maps.weights),
        "Kendall's τ of the alignment",
        "Kendall's τ of the alignment: 1 if attention advances with each target token, -1 if it goes back.",
        limits=lambda num_keys: (-1.0, 1.0),
    ),
    "coverage": Measure(
        lambda maps, rows, tokens: formulas.coverage(maps.weights),
        "share of the source attended to",
        "Share of the source that is attended to: the mean over source tokens of the sum of weights, at most 1 each.",
    ),
    "source_end": Measure(
        lambda maps, rows, tokens: formulas.source_end(maps.weights),
        "share on the source's end",
        "Share of attention on the last token of the source.",
    ),
    "vertical": replace(MEASURES["vertical"], compute=lambda maps, rows, tokens: formulas.vertical(maps.weights, -1)),
    "largest_logit": MEASURES["largest_logit"],
    "rank": MEASURES["rank"],
    "similarity": MEASURES["similarity"],
}
"""The measures of cross-attention, by the last part of the logged name, as in `attention/cross/layer_00/head_00/…`.

Queries are tokens of the target, keys tokens of the source, both without padding.
"""

ALL_MEASURES = CROSS_MEASURES | MEASURES | PATTERNS  # every measure by name, whatever kind of attention has it

WHOLE = {name for name, measure in ALL_MEASURES.items() if measure.is_whole}

EXPLANATIONS = {name: measure.explanation for name, measure in ALL_MEASURES.items()} | {
    "importance": "Mean absolute gradient of the loss with respect to the head's gate; near 0 for a useless head."
}
"""The explanations of the atlas, by the name of the value."""


def measure_layers(
    measures: Mapping[str, Measure], maps: CapturedMaps, tokens: Int[Tensor, "batch k_seq"]
) -> dict[str, list[list[float]]]:
    """Measures of the maps of a forward pass on `tokens`: values by name, layer and map; nan for ablated heads."""
    assert maps.rows is not None
    if not measures:
        return {}
    alike: dict[torch.Size, list[int]] = defaultdict(list)
    for number, layer in enumerate(maps.layers):
        alike[layer.weights.shape].append(number)
    values: dict[str, list[list[float]]] = {name: [[]] * len(maps.layers) for name in measures}
    for numbers in alike.values():
        # Layers of one shape are stacked and all values copied at once, since launches and copies are slow on a GPU.
        weights, logits = (torch.stack(parts) for parts in zip(*(maps.layers[n] for n in numbers), strict=True))
        stacked = AttentionMaps(weights, logits)
        computed = torch.stack([measure.compute(stacked, maps.rows, tokens) for measure in measures.values()]).tolist()
        for name, layers in zip(measures, computed, strict=True):
            for number, heads in zip(numbers, layers, strict=True):
                flags = maps.ablated[number] if maps.ablated else [False] * len(heads)
                values[name][number] = [math.nan if flag else value for value, flag in zip(heads, flags, strict=True)]
    return values


def combine_inputs(
    measures: Mapping[str, Measure], values: Sequence[Mapping[str, list[list[float]]]], num_rows: Sequence[int]
) -> dict[str, list[list[float]]]:
    """Combine the results of `measure_layers` for several inputs, weighted by the number of rows of each input."""
    if len(values) == 1:
        return dict(values[0])
    counts = torch.tensor(num_rows)
    combined: dict[str, list[list[float]]] = {}
    for name, measure in measures.items():
        layers = zip(*(of_input[name] for of_input in values), strict=True)
        stacked = [torch.tensor(layer, dtype=torch.float64).repeat_interleave(counts, dim=0) for layer in layers]
        combined[name] = [measure.combine(layer).tolist() for layer in stacked]
    return combined
