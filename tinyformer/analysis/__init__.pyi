from .ablation import HeadAblation, HeadImportance
from .alignment import CrossAlignment
from .circuit import HeadCircuit
from .gradients import GradientFlow
from .maps import HeadMaps
from .measures.capture import CapturedMaps, capture_attention
from .measures.cross_measures import CROSS_MEANINGS, CROSS_MEASURES
from .measures.events import TRAITS, Event, EventDetector, Trait, head_labels, head_traits
from .measures.measures import MEANINGS, MEASURES, PATTERNS, measure_layers, repeated_tokens
from .measures.non_finite import first_non_finite
from .measures.padding import of_one_length
from .measures.pair_probe import (
    Axes,
    TokenPair,
    axes_of_pair,
    capture_pair,
    decoded_pair,
    measure_pairs,
    pairs_of,
    sides_of,
)
from .measures.probe import (
    HeadMeasures,
    Probe,
    Probes,
    ablated_maps,
    capture_weights,
    head_label,
    layer_label,
    make_probes,
    map_names,
    measure_heads,
    split_name,
)
from .pictures.atlas import atlas_html, write_atlas
from .pictures.picture import Picture, save_png
from .pictures.plots import head_maps, measure_maps
from .predictions import analyse_predictions
from .pruning import HeadPruning
from .relations import HeadRelations
from .residual import ResidualSurgery
from .seeds import seeds_by_number, seeds_by_setting
from .subject import Analysis, Findings, Subject, Trained, caption
from .words import Words, merge_words, words_of

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
    "Trained",
    "Trait",
    "Words",
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
