"""Text as the data of a run."""

from typing import Any, cast

from torch.utils.data import DataLoader

from tinyformer.batch import Batch
from tinyformer.data.base import (
    TokenDataModule,
    TokenDevice,
    hold_out_settings,
    how_to_hold_out,
    require_at_least_one,
)
from tinyformer.data.cache import TextRecipe, open_prepared, prepare_text
from tinyformer.data.masking import Masking
from tinyformer.data.sources import Source, lacks_own_splits
from tinyformer.data.tokenizer import TextTokenizer
from tinyformer.data.tokenizer_recipes import MaskedTokenizer, TokenizerRecipe
from tinyformer.data.windows import PACKS, Pack


class TextDataModule(TokenDataModule):
    """Windows of token ids from a source of text.

    Args:
        source: Where the text comes from.
        tokenizer: A recipe, built on the training documents, or a finished tokenizer.
        seq_len: Tokens in a window.
        batch_size: Windows in a batch, on each device.
        pack: See `Windows`.
        validation_fraction: Share of the training text to hold out, unless the source has its own validation
            split.
        test_fraction: The same for testing.
        document_mask: Whether batches say which document each token belongs to.
        max_tokens: Train on no more tokens than this.
        group_near_copies: Keep documents that nearly equal one another on one side of the hold-out.
        masking: See `TokenDataModule`; the tokenizer then has a token that stands for a hidden one.
        device: See `TokenDataModule`.
        cache_dir: Where tokenised text is kept.
        num_workers: Processes that read training batches ahead. A batch takes less than 0.1 ms: 0 is fast.
        seed: Decides which documents are held out, and the order of the training windows.

    Attributes:
        tokenizer: After `prepare`, the tokenizer.
        splits: After `prepare`, the tokens by split: train, validation, test, or "all" alone.
        fingerprint: After `prepare`, identifies text, tokenizer and hold-out together.
        has_own_validation: After `prepare`, whether the source brought its own validation split.

    Raises:
        ValueError: If a number or `pack` is not one that works.
    """

    has_own_validation: bool

    def __init__(
        self,
        source: Source,
        tokenizer: TokenizerRecipe,
        seq_len: int,
        batch_size: int,
        *,
        pack: str = "concat",
        validation_fraction: float | int = 0.05,
        test_fraction: float | int = 0.05,
        max_tokens: int | None = None,
        document_mask: bool = False,
        group_near_copies: bool = True,
        masking: Masking | None = None,
        device: TokenDevice = "auto",
        cache_dir: str = "data/cache",
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        require_at_least_one("model.max_seq_len", seq_len, 256)
        if max_tokens is not None:
            require_at_least_one("data.max_tokens", max_tokens, 1_000_000)
        if pack not in PACKS:
            raise ValueError(f"data.pack={pack}: must be {' or '.join(PACKS)}.")
        held_out = hold_out_settings(validation_fraction, test_fraction, group_near_copies)
        super().__init__(seq_len, batch_size, cast(Pack, pack), document_mask, num_workers, seed, masking, device)
        tokenizer = MaskedTokenizer(tokenizer) if masking else tokenizer
        self.source, self.name, self.cache_dir, self._recipe = source, source.name, cache_dir, tokenizer
        self._held_out = held_out
        self._max_tokens = max_tokens

    @property
    def scored_whole(self) -> bool:
        """True for text files without a validation split of their own."""
        return lacks_own_splits(self.source)

    def prepare(self, whole: bool = False) -> None:
        """Tokenises the text, or opens what was tokenised before.

        Args:
            whole: Hold nothing out: all documents become the one split "all", to evaluate other data than
                trained on.

        Raises:
            ValueError: If the source cannot be read, or the training text is shorter than one window.
        """
        prepared = prepare_text(self._text_recipe(whole), self.cache_dir)
        self.tokenizer, self.splits = prepared.tokenizer, prepared.splits
        self.fingerprint, self.has_own_validation = prepared.fingerprint, prepared.own_validation
        if not whole:
            self._check_length(self.splits["train"].num_tokens)

    def is_prepared(self, tokenizer: TextTokenizer, whole: bool = False) -> bool:
        """Whether the text lies in the cache already, in the tokens of a given tokenizer."""
        prepared = open_prepared(self._text_recipe(whole), self.cache_dir)
        return prepared is not None and prepared.tokenizer.fingerprint == tokenizer.fingerprint

    def _text_recipe(self, whole: bool) -> TextRecipe:
        settings: dict[str, Any] = {} if whole else self._held_out | {"seed": self.seed}
        return TextRecipe(self.source, self._recipe, max_tokens=self._max_tokens, whole=whole, **settings)

    def _evaluation_loader(self, split_name: str, rank: int, world_size: int) -> DataLoader[Batch]:
        if self.splits[split_name].num_tokens == 0:
            raise ValueError(
                f"the split {split_name} holds no text; give more text in data.files, or a larger "
                f"data.{split_name}_fraction, for instance 0.1."
            )
        return super()._evaluation_loader(split_name, rank, world_size)

    def _remedy(self, split_name: str) -> str:
        return how_to_hold_out(split_name)

    def _check_length(self, num_tokens: int) -> None:
        needed = self.seq_len if self.pack == "concat" else 1
        if num_tokens < needed:
            shorter = f"model.max_seq_len={num_tokens}" if num_tokens else "data=pydoc"
            raise ValueError(
                f"model.max_seq_len={self.seq_len}: the training text has only {num_tokens} tokens; "
                f"give more text in data.files, or {shorter} works."
            )
