"""Windows of token ids as the data of a run."""

from typing import Any, Literal, cast

import torch
from torch.utils.data import DataLoader

from tinyformer.batch import Batch
from tinyformer.data.base import DataModule, SourceDataModule
from tinyformer.data.batches.loader import ResumableLoader
from tinyformer.data.batches.masking import MaskedWindows, Masker, Masking
from tinyformer.data.batches.share import share
from tinyformer.data.batches.windows import PACKS, Pack, Windows
from tinyformer.data.cache import Prepared, TextRecipe
from tinyformer.data.sources.source import Source
from tinyformer.data.stream import TokenSplit
from tinyformer.data.tokenizer.recipes import MaskedTokenizer, TokenizerRecipe
from tinyformer.errors import ArgumentError, require_at_least, require_choice

TokenDevice = Literal["auto", "cpu", "cuda"]
SHARE_OF_GPU = 0.1
"""The share of a GPU's free memory that tokens may take with `device="auto"`."""


class TokenDataModule(DataModule):
    """Batches of windows of token ids.

    Args:
        seq_len: tokens in a window.
        batch_size: windows in a batch, on each device.
        pack: see `Windows`.
        document_mask: whether batches contain the document of each token.
        masking: how tokens are masked, for a model that predicts them from both sides; None: no token is masked.
        device: where training tokens are kept: in a memory map ("cpu") or on the GPU that trains ("cuda"). "auto" is
            the GPU if they fit into a tenth of its free memory and windows run across documents, unmasked and without
            `document_mask`.
        settings: further arguments of `DataModule`; `seed` and `split_seed` also determine the masks.

    Raises:
        ArgumentError: the GPU is requested for windows that only the memory map supports.
    """

    splits: dict[str, TokenSplit]

    def __init__(
        self,
        seq_len: int,
        batch_size: int,
        pack: Pack,
        document_mask: bool,
        masking: Masking | None = None,
        device: TokenDevice = "auto",
        **settings: Any,
    ) -> None:
        super().__init__(seq_len, batch_size, **settings)
        self.pack, self._document_mask, self._masking, self._device = pack, document_mask, masking, device
        if device == "cuda" and not self._is_plain:
            reason = "windows within documents, or with masked tokens, are read from the memory map"
            raise ArgumentError("device", device, reason, {"device": "auto"})

    def _training_loader(self, **settings: Any) -> ResumableLoader:
        return ResumableLoader(
            self.splits["train"],
            self.seq_len,
            pack=self.pack,
            with_documents=self._document_mask,
            masker=self._masker(self.seed),
            device=self._token_device(),
            **settings,
        )

    @property
    def _is_plain(self) -> bool:
        return self.pack == "concat" and not self._document_mask and self._masking is None

    def require_device(self, device: str) -> None:
        """Refuse to train on a type of device that cannot hold the tokens.

        Raises:
            ArgumentError: the tokens are to be kept on a GPU, and this is another device.
        """
        if self._device == "cuda" and device != "cuda":
            raise ArgumentError("device", self._device, f"the run is on {device}", {"device": "auto"})

    def _token_device(self) -> torch.device | None:
        """The device that holds the training tokens; None: the memory map."""
        device = self.trainer.strategy.root_device if self.trainer is not None else torch.device("cpu")
        self.require_device(device.type)
        if device.type != "cuda":
            return None
        if self._device == "cuda":
            return device
        split = self.splits["train"]
        fits = 4 * len(split.ids) <= SHARE_OF_GPU * torch.cuda.mem_get_info(device)[0]
        return device if self._device == "auto" and self._is_plain and split.scored is None and fits else None

    def _rows(self, split: str) -> Windows | MaskedWindows:
        windows = Windows(self.splits[split], self.seq_len, self.pack, with_documents=self._document_mask)
        masker = self._masker(self.split_seed)
        return MaskedWindows(windows, masker) if masker else windows

    def _evaluation_loader(self, split: str, rank: int, world_size: int) -> DataLoader[Batch]:
        return share(self._rows(split), self.batch_size, rank, world_size)

    def _masker(self, seed: int) -> Masker | None:
        return Masker(self._masking, self.tokenizer, seed) if self._masking else None


class TextDataModule(SourceDataModule, TokenDataModule):
    """Windows of token ids from a source of text.

    Args:
        source: where the text comes from.
        tokenizer: a recipe, built on the training documents, or a finished tokenizer.
        seq_len: tokens in a window.
        batch_size: windows in a batch, on each device.
        pack: see `Windows`.
        document_mask: whether batches contain the document of each token.
        max_tokens: maximum number of training tokens.
        masking: see `TokenDataModule`; the tokenizer then has a mask token.
        device: see `TokenDataModule`.
        settings: further arguments of `SourceDataModule`.

    Attributes:
        tokenizer: after `prepare`, the tokenizer.
        splits: after `prepare`, the tokens by split: train, validation, test, or "all" alone.
        fingerprint: after `prepare`, identifies text, tokenizer and hold-out together.

    Raises:
        ArgumentError: a number is out of range, or `pack` or `device` is not supported.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: TokenizerRecipe,
        seq_len: int,
        batch_size: int,
        *,
        pack: str = "concat",
        max_tokens: int | None = None,
        document_mask: bool = False,
        masking: Masking | None = None,
        device: TokenDevice = "auto",
        **settings: Any,
    ) -> None:
        require_at_least(1, {"max_tokens": 1_000_000}, max_tokens=max_tokens)
        require_choice("pack", pack, PACKS)
        super().__init__(
            source,
            MaskedTokenizer(tokenizer) if masking else tokenizer,
            seq_len,
            batch_size=batch_size,
            pack=cast(Pack, pack),
            document_mask=document_mask,
            masking=masking,
            device=device,
            **settings,
        )
        self._max_tokens = max_tokens

    def _take(self, prepared: Prepared, whole: bool) -> None:
        self.splits = prepared.splits
        num_tokens, needed = (
            self.splits[next(iter(self.splits))].num_tokens,
            self.seq_len if self.pack == "concat" else 1,
        )
        if not whole and num_tokens < needed:
            works = {"seq_len": num_tokens} if num_tokens else {}
            raise ArgumentError("seq_len", self.seq_len, f"the training text has only {num_tokens} tokens", works)

    def _recipe(self, whole: bool) -> TextRecipe:
        hold_out = self._hold_out(whole)
        return TextRecipe(self.source, self._tokenizer_recipe, max_tokens=self._max_tokens, **hold_out)

    def _rows(self, split: str) -> Windows | MaskedWindows:
        self._require_rows(split)
        return super()._rows(split)
