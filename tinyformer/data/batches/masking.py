"""Masking of tokens for masked language models."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float

from tinyformer.data.batches.windows import IGNORED, Batch, Rows, Windows
from tinyformer.data.tokenizer.tokenizer import TextTokenizer
from tinyformer.errors import ArgumentError


@dataclass(frozen=True)
class Masking:
    """The choice of masked tokens and of their replacements (Devlin et al. 2018, arXiv 1810.04805).

    Each token except `eos` is selected with probability `rate`, and at least one token of each window is selected. Of
    the selected tokens, the share `mask_share` becomes `<mask>`, the share `random_share` becomes a random token, and
    the others are unchanged. BERT's shares are 0.8 and 0.1; with 1 and 0, all selected tokens become `<mask>`.
    """

    rate: float = 0.15  # BERT's; Wettig et al. 2022 (arXiv 2202.08005) find 0.4 better for large models
    mask_share: float = 0.8
    random_share: float = 0.1
    whole_words: bool = False  # select all tokens of a word or none

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise ArgumentError("rate", self.rate, "must be greater than 0 and less than 1", {"rate": 0.15})
        if not (self.mask_share >= 0 <= self.random_share and self.mask_share + self.random_share <= 1):
            reason = f"must be at most 1 - `mask_share`, and `mask_share`={self.mask_share}"
            works = {"mask_share": 0.8, "random_share": 0.1}
            raise ArgumentError("random_share", self.random_share, reason, works)


class Masker:
    """Masks tokens of windows. The mask of a window depends on seed, epoch and window only, not on the batch."""

    def __init__(self, masking: Masking, tokenizer: TextTokenizer, seed: int) -> None:
        assert tokenizer.mask_id is not None
        self._masking, self._seed = masking, seed
        self._mask_id, self._start_id, self._vocab_size = tokenizer.mask_id, tokenizer.start_id, tokenizer.vocab_size
        self._joins = tokenizer.joins() if masking.whole_words else None

    def __call__(self, batch: Batch, windows: list[int], epoch: int) -> Batch:
        """Mask the batch of the windows with these indices; only the selected tokens are targets."""
        tokens = batch["inputs"].numpy()
        # The original targets are the next tokens, which end where the text ends.
        lengths = (batch["targets"] != IGNORED).sum(dim=1)
        eligible = (np.arange(tokens.shape[1]) < lengths.numpy()[:, None]) & (tokens != self._start_id)
        # Three uniform numbers for each token: for its selection, its kind of replacement, and a random token.
        draws = [np.random.default_rng((self._seed, epoch, window)).random((3, tokens.shape[1])) for window in windows]
        chance, fate, other = np.stack(draws, axis=1)
        if self._joins is not None:
            chance = self._one_per_word(batch, chance)
        chance = np.where(eligible, chance, np.inf)
        selected = (chance < self._masking.rate) | (chance == chance.min(axis=1, keepdims=True)) & eligible
        masked = selected & (fate < self._masking.mask_share)
        randomised = selected & ~masked & (fate < self._masking.mask_share + self._masking.random_share)
        random_tokens = (other * self._vocab_size).astype(np.int64)
        inputs = np.where(masked, self._mask_id, np.where(randomised, random_tokens, tokens))
        result: Batch = {**batch, "inputs": torch.from_numpy(inputs)}
        result["targets"] = torch.from_numpy(np.where(selected, tokens, IGNORED))
        return result

    def _one_per_word(self, batch: Batch, chance: Float[np.ndarray, "batch seq"]) -> Float[np.ndarray, "batch seq"]:
        """Give each token the random number of its word's first token, so that whole words are selected."""
        assert self._joins is not None
        (begins, ends), tokens = self._joins, batch["inputs"].numpy()
        joined: Bool[np.ndarray, "batch seq"] = begins[tokens]
        joined[:, 1:] &= ends[tokens[:, :-1]]
        joined = batch["continues"].numpy() if "continues" in batch else joined
        first = np.maximum.accumulate(np.where(joined, 0, np.arange(tokens.shape[1])), axis=1)
        return np.take_along_axis(chance, first, axis=1)


class MaskedWindows(Rows):
    """Windows with masked tokens; the epoch of evaluation is 0, and training epochs are numbered from 1."""

    def __init__(self, windows: Windows, masker: Masker, epoch: int = 0) -> None:
        self._windows, self._masker, self._epoch = windows, masker, epoch

    def __len__(self) -> int:
        return len(self._windows)

    def __getitems__(self, indices: list[int]) -> Batch:
        return self._masker(self._windows.__getitems__(indices), indices, self._epoch)
