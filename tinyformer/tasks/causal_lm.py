"""Predict the next token."""

import math
from collections.abc import Mapping

from torch import Tensor

from tinyformer.data import TokenSplit
from tinyformer.nn import AttentionMask
from tinyformer.tasks.language import TokenTask, perplexity
from tinyformer.tasks.task import Batch


class CausalLM(TokenTask):
    """Next-token prediction: every token is predicted from those before it (Radford et al. 2018)."""

    generates = True

    def mask(self, batch: Batch) -> AttentionMask:
        """Who may attend to whom in a batch. Padding stands at the right, so that causality already hides it."""
        return AttentionMask(causal=True, documents=batch.get("documents"))

    def metrics(self, sums: Mapping[str, Tensor], split: TokenSplit) -> dict[str, float | None]:
        """Those of every prediction of tokens, and what the text costs.

        Returns:
            Besides, `perplexity`, and `bits_per_byte` (of the raw UTF-8 text, so that tokenizers compare; None where
            characters were unknown or tokens are not scored, since their cost is not known).
        """
        metrics = super().metrics(sums, split)
        loss = metrics["loss"]
        assert loss is not None
        # Dividing by what was scored and multiplying by what there is: the same, unless `limit_val_batches` cut it.
        bits = loss * split.num_tokens / math.log(2)
        cost_is_known = split.num_unknown == 0 and split.scored is None
        return metrics | {
            "perplexity": perplexity(loss),
            "bits_per_byte": bits / split.num_bytes if cost_is_known else None,
        }

    def describe(self, metrics: Mapping[str, float | None], split: TokenSplit) -> dict[str, str | None]:
        """Perplexity, bits per byte, and how often the next token was right."""
        bits = metrics["bits_per_byte"]
        reason = "characters were unknown" if split.num_unknown else "not every token is scored"
        return {
            "perplexity": f"{metrics['perplexity']:.2f}",
            "bits per byte": f"none, since {reason}" if bits is None else f"{bits:.4f}",
            "next token": f"{metrics['accuracy']:.1%} right, {metrics['accuracy_top5']:.1%} among the first five",
        }
