"""Points, the named activations of a network, and a forward pass that captures or replaces some of them.

`first_non_finite` finds the first NaN or infinite value of a training step.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tinyformer.data.batches.windows import IGNORED, Batch
from tinyformer.errors import ArgumentError
from tinyformer.measures.capture import running_hooks
from tinyformer.nn import AttentionInputs, BaseAttention, Block, ClassReadout, Encoder, Network, StateReadout
from tinyformer.nn.maps import TOLERANCES, NoMapsError, is_own
from tinyformer.nn.textbook import TextbookAttention

Shape: TypeAlias = tuple[int | str, ...]
"""The sizes of a tensor; dimensions of variable size have a name: "batch", "seq" or "source_seq"."""

Lengths: TypeAlias = Mapping[str, Int[Tensor, " batch"]]
"""The number of tokens of each row without padding, for "seq" and, in an encoder–decoder, "source_seq"."""

Replacement: TypeAlias = Tensor | Callable[[Tensor], Tensor]
"""The replacement of an activation: a tensor, or a function from the activation to a tensor."""


class Points(dict[str, Shape]):
    """The shape of each point of a model by name, in the order of computation; it prints as a table."""

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{name:{width}}  {' '.join(map(str, shape))}" for name, shape in self.items())


def _output(inputs: Any, output: Any) -> Tensor:
    """The output of a module, which side inputs of the next layer may follow."""
    return output[0] if isinstance(output, tuple) else output


def _with_output(inputs: Any, output: Any, value: Tensor) -> Any:
    return (value, *output[1:]) if isinstance(output, tuple) else value


@dataclass(frozen=True)
class Point:
    """An activation of a network, which a module computes.

    `get` extracts the activation from the module's inputs and output; `put` returns the output with another activation
    in its place. If the activation is one term of the output, `put` adds the change of this term to the output.
    """

    module: nn.Module
    shape: Shape
    get: Callable[[Any, Any], Tensor] = _output
    put: Callable[[Any, Any, Tensor], Any] = _with_output
    is_input: bool = False  # whether it is the module's input, which `get` and `put` then take as `output`


def points_of(network: Network) -> dict[str, Point]:
    """The points of a network by name, in order of computation; in an encoder–decoder, the stack's name comes first."""
    points: dict[str, Point] = {}
    stacks = network.stacks()
    sides = [("", "seq")] if len(stacks) == 1 else [("encoder.", "source_seq"), ("decoder.", "seq")]
    for stack, (prefix, seq) in zip(stacks, sides, strict=True):
        points |= {prefix + name: point for name, point in _of_stack(stack, seq)}
    readout: Any = network.readout
    batch: Shape = ("batch",) if isinstance(readout, ClassReadout) else ("batch", "seq")
    scores = readout.proj.out_features if hasattr(readout, "proj") else "scores"
    scores = stacks[-1].token_embedding.embedding_dim if isinstance(readout, StateReadout) else scores
    points["logits"] = Point(readout, (*batch, scores))
    return points


def _of_stack(stack: Encoder, seq: str) -> Iterator[tuple[str, Point]]:
    stream: Shape = ("batch", seq, stack.token_embedding.embedding_dim)
    yield from _of_embedding(stack, stream)
    yield "embedding", Point(stack.dropout, stream)
    for index, layer in enumerate(stack.layers):
        modules = dict(layer.named_children())
        for attention, keys_seq, mid in (("attention", seq, "mid"), ("cross_attention", "source_seq", "cross_mid")):
            module = modules.get(attention)
            if isinstance(module, BaseAttention) and not isinstance(module, TextbookAttention):
                for name, point in _of_attention(module, seq, keys_seq):
                    yield f"layers.{index}.{attention}.{name}", point
            if attention in modules:
                yield from _of_output(layer, index, attention, stream)
            if f"residual_{mid}_hook" in modules:
                yield f"layers.{index}.residual_{mid}", Point(modules[f"residual_{mid}_hook"], stream)
        if feed_forward := modules.get("feed_forward"):
            yield f"layers.{index}.feed_forward.input", Point(feed_forward, stream, is_input=True)
            if isinstance(down := getattr(feed_forward, "down_proj", None), nn.Linear):
                neurons: Shape = ("batch", seq, down.in_features)
                yield f"layers.{index}.feed_forward.neurons", Point(down, neurons, is_input=True)
            yield from _of_output(layer, index, "feed_forward", stream)
        yield f"layers.{index}.residual_post", Point(layer, stream)
    yield "final_norm", Point(stack.final_norm, stream)


