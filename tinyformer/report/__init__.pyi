from .page import atlas_html, write_atlas
from .picture import Picture, save_png
from .plots import head_maps, maps_by_kind, measure_maps
from .result import AnalysisResult, caption

__all__ = [
    "AnalysisResult",
    "Picture",
    "atlas_html",
    "caption",
    "head_maps",
    "maps_by_kind",
    "measure_maps",
    "save_png",
    "write_atlas",
]
