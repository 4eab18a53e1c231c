from .app.trained_run import TrainedRun, train
from .loading import load
from .model import Model
from .seq2seq_model import Seq2SeqModel
from .span_model import SpanModel

__all__ = ["Model", "Seq2SeqModel", "SpanModel", "TrainedRun", "load", "train"]
