"""What a trained model's heads do."""

from tinyformer.analysis.capture import capture_attention
from tinyformer.analysis.measures import MEASURES
from tinyformer.analysis.plots import head_maps, save_png
from tinyformer.analysis.seeds import seeds_by_number, seeds_by_setting

__all__ = ["MEASURES", "capture_attention", "head_maps", "save_png", "seeds_by_number", "seeds_by_setting"]
