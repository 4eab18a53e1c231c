"""Train small transformers and see exactly what every attention head does.

Each name in `__init__.pyi` is imported on first use, since torch and the training libraries take seconds.
"""

import warnings
from typing import Any

import lazy_loader

_get, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm's, of a notebook without widgets
        return _get(name)
