"""Analyses of trained models: ablation, importance, pruning, causes, texts, depth and training.

Each name in `__init__.pyi` is imported on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
