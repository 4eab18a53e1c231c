"""The inside of a trained model, from Python: its attention maps, its activations, and its outputs without some heads.

Each name is imported on first use, since trained models import this package, and its maps import the analyses.
"""

from typing import TYPE_CHECKING

from tinyformer.lazy import lazy_names

if TYPE_CHECKING:
    from tinyformer.inspection.description import Origin, describe
    from tinyformer.inspection.difference import MapsDifference
    from tinyformer.inspection.layer_maps import LayerMaps
    from tinyformer.inspection.reading import maps_of_pair, maps_of_tokens
    from tinyformer.inspection.table import Table
    from tinyformer.inspection.text_maps import TextMaps

__all__ = ["LayerMaps", "MapsDifference", "Origin", "Table", "TextMaps", "describe", "maps_of_pair", "maps_of_tokens"]

_NAMES = {
    "description": ("Origin", "describe"),
    "difference": ("MapsDifference",),
    "layer_maps": ("LayerMaps",),
    "reading": ("maps_of_pair", "maps_of_tokens"),
    "table": ("Table",),
    "text_maps": ("TextMaps",),
}
"""The names that each module defines."""

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
