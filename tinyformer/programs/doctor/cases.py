"""Attention modules, masks and sizes of the doctor's cells."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tinyformer import nn
from tinyformer.nn import AttentionMask, BaseAttention
from tinyformer.programs.doctor.variants import DTYPE_NAMES, MASK_NAMES, MAX_SEQ, NUM_HEADS, Variant

DTYPES = dict(zip(DTYPE_NAMES, (torch.float32, torch.bfloat16), strict=True))


@dataclass(frozen=True)
class Shape:
    """The sizes of a batch: tokens of a row, dimensions of each of the `NUM_HEADS` heads, and rows."""

    seq: int
    head_dim: int
    batch: int

    @property
    def d_model(self) -> int:
        return NUM_HEADS * self.head_dim


EXACT_SHAPE, TIMED_SHAPE, FULL_SHAPE = Shape(64, 32, 2), Shape(256, 32, 2), Shape(MAX_SEQ, 64, 2)
"""Most errors show at any length; speed is measured where the matrices are large enough to matter. `--full` does both
at a length of several blocks of keys, between which a fused kernel rescales its sums."""


def _lengths(rows: int, seq: int, device: torch.device) -> torch.Tensor:
    """The number of keys that are not padding: two thirds of each row, none in the last row."""
    return torch.tensor([2 * seq // 3] * (rows - 1) + [0], device=device)


def _documents(rows: int, seq: int, device: torch.device) -> torch.Tensor:
    """Three or four documents per row, with different borders in each row."""
    shifts = torch.arange(rows, device=device).unsqueeze(1) * seq // 7
    return (torch.arange(seq, device=device) + shifts) * 3 // seq


MakeMask = Callable[[int, int, torch.device], AttentionMask]
"""Makes the mask of a batch from its number of rows, its number of keys and the device."""

MASKS: dict[str, MakeMask] = {
    "full": lambda rows, seq, device: AttentionMask(),
    "causal": lambda rows, seq, device: AttentionMask(causal=True),
    "padded": lambda rows, seq, device: AttentionMask(lengths=_lengths(rows, seq, device)),
    "causal+padded": lambda rows, seq, device: AttentionMask(causal=True, lengths=_lengths(rows, seq, device)),
    "documents": lambda rows, seq, device: AttentionMask(causal=True, documents=_documents(rows, seq, device)),
}
"""Documents have a causal mask, too, as in the training of language models."""
assert tuple(MASKS) == MASK_NAMES


def factory_of(variant: Variant) -> Callable[..., BaseAttention]:
    """A function that makes the attention module of a variant, called with `d_model` and `num_heads`."""
    options = dict(variant.options)
    if "position" in options:
        kind, arguments = options["position"]
        options["position"] = functools.partial(getattr(nn, kind), **arguments)
    return functools.partial(getattr(nn, variant.attention), **options)


def make_module(variant: Variant, shape: Shape) -> BaseAttention:
    """A random attention module, with all parameters away from special values such as 0 or 1."""
    torch.manual_seed(0)
    module = factory_of(variant)(shape.d_model, NUM_HEADS)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return module
