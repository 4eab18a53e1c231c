"""Attention as textbooks write it, `forward(query, key, value, mask)` with a tensor as mask, in the place of ours."""

import copy
import inspect
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tinyformer.errors import ArgumentError
from tinyformer.nn.attention import BaseAttention
from tinyformer.nn.kernels.eager import AttentionMaps
from tinyformer.nn.maps import QKV, HeadOutputs, NoMapsError, Weights
from tinyformer.nn.mask import AttentionMask

OURS = dict.fromkeys(("h", "heads", "n_heads", "n_head"), "num_heads") | dict.fromkeys(("embed_dim", "dim"), "d_model")
"""Our names of parameters that textbooks call otherwise."""

Form: TypeAlias = tuple[bool, int] | None
"""How an attention takes its mask, see `_results`; None if it is causal by itself."""


def make_attention(factory: Callable[..., Any], d_model: int, **layer: Any) -> nn.Module:
    """The attention that a factory makes from the arguments that it names, adapted if it is a textbook's."""
    maker = factory if isinstance(factory, partial) else partial(factory)
    named, given = inspect.signature(maker.func).parameters, maker.keywords | layer
    if not any(each.kind is each.VAR_KEYWORD for each in named.values()):
        ours = {name: name if name in given else OURS.get(name) for name in list(named)[len(maker.args) :]}
        given = {name: given[key] for name, key in ours.items() if key in given}
        for name in ours.keys() - given.keys():
            if named[name].default is inspect.Parameter.empty:
                reason = f"is needed by {maker.func.__name__}; on a command line, + before the key adds it"
                raise ArgumentError(name, None, reason)
    bare: Any = copy.copy(maker)  # of Hydra's class of partials, which checks what it calls
    bare.__setstate__((maker.func, maker.args, {}, vars(maker)))
    made: nn.Module = bare(**given)
    roles = [name[0] for name in inspect.signature(made.forward).parameters][:3]
    return TextbookAttention(made, d_model) if sorted(roles) == ["k", "q", "v"] else made


class TextbookAttention(BaseAttention):
    """A user-defined attention whose `forward` takes queries, keys, values and, in any `Form`, a tensor as mask.

    Its maps are what it returns after the output, or stores as an attribute. They can be shown, not changed.

    Raises:
        ArgumentError: whatever the form of the mask, queries depend on the keys that it hides.
    """

    def __init__(self, attention: nn.Module, d_model: int) -> None:
        forms: tuple[Form, ...] = (*itertools.product((False, True), range(3)), None)
        tried = {form: _num_maps(attention, form, d_model) for form in forms}
        found = {form: num_maps for form, num_maps in tried.items() if isinstance(num_maps, int)}
        if not found:
            error, names = tried[False, 0], ", ".join(inspect.signature(attention.forward).parameters)
            reason = "must hide the keys where a mask is False, as scores.masked_fill(mask == 0, -1e9) does"
            raise ArgumentError("forward", names, reason if error is None else f"{reason}; it raises: {error}")
        form, num_maps = next(iter(found.items()))
        super().__init__(d_model, num_maps or 1, d_model // (num_maps or 1), backend="eager")
        del self.head_gate
        self.attention, self.form = attention, form

    def __getattr__(self, name: str) -> Any:
        if name in ("head_gate", "q_proj", "k_proj", "v_proj", "o_proj"):
            raise NoMapsError(self.attention, "is no BaseAttention, so its heads can be shown, but not changed")
        return super().__getattr__(name)

    def forward(self, x: Tensor, *inputs: Any, **named: Any) -> Float[Tensor, "batch q_seq d_model"]:
        """The output, given the arguments of `BaseAttention.forward`, but no cache."""
        call = self.call_point(self.call(x, *inputs, **named))
        return self.attend(call.qkv, call.mask, call.is_cross).squeeze(1)

    def project(self, x: Tensor, context: Tensor | None = None, cache: Any = None) -> QKV:
        """The vectors, as if of one head."""
        source = (x if context is None else context).unsqueeze(1)
        return QKV(x.unsqueeze(1), source, source)

    def attend(self, qkv: QKV, mask: AttentionMask, is_cross: bool) -> HeadOutputs:
        """The output, as if of one head."""
        output: Tensor = _results(self.attention, self.form, qkv, self._visible(qkv, mask))[0]
        return output.unsqueeze(1)

    def attention_maps(
        self, qkv: QKV, mask: AttentionMask, is_cross: bool, rows: Int[Tensor, " rows"] | None = None
    ) -> AttentionMaps:
        """What the attention returns after the output, or stores, without dropout."""
        was_training, visible = self.training, self._visible(qkv, mask)
        weights = _maps(self.attention.eval(), _results(self.attention, self.form, qkv, visible), qkv)
        self.attention.train(was_training)
        if weights is None:
            raise NoMapsError(self.attention, "neither returns its attention weights after the output nor stores them")
        weights = weights if rows is None else weights[..., rows, :]
        return AttentionMaps(weights.float(), weights.float().log())

    def ablated(self) -> list[bool]:
        """False for each head."""
        return [False] * self.num_heads

    def _visible(self, qkv: QKV, mask: AttentionMask) -> Bool[Tensor, "batch _ q_seq k_seq"]:
        if self.form is None and not (mask.causal and mask.documents is mask.allowed is mask.window is None):
            reason = f"must be causal, and nothing else, since {type(self.attention).__name__} takes no mask"
            raise ArgumentError("mask", "…", reason)
        sizes = (qkv.q.shape[2], qkv.k.shape[2])
        everything = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=qkv.q.device)
        dense = mask.dense(*sizes, qkv.q.device)
        return (everything if dense is None else dense).expand(len(qkv.q), -1, *sizes)


