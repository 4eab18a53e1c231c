"""Ablation of the heads of a trained model, in all that it computes inside a block."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeAlias, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tinyformer.analysis.ablation import MODES, ablated
from tinyformer.analysis.capture import running_hooks
from tinyformer.batch import Batch
from tinyformer.errors import ArgumentError, require_choice
from tinyformer.inspection.forward import lengths_of
from tinyformer.nn import Network
from tinyformer.nn.heads import KINDS, not_a_head, plain_address
from tinyformer.tasks import Task

Head: TypeAlias = Sequence[int | str]
"""The address of a head: (layer, head), or (kind, layer, head) in an encoder–decoder."""


@contextmanager
def ablated_heads(
    network: Network, task: Task, heads: Sequence[Head], mode: str, batch: Batch | None
) -> Iterator[None]:
    """Ablate heads inside the block.

    Args:
        network: the model.
        task: its task.
        heads: their addresses.
        mode: see `Model.ablated`.
        batch: the texts from which replacements are computed; required unless the mode is "zero".

    Raises:
        ArgumentError: there is no such head or mode, or no batch.
    """
    require_choice("mode", mode, MODES)
    layers, by_layer = network.attentions(), _by_layer(network, heads)
    if mode != "zero" and batch is None:
        reason = f"must be given for mode={mode!r}, whose replacements are computed from texts"
        raise ArgumentError("texts", None, reason, {"texts": ["A text", "and another"]})
    replacements: dict[int, Callable[[Tensor], Tensor] | None] = dict.fromkeys(by_layer)
    if mode != "zero":
        outputs = _outputs_by_head(network, task, cast(Batch, batch), list(by_layer))
        replacements = {index: _REPLACEMENTS[mode](of_layer) for index, of_layer in outputs.items()}
    with ExitStack() as blocks:
        blocks.enter_context(running_hooks(network))  # or each set of heads would be compiled
        for index, of_layer in by_layer.items():
            blocks.enter_context(ablated(layers[index], of_layer, replacements[index]))
        yield


def _by_layer(network: Network, heads: Sequence[Head]) -> dict[int, list[int]]:
    """The indices of heads within their layers, by the index of the layer in `Network.attentions`."""
    layers, addresses = network.attentions(), network.layer_addresses()
    found: dict[int, list[int]] = {}
    if not isinstance(heads, Sequence):
        raise ArgumentError("heads", heads, "must be a list of heads", {"heads": [(*addresses[0], 0)]})
    for entry in heads:
        head = plain_address(entry if isinstance(entry, Sequence) else [entry])
        *address, number = head or (None,)
        is_known = all(type(part) in (int, str) for part in head) and tuple(address) in addresses
        index = addresses.index(tuple(address)) if is_known else None
        if index is None or number not in layers[index].head_map.ids:
            kinds = [kind for kind in KINDS if (kind, 0) in addresses]
            kind = next((kind for kind in kinds if kind in head), kinds[0]) if kinds else None
            of_kind = [layer for own, layer in zip(addresses, layers, strict=True) if kind in (None, own[0])]
            raise not_a_head("heads", list(head), len(of_kind), of_kind[-1].num_heads, kind)
        found.setdefault(index, []).append(layers[index].head_map.ids.index(cast(int, number)))
    return found


def _outputs_by_head(
    network: Network, task: Task, batch: Batch, indices: Sequence[int]
) -> dict[int, Float[Tensor, "tokens heads dim"]]:
    """The outputs of the heads of some layers for each token of a batch, without its padding.

    A head that is already ablated has its own outputs, as if it were not.
    """
    layers, addresses, lengths = network.attentions(), network.layer_addresses(), lengths_of(batch)
    found: dict[int, Tensor] = {}

    def record(index: int, gate: nn.Module, args: tuple[Float[Tensor, "batch heads seq dim"]]) -> None:
        outputs = args[0].transpose(1, 2)
        place = torch.arange(outputs.shape[1], device=outputs.device)
        seq = "source_seq" if addresses[index][0] == "encoder" else "seq"
        found[index] = outputs[place < lengths[seq].unsqueeze(1)]

    hooks = [layers[index].head_gate.register_forward_pre_hook(partial(record, index)) for index in indices]
    try:
        with running_hooks(network), torch.no_grad():
            task.forward(network, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _mean(outputs: Float[Tensor, "tokens heads dim"]) -> Callable[[Tensor], Tensor]:
    mean = outputs.float().mean(dim=0).unsqueeze(1)
    return lambda heads: mean.to(heads.dtype)


def _resample(outputs: Float[Tensor, "tokens heads dim"]) -> Callable[[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)

    def drawn(heads: Float[Tensor, "batch heads seq dim"]) -> Float[Tensor, "batch heads seq dim"]:
        # The same draws for every row, or those of a text would depend on the lengths of the texts before it.
        tokens = torch.randint(len(outputs), (heads.shape[2],), generator=generator)
        return outputs[tokens.to(outputs.device)].transpose(0, 1).expand_as(heads)

    return drawn


_REPLACEMENTS = {"mean": _mean, "resample": _resample}
"""By mode, makes the replacement of the outputs of a layer's heads from their outputs on some texts."""
