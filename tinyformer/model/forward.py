"""A forward pass whose activations are returned or replaced."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.analysis.measures.capture import running_hooks
from tinyformer.batch import IGNORED, Batch
from tinyformer.errors import ArgumentError
from tinyformer.model.points import Point, matching, points_of
from tinyformer.nn import Network
from tinyformer.nn.maps import NoMapsError

Replacement: TypeAlias = Tensor | Callable[[Tensor], Tensor]
"""What takes the place of an activation: a tensor, or a function of the activation that returns one."""


class ForwardPass(NamedTuple):
    """The results of a forward pass; all values at padding are zero.

    Attributes:
        logits: the logits, as the model's `logits` returns them.
        activations: the captured activations by the names of their points, after any replacement.
    """

    logits: Float[Tensor, "batch *seq scores"]
    activations: dict[str, Tensor]


def forward_pass(
    network: Network,
    forward: Callable[[], Tensor],
    lengths: Mapping[str, Int[Tensor, " batch"]],
    capture: str | Sequence[str] = (),
    replace: Mapping[str, Replacement] | None = None,
) -> ForwardPass:
    """Run a network, capture some activations and replace others; all that depends on these is computed from them.

    Args:
        network: the model; a compiled network runs uncompiled.
        forward: runs it and returns its logits.
        lengths: the number of tokens of each row without padding, for "seq" and, in an encoder–decoder, "source_seq".
        capture: names of points, in which `*` stands for any characters.
        replace: for each point, the replacement.

    Raises:
        ArgumentError: there is no such point, or a replacement has another shape, dtype or device than the activation.
    """
    points, replace = points_of(network), {} if replace is None else replace
    capture = [capture] if isinstance(capture, str) else capture
    if not isinstance(capture, Sequence) or not all(isinstance(name, str) for name in capture):
        raise ArgumentError("capture", capture, "must be the name of a point, or a list of names", {"capture": ["*"]})
    if not isinstance(replace, Mapping):
        raise ArgumentError("replace", replace, "must be a dictionary, from points to replacements")
    for name, replacement in replace.items():
        if not isinstance(name, str):
            raise ArgumentError("replace", name, "must be the name of a point, see model.points")
        if not isinstance(replacement, Tensor) and not callable(replacement):
            reason = "must be a tensor, or a function of the activation that returns one"
            raise ArgumentError("replace", {name: replacement}, reason)
    replaced = {name: replace[pattern] for name, pattern in matching(points, replace, "replace").items()}
    captured = matching(points, capture, "capture")
    activations: dict[str, Tensor] = {}
    is_replacing = False

    def hook_of(name: str, point: Point) -> Callable[[nn.Module, Any, Any], Any]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
            nonlocal is_replacing
            if is_replacing:  # in a forward pass that a replacing function runs
                return output
            try:
                value = point.get(output)
            except NoMapsError:
                if name in replaced or name in capture:
                    raise
                watched.pop(name)  # a pattern matches the weights of a class of one's own that has none
                return output
            if name in replaced:
                is_replacing = True
                value = _replacement(name, value, replaced[name], point, lengths)
                is_replacing = False
                output = point.put(output, value)
            activations[name] = _of_tokens(value, point, lengths)
            return output

        return hook

    # Hooks of a module run in the order of their points, so that weights are computed from replaced queries.
    watched = {name: point for name, point in points.items() if name in replaced or name in captured}
    hooks = [point.module.register_forward_hook(hook_of(name, point)) for name, point in watched.items()]
    try:
        with running_hooks(network), torch.no_grad():
            logits = forward()
    finally:
        for hook in hooks:
            hook.remove()
    for name in watched:
        if name not in activations:
            argument = "replace" if name in replaced else "capture"
            raise ArgumentError(argument, name, "is not computed in the forward pass of this network")
    return ForwardPass(
        _of_tokens(logits, points["logits"], lengths),
        {name: activations[name] for name in watched if name in captured},
    )


def _replacement(
    name: str, value: Tensor, replacement: Replacement, point: Point, lengths: Mapping[str, Int[Tensor, " batch"]]
) -> Tensor:
    """What replaces an activation, with zeros at padding.

    A function is given the rows of each length without padding, so that a text is as if it were alone; or the whole
    batch, with zeros at padding, if its result does not fit.

    Raises:
        ArgumentError: the replacement does not fit.
    """
    if isinstance(replacement, Tensor):
        return _of_tokens(_fitting(name, replacement, value), point, lengths)
    new, value = torch.zeros_like(value), _of_tokens(value, point, lengths)  # in memory as it was, for equal bits
    sizes = {dim: lengths[str(size)] for dim, size in enumerate(point.shape) if size in lengths}
    if not sizes:
        return _fitting(name, replacement(value), value)
    of_rows = torch.stack([*sizes.values()], dim=1)
    try:
        for row in of_rows.unique(dim=0):
            part: list[Any] = [(of_rows == row).all(dim=1), *[slice(None)] * (value.ndim - 1)]
            for dim, length in zip(sizes, row.tolist(), strict=True):
                part[dim] = slice(length)
            given = value[tuple(part)].contiguous()
            new[tuple(part)] = _fitting(name, replacement(given), given)
    except (RuntimeError, IndexError, ArgumentError):
        return _of_tokens(_fitting(name, replacement(value), value), point, lengths)
    return new


def _fitting(name: str, new: Any, value: Tensor) -> Tensor:
    """A replacement of the activation's kind.

    Raises:
        ArgumentError: it is of another.
    """
    if not isinstance(new, Tensor) or _kind(new) != _kind(value):
        given = _kind(new) if isinstance(new, Tensor) else type(new).__name__
        raise ArgumentError("replace", {name: given}, f"must be a tensor of the activation's kind, {_kind(value)}")
    return new


def _kind(value: Tensor) -> str:
    return f"{value.dtype} {tuple(value.shape)} on {value.device}"


def _of_tokens(x: Tensor, point: Point, lengths: Mapping[str, Int[Tensor, " batch"]]) -> Tensor:
    """A copy of an activation with zeros at padding; for weights, at padded queries and keys."""
    x = x.clone()
    for dim, size in enumerate(point.shape):
        x = without_padding(x, lengths[str(size)], dim) if size in lengths else x
    return x


def without_padding(x: Float[Tensor, "batch ..."], lengths: Int[Tensor, " batch"], dim: int = 1) -> Tensor:
    """A tensor with zeros at padding, given the dimension of the tokens."""
    is_padding = torch.arange(x.shape[dim], device=x.device) >= lengths.unsqueeze(1)
    return x.masked_fill(is_padding.view(len(x), *(1,) * (dim - 1), -1, *(1,) * (x.ndim - dim - 1)), 0.0)


def lengths_of(batch: Batch) -> dict[str, Int[Tensor, " batch"]]:
    """The number of tokens of each row without padding, for "seq" and, if there is a source, for "source_seq"."""
    if "source" in batch:
        return {"source_seq": batch["source_lengths"], "seq": (batch["targets"] != IGNORED).sum(dim=1)}
    return {"seq": batch["lengths"]}
