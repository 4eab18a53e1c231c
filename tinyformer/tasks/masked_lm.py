"""Predict hidden tokens from both sides."""

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinyformer.data import TextTokenizer, TokenSplit
from tinyformer.nn import AttentionMask, Transformer
from tinyformer.tasks.language import TokenTask, perplexity
from tinyformer.tasks.task import Batch


class MaskedLM(TokenTask):
    """Some tokens are hidden, and predicted from all others (Devlin et al. 2018, arXiv 1810.04805).

    Which are hidden is the data's business, see `tinyformer.data.Masking`.

    Args:
        pseudo_perplexity_tokens: of the validation split over which pseudo-perplexity is taken at the end of a run,
            from its beginning; each takes a forward pass of its window. 0: it is not taken.

    Raises:
        ValueError: that number is negative.
    """

    def __init__(self, pseudo_perplexity_tokens: int = 512) -> None:
        if pseudo_perplexity_tokens < 0:
            raise ValueError(
                f"task.objective.pseudo_perplexity_tokens={pseudo_perplexity_tokens} is negative; "
                "task.objective.pseudo_perplexity_tokens=512 works."
            )
        self.pseudo_perplexity_tokens = pseudo_perplexity_tokens

    def mask(self, batch: Batch) -> AttentionMask:
        """Everybody sees everybody, but for padding."""
        return AttentionMask(lengths=batch.get("lengths"), documents=batch.get("documents"))

    def metrics(self, sums: Mapping[str, Tensor], split: TokenSplit) -> dict[str, float | None]:
        """Those of every prediction of tokens, and `majority_share`: how often the most frequent token is right."""
        counts = np.bincount(np.asarray(split.ids))
        counts[split.ids[0]] = 0  # <eos>, which is never hidden
        return super().metrics(sums, split) | {"majority_share": float(counts.max() / max(counts.sum(), 1))}

    @torch.no_grad()
    def final_metrics(
        self, network: Transformer, split: TokenSplit, tokenizer: TextTokenizer
    ) -> dict[str, float | None]:
        """`pseudo_perplexity`: of a text whose tokens are hidden one at a time (Salazar et al. 2020, arXiv 1910.14659).

        exp(-1/N sum_i log p(w_i | all others)), over windows of as many tokens as the model takes.
        """
        ids = torch.from_numpy(np.asarray(split.ids[: self.pseudo_perplexity_tokens], dtype=np.int64))
        assert tokenizer.mask_id is not None
        device, was_training = next(network.parameters()).device, network.training
        network.eval()
        nats: list[Tensor] = []
        for window in ids.split(network.encoder.max_seq_len):
            positions = (window != tokenizer.eos_id).nonzero().squeeze(1)
            # As many copies of the window at a time; of nothing, `split` makes one empty part.
            for hidden in positions.split(32) if len(positions) else ():
                rows = torch.arange(len(hidden))
                tokens = window.repeat(len(hidden), 1)
                tokens[rows, hidden] = tokenizer.mask_id
                logits = network(tokens.to(device), AttentionMask())[rows, hidden].float()
                nats.append(F.cross_entropy(logits, window[hidden].to(device), reduction="none"))
        network.train(was_training)
        return {"pseudo_perplexity": perplexity(float(torch.cat(nats).mean())) if nats else None}

    def describe(self, metrics: Mapping[str, float | None], split: TokenSplit) -> dict[str, str | None]:
        """How often the hidden token was right, beside the most frequent one, and pseudo-perplexity."""
        pseudo = metrics.get("pseudo_perplexity")
        return {
            "hidden token": f"{metrics['accuracy']:.1%} right, {metrics['accuracy_top5']:.1%} among the first five; "
            f"the most frequent is {metrics['majority_share']:.1%} of all",
            "pseudo-perplexity": None if pseudo is None else f"{pseudo:.2f}, of the first tokens hidden one by one",
        }
