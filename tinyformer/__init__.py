"""Train small transformers and see exactly what every attention head does.

Each name in `__init__.pyi` is imported on first use: importing torch and the training libraries takes seconds.
"""

import warnings

import lazy_loader

warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm's, of a notebook without widgets
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
