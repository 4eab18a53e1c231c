"""What a model is trained for: from a batch to a mask, a loss and metrics."""

from tinyformer.tasks.causal_lm import CausalLM
from tinyformer.tasks.classification import Classification
from tinyformer.tasks.masked_lm import MaskedLM
from tinyformer.tasks.task import Batch, Task

__all__ = ["Batch", "CausalLM", "Classification", "MaskedLM", "Task"]
