"""What a trained model's heads do."""

from tinyformer.analysis.capture import CapturedMaps, capture_attention
from tinyformer.analysis.measures import MEASURES, PATTERNS, measure_layers, repeated_tokens
from tinyformer.analysis.plots import head_maps, save_png

__all__ = [
    "MEASURES",
    "PATTERNS",
    "CapturedMaps",
    "capture_attention",
    "head_maps",
    "measure_layers",
    "repeated_tokens",
    "save_png",
]
