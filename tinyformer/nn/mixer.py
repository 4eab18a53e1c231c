"""Token mixers without scores: what a layer may have in the place of self-attention, see `recurrent`, `convolution`."""

from abc import abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tinyformer.errors import ArgumentError
from tinyformer.nn.cache import LayerCache
from tinyformer.nn.mask import AttentionMask


class TokenMixer(nn.Module):
    """Base of causal modules in the place of self-attention, which have neither heads nor maps.

    A token reads those before it in its own document. Padding, which comes after all tokens of a row, is read by none.
    """

    d_model: int
    multiply_adds: int = 0
    """Multiply-adds for each token, in addition to those of the matrices of linear and recurrent layers."""
    cache_elements: int
    """Elements of the cache for each token that it holds."""
    window: int
    """The most tokens that the cache holds, as the window of an attention layer."""

    def forward(
        self, x: Float[Tensor, "batch seq d_model"], mask: AttentionMask | None = None, cache: LayerCache | None = None
    ) -> Float[Tensor, "batch seq d_model"]:
        """One vector for each token, from those that the mask allows; the cache holds the state before `x`.

        Raises:
            ArgumentError: the mask is none but causality, lengths and documents, or there are documents in a cache.
        """
        self.require_causal(mask or AttentionMask())
        documents = None if mask is None else mask.documents
        if documents is None:
            return self.mix(x, cache)
        if cache is not None:
            raise ArgumentError("mask.documents", "…", "must be None with a cache, whose state is of one document")
        # Each document is a row of its own, which begins without a state.
        starts = documents.diff(dim=1, prepend=documents[:, :1] - 1).flatten().nonzero().flatten()
        sizes = starts.diff(append=starts.new_tensor([documents.numel()])).cpu()
        rows = nn.utils.rnn.pad_sequence(list(x.flatten(0, 1).split(sizes.tolist())), batch_first=True)
        return torch.cat(nn.utils.rnn.unpad_sequence(self.mix(rows), sizes, batch_first=True)).view_as(x)

    def require_causal(self, mask: AttentionMask) -> None:
        """Refuse a mask under which a token reads later ones, or not all of those before it."""
        if not mask.causal or mask.window is not None or mask.allowed is not None:
            reason = "reads the tokens from left to right, so it needs a causal mask, as for predicting the next token"
            raise ArgumentError("attention", type(self).__name__, reason)

    @abstractmethod
    def mix(
        self, x: Float[Tensor, "batch seq d_model"], cache: LayerCache | None = None
    ) -> Float[Tensor, "batch seq d_model"]:
        """One vector for each token, from it and those before it."""
