"""Ablation of the heads of a trained model, in everything that it computes inside a `with` statement."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tinyformer.analysis import AnalysisContext
from tinyformer.analysis.removal.ablation import MODES, Replacement, gated, outputs_by_head, resampled_positions
from tinyformer.errors import ArgumentError, require_choice
from tinyformer.measures.capture import running_hooks
from tinyformer.nn.cache import Cache
from tinyformer.tasks.user_texts import SOME_TEXTS

Head: TypeAlias = Sequence[int | str]
"""The address of a head: (layer, head), or (kind, layer, head) in an encoder–decoder."""


@contextmanager
def ablated_heads(context: AnalysisContext, heads: Sequence[Head], mode: str) -> Iterator[None]:
    """Ablate heads inside a `with` statement, see `Model.ablated`; replacements are computed from `context.batches`."""
    require_choice("mode", mode, MODES)
    network = context.network
    pairs = [network.find_head("heads", entry) for entry in heads]
    if mode != "zero" and not context.batches:
        reason = f"must be given for mode={mode!r}, whose replacements are computed from texts"
        raise ArgumentError("texts", None, reason, {"texts": SOME_TEXTS})
    replacement, hooks = _resampled(context) if mode == "resample" else (MODES[mode](context), [])
    # Hooks run uncompiled, or each set of heads would be compiled.
    with running_hooks(network, hooks), gated(network, pairs, replacement=replacement):
        yield


def _resampled(context: AnalysisContext) -> tuple[Replacement, list[RemovableHandle]]:
    """The replacement of heads' outputs by their outputs for one row of the context's batch, drawn with a fixed seed.

    Every row of a later batch gets the same replacement, so the results for a text do not depend on the other texts of
    the batch. In each forward pass, the returned hooks record the first token's position, the length of the cache.
    """
    (batch,) = context.batches
    row = int(torch.randint(len(batch["inputs"]), (), generator=torch.Generator().manual_seed(0)))
    outputs = [(outputs[row], is_token[row].sum()) for outputs, is_token in outputs_by_head(context, batch)]
    stacks, begins = context.network.stacks(), dict[nn.Module, int]()

    def begin(stack: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        caches = (given for given in (*args, *named.values()) if isinstance(given, Cache))
        begins[stack] = next((cache.length for cache in caches), 0)

    def resampled(batch: Any, layer: int, heads: Tensor) -> Tensor:
        first = begins[stacks[0 if context.kinds[layer] == "encoder" else -1]]
        of_row, length = outputs[layer]
        positions = resampled_positions(length.view(1), context.network.max_seq_len)[0]
        return of_row[:, positions[first : first + heads.shape[2]]].expand_as(heads)

    return resampled, [stack.register_forward_pre_hook(begin, with_kwargs=True) for stack in stacks]
