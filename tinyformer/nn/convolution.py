"""A gated causal convolution in the place of self-attention."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tinyformer.errors import argument_path
from tinyformer.nn.cache import LayerCache
from tinyformer.nn.mask import window_of_layer
from tinyformer.nn.mixer import TokenMixer


class BaseConv(TokenMixer):
    """A gated causal convolution, BaseConv (Arora et al. 2023, arXiv 2312.04927, section 4).

    y_t = (W x_t + b₁) ⊙ (Σ_j h_j ⊙ x_{t-j} + b₂),  j from 0 to kernel_size - 1

    Each dimension has a filter h of its own. The sum is computed by FFT, in fp32, so that the time grows with
    seq log seq. The cache holds the last inputs, as many as a filter is long.

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
        # As torch.nn.Conv1d's: its last column is that of the token itself. Three axes, since it is no matrix.
        self.filters = nn.Parameter(torch.empty(d_model, 1, self.window).uniform_(-1, 1) * self.window**-0.5)
        self.filter_bias = nn.Parameter(torch.zeros(d_model))

    def mix(
        self, x: Float[Tensor, "batch seq d_model"], cache: LayerCache | None = None
    ) -> Float[Tensor, "batch seq d_model"]:
        """The gated convolution at each token; inputs before the first token are 0."""
        seen = x if cache is None else cache.extend(x, window=self.window)[0]
        size = seen.shape[1] + self.window - 1
        # An FFT needs fp32, which autocast leaves as it is.
        spectrum = torch.fft.rfft(seen.float(), size, dim=1)
        filters = torch.fft.rfft(self.filters[:, 0].float().flip(1).T, size, dim=0)
        mixed = torch.fft.irfft(spectrum * filters, size, dim=1)[:, seen.shape[1] - x.shape[1] : seen.shape[1]]
        return self.gate_proj(x) * (mixed + self.filter_bias).to(x.dtype)
