"""What a trained model's heads do."""

from tinyformer.analysis.atlas import write_atlas
from tinyformer.analysis.capture import capture_attention
from tinyformer.analysis.measures import MEASURES
from tinyformer.analysis.plots import head_maps, save_png

__all__ = ["MEASURES", "capture_attention", "head_maps", "save_png", "write_atlas"]
