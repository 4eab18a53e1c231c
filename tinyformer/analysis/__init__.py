"""Analyses of trained models: attention maps, measures, ablation, importance, pruning and costs."""

from tinyformer.analysis.ablation import HeadAblation
from tinyformer.analysis.atlas import write_atlas
from tinyformer.analysis.capture import CapturedMaps, capture_attention
from tinyformer.analysis.classification import analyse_predictions
from tinyformer.analysis.events import Event, EventDetector, Trait, head_traits
from tinyformer.analysis.importance import HeadImportance
from tinyformer.analysis.maps import HeadMaps
from tinyformer.analysis.measures import MEANINGS, MEASURES, PATTERNS, measure_layers, repeated_tokens
from tinyformer.analysis.picture import Picture, save_png
from tinyformer.analysis.plots import head_maps, measure_maps
from tinyformer.analysis.probe import HeadMeasures, Probe, capture_weights, make_probes, map_names, measure_heads
from tinyformer.analysis.pruning import HeadPruning
from tinyformer.analysis.residual import ResidualSurgery
from tinyformer.analysis.seeds import seeds_by_number, seeds_by_setting
from tinyformer.analysis.subject import Analysis, Findings, Subject, fullest

__all__ = [
    "MEANINGS",
    "MEASURES",
    "PATTERNS",
    "Analysis",
    "CapturedMaps",
    "Event",
    "EventDetector",
    "Findings",
    "HeadAblation",
    "HeadImportance",
    "HeadMaps",
    "HeadMeasures",
    "HeadPruning",
    "Picture",
    "Probe",
    "ResidualSurgery",
    "Subject",
    "Trait",
    "analyse_predictions",
    "capture_attention",
    "capture_weights",
    "fullest",
    "head_maps",
    "head_traits",
    "make_probes",
    "map_names",
    "measure_heads",
    "measure_layers",
    "measure_maps",
    "repeated_tokens",
    "save_png",
    "seeds_by_number",
    "seeds_by_setting",
    "write_atlas",
]
