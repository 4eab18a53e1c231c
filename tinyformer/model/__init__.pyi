from .description import Origin, describe
from .difference import MapsDifference
from .layer_maps import LayerMaps
from .maps import maps_of_batch
from .table import Table
from .text_maps import TextMaps

__all__ = ["LayerMaps", "MapsDifference", "Origin", "Table", "TextMaps", "describe", "maps_of_batch"]
