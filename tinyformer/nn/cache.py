"""What a layer remembers of the tokens before, so that the next one costs a step and not the whole sequence."""

import torch
from torch import Tensor

from tinyformer.errors import ArgumentError


class LayerCache:
    """The keys and values of one layer (or the latent that they are made of), growing along the sequence.

    Under a window W it holds the last W tokens, the most that the next one may see, itself included.

    Args:
        room: for how many tokens there is memory from the start; it doubles when it is full. A window needs none.
    """

    def __init__(self, room: int = 0) -> None:
        self.length = 0
        """Tokens that came, those included that a window has left behind."""
        self.num_held = 0
        """Tokens that are held."""
        self._room = room
        self._memory: tuple[Tensor, ...] = ()

    def __repr__(self) -> str:
        return f"LayerCache of {self.length} tokens"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What is held of the last `num_held` tokens; axis -2 is the sequence."""
        return tuple(memory[..., : self.num_held, :] for memory in self._memory)

    @property
    def num_bytes(self) -> int:
        """Memory of the tokens that are held, without the room for more."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def extend(self, *new: Tensor, window: int | None = None) -> tuple[Tensor, ...]:
        """Remember some more tokens.

        Args:
            new: what is held of them; axis -2 is the sequence.
            window: how many tokens one may see, itself included; all before it unless given.

        Returns:
            All that one of the new tokens may see, themselves at the end.

        Raises:
            ValueError: they carry a gradient, for which memory that is written to again is no place.
        """
        if any(tensor.requires_grad for tensor in new):
            raise ArgumentError(
                "cache", self, "keeps no gradients: call the model under torch.no_grad()", {"cache": None}
            )
        self.length += new[0].shape[-2]
        return self._append(new) if window is None else self._slide(new, window)

    def num_behind(self, window: int | None) -> int:
        """How many of the tokens so far the next one cannot see through a window of this size; see `extend`."""
        return 0 if window is None else self.length - min(self.num_held, window - 1)

    def copy(self) -> "LayerCache":
        """The same, with memory of its own."""
        other = LayerCache(self._room)
        other.length, other.num_held = self.length, self.num_held
        other._memory = tuple(tensor.clone() for tensor in self.tensors)
        return other

    def _append(self, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        first, end = self.num_held, self.num_held + new[0].shape[-2]
        if not self._memory or end > self._memory[0].shape[-2]:
            # Twice as much each time: all copies together are no more than the sequence.
            room, held = max(end, 2 * first, self._room), self.tensors
            self._memory = tuple(tensor.new_empty(*tensor.shape[:-2], room, tensor.shape[-1]) for tensor in new)
            for memory, tensor in zip(self._memory, held, strict=False):
                memory[..., :first, :] = tensor
        for memory, tensor in zip(self._memory, new, strict=True):
            memory[..., first:end, :] = tensor
        self.num_held = end
        return self.tensors

    def _slide(self, new: tuple[Tensor, ...], window: int) -> tuple[Tensor, ...]:
        # The first of the new tokens sees window - 1 before itself.
        first = max(0, self.num_held - (window - 1))
        seen = new
        if self._memory:
            pairs = zip(self.tensors, new, strict=True)
            seen = tuple(torch.cat([tensor[..., first:, :], more], dim=-2) for tensor, more in pairs)
        self.num_held = min(window, seen[0].shape[-2])
        # Of a long prompt a copy of its end, so that its memory goes.
        long = self.num_held < seen[0].shape[-2]
        self._memory = tuple(tensor[..., -window:, :].clone() for tensor in seen) if long else seen
        return seen


class Cache:
    """A `LayerCache` for each layer of a model.

    Args:
        num_layers: of the model.
        room: see `LayerCache`.
    """

    def __init__(self, num_layers: int, room: int = 0) -> None:
        self.layers = [LayerCache(room) for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """Tokens that came."""
        return self.layers[0].length

    @property
    def num_bytes(self) -> int:
        """Memory of the tokens that all layers hold."""
        return sum(layer.num_bytes for layer in self.layers)