def _results(attention: nn.Module, form: Form, qkv: QKV, visible: Bool[Tensor, "batch _ q_seq k_seq"]) -> Any:
    """The output, and what the attention returns after it.

    The shape of its mask is `batch 1 q_seq k_seq`, `batch q_seq k_seq` or, as in PyTorch, `batch*heads q_seq k_seq`; it
    is True at the keys that are visible, or at those that are hidden.
    """
    names = list(inspect.signature(attention.forward).parameters)
    given = {name: getattr(qkv, name[0]).squeeze(1) for name in names[:3]}
    if form is not None and (masks := [name for name in names[3:] if "mask" in name and "padding" not in name]):
        heads: Any = next((part.num_heads for part in attention.modules() if hasattr(part, "num_heads")), 1)
        of_rows = visible.squeeze(1)
        given[masks[0]] = form[0] ^ (visible, of_rows, of_rows.repeat_interleave(heads, dim=0))[form[1]]
    results = attention(**given)
    return results if isinstance(results, tuple) else (results,)


def _maps(attention: nn.Module, results: Any, qkv: QKV) -> Weights | None:
    """The attention weights among the results, or else among the attributes: rows over the keys that sum to 1."""
    shape = (qkv.q.shape[2], qkv.k.shape[2])
    for found in (*results[1:], *(value for part in attention.modules() for value in vars(part).values())):
        is_map = isinstance(found, Tensor) and found.ndim > 2 and found.shape[-2:] == shape
        if is_map and (found.is_meta or (found.sum(-1) - 1).abs().max() < 0.02):
            return found.reshape(len(qkv.q), -1, *shape)
    return None


def _num_maps(attention: nn.Module, form: Form, d_model: int) -> int | Exception | None:
    """The number of maps, 0 if there are none; None if queries depend on hidden keys, or the error that is raised."""
    x = torch.arange(8.0 * d_model).sin().view(2, 1, 4, d_model)
    changed, visible = x.clone(), torch.ones(2, 1, 4, 4, dtype=torch.bool).tril()
    changed[0, :, 3] += 1
    if form is not None:  # in the second example, later queries do not see the first token
        changed[1, :, 0] += 1
        visible[1, :, 1:, 0] = False
    try:
        with torch.no_grad():
            results = _results(attention.eval(), form, QKV(x, x, x), visible)
            maps = _maps(attention, results, QKV(x, x, x))
            change = (_results(attention, form, QKV(changed, changed, changed), visible)[0] - results[0]).abs()
    except (RuntimeError, IndexError, TypeError, ValueError, AttributeError, AssertionError) as error:  # of the mask
        return error
    finally:
        attention.train()
    hides = change.shape == x[:, 0].shape and (change.is_meta or max(change[0, :3].max(), change[1, 1:].max()) < 1e-4)
    return (0 if maps is None else maps.shape[1]) if hides else None
