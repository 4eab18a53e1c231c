"""What a trained model's heads do."""

from tinyformer.analysis.ablation import HeadAblation
from tinyformer.analysis.atlas import write_atlas
from tinyformer.analysis.capture import CapturedMaps, capture_attention
from tinyformer.analysis.importance import HeadImportance
from tinyformer.analysis.maps import HeadMaps
from tinyformer.analysis.measures import MEASURES, PATTERNS, measure_layers, repeated_tokens
from tinyformer.analysis.plots import head_maps, save_png
from tinyformer.analysis.pruning import HeadPruning
from tinyformer.analysis.residual import ResidualSurgery
from tinyformer.analysis.seeds import seeds_by_number, seeds_by_setting
from tinyformer.analysis.subject import Analysis, Findings, Subject

__all__ = [
    "MEASURES",
    "PATTERNS",
    "Analysis",
    "CapturedMaps",
    "Findings",
    "HeadAblation",
    "HeadImportance",
    "HeadMaps",
    "HeadPruning",
    "ResidualSurgery",
    "Subject",
    "capture_attention",
    "head_maps",
    "measure_layers",
    "repeated_tokens",
    "save_png",
    "seeds_by_number",
    "seeds_by_setting",
    "write_atlas",
]
