from .classification import Classification
from .language_model import CausalLM, MaskedLM
from .seq2seq import Output, Seq2Seq
from .span import Prediction, SpanExtraction
from .task import Batch, Task

__all__ = [
    "Batch",
    "CausalLM",
    "Classification",
    "MaskedLM",
    "Output",
    "Prediction",
    "Seq2Seq",
    "SpanExtraction",
    "Task",
]
