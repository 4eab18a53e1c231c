"""What a model is trained for: from a batch to a mask, a loss and metrics."""

from tinyformer.tasks.causal_lm import IGNORED, Batch, CausalLM

__all__ = ["IGNORED", "Batch", "CausalLM"]
