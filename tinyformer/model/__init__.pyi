from .model import Origin, describe
from .notebook import Table, heat_map
from .text_maps import LayerMaps, MapsDifference, TextMaps, maps_of_batch

__all__ = ["LayerMaps", "MapsDifference", "Origin", "Table", "TextMaps", "describe", "heat_map", "maps_of_batch"]