def _of_output(layer: nn.Module, index: int, sublayer: str, stream: Shape) -> Iterator[tuple[str, Point]]:
    """The output of a sublayer, and what the block's norm of it gives, if there is one."""
    yield f"layers.{index}.{sublayer}.output", Point(getattr(layer, sublayer), stream)
    if isinstance(layer, Block) and "output" in layer.norm_names:
        yield f"layers.{index}.{sublayer}.output_norm", Point(layer.norms(sublayer).output, stream)


def _of_embedding(stack: Encoder, stream: Shape) -> Iterator[tuple[str, Point]]:
    """The points of token and position embeddings; a position embedding is the output of `stack.position` for zeros."""
    position: Any = stack.position
    if position is None:
        yield "token_embedding", Point(stack.embedding_norm, stream, is_input=True)
        return

    def of_position(inputs: Any, output: Tensor) -> Tensor:
        tokens, *others = inputs
        return position.forward(torch.zeros_like(tokens), *others)

    yield "token_embedding", _term(position, stream, lambda inputs, output: output - of_position(inputs, output))
    yield "position_embedding", _term(position, stream, of_position)


def _term(module: nn.Module, shape: Shape, get: Callable[[Any, Any], Tensor]) -> Point:
    """A point whose value is a term of the output; a value with an axis of heads is first summed over the heads."""

    def put(inputs: Any, output: Tensor, value: Tensor) -> Tensor:
        difference = value - get(inputs, output)
        return output + (difference.sum(dim=1) if difference.ndim > output.ndim else difference)

    return Point(module, shape, get, put)


def _of_attention(layer: BaseAttention, seq: str, keys_seq: str) -> Iterator[tuple[str, Point]]:
    maps, keys = layer.num_heads * layer.num_softmaxes, layer.num_kv_heads * layer.num_softmaxes

    def projected(part: str, shape: Shape) -> Point:
        def put(inputs: Any, call: AttentionInputs, value: Tensor) -> AttentionInputs:
            return call._replace(qkv=call.qkv._replace(**{part: value}))

        return Point(layer.inputs_hook, shape, lambda inputs, call: getattr(call.qkv, part), put)

    def scores(inputs: Any, call: AttentionInputs) -> Tensor:
        return layer.maps_of_call(call).logits

    def weights(inputs: Any, call: AttentionInputs) -> Tensor:
        return layer.maps_of_call(call).weights if call.weights is None else F.pad(call.weights, (call.num_behind, 0))

    def put_weights(inputs: Any, call: AttentionInputs, value: Tensor) -> AttentionInputs:
        return call._replace(weights=value[..., call.num_behind :])

    def put_scores(inputs: Any, call: AttentionInputs, value: Tensor) -> AttentionInputs:
        if is_own(layer):
            maps = layer.maps_of_call(call)
            error = layer.weights_of_scores(call, maps.logits) - maps.weights
            if error.abs().max() > TOLERANCES.get(error.dtype, 0.03):
                raise NoMapsError(layer, "has weights that are not the softmax of its scores")
        return call._replace(weights=layer.weights_of_scores(call, value[..., call.num_behind :]))

    def added(inputs: Any, output: Tensor) -> Tensor:
        heads = inputs[0].unflatten(-1, (layer.num_heads, -1))
        return torch.einsum("bshv,dhv->bhsd", heads, layer.o_proj.weight.to(heads.dtype).unflatten(1, heads.shape[-2:]))

    yield "queries", projected("q", ("batch", maps, seq, layer.head_dim))
    yield "keys", projected("k", ("batch", keys, keys_seq, layer.head_dim))
    yield "values", projected("v", ("batch", layer.num_kv_heads, keys_seq, layer.v_head_dim))
    shape: Shape = ("batch", maps, seq, keys_seq)
    yield "scores", Point(layer.inputs_hook, shape, scores, put_scores)
    yield "weights", Point(layer.inputs_hook, shape, weights, put_weights)
    yield "output_by_head", Point(layer.head_gate, ("batch", layer.num_heads, seq, layer.v_head_dim))
    by_head: Shape = ("batch", layer.num_heads, seq, layer.o_proj.out_features)
    yield "added_by_head", _term(layer.o_proj, by_head, added)


