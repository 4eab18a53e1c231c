"""Training objectives: the attention mask, the loss and the metrics of a batch."""

from tinyformer.tasks.causal_lm import CausalLM
from tinyformer.tasks.classification import Classification
from tinyformer.tasks.masked_lm import MaskedLM
from tinyformer.tasks.seq2seq import Output, Seq2Seq
from tinyformer.tasks.span import Prediction, SpanExtraction
from tinyformer.tasks.task import Batch, Task

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
