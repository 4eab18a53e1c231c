from .app.trained_run import TrainedRun as TrainedRun
from .app.trained_run import train as train
from .loading import load as load
from .model import Model as Model
from .seq2seq_model import Seq2SeqModel as Seq2SeqModel
from .span_model import SpanModel as SpanModel
