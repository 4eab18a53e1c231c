"""Hiding tokens, for a model that predicts them from both sides."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64

from tinyformer.batch import IGNORED, Batch
from tinyformer.data.tokenizer import TextTokenizer
from tinyformer.data.windows import Windows

EVALUATION = 0
"""The epoch whose masks an evaluation has; those of training are numbered from 1."""


@dataclass(frozen=True)
class Masking:
    """Which tokens are hidden, and what stands in their place (Devlin et al. 2018, arXiv 1810.04805).

    Each token is chosen with the same probability, but for those between documents; at least one of each window is.
    Of the chosen ones, `mask_share` become `<mask>`, `random_share` any token of the vocabulary, and the others stay
    as they are. BERT's shares are 0.8 and 0.1; with 1 and 0, every one becomes `<mask>`.

    Args:
        rate: Probability of a token to be chosen. BERT's is 0.15; Wettig et al. 2022 (arXiv 2202.08005) find 0.4 to be
            better for large models.
        mask_share: Of the chosen tokens.
        random_share: Of the chosen tokens.
        whole_words: Choose all tokens of a word or none.

    Raises:
        ValueError: If a share is none.
    """

    rate: float = 0.15
    mask_share: float = 0.8
    random_share: float = 0.1
    whole_words: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise ValueError(f"task.masking.rate={self.rate}: no share between 0 and 1; task.masking.rate=0.15 works.")
        if self.mask_share < 0 or self.random_share < 0 or self.mask_share + self.random_share > 1:
            raise ValueError(
                f"task.masking.mask_share={self.mask_share} and task.masking.random_share={self.random_share} are no "
                "shares of the chosen tokens; 0.8 and 0.1 are."
            )


class Masker:
    """Hides tokens of windows. A window's mask depends on the seed, the epoch and the window alone, not on its batch.

    Args:
        masking: How.
        tokenizer: Of the windows.
        seed: Decides what is hidden.
    """

    def __init__(self, masking: Masking, tokenizer: TextTokenizer, seed: int) -> None:
        assert tokenizer.mask_id is not None
        self._masking, self._seed = masking, seed
        self._mask_id, self._eos_id, self._vocab_size = tokenizer.mask_id, tokenizer.eos_id, tokenizer.vocab_size
        self._joins = tokenizer.joins() if masking.whole_words else None

    def __call__(self, batch: Batch, windows: list[int], epoch: int) -> Batch:
        """The batch of these windows with tokens hidden, which become its targets; all other targets are ignored."""
        tokens = batch["inputs"].numpy()
        # Targets are the next tokens, which end where the text does.
        lengths = (batch["targets"] != IGNORED).sum(dim=1)
        eligible = (np.arange(tokens.shape[1]) < lengths.numpy()[:, None]) & (tokens != self._eos_id)
        chance, fate, other = self._draw(windows, epoch, tokens.shape[1])
        if self._joins is not None:
            chance = self._of_words(tokens, chance)
        chance = np.where(eligible, chance, np.inf)
        chosen = (chance < self._masking.rate) | (chance == chance.min(axis=1, keepdims=True)) & eligible
        hidden = chosen & (fate < self._masking.mask_share)
        replaced = chosen & ~hidden & (fate < self._masking.mask_share + self._masking.random_share)
        inputs = np.where(
            hidden, self._mask_id, np.where(replaced, (other * self._vocab_size).astype(np.int64), tokens)
        )
        masked: Batch = {**batch, "inputs": torch.from_numpy(inputs)}
        masked["targets"] = torch.from_numpy(np.where(chosen, tokens, IGNORED))
        return masked

    def _draw(self, windows: list[int], epoch: int, seq: int) -> Float[np.ndarray, "3 batch seq"]:
        """Three numbers from 0 to 1 for each token."""
        draws = [np.random.default_rng((self._seed, epoch, window)).random((3, seq)) for window in windows]
        return np.stack(draws, axis=1)

    def _of_words(
        self, tokens: Int64[np.ndarray, "batch seq"], chance: Float[np.ndarray, "batch seq"]
    ) -> Float[np.ndarray, "batch seq"]:
        """The numbers of each word's first token, for all of its tokens."""
        assert self._joins is not None
        begins, ends = self._joins
        joined: Bool[np.ndarray, "batch seq"] = begins[tokens]
        joined[:, 1:] &= ends[tokens[:, :-1]]
        first = np.maximum.accumulate(np.where(joined, 0, np.arange(tokens.shape[1])), axis=1)
        return np.take_along_axis(chance, first, axis=1)


class MaskedWindows(torch.utils.data.Dataset):
    """Windows with tokens hidden.

    Args:
        windows: The text.
        masker: Hides.
        epoch: `EVALUATION`, or that of training from 1.
    """

    def __init__(self, windows: Windows, masker: Masker, epoch: int = EVALUATION) -> None:
        self._windows, self._masker, self._epoch = windows, masker, epoch

    def __len__(self) -> int:
        return len(self._windows)

    def __getitems__(self, indices: list[int]) -> Batch:
        """The windows with these numbers, as one batch; with their lengths, if windows of this kind may be padded."""
        batch = self._windows.__getitems__(indices)
        masked = self._masker(batch, indices, self._epoch)
        if self._windows.may_be_padded:
            masked["lengths"] = (batch["targets"] != IGNORED).sum(dim=1)
        return masked

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])
