"""Train small transformers and see exactly what every attention head does."""

import warnings
from typing import TYPE_CHECKING, Any

from tinyformer.lazy import lazy_names

if TYPE_CHECKING:
    from tinyformer.app.trained_run import TrainedRun, train
    from tinyformer.loading import load
    from tinyformer.model import Model
    from tinyformer.seq2seq_model import Seq2SeqModel
    from tinyformer.span_model import SpanModel

__all__ = ["Model", "Seq2SeqModel", "SpanModel", "TrainedRun", "load", "train"]

_NAMES = {
    "app.trained_run": ("TrainedRun", "train"),
    "loading": ("load",),
    "model": ("Model",),
    "seq2seq_model": ("Seq2SeqModel",),
    "span_model": ("SpanModel",),
}
"""The names that each module defines."""

_get, __dir__ = lazy_names(__name__, _NAMES)


def __getattr__(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm's, of a notebook without widgets
        return _get(name)
