"""Next-token prediction."""

import math
from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tinyformer.batch import IGNORED, Batch
from tinyformer.data import TokenSplit
from tinyformer.nn import AttentionMask, Network
from tinyformer.tasks.language import TokenTask, perplexity


class CausalLM(TokenTask):
    """Causal language modelling: each token is predicted from the tokens before it (Radford et al. 2018)."""

    generates = True

    def mask(self, batch: Batch) -> AttentionMask:
        """A causal mask, within documents if the batch has them; it also hides padding, which is on the right."""
        documents, starts = batch.get("documents"), batch.get("document_starts")
        return AttentionMask(causal=True, documents=documents, document_starts=starts)

    def nats_of_texts(
        self, network: Network, batch: Batch, mask_id: int | None = None
    ) -> tuple[Float[Tensor, " batch"], Int[Tensor, " batch"]]:
        """The negative log-likelihood of each text after its first token; the end of the text is not a target."""
        inputs = batch["inputs"]
        is_target = torch.arange(inputs.shape[1], device=inputs.device) < batch["lengths"].unsqueeze(1) - 1
        return self.nats(network, {**batch, "targets": inputs.roll(-1, dims=1).where(is_target, IGNORED)})

    def metrics(self, sums: Mapping[str, Tensor], split: TokenSplit) -> dict[str, float | None]:
        """The metrics of `TokenTask`, `perplexity` and `bits_per_byte`.

        Bits per byte of the raw UTF-8 text are comparable between tokenizers. They are None if the text has unknown
        characters or tokens that are not scored, whose cost is not known.
        """
        metrics = super().metrics(sums, split)
        loss = metrics["loss"]
        assert loss is not None
        # Scaled to the whole split, in case `limit_val_batches` scored only a part of it.
        bits = loss * split.num_tokens / math.log(2)
        cost_is_known = split.num_unknown == 0 and split.scored is None
        return metrics | {
            "perplexity": perplexity(loss),
            "bits_per_byte": bits / split.num_bytes if cost_is_known else None,
        }

    def describe(self, metrics: Mapping[str, float | None], split: TokenSplit) -> dict[str, str | None]:
        """Perplexity, bits per byte and accuracy, for the summary."""
        bits = metrics["bits_per_byte"]
        reason = "the text has unknown characters" if split.num_unknown else "not every token is scored"
        return {
            "perplexity": f"{metrics['perplexity']:.2f}",
            "bits per byte": f"none: {reason}" if bits is None else f"{bits:.4f}",
            "next token": f"{metrics['accuracy']:.1%} correct, {metrics['accuracy_top5']:.1%} in the top five",
        }
