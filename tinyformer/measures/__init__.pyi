from .batches import TokenPair, decoded_pair, of_one_length, pairs_of
from .capture import (
    Axes,
    CapturedMaps,
    axes_of,
    capture_attention,
    capture_pair,
    capture_weights,
    head_label,
    map_names,
)
from .events import TRAITS, Event, EventDetector, Trait, head_labels, head_roles, head_traits
from .formulas import repeated_tokens
from .intervals import Change, Losses
from .points import first_non_finite
from .probe import HeadMeasures, Probe, ablated_maps, make_probes, measure_heads, measure_pairs
from .table import ALL_MEASURES, CROSS_MEASURES, MEASURES, PATTERNS, measure_layers
from .words import Words, merge_words, words_of

__all__ = [
    "ALL_MEASURES",
    "CROSS_MEASURES",
    "MEASURES",
    "PATTERNS",
    "TRAITS",
    "Axes",
    "CapturedMaps",
    "Change",
    "Event",
    "EventDetector",
    "HeadMeasures",
    "Losses",
    "Probe",
    "TokenPair",
    "Trait",
    "Words",
    "ablated_maps",
    "axes_of",
    "capture_attention",
    "capture_pair",
    "capture_weights",
    "decoded_pair",
    "first_non_finite",
    "head_label",
    "head_labels",
    "head_roles",
    "head_traits",
    "make_probes",
    "map_names",
    "measure_heads",
    "measure_layers",
    "measure_pairs",
    "merge_words",
    "of_one_length",
    "pairs_of",
    "repeated_tokens",
    "words_of",
]
