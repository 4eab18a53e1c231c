from .ablation import HeadAblation, HeadImportance
from .alignment import CrossAlignment
from .atlas.head_atlas import HeadAtlas
from .circuit import HeadCircuit
from .distance import AccuracyByDistance
from .gradients import GradientFlow
from .maps import HeadMaps
from .measures.capture import CapturedMaps, capture_attention, capture_pair, capture_weights, head_label, map_names
from .measures.events import TRAITS, Event, EventDetector, Trait, head_labels, head_roles, head_traits
from .measures.inputs import Axes, TokenPair, axes_of, decoded_pair, of_one_length, pairs_of
from .measures.measures import repeated_tokens
from .measures.non_finite import first_non_finite
from .measures.probe import HeadMeasures, Probe, Probes, ablated_maps, make_probes, measure_heads, measure_pairs
from .measures.table import ALL_MEASURES, CROSS_MEASURES, MEASURES, PATTERNS, measure_layers
from .mechanism.attribution import LogitAttribution
from .mechanism.edges import EdgeAttribution
from .mechanism.gates import HeadGating
from .mechanism.lens import LogitLens
from .mechanism.patching import ActivationPatching
from .mechanism.weights import HeadWeights
from .pictures.atlas import atlas_html, write_atlas
from .pictures.picture import Picture, save_png
from .pictures.plots import head_maps, maps_by_kind, measure_maps
from .predictions import analyse_predictions
from .pruning import HeadPruning
from .redundancy import HeadRedundancy
from .relations import HeadRelations
from .residual import ResidualSurgery
from .seeds import seeds_by_number, seeds_by_setting
from .snapshots.dynamics import TrainingDynamics
from .snapshots.film import TrainingFilm
from .subject import Analysis, Findings, Snapshot, Subject, Trained, caption
from .words import Words, merge_words, words_of

__all__ = [
    "ALL_MEASURES",
    "CROSS_MEASURES",
    "MEASURES",
    "PATTERNS",
    "TRAITS",
    "AccuracyByDistance",
    "ActivationPatching",
    "Analysis",
    "Axes",
    "CapturedMaps",
    "CrossAlignment",
    "EdgeAttribution",
    "Event",
    "EventDetector",
    "Findings",
    "GradientFlow",
    "HeadAblation",
    "HeadAtlas",
    "HeadCircuit",
    "HeadGating",
    "HeadImportance",
    "HeadMaps",
    "HeadMeasures",
    "HeadPruning",
    "HeadRedundancy",
    "HeadRelations",
    "HeadWeights",
    "LogitAttribution",
    "LogitLens",
    "Picture",
    "Probe",
    "Probes",
    "ResidualSurgery",
    "Snapshot",
    "Subject",
    "TokenPair",
    "Trained",
    "TrainingDynamics",
    "TrainingFilm",
    "Trait",
    "Words",
    "ablated_maps",
    "analyse_predictions",
    "atlas_html",
    "axes_of",
    "caption",
    "capture_attention",
    "capture_pair",
    "capture_weights",
    "decoded_pair",
    "first_non_finite",
    "head_label",
    "head_labels",
    "head_maps",
    "head_roles",
    "head_traits",
    "make_probes",
    "map_names",
    "maps_by_kind",
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
    "words_of",
    "write_atlas",
]
