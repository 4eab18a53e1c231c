"""What is examined: attentions, masks, number formats, and the sizes they are tried at."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tinyformer.nn import (
    ALiBi,
    Attention,
    AttentionMask,
    BaseAttention,
    DifferentialAttention,
    LatentAttention,
    RotaryPosition,
    ShawPosition,
    T5Position,
)

NUM_HEADS = 4
DROPOUT = 0.1

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    """The sizes of a batch."""

    seq: int
    head_dim: int
    batch: int

    @property
    def d_model(self) -> int:
        """Of a model whose heads share its width."""
        return NUM_HEADS * self.head_dim


EXACT_SHAPE, TIMED_SHAPE, FULL_SHAPE = Shape(64, 32, 2), Shape(256, 32, 4), Shape(1024, 64, 2)
"""Errors show at any length; speed is measured where the matrices are large enough to matter; `--full` does both."""


def _lengths(rows: int, seq: int, device: torch.device) -> torch.Tensor:
    """Real keys of each row: two thirds, and none in the last row."""
    return torch.tensor([2 * seq // 3] * (rows - 1) + [0], device=device)


def _documents(rows: int, seq: int, device: torch.device) -> torch.Tensor:
    """Three or four documents a row, whose borders are elsewhere in each."""
    shifts = torch.arange(rows, device=device).unsqueeze(1) * seq // 7
    return (torch.arange(seq, device=device) + shifts) * 3 // seq


MASKS: dict[str, Callable[[int, int, torch.device], AttentionMask]] = {
    "full": lambda rows, seq, device: AttentionMask(),
    "causal": lambda rows, seq, device: AttentionMask(causal=True),
    "padded": lambda rows, seq, device: AttentionMask(lengths=_lengths(rows, seq, device)),
    "causal+padded": lambda rows, seq, device: AttentionMask(causal=True, lengths=_lengths(rows, seq, device)),
    "documents": lambda rows, seq, device: AttentionMask(causal=True, documents=_documents(rows, seq, device)),
}
"""From a batch's rows and keys to its mask. Documents are packed as language models train on them, causal."""


@dataclass(frozen=True)
class Variant:
    """An attention to examine.

    Args:
        name: in the report.
        make: its class.
        options: of the class, besides its sizes.
        crosses: whether it attends to another sequence, half as long again.
        masks: of `MASKS`, those that it is examined with.
        max_seq: the longest sequence that it is tried at, where memory sets a bound.
    """

    name: str
    make: Callable[..., BaseAttention] = Attention
    options: Mapping[str, Any] = field(default_factory=dict)
    crosses: bool = False
    masks: tuple[str, ...] = tuple(MASKS)
    max_seq: int | None = None

    def shape(self, shape: Shape) -> Shape:
        """A shape that this attention can be tried at."""
        return replace(shape, seq=min(shape.seq, self.max_seq or shape.seq))

    def module(self, shape: Shape) -> BaseAttention:
        """A random attention; none of its parameters at a special value such as 0 or 1."""
        torch.manual_seed(0)
        module = self.make(shape.d_model, NUM_HEADS, **self.options)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        return module


def _attention(name: str, **options: Any) -> Variant:
    return Variant(name, options=options)


VARIANTS = {
    variant.name: variant
    for variant in (
        _attention("mha"),
        _attention("gqa", num_kv_heads=2),
        _attention("mqa", num_kv_heads=1),
        Variant("mla", LatentAttention, {"position": functools.partial(RotaryPosition, max_seq_len=FULL_SHAPE.seq)}),
        Variant("differential", DifferentialAttention),
        Variant("cross", crosses=True, masks=("full", "padded")),
        _attention("dot", score="dot"),
        _attention("general", score="general"),
        Variant("additive", options={"score": "additive"}, max_seq=128),  # it holds seq² head_dim numbers a head
        _attention("rotary", position=functools.partial(RotaryPosition, max_seq_len=FULL_SHAPE.seq)),
        _attention("alibi", position=functools.partial(ALiBi, num_heads=NUM_HEADS)),
        _attention("t5", position=functools.partial(T5Position, num_heads=NUM_HEADS)),
        _attention("relative", position=ShawPosition),
        _attention("relative_keys", position=functools.partial(ShawPosition, values=False)),
        _attention("window", window=16),
        _attention("local_gaussian", window=16, local_gaussian=True),
        _attention("softcap", softcap=1.0),
        _attention("sink", sink=True),
        _attention("gate", gate=True),
        _attention("qk_norm", qk_norm=True),
        _attention("dropout", dropout=DROPOUT),
    )
}
