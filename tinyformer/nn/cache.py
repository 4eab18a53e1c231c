"""What a layer remembers of the tokens before, so that the next one costs a step and not the whole sequence."""

import torch
from torch import Tensor


class LayerCache:
    """The keys and values of one layer (or the latent that they are made of), growing along the sequence."""

    def __init__(self) -> None:
        self.tensors: tuple[Tensor, ...] = ()

    @property
    def length(self) -> int:
        """Tokens that are remembered."""
        return self.tensors[0].shape[-2] if self.tensors else 0

    @property
    def num_bytes(self) -> int:
        """Memory that they take."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def extend(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Remember some more tokens, and return all; axis -2 is the sequence."""
        if self.tensors:
            new = tuple(torch.cat(pair, dim=-2) for pair in zip(self.tensors, new, strict=True))
        self.tensors = new
        return new

    def without_last(self, num_tokens: int) -> "LayerCache":
        """What was remembered before the last tokens came."""
        earlier = LayerCache()
        if self.length > num_tokens:
            earlier.tensors = tuple(tensor[..., : self.length - num_tokens, :] for tensor in self.tensors)
        return earlier


class Cache:
    """A `LayerCache` for each layer of a model."""

    def __init__(self, num_layers: int) -> None:
        self.layers = [LayerCache() for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """Tokens that are remembered."""
        return self.layers[0].length

    @property
    def num_bytes(self) -> int:
        """Memory that all layers take."""
        return sum(layer.num_bytes for layer in self.layers)
