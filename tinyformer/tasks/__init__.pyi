from .classification import Classification
from .seq2seq import Output, Seq2Seq
from .span import Prediction, SpanExtraction
from .task import Batch, CausalLM, MaskedLM, States, Task

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
