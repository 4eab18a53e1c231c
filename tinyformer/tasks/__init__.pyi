from .classification import Classification
from .seq2seq import Output, Seq2Seq
from .span import Prediction, SpanExtraction
from .states import States
from .task import Batch, CausalLM, MaskedLM, Task

__all__ = [
    "Batch",
    "CausalLM",
    "Classification",
    "MaskedLM",
    "Output",
    "Prediction",
    "Seq2Seq",
    "SpanExtraction",
    "States",
    "Task",
]
