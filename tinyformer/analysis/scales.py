"""What each measure of a head means, in a sentence, and the limits of its colours, the same in every picture."""

import math
from collections.abc import Callable
from typing import TypeAlias

Limits: TypeAlias = Callable[[int], tuple[float, float]]
"""The values of the first and the last colour of a measure, given the number of keys of the maps."""

EXPLANATIONS: dict[str, str] = {
    "entropy": "Entropy of the attention weights, in nats: 0 for attention on one token, ln n for n equal weights.",
    "entropy_share": "Entropy divided by its maximum: 0 for attention on one token, 1 for equal attention on all.",
    "distance": "Mean distance between a query and the keys that it attends to, in tokens.",
    "first_token": "Share of attention on the first token of the text; near 1 in an attention sink.",
    "previous_token": "Share of attention on the token just before the query.",
    "self": "Share of attention on the query's own token.",
    "near": "Share of attention on keys at most 8 tokens away from the query.",
    "vertical": "Share of attention on the one key, other than the first, that receives most of it.",
    "block": "Overlap with a map of two blocks within each of which attention is even: 1 for such a map.",
    "largest_logit": "Largest logit before the softmax; it keeps growing before training diverges.",
    "rank": "Effective rank of the map: 1 if all queries attend to the same keys, n for n different keys.",
    "similarity": "Cosine similarity to the most similar other head of the layer: 1 for the same map.",
    "mean_similarity": "Mean cosine similarity to the other heads of the layer: 1 if all have the same map.",
    "induction": "Share of attention on tokens that followed the query's token before, where it occurred before.",
    "duplicate_token": "Share of attention on earlier occurrences of the query's token, where it occurred before.",
    "diagonal_distance": "Mean distance from the diagonal, as a share of the source: 0 for an even pace.",
    "monotonicity": "Kendall's τ of the alignment: 1 if attention advances with each target token, -1 if it goes back.",
    "coverage": "Share of the source that is attended to, where weights of a source token count up to a sum of 1.",
    "source_end": "Share of attention on the last token of the source.",
    "importance": "Mean absolute gradient of the loss with respect to the head's gate; near 0 for a useless head.",
}
"""By measure, its meaning in a sentence."""


def _share(num_keys: int) -> tuple[float, float]:
    return 0.0, 1.0


LIMITS: dict[str, Limits] = {
    **dict.fromkeys(EXPLANATIONS, _share),
    "entropy": lambda num_keys: (0.0, math.log(num_keys)),
    "distance": lambda num_keys: (0.0, (num_keys - 1) / 2),  # a causal head on the first token
    "largest_logit": lambda num_keys: (0.0, 50.0),
    "rank": lambda num_keys: (1.0, float(num_keys)),
    "monotonicity": lambda num_keys: (-1.0, 1.0),
}
"""By measure, the limits of its colours."""

del LIMITS["importance"]  # it is in units of the loss, which have no fixed limits
