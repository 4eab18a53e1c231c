"""The attention variants that doctor, tests and benchmarks share, as plain data, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NUM_HEADS = 4
MAX_SEQ = 1024  # the longest sequence that a rotary table of these variants covers

BACKEND_NAMES = ("eager", "sdpa", "flash", "flex", "fa3", "fa4")
DTYPE_NAMES = ("fp32", "bf16")
MASK_NAMES = ("full", "causal", "padded", "causal+padded", "documents")
CAUSAL_NAMES = ("causal", "causal+padded", "documents")


@dataclass(frozen=True)
class Variant:
    """An attention variant."""

    name: str
    attention: str = "Attention"  # the class in `tinyformer.nn`
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments of the class, without its sizes
    overrides: tuple[str, ...] = ()  # the config overrides that choose it
    cross: bool = False  # whether it is tested as cross-attention, to a sequence 1.5 times as long
    masks: tuple[str, ...] = MASK_NAMES  # the names of the masks that it is tested with
    max_seq: int | None = None  # the longest sequence that it is tested with, if memory limits it


def _position(name: str, override: str, kind: str, *more: str, **arguments: Any) -> Variant:
    return Variant(name, options={"position": (kind, arguments)}, overrides=(f"position={override}", *more))


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("mha"),
        Variant("gqa", options={"num_kv_heads": 2}, overrides=("attention=gqa",)),
        Variant("mqa", options={"num_kv_heads": 1}, overrides=("attention=mqa",)),
        Variant("mla", "LatentAttention", overrides=("attention=mla",)),
        Variant("differential", "DifferentialAttention", overrides=("attention=differential",)),
        Variant("cross", cross=True, masks=("full", "padded")),
        Variant("dot", options={"score": "dot"}, overrides=("attention.score=dot",)),
        Variant("general", options={"score": "general"}, overrides=("attention.score=general",)),
        # Additive scores hold seq² x head_dim numbers per head.
        Variant("additive", options={"score": "additive"}, overrides=("attention.score=additive",), max_seq=128),
        Variant("v_head_dim", options={"v_head_dim": 24}, overrides=("attention.v_head_dim=24",)),
        _position("rotary", "rotary", "RotaryPosition", max_seq_len=MAX_SEQ),
        _position(
            "rotary_scaled",
            "rotary",
            "RotaryPosition",
            *("position.relative.fraction=0.5", "position.relative.scaling=yarn", "position.relative.factor=4"),
            **{"max_seq_len": MAX_SEQ, "fraction": 0.5, "scaling": "yarn", "factor": 4.0},
        ),
        _position("alibi", "alibi", "ALiBi", num_heads=NUM_HEADS),
        _position("t5", "t5", "T5Position", num_heads=NUM_HEADS),
        _position("relative", "relative", "ShawPosition"),
        _position("relative_keys", "relative", "ShawPosition", "position.relative.values=false", values=False),
        Variant("window", options={"window": 16}, overrides=("attention.window=16",)),
        Variant(
            "local_gaussian",
            options={"window": 16, "local_gaussian": True},
            overrides=("attention.window=16", "attention.local_gaussian=true"),
        ),
        Variant("softcap", options={"softcap": 1.0}, overrides=("attention.softcap=5.0",)),
        Variant("ssmax", options={"ssmax": True}, overrides=("attention.ssmax=true",)),
        Variant("sink", options={"sink": True}, overrides=("attention.sink=true",)),
        Variant("softmax1", options={"sink": "zero"}, overrides=("attention.sink=zero",)),
        Variant("gate", options={"gate": True}, overrides=("attention.gate=true",)),
        Variant("elementwise", options={"gate": "elementwise"}, overrides=("attention.gate=elementwise",)),
        Variant("forget", options={"forget": True}, overrides=("attention.forget=true",), masks=CAUSAL_NAMES),
        Variant("exclusive", options={"exclusive": True}, overrides=("attention.exclusive=true",)),
        Variant("convolution", options={"convolution": "qkv"}, overrides=("attention.convolution=qkv",)),
        Variant("shifted_keys", options={"shifted_keys": True}, overrides=("attention.shifted_keys=true",)),
        Variant("qk_norm", options={"qk_norm": True}, overrides=("attention.qk_norm=true",)),
        Variant("projection_norm", options={"qk_norm": "projection"}, overrides=("attention.qk_norm=projection",)),
        Variant("bias", options={"bias": "qkv"}, overrides=("attention.bias=qkv",)),
        Variant("dropout", options={"dropout": 0.1}, overrides=("attention.dropout=0.1",)),
    )
}
"""The variants that the doctor tests, each with one feature; multi-head attention unless the name says otherwise."""
