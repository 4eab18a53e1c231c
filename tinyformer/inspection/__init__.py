"""Inside a trained model, from Python: its attention maps, its activations, and what it computes without some heads.

Each name is imported on first use: the models import this package, whose maps import the analyses.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyformer.inspection.description import Origin, describe
    from tinyformer.inspection.difference import MapsDifference
    from tinyformer.inspection.layer_maps import LayerMaps
    from tinyformer.inspection.reading import maps_of_pair, maps_of_tokens
    from tinyformer.inspection.table import Table
    from tinyformer.inspection.text_maps import TextMaps

__all__ = ["LayerMaps", "MapsDifference", "Origin", "Table", "TextMaps", "describe", "maps_of_pair", "maps_of_tokens"]

_MODULES = {
    "LayerMaps": "layer_maps",
    "MapsDifference": "difference",
    "Origin": "description",
    "Table": "table",
    "TextMaps": "text_maps",
    "describe": "description",
    "maps_of_pair": "reading",
    "maps_of_tokens": "reading",
}
"""The module that defines each name."""


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
