from .description import Origin as Origin
from .description import describe as describe
from .difference import MapsDifference as MapsDifference
from .layer_maps import LayerMaps as LayerMaps
from .reading import maps_of_pair as maps_of_pair
from .reading import maps_of_tokens as maps_of_tokens
from .table import Table as Table
from .text_maps import TextMaps as TextMaps
