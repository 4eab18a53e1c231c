"""The KV cache: keys and values of earlier tokens, so that decoding computes only the new token."""

import torch
from torch import Tensor

from tinyformer.errors import ArgumentError


class LayerCache:
    """The cached keys and values of one layer, or the latents that they are projected from.

    With a window of W keys, the cache holds the last W tokens, which include all tokens that the next query attends to.

    Args:
        room: number of tokens to allocate memory for at first; memory that is full is doubled. Unused with a window.
    """

    def __init__(self, room: int = 0) -> None:
        self.length = 0
        """Number of tokens appended so far, including tokens outside the window."""
        self.num_held = 0
        """Number of tokens in memory."""
        self.num_queries = 0
        """In cross-attention with a window, number of tokens so far that have attended to the context."""
        self.parts: dict[str, LayerCache] = {}
        """The caches of the layer's parts that read other tensors of earlier tokens, such as a convolution, by name."""
        self._room = room
        self._memory: tuple[Tensor, ...] = ()

    def __repr__(self) -> str:
        return f"LayerCache of {self.length} tokens"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The cached tensors of the last `num_held` tokens; axis -2 is the sequence."""
        return tuple(memory[..., : self.num_held, :] for memory in self._memory)

    @property
    def num_bytes(self) -> int:
        """Bytes of the cached tokens, without memory that is allocated for later tokens."""
        own = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)
        return own + sum(part.num_bytes for part in self.parts.values())

    def part(self, name: str) -> "LayerCache":
        """The cache of the part `name` of the layer, created empty at the first call."""
        return self.parts.setdefault(name, LayerCache())

    def extend(self, *new: Tensor, window: int | None = None) -> tuple[Tensor, ...]:
        """Append the keys and values of new tokens, which must not require gradients; axis -2 is the sequence.

        Returns:
            The tensors of all tokens that the new tokens attend to within the window, ending with the new tokens.
        """
        if any(tensor.requires_grad for tensor in new):  # autograd cannot follow a cache that is overwritten in place
            reason = "keeps no gradients: call the model under torch.no_grad()"
            raise ArgumentError("cache", self, reason, {"cache": None})
        self.length += new[0].shape[-2]
        return self._append(new) if window is None else self._slide(new, window)

    def with_earlier(self, new: Tensor, number: int) -> Tensor:
        """Return up to `number` earlier tokens, then the new ones; the cache keeps the last `number` of all these."""
        seen = torch.cat([*self.tensors, new], dim=-2)
        self._memory, self.length = (seen[..., -number:, :].clone(),), self.length + new.shape[-2]
        self.num_held = self._memory[0].shape[-2]
        return seen

    def of_context(self, context: Tensor) -> tuple[Tensor, ...]:
        """The cached tensors, () at first; an `ArgumentError` is raised if they are of a context of another shape."""
        for tensor in self.tensors:
            if (tensor.shape[0], tensor.shape[-2]) != context.shape[:2]:
                held = f"{tensor.shape[0]} sequences of {tensor.shape[-2]} tokens"
                reason = f"holds a context of {held}, not {context.shape[0]} sequences of {context.shape[1]} tokens"
                raise ArgumentError("cache", self, f"{reason}; each context needs a separate cache")
        return self.tensors

    def num_behind(self, window: int | None) -> int:
        """Number of cached tokens outside the window of the next query; `extend` does not return them."""
        return 0 if window is None else self.length - min(self.num_held, window - 1)

    def count_queries(self, number: int) -> int:
        """Add `number` tokens to `num_queries`, and return the number of queries before them."""
        self.num_queries += number
        return self.num_queries - number

    def copy(self) -> "LayerCache":
        """A copy that shares no memory with this cache."""
        other = LayerCache(self._room)
        other.length, other.num_held, other.num_queries = self.length, self.num_held, self.num_queries
        other._memory = tuple(tensor.clone() for tensor in self.tensors)
        other.parts = {name: part.copy() for name, part in self.parts.items()}
        return other

    def select(self, rows: Tensor) -> None:
        """Keep the rows of the batch at the indices `rows`, in this order; an index may be repeated."""
        self._memory = tuple(tensor[rows] for tensor in self._memory)
        for part in self.parts.values():
            part.select(rows)

    def _append(self, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        first, end = self.num_held, self.num_held + new[0].shape[-2]
        if not self._memory or end > self._memory[0].shape[-2]:
            # Doubling copies fewer tokens in total than the sequence has.
            room, held = max(end, 2 * first, self._room), self.tensors
            self._memory = tuple(tensor.new_empty(*tensor.shape[:-2], room, tensor.shape[-1]) for tensor in new)
            for memory, tensor in zip(self._memory, held, strict=False):
                memory[..., :first, :] = tensor
        for memory, tensor in zip(self._memory, new, strict=True):
            memory[..., first:end, :] = tensor
        self.num_held = end
        return self.tensors

    def _slide(self, new: tuple[Tensor, ...], window: int) -> tuple[Tensor, ...]:
        # The first of the new tokens attends to window - 1 tokens before it.
        first = max(0, self.num_held - (window - 1))
        seen = new
        if self._memory:
            pairs = zip(self.tensors, new, strict=True)
            seen = tuple(torch.cat([tensor[..., first:, :], more], dim=-2) for tensor, more in pairs)
        self.num_held = min(window, seen[0].shape[-2])
        # Copy the end of a long prompt, so that the memory of the rest is freed.
        long = self.num_held < seen[0].shape[-2]
        self._memory = tuple(tensor[..., -window:, :].clone() for tensor in seen) if long else seen
        return seen


class Cache:
    """The KV cache of a model: for each layer one `LayerCache` for self-attention, and one for cross-attention."""

    def __init__(self, num_layers: int, room: int = 0) -> None:
        self.layers = [LayerCache(room) for _ in range(num_layers)]
        self.context_layers = [LayerCache() for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """Number of tokens appended so far."""
        return self.layers[0].length

    def select(self, rows: Tensor, contexts: bool = True) -> None:
        """Keep the rows at the indices `rows`, see `LayerCache.select`; `contexts=False` leaves contexts unchanged."""
        for layer in (*self.layers, *(self.context_layers if contexts else ())):
            layer.select(rows)

    @property
    def num_bytes(self) -> int:
        """Bytes of the cached tokens, over all layers."""
        return sum(layer.num_bytes for layer in (*self.layers, *self.context_layers))
