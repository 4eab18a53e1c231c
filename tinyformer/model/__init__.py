"""The inside of a trained model, from Python: its attention maps, its activations, and its outputs without some heads.

Each name in `__init__.pyi` is imported on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
