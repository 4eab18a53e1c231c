"""Analyses of trained models: attention maps, measures, ablation, importance, pruning and costs.

Each name is imported on first use: the costs of a model do not wait for the training libraries of an analysis.
"""

from typing import TYPE_CHECKING

from tinyformer.lazy import lazy_names

if TYPE_CHECKING:
    from tinyformer.analysis.ablation import HeadAblation
    from tinyformer.analysis.alignment import CrossAlignment
    from tinyformer.analysis.atlas import atlas_html, write_atlas
    from tinyformer.analysis.capture import CapturedMaps, capture_attention
    from tinyformer.analysis.circuit import HeadCircuit
    from tinyformer.analysis.cross_measures import CROSS_MEANINGS, CROSS_MEASURES
    from tinyformer.analysis.events import TRAITS, Event, EventDetector, Trait, head_labels, head_traits
    from tinyformer.analysis.gradients import GradientFlow
    from tinyformer.analysis.importance import HeadImportance
    from tinyformer.analysis.maps import HeadMaps
    from tinyformer.analysis.measures import MEANINGS, MEASURES, PATTERNS, measure_layers, repeated_tokens
    from tinyformer.analysis.non_finite import first_non_finite
    from tinyformer.analysis.padding import of_one_length
    from tinyformer.analysis.pair_probe import (
        Axes,
        TokenPair,
        axes_of_pair,
        capture_pair,
        decoded_pair,
        measure_pairs,
        pairs_of,
        sides_of,
    )
    from tinyformer.analysis.picture import Picture, save_png
    from tinyformer.analysis.plots import head_maps, measure_maps
    from tinyformer.analysis.predictions import analyse_predictions
    from tinyformer.analysis.probe import (
        HeadMeasures,
        Probe,
        Probes,
        ablated_heads,
        ablated_maps,
        capture_weights,
        head_label,
        layer_label,
        make_probes,
        map_names,
        measure_heads,
        split_name,
    )
    from tinyformer.analysis.pruning import HeadPruning
    from tinyformer.analysis.relations import HeadRelations
    from tinyformer.analysis.residual import ResidualSurgery
    from tinyformer.analysis.seeds import seeds_by_number, seeds_by_setting
    from tinyformer.analysis.subject import Analysis, Findings, Subject, caption
    from tinyformer.analysis.words import Words, merge_words, words_of

__all__ = [
    "CROSS_MEANINGS",
    "CROSS_MEASURES",
    "MEANINGS",
    "MEASURES",
    "PATTERNS",
    "TRAITS",
    "Analysis",
    "Axes",
    "CapturedMaps",
    "CrossAlignment",
    "Event",
    "EventDetector",
    "Findings",
    "GradientFlow",
    "HeadAblation",
    "HeadCircuit",
    "HeadImportance",
    "HeadMaps",
    "HeadMeasures",
    "HeadPruning",
    "HeadRelations",
    "Picture",
    "Probe",
    "Probes",
    "ResidualSurgery",
    "Subject",
    "TokenPair",
    "Trait",
    "Words",
    "ablated_heads",
    "ablated_maps",
    "analyse_predictions",
    "atlas_html",
    "axes_of_pair",
    "caption",
    "capture_attention",
    "capture_pair",
    "capture_weights",
    "decoded_pair",
    "first_non_finite",
    "head_label",
    "head_labels",
    "head_maps",
    "head_traits",
    "layer_label",
    "make_probes",
    "map_names",
    "measure_heads",
    "measure_layers",
    "measure_maps",
    "measure_pairs",
    "merge_words",
    "of_one_length",
    "pairs_of",
    "repeated_tokens",
    "save_png",
    "seeds_by_number",
    "seeds_by_setting",
    "sides_of",
    "split_name",
    "words_of",
    "write_atlas",
]

_NAMES = {
    "ablation": ("HeadAblation",),
    "alignment": ("CrossAlignment",),
    "atlas": (
        "atlas_html",
        "write_atlas",
    ),
    "capture": (
        "CapturedMaps",
        "capture_attention",
    ),
    "predictions": ("analyse_predictions",),
    "circuit": ("HeadCircuit",),
    "cross_measures": (
        "CROSS_MEANINGS",
        "CROSS_MEASURES",
    ),
    "events": (
        "TRAITS",
        "Event",
        "EventDetector",
        "Trait",
        "head_labels",
        "head_traits",
    ),
    "gradients": ("GradientFlow",),
    "importance": ("HeadImportance",),
    "maps": ("HeadMaps",),
    "measures": (
        "MEANINGS",
        "MEASURES",
        "PATTERNS",
        "measure_layers",
        "repeated_tokens",
    ),
    "non_finite": ("first_non_finite",),
    "padding": ("of_one_length",),
    "pair_probe": (
        "Axes",
        "TokenPair",
        "axes_of_pair",
        "capture_pair",
        "decoded_pair",
        "measure_pairs",
        "pairs_of",
        "sides_of",
    ),
    "picture": (
        "Picture",
        "save_png",
    ),
    "plots": (
        "head_maps",
        "measure_maps",
    ),
    "probe": (
        "HeadMeasures",
        "Probe",
        "Probes",
        "ablated_heads",
        "ablated_maps",
        "capture_weights",
        "head_label",
        "layer_label",
        "make_probes",
        "map_names",
        "measure_heads",
        "split_name",
    ),
    "pruning": ("HeadPruning",),
    "relations": ("HeadRelations",),
    "residual": ("ResidualSurgery",),
    "seeds": (
        "seeds_by_number",
        "seeds_by_setting",
    ),
    "subject": (
        "Analysis",
        "Findings",
        "Subject",
        "caption",
    ),
    "words": (
        "Words",
        "merge_words",
        "words_of",
    ),
}
"""The names that each module defines."""

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