def matching(points: Mapping[str, Any], patterns: Iterable[str], argument: str) -> dict[str, str]:
    """The points that match the patterns of an argument, each with its pattern; `*` matches any characters."""
    matched: dict[str, str] = {}
    for pattern in patterns:
        names = [name for name in points if fnmatchcase(name, pattern)]
        if not names:
            near = difflib.get_close_matches(pattern, points, cutoff=0.5) or list(points)[-3:]
            raise ArgumentError(argument, pattern, f"matches no point; there are {', '.join(near)} and others")
        if argument == "replace" and (twice := [name for name in names if name in matched]):
            raise ArgumentError(argument, pattern, f"matches {twice[0]}, which {matched[twice[0]]!r} replaces already")
        matched |= dict.fromkeys(names, pattern)
    return matched


class ForwardPass(NamedTuple):
    """The results of a forward pass; all values at padding are zero."""

    logits: Float[Tensor, "batch *seq scores"]  # as `Model.logits` returns them
    activations: dict[str, Tensor]  # by the names of their points, after any replacement


def forward_pass(
    network: Network, forward: Callable[[], Tensor], lengths: Lengths, *others: Any, **options: Any
) -> ForwardPass:
    """Call `forward`, which runs the network and returns the logits, in an `intervention` with the other arguments."""
    with intervention(network, lengths, *others, **options) as passes:
        logits = _of_tokens(forward(), points_of(network)["logits"], lengths)
    return ForwardPass(logits, {name: of_passes[-1] for name, of_passes in passes.items()})


@contextmanager
def intervention(
    network: Network,
    lengths: Lengths,
    capture: str | Sequence[str] = (),
    replace: Mapping[str, Replacement] | None = None,
    gradients: bool = False,
) -> Iterator[dict[str, list[Tensor]]]:
    """A context that captures and replaces activations; it yields, by name, the captured tensors of each forward pass.

    Later activations are computed from the replaced activations; a compiled network runs uncompiled. In the names of
    points, `*` matches any characters. With `gradients`, or a replacement that requires a gradient, the logits are
    computed from the captured tensors themselves, so that autograd can differentiate with respect to each tensor.
    """
    points, replace = points_of(network), {} if replace is None else replace
    capture = [capture] if isinstance(capture, str) else capture
    replaced = {name: replace[pattern] for name, pattern in matching(points, replace, "replace").items()}
    captured = matching(points, capture, "capture")
    gradients = gradients or any(isinstance(other, Tensor) and other.requires_grad for other in replaced.values())
    is_replacing = False

    def hook_on(name: str, point: Point) -> RemovableHandle:
        def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
            nonlocal is_replacing
            if is_replacing:  # in a forward pass that a replacing function runs
                return output
            seen.add(name)
            try:
                value = point.get(inputs, output)
                if name in replaced:
                    is_replacing = True
                    value = _replacement(name, value, replaced[name], point, lengths)
                    is_replacing = False
                else:
                    value = _of_tokens(value, point, lengths)
                if gradients:
                    value.requires_grad_()
                    output = point.put(inputs, output, _of_tokens(value, point, lengths))  # no gradient at padding
                elif name in replaced:
                    output = point.put(inputs, output, value)
                if name in captured:
                    passes.setdefault(name, []).append(value)
            except NoMapsError:  # a pattern may match the weights of a user-defined class that has none
                if name in replaced or name in capture:
                    raise
            return output

        def input_hook(module: nn.Module, inputs: Any) -> Any:
            return (hook(module, inputs, inputs[0]), *inputs[1:])

        if point.is_input:
            return point.module.register_forward_pre_hook(input_hook)
        return point.module.register_forward_hook(hook)

    # Hooks of a module run in the order of their points, so that weights are computed from replaced queries.
    watched = {name: point for name, point in points.items() if name in replaced or name in captured}
    seen, passes = set[str](), dict[str, list[Tensor]]()
    hooks = [hook_on(name, point) for name, point in watched.items()]
    hooks.append(network.encoder.register_forward_hook(lambda *_: seen.add("")))  # in every pass
    with running_hooks(network, hooks), torch.set_grad_enabled(gradients):
        yield passes
    for name in [name for name in watched if seen and name not in seen]:
        argument = "replace" if name in replaced else "capture"
        raise ArgumentError(argument, name, "is not computed in the forward pass of this network")


