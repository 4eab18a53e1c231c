"""Analyses of trained models: attention maps, measures, ablation, importance, pruning and costs.

Each name in `__init__.pyi` is imported on first use: the costs of a model do not wait for the training libraries of an
analysis.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
