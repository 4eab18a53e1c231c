"""Masked language modelling."""

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tinyformer.batch import IGNORED, Batch
from tinyformer.data import TextTokenizer, TokenSplit
from tinyformer.errors import ArgumentError, require_at_least
from tinyformer.nn import AttentionMask, Network
from tinyformer.tasks.task import TokenTask, describe_accuracy, perplexity
from tinyformer.tasks.user_texts import TextReader, Texts


class MaskedLM(TokenTask):
    """Masked tokens are predicted from all other tokens (Devlin et al. 2018, arXiv 1810.04805).

    The data choose which tokens are masked, see `tinyformer.data.Masking`.

    Args:
        pseudo_perplexity_tokens: number of validation tokens, from the beginning of the split, over which
            pseudo-perplexity is computed at the end of a run. Each takes a forward pass of its window. 0 skips it.
    """

    needs_masking = True

    def __init__(self, pseudo_perplexity_tokens: int = 512) -> None:
        require_at_least(0, {"pseudo_perplexity_tokens": 512}, pseudo_perplexity_tokens=pseudo_perplexity_tokens)
        self.pseudo_perplexity_tokens = pseudo_perplexity_tokens

    def mask(self, batch: Batch) -> AttentionMask:
        """A bidirectional mask that hides padding, within documents if the batch has them."""
        if "documents" in batch:  # padding is a document of its own
            return AttentionMask(documents=batch["documents"], document_starts=batch.get("document_starts"))
        return super().mask(batch)

    def metrics(self, sums: Mapping[str, Tensor], split: TokenSplit) -> dict[str, float | None]:
        """The metrics of `TokenTask`, `num_scored` and `majority_share`, the share of the most frequent token."""
        counts = np.bincount(np.asarray(split.ids))
        counts[split.ids[0]] = 0  # <eos>, which is never masked
        majority_share = float(counts.max() / max(counts.sum(), 1))
        return super().metrics(sums, split) | {"num_scored": int(sums["tokens"]), "majority_share": majority_share}

    @torch.no_grad()
    def final_metrics(self, network: Network, split: TokenSplit, tokenizer: TextTokenizer) -> dict[str, float | None]:
        """`pseudo_perplexity`: each token masked in turn (Salazar et al. 2020, arXiv 1910.14659).

        exp(-1/N Σ_i log p(w_i | all other tokens)), over windows of the model's context length. A token attends to its
        whole window, other documents included, whatever `data.document_mask` says.
        """
        ids = torch.from_numpy(np.asarray(split.ids[: self.pseudo_perplexity_tokens], dtype=np.int64))
        assert tokenizer.mask_id is not None
        device, was_training = next(network.parameters()).device, network.training
        network.eval()
        nats = []
        for window in ids.split(network.max_seq_len):
            masked = (window != tokenizer.start_id).nonzero()[:, 0]
            nats.append(pseudo_nats(network, window.to(device), masked, tokenizer.mask_id))
        network.train(was_training)
        total = torch.cat(nats)
        return {"pseudo_perplexity": perplexity(float(total.mean())) if len(total) else None}

    def read_scored(self, reader: TextReader, texts: Texts) -> Batch:
        """The texts, with each of their tokens as a target, except the special ones."""
        batch, tokenizer = self.read(reader, texts), reader.own_tokenizer
        special = torch.tensor(sorted(tokenizer.special_ids if tokenizer else []), device=reader.device)
        return {**batch, "targets": batch["inputs"].masked_fill(torch.isin(batch["inputs"], special), IGNORED)}

    def places(self, batch: Batch, tokenizer: TextTokenizer) -> Int[Tensor, " batch"]:
        """The mask token of each text."""
        mask_ids = [tokenizer.mask_id] if tokenizer.mask_id is not None else []
        is_masked = torch.isin(batch["inputs"], batch["inputs"].new_tensor(mask_ids))
        if not bool((is_masked.sum(dim=1) == 1).all()):
            reason = f"must have one {tokenizer.decode(mask_ids) or 'mask token'}, which the model predicts"
            raise ArgumentError("text", tokenizer.decode(batch["inputs"][0]), reason)
        return is_masked.int().argmax(dim=1)

    def nats_of_texts(self, reader: TextReader, batch: Batch) -> tuple[Float[Tensor, " texts"], Int[Tensor, " texts"]]:
        """The pseudo-log-likelihood of each text, negated, see `pseudo_nats`: each of its `targets` masked in turn."""
        if (mask_id := getattr(reader.own_tokenizer, "mask_id", None)) is None:
            raise ArgumentError("tokenizer", None, "has no mask token")
        nats, places = [], [(row != IGNORED).nonzero()[:, 0] for row in batch["targets"]]
        for row, length, masked in zip(batch["inputs"], batch["lengths"].tolist(), places, strict=True):
            nats.append(pseudo_nats(reader.network, row[:length], masked, mask_id).sum())
        return torch.stack(nats), torch.tensor(list(map(len, places))).to(nats[0].device)

    def describe(self, metrics: Mapping[str, float | None], split: TokenSplit) -> dict[str, str | None]:
        pseudo = metrics.get("pseudo_perplexity")
        return {
            "masked token": f"{describe_accuracy(metrics)}; the most frequent token makes up "
            f"{metrics['majority_share']:.1%}",
            "pseudo-perplexity": None if pseudo is None else f"{pseudo:.2f}, over the first tokens of the split",
        }


@torch.no_grad()
def pseudo_nats(
    network: Network, window: Int[Tensor, " seq"], positions: Int[Tensor, " masked"], mask_id: int
) -> Float[Tensor, " masked"]:
    """-log p(w_i | all other tokens) of the tokens at some positions of a window, each masked in turn."""
    nats = [torch.zeros(0, device=window.device)]
    # 32 copies of the window at a time. `split` of an empty tensor would give one empty part.
    for masked in positions.to(window.device).split(32) if len(positions) else ():
        rows = torch.arange(len(masked), device=window.device)
        tokens = window.repeat(len(masked), 1)
        tokens[rows, masked] = mask_id
        logits = network(tokens, AttentionMask())[rows, masked].float()
        nats.append(F.cross_entropy(logits, window[masked], reduction="none"))
    return torch.cat(nats)