def _replacement(name: str, value: Tensor, replacement: Replacement, point: Point, lengths: Lengths) -> Tensor:
    """The replacement of an activation, with zeros at padding.

    If the replacement is a function, it is called once for each length, with all rows of this length, unpadded.
    """
    if isinstance(replacement, Tensor):
        return _of_tokens(_fitting(name, replacement, value), point, lengths)
    new, value = torch.zeros_like(value), _of_tokens(value, point, lengths)  # equal layouts give equal bits
    sizes = {dim: lengths[str(size)] for dim, size in enumerate(point.shape) if size in lengths}
    if not sizes:
        return _fitting(name, replacement(value), value).clone()
    of_rows = torch.stack([*sizes.values()], dim=1)
    for row in of_rows.unique(dim=0):
        part: list[Any] = [(of_rows == row).all(dim=1), *[slice(None)] * (value.ndim - 1)]
        for dim, length in zip(sizes, row.tolist(), strict=True):
            part[dim] = slice(length)
        given = value[tuple(part)].contiguous()
        new[tuple(part)] = _fitting(name, replacement(given), given)
    return new


def _fitting(name: str, new: Any, value: Tensor) -> Tensor:
    """Return a replacement, or raise an `ArgumentError` if its dtype, shape or device is not the activation's."""
    if not isinstance(new, Tensor) or _kind(new) != _kind(value):
        given = _kind(new) if isinstance(new, Tensor) else type(new).__name__
        raise ArgumentError("replace", {name: given}, f"must be a tensor like the activation, {_kind(value)}")
    return new


def _kind(value: Tensor) -> str:
    return f"{value.dtype} {tuple(value.shape)} on {value.device}"


def _of_tokens(x: Tensor, point: Point, lengths: Lengths) -> Tensor:
    """A copy of an activation with zeros at padding; in attention maps, padded queries and padded keys are zero."""
    x = x.clone()
    for dim, size in enumerate(point.shape):
        x = without_padding(x, lengths[str(size)], dim) if size in lengths else x
    return x


def without_padding(x: Float[Tensor, "batch ..."], lengths: Int[Tensor, " batch"], dim: int = 1) -> Tensor:
    """A copy of a tensor with zeros at padding; `dim` is the dimension of the tokens."""
    is_padding = torch.arange(x.shape[dim], device=x.device) >= lengths.unsqueeze(1)
    return x.masked_fill(is_padding.view(len(x), *(1,) * (dim - 1), -1, *(1,) * (x.ndim - dim - 1)), 0.0)


def lengths_of(batch: Batch) -> Lengths:
    """The number of tokens of each row of a batch, without padding."""
    if "source" in batch:
        return {"source_seq": batch["source_lengths"], "seq": (batch["targets"] != IGNORED).sum(dim=1)}
    return {"seq": batch["lengths"]}


def first_non_finite(network: Network, compute_loss: Callable[[], Tensor]) -> str | None:
    """The first NaN or infinite value of a training step, such as "the output of encoder.layers.3.attention".

    Weights are checked first, then the outputs of all modules in the order of computation, the loss, the gradients of
    the outputs in the order of the backward pass, and the gradients of the weights. `compute_loss` runs the step again,
    uncompiled; the `grad` of the weights does not change. The result is None if all values are finite.
    """
    parameters = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    for name, parameter in network.named_parameters():
        if not parameter.isfinite().all():
            return f"the weight {name}"
    places: list[str] = []

    def record(value: Tensor, place: str) -> None:
        if not places and not value.isfinite().all():
            places.append(place)

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for value in output if isinstance(output, tuple) else (output,):
                if isinstance(value, Tensor) and value.is_floating_point():
                    record(value, f"the output of {name}")
                    if value.requires_grad:
                        value.register_hook(lambda grad: record(grad, f"the gradient of the output of {name}"))

        return hook

    hooks = [module.register_forward_hook(watch(name)) for name, module in network.named_modules() if name]
    with running_hooks(network, hooks), torch.enable_grad():
        loss = compute_loss()
        record(loss, "the loss")
        if not places:
            # `backward` would add to `grad`, and run the hooks of DistributedDataParallel.
            gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            for name, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    record(gradient, f"the gradient of {name}")
    return places[0] if places else None
