"""What a trained model's heads do."""

from tinyformer.analysis.capture import CapturedMaps, capture_attention
from tinyformer.analysis.events import Event, EventDetector, Trait, head_traits
from tinyformer.analysis.measures import MEASURES, PATTERNS, measure_layers, repeated_tokens
from tinyformer.analysis.picture import Picture, save_png
from tinyformer.analysis.plots import head_maps, measure_maps
from tinyformer.analysis.probe import HeadMeasures, Probe, capture_weights, measure_heads

__all__ = [
    "MEASURES",
    "PATTERNS",
    "CapturedMaps",
    "Event",
    "EventDetector",
    "HeadMeasures",
    "Picture",
    "Probe",
    "Trait",
    "capture_attention",
    "capture_weights",
    "head_maps",
    "head_traits",
    "measure_heads",
    "measure_layers",
    "measure_maps",
    "repeated_tokens",
    "save_png",
]
