"""Train small transformers and see exactly what every attention head does."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyformer.loading import load
    from tinyformer.model import Model

__all__ = ["Model", "load"]

_MODULES = {"Model": "tinyformer.model", "load": "tinyformer.loading"}


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> Any:
    """Import `tinyformer.load` and `tinyformer.Model` on first use, since torch takes seconds to import."""
    if name not in __all__:
        raise AttributeError(f"module 'tinyformer' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULES[name]), name)
