"""An adapter for attention as textbooks write it: `forward(query, key, value, mask)` with a tensor as mask."""

import inspect
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tinyformer.errors import ArgumentError
from tinyformer.nn.attention import BaseAttention
from tinyformer.nn.kernels.eager import AttentionMaps
from tinyformer.nn.maps import QKV, HeadOutputs, NoMapsError, Weights
from tinyformer.nn.mask import AttentionMask


class TextbookAttention(BaseAttention):
    """A user-defined attention whose `forward` takes queries, keys, values and a boolean mask, True at visible keys.

    Attention maps are read from the values that `forward` returns besides the output, or from attributes. They can be
    shown, but not changed.

    Raises:
        ArgumentError: the output depends on hidden keys, both with a mask of shape `batch 1 q_seq k_seq` and with one
            of shape `batch q_seq k_seq`.
    """

    def __init__(self, attention: nn.Module, d_model: int) -> None:
        mask_dims, num_maps = _try_out(attention, d_model)
        super().__init__(d_model, num_maps or 1, d_model // (num_maps or 1), backend="eager")
        del self.head_gate
        self.attention, self.mask_dims = attention, mask_dims

    def __getattr__(self, name: str) -> Any:
        if name in ("head_gate", "q_proj", "k_proj", "v_proj", "o_proj"):
            raise NoMapsError(self.attention, "is no BaseAttention, so its heads can be shown, but not changed")
        return super().__getattr__(name)

    def forward(self, x: Tensor, *inputs: Any, **named: Any) -> Float[Tensor, "batch q_seq d_model"]:
        """The output, given the arguments of `BaseAttention.forward` except a cache."""
        call = self.inputs_hook(self.inputs(x, *inputs, **named))
        return self.attend(call.qkv, call.mask, call.is_cross).squeeze(1)

    def project(self, x: Tensor, context: Tensor | None = None, cache: Any = None, side: Any = None) -> QKV:
        """The input vectors themselves, as the queries, keys and values of a single head."""
        source = (x if context is None else context).unsqueeze(1)
        return QKV(x.unsqueeze(1), source, source)

    def attend(self, qkv: QKV, mask: AttentionMask, is_cross: bool) -> HeadOutputs:
        """The output of the user-defined attention, as the output of a single head."""
        output: Tensor = _results(self.attention, qkv, self._visible(qkv, mask))[0]
        return output.unsqueeze(1)

    def attention_maps(
        self, qkv: QKV, mask: AttentionMask, is_cross: bool, rows: Int[Tensor, " rows"] | None = None
    ) -> AttentionMaps:
        """The maps, without dropout, that the attention returns as a second or later value, or has as an attribute."""
        was_training = self.training
        weights = _maps(self.attention.eval(), _results(self.attention, qkv, self._visible(qkv, mask)), qkv)
        self.attention.train(was_training)
        if weights is None:
            raise NoMapsError(self.attention, "has attention weights neither in its results nor in its attributes")
        weights = (weights if rows is None else weights[..., rows, :]).float()
        return AttentionMaps(weights, weights.log())

    def ablated(self) -> list[bool]:
        """A flag for each head, always False, since these heads cannot be ablated."""
        return [False] * self.num_heads

    def _visible(self, qkv: QKV, mask: AttentionMask) -> Bool[Tensor, "batch *_ q_seq k_seq"]:
        sizes, device = (qkv.q.shape[2], qkv.k.shape[2]), qkv.q.device
        dense = mask.dense(*sizes, device)
        everything = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        visible = (everything if dense is None else dense).expand(len(qkv.q), -1, *sizes)
        return visible if self.mask_dims == visible.ndim else visible.squeeze(1)


def _results(attention: nn.Module, qkv: QKV, visible: Bool[Tensor, "batch *_ q_seq k_seq"]) -> Any:
    """The results of the attention as a tuple, whose first element is the output."""
    roles = list(inspect.signature(attention.forward).parameters)[:4]
    given = {name: getattr(qkv, name[0]).squeeze(1) for name in roles[:3]} | dict.fromkeys(roles[3:], visible)
    results = attention(**given)
    return results if isinstance(results, tuple) else (results,)


def _maps(attention: nn.Module, results: Any, qkv: QKV) -> Weights | None:
    """The first tensor in `results[1:]`, then in attributes, that has the shape of maps and rows that sum to 1."""
    shape = (qkv.q.shape[2], qkv.k.shape[2])
    for found in (*results[1:], *(value for part in attention.modules() for value in vars(part).values())):
        is_map = isinstance(found, Tensor) and found.ndim > 2 and found.shape[-2:] == shape
        if is_map and (found.is_meta or (found.sum(-1) - 1).abs().max() < 0.02):
            return found.reshape(len(qkv.q), -1, *shape)
    return None


def _try_out(attention: nn.Module, d_model: int) -> tuple[int, int]:
    """The number of dimensions of the mask that an attention takes, and its number of attention maps, possibly 0."""
    x = torch.arange(8.0 * d_model).sin().view(2, 1, 4, d_model)
    changed, visible = x.clone(), torch.ones(2, 4, 4, dtype=torch.bool).tril()
    visible[1, 1:, 0] = False  # in the second example, later queries do not see the first token
    changed[0, :, 3] += 1
    changed[1, :, 0] += 1
    problem = ""
    for mask in (visible.unsqueeze(1), visible):  # of shape batch 1 q_seq k_seq, or batch q_seq k_seq
        try:
            with torch.no_grad():
                results = _results(attention.eval(), QKV(x, x, x), mask)
                maps = _maps(attention, results, QKV(x, x, x))
                change = (_results(attention, QKV(changed, changed, changed), mask)[0] - results[0]).abs()
        except (RuntimeError, IndexError, TypeError, ValueError, AttributeError, AssertionError) as error:
            problem = problem or f"; it raises: {error}"
            continue
        finally:
            attention.train()
        is_hidden = change.is_meta or max(change[0, :3].max(), change[1, 1:].max()) < 1e-4
        if change.shape == x[:, 0].shape and is_hidden:
            return mask.ndim, 0 if maps is None else maps.shape[1]
    reason = "must hide the keys where a mask is False, as scores.masked_fill(mask == 0, -1e9) does"
    raise ArgumentError("forward", ", ".join(inspect.signature(attention.forward).parameters), f"{reason}{problem}")
