"""The points are those of TransformerLens, on the same weights: captured and replaced."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from interop.models import BERT, GPT2, LLAMA, T5, VOCAB, checkpoint_of, theirs, tokens
from torch import Tensor

import tinyformer

pytestmark = pytest.mark.slow  # the library takes seconds to import

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "llama": ("Llama", LLAMA),  # rotary positions, grouped queries, RMSNorm
    "bert": ("Bert", BERT),  # post-norm
    "t5": ("T5", T5),  # an encoder–decoder
}
HOOKS = {
    "embedding": "blocks.0.hook_in",
    "attention.queries": "attn.hook_q",
    "attention.keys": "attn.hook_k",
    "attention.values": "attn.hook_v",
    "attention.weights": "attn.hook_pattern",
    "attention.output_by_head": "attn.hook_z",
    "residual_mid": "hook_resid_mid",
    "residual_post": "hook_out",
    "final_norm": "ln_final.hook_out",
    "logits": "unembed.hook_out",
}
ROTATED = {"attention.queries": "attn.hook_rot_q", "attention.keys": "attn.hook_rot_k"}
"""Queries and keys after rotary positions."""
POST_NORM = {"residual_mid": "ln1.hook_out"}
"""The residual stream as the feed-forward network reads it; `hook_resid_mid` is before the norm."""
CROSS = {name.replace("attention", "cross_attention"): hook for name, hook in HOOKS.items() if "attention" in name}
CROSS = {name: hook.replace("attn", "cross_attn") for name, hook in CROSS.items()} | {
    "residual_cross_mid": "hook_resid_mid2"
}
IDS, TARGETS = tokens(), tokens().flip(0)[:, :13]


def hook_of(point: str, family: str) -> str | None:
    """The name of a point in the library; None where it has none."""
    stack, part = re.fullmatch(r"((?:encoder|decoder)\.)?(.*)", point).groups()
    layer, name = re.fullmatch(r"(layers\.\d+\.)?(.*)", part).groups()
    names = HOOKS | CROSS | {"llama": ROTATED, "bert": POST_NORM}.get(family, {})
    hook = f"{(layer or '').replace('layers', 'blocks')}{names[name]}"
    if family == "bert" and name == "final_norm":  # their name of the norm in the readout
        return None
    if (family == "t5" and name == "attention.weights") or name == "cross_attention.weights":
        return None
    if stack is not None:
        hook = f"{stack[:-1]}_{hook}"
        hook = hook.replace(".attn.", ".self_attn.") if stack == "decoder." else hook
    return hook


def theirs_of(point: str, value: Tensor) -> Tensor:
    """An activation of ours in the layout of the library, and the other way round: heads are behind positions."""
    return value.transpose(1, 2) if re.search(r"queries|keys|values|output_by_head", point) else value


def hook_to_replace(hook: str, other: Tensor, cache: Any) -> tuple[str, Tensor]:
    """The hook and the value that make an activation the other one.

    Their `hook_resid_mid` is the input of the norm alone, so that the sublayer before it has to make the difference.
    """
    block, _, name = hook.rpartition(".")
    before, update = {
        "hook_resid_mid": ("hook_in", "self_attn" if "decoder" in block else "attn"),
        "hook_resid_mid2": ("hook_resid_mid", "cross_attn"),
    }.get(name, (None, None))
    return (hook, other) if before is None else (f"{block}.{update}.hook_out", other - cache[f"{block}.{before}"])


class Sides:
    """Both models of a family."""

    def __init__(self, family: str, folder: Path) -> None:
        from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

        name, fields = FAMILIES[family]
        model = theirs(name, **fields, attn_implementation="eager")
        model.save_pretrained(folder / "model")
        checkpoint_of(folder / "model", folder / "out.ckpt")
        self.ours = tinyformer.load(folder / "out.ckpt", backend="sdpa" if family != "t5" else "eager")
        self.bridge = build_bridge_from_module(model, type(model).__name__, hf_config=model.config).eval()
        self.arguments: dict[str, Any] = {}
        self.run = functools.partial(self.ours.run, IDS)
        if family == "t5":
            self.run = functools.partial(self.ours.run, IDS, TARGETS.tolist())
            start = torch.zeros(2, 1, dtype=torch.long)
            self.arguments = {"decoder_input": torch.cat([start, TARGETS], dim=1)}


def assert_same(ours: Tensor, expected: Tensor, point: str) -> None:
    assert ours.shape == expected.shape, point
    assert (ours - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max())), point


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_and_replaced_points_are_those_of_the_library(family: str, tmp_path: Path) -> None:
    sides = Sides(family, tmp_path)
    hooks = {point: hook for point in sides.ours.points if (hook := hook_of(point, family))}
    assert len(hooks) >= len(sides.ours.points) - {"t5": 9}.get(family, 1)
    logits, activations = sides.run(capture="*")
    assert logits.shape[-1] == VOCAB
    with torch.no_grad():
        expected, cache = sides.bridge.run_with_cache(IDS, **sides.arguments)
    assert_same(logits, expected, "logits")
    generator = torch.Generator().manual_seed(3)
    for point, hook in hooks.items():
        found = activations[point]
        assert_same(found, theirs_of(point, cache[hook]), point)
        if family == "bert" and point.endswith("weights"):
            continue  # theirs are computed beside the forward pass
        other = found + torch.randn(found.shape, generator=generator)
        replaced = sides.run(replace={point: other}).logits
        name, value = hook_to_replace(hook, theirs_of(point, other).contiguous(), cache)
        with torch.no_grad():
            expected = sides.bridge.run_with_hooks(
                IDS, fwd_hooks=[(name, lambda _, hook, value=value: value)], **sides.arguments
            )
        assert_same(replaced, expected, point)
        assert (replaced - logits).abs().max() > 1e-3, point
