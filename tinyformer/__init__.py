"""Train small transformers and see exactly what every attention head does."""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyformer.app.trained_run import TrainedRun, train
    from tinyformer.loading import load
    from tinyformer.model import Model
    from tinyformer.seq2seq_model import Seq2SeqModel
    from tinyformer.span_model import SpanModel

__all__ = ["Model", "Seq2SeqModel", "SpanModel", "TrainedRun", "load", "train"]

_MODULES = {
    "Model": "tinyformer.model",
    "Seq2SeqModel": "tinyformer.seq2seq_model",
    "SpanModel": "tinyformer.span_model",
    "TrainedRun": "tinyformer.app.trained_run",
    "load": "tinyformer.loading",
    "train": "tinyformer.app.trained_run",
}


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> Any:
    """Import `tinyformer.load` and the others on first use, since torch takes seconds to import."""
    if name not in __all__:
        raise AttributeError(f"module 'tinyformer' has no attribute '{name}'")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm's, of a notebook without widgets
        return getattr(importlib.import_module(_MODULES[name]), name)
