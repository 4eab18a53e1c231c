"""Token mixers without scores, which may take the place of self-attention: a recurrent network and a convolution."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import nn

from tinyformer.errors import ArgumentError, argument_path
from tinyformer.nn.cache import LayerCache
from tinyformer.nn.layers import Stream
from tinyformer.nn.mask import AttentionMask, window_of_layer


class TokenMixer(nn.Module):
    """Base class of causal modules that replace self-attention and have neither heads nor attention maps.

    A token's output depends on this token and the earlier tokens of its document, and not on padding.
    """

    d_model: int
    multiply_adds: int = 0
    """Multiply-adds for each token, in addition to the multiply-adds of linear and recurrent layers."""
    cache_elements: int
    """Number of cached elements for each cached token."""
    window: int
    """Largest number of tokens that the cache holds, like the window of an attention layer."""

    def forward(self, x: Stream, mask: AttentionMask | None = None, cache: LayerCache | None = None) -> Stream:
        """Return one vector for each token; the cache holds the state after the tokens before `x`.

        Raises:
            ArgumentError: the mask is not causal, has a window or a pattern, or has documents together with a cache.
        """
        self.require_causal(mask or AttentionMask())
        documents = None if mask is None else mask.documents
        if documents is None:
            return self.mix(x, cache)
        if cache is not None:
            raise ArgumentError("mask.documents", "…", "must be None with a cache, which holds one document's state")
        # Each document becomes a row, which starts without a cached state.
        starts = documents.diff(dim=1, prepend=documents[:, :1] - 1).flatten().nonzero().flatten()
        sizes = starts.diff(append=starts.new_tensor([documents.numel()])).cpu()
        rows = nn.utils.rnn.pad_sequence(list(x.flatten(0, 1).split(sizes.tolist())), batch_first=True)
        return torch.cat(nn.utils.rnn.unpad_sequence(self.mix(rows), sizes, batch_first=True)).view_as(x)

    def require_causal(self, mask: AttentionMask) -> None:
        """Raise an `ArgumentError` unless the mask is causal, without a window or a pattern."""
        if not mask.causal or mask.window is not None or mask.allowed is not None:
            reason = "processes tokens from left to right, so it needs a causal mask, as for predicting the next token"
            raise ArgumentError("attention", type(self).__name__, reason)

    @abstractmethod
    def mix(self, x: Stream, cache: LayerCache | None = None) -> Stream:
        """Return one vector for each token, computed from this token and all earlier tokens."""


class LSTM(TokenMixer):
    """A unidirectional `torch.nn.LSTM` (Hochreiter & Schmidhuber 1997; with Gers et al. 2000's forget gate).

    i, f, o = σ(W [x_t, h_{t-1}] + b);  c_t = f ⊙ c_{t-1} + i ⊙ tanh(W [x_t, h_{t-1}] + b);  h_t = o ⊙ tanh(c_t)

    It has 8 d_model² weights with torch's initialisation. The cache holds one h and one c, regardless of the length.
    """

    window = 1

    def __init__(
        self, d_model: int, bias: bool = True, layer_index: int = 0, num_layers: int = 1, kind: str | None = None
    ) -> None:
        super().__init__()
        self.d_model, self.cache_elements = d_model, 2 * d_model
        self.lstm = nn.LSTM(d_model, d_model, bias=bias, batch_first=True)

    def mix(self, x: Stream, cache: LayerCache | None = None) -> Stream:
        """The hidden state of each token, computed from the cached h and c onwards."""
        state = None
        if cache is not None and cache.length:
            state = tuple(part.transpose(0, 1).contiguous().to(x.dtype) for part in cache.tensors)
        hidden, (_, cell) = self.lstm(x, state)
        if cache is not None:
            cache.extend(hidden, cell.transpose(0, 1), window=self.window)  # only the last h and c remain
        return hidden


class BaseConv(TokenMixer):
    """A gated causal convolution, BaseConv (Arora et al. 2023, arXiv 2312.04927, section 4).

    y_t = (W x_t + b₁) ⊙ (Σ_j h_j ⊙ x_{t-j} + b₂),  j from 0 to kernel_size - 1

    Each dimension has its own filter h. The sum is computed by FFT, in fp32, so that the time grows with
    seq log seq. The cache holds the last `kernel_size` inputs.

    Args:
        max_seq_len: length of the longest sequence, in tokens.
        kernel_size: length of the filters, in tokens; None for `max_seq_len`. A list is a pattern that repeats over the
            layers, such as the paper's [3, None].
    """

    def __init__(
        self,
        d_model: int,
        max_seq_len: int,
        kernel_size: int | Sequence[int | None] | None = None,
        layer_index: int = 0,
        num_layers: int = 1,
        kind: str | None = None,
    ) -> None:
        super().__init__()
        with argument_path(passed={"window": "kernel_size"}):
            self.window = window_of_layer(kernel_size, layer_index) or max_seq_len
        self.d_model, self.cache_elements, self.multiply_adds = d_model, d_model, self.window * d_model
        self.gate_proj = nn.Linear(d_model, d_model)
        # Laid out as in torch.nn.Conv1d, with the token itself last. Optimizers treat only two axes as a matrix.
        self.filters = nn.Parameter(torch.empty(d_model, 1, self.window).uniform_(-1, 1) * self.window**-0.5)
        self.filter_bias = nn.Parameter(torch.zeros(d_model))

    def mix(self, x: Stream, cache: LayerCache | None = None) -> Stream:
        """The gated convolution at each token; inputs before the first token are 0."""
        seen = x if cache is None else cache.extend(x, window=self.window)[0]
        size = seen.shape[1] + self.window - 1
        # An FFT needs fp32, which autocast leaves as it is.
        spectrum = torch.fft.rfft(seen.float(), size, dim=1)
        filters = torch.fft.rfft(self.filters[:, 0].float().flip(1).T, size, dim=0)
        mixed = torch.fft.irfft(spectrum * filters, size, dim=1)[:, seen.shape[1] - x.shape[1] : seen.shape[1]]
        return self.gate_proj(x) * (mixed + self.filter_bias).to(x.dtype)
