"""A recurrent network in the place of self-attention."""

from jaxtyping import Float
from torch import Tensor, nn

from tinyformer.nn.cache import LayerCache
from tinyformer.nn.mixer import TokenMixer


class LSTM(TokenMixer):
    """A unidirectional `torch.nn.LSTM` (Hochreiter & Schmidhuber 1997; with Gers et al. 2000's forget gate).

    i, f, o = σ(W [x_t, h_{t-1}] + b);  c_t = f ⊙ c_{t-1} + i ⊙ tanh(W [x_t, h_{t-1}] + b);  h_t = o ⊙ tanh(c_t)

    It has 8 d_model² weights, initialised as torch does. The cache holds h and c, whatever the length.
    """

    window = 1

    def __init__(
        self, d_model: int, bias: bool = True, layer_index: int = 0, num_layers: int = 1, kind: str | None = None
    ) -> None:
        super().__init__()
        self.d_model, self.cache_elements = d_model, 2 * d_model
        self.lstm = nn.LSTM(d_model, d_model, bias=bias, batch_first=True)

    def mix(
        self, x: Float[Tensor, "batch seq d_model"], cache: LayerCache | None = None
    ) -> Float[Tensor, "batch seq d_model"]:
        """The hidden state of each token, which continues from the cache's h and c."""
        state = None
        if cache is not None and cache.length:
            state = tuple(part.transpose(0, 1).contiguous().to(x.dtype) for part in cache.tensors)
        hidden, (_, cell) = self.lstm(x, state)
        if cache is not None:
            cache.extend(hidden, cell.transpose(0, 1), window=self.window)  # it keeps the last of each
        return hidden
