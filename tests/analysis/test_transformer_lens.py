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
    "token_embedding": "embed.hook_out",
    "position_embedding": "pos_embed.hook_out",
    "embedding": "blocks.0.hook_in",
    "attention.queries": "attn.hook_q",
    "attention.keys": "attn.hook_k",
    "attention.values": "attn.hook_v",
    "attention.scores": "attn.hook_attn_scores",
    "attention.weights": "attn.hook_pattern",
    "attention.output_by_head": "attn.hook_z",
    "attention.added_by_head": "attn.hook_result",
    "attention.output": "attn.hook_out",
    "residual_mid": "hook_resid_mid",
    "feed_forward.input": "mlp.hook_in",
    "feed_forward.neurons": "mlp.out.hook_in",
    "feed_forward.output": "mlp.out.hook_out",
    "residual_post": "hook_out",
    "final_norm": "ln_final.hook_out",
    "logits": "unembed.hook_out",
}
ROTATED = {"attention.queries": "attn.hook_rot_q", "attention.keys": "attn.hook_rot_k"}
"""Queries and keys after rotary positions."""
POST_NORM = {"residual_mid": "ln1.hook_out", "attention.output": "attn.o.hook_out"}
"""The residual stream as the feed-forward network reads it; `hook_resid_mid` is before the norm, `attn.hook_out` is
behind it."""
CROSS = {
    f"cross_{name}": hook.replace("attn", "cross_attn") for name, hook in HOOKS.items() if name.startswith("attention")
} | {"residual_cross_mid": "hook_resid_mid2"}
LACKING = {
    ("bert", "position_embedding"),  # ours holds the vector of the first segment, too
    ("bert", "final_norm"),
    ("bert", "attention.scores"),
    ("t5", "attention.weights"),
    ("t5", "attention.scores"),
}
LACKING |= {("t5", f"cross_attention.{name}") for name in ("weights", "scores", "added_by_head")}
LACKING |= {("t5", "token_embedding"), ("t5", "attention.added_by_head"), ("bert", "attention.added_by_head")}
LOWEST = torch.finfo(torch.float32).min
"""The score of a masked key there, where ours is -inf."""
IDS, TARGETS = tokens(), tokens().flip(0)[:, :13]


def hook_of(point: str, family: str) -> str | None:
    """The name of a point in the library; None where it has none."""
    stack, layer, name = re.fullmatch(r"(encoder\.|decoder\.)?(layers\.\d+\.)?(.*)", point).groups("")
    if (family, name) in LACKING:
        return None
    names = HOOKS | CROSS | {"llama": ROTATED, "bert": POST_NORM}.get(family, {})
    hook = f"{stack.replace('.', '_')}{layer.replace('layers', 'blocks')}{names[name]}"
    return hook.replace(".attn.", ".self_attn.") if stack == "decoder." else hook


def theirs_of(point: str, value: Tensor) -> Tensor:
    """An activation of ours in the layout of the library, and the other way round: heads are behind positions."""
    return value.transpose(1, 2) if re.search(r"queries|keys|values|by_head", point) else value


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


def both(family: str, folder: Path) -> tuple[tinyformer.Model, Any]:
    """The model of a family as ours and as theirs."""
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    name, fields = FAMILIES[family]
    model = theirs(name, **fields, attn_implementation="eager")
    model.save_pretrained(folder / "model")
    checkpoint_of(folder / "model", folder / "out.ckpt")
    ours = tinyformer.load(folder / "out.ckpt", backend="sdpa" if family != "t5" else "eager")
    bridge = build_bridge_from_module(model, type(model).__name__, hf_config=model.config).eval()
    if family in ("gpt2", "llama"):
        bridge.set_use_attn_result(True)
    return ours, bridge


def assert_same(ours: Tensor, expected: Tensor, point: str) -> None:
    assert ours.shape == expected.shape, point
    assert (ours - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max())), point


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_and_replaced_points_are_those_of_the_library(family: str, tmp_path: Path) -> None:
    ours, bridge = both(family, tmp_path)
    run, arguments = functools.partial(ours.run, IDS), {}
    if family == "t5":
        run = functools.partial(ours.run, IDS, TARGETS.tolist())
        arguments = {"decoder_input": torch.cat([torch.zeros(2, 1, dtype=torch.long), TARGETS], dim=1)}
    hooks = {point: hook for point in ours.points if (hook := hook_of(point, family))}
    assert len(hooks) >= len(ours.points) - {"t5": 25, "bert": 5}.get(family, 0)
    logits, activations = run(capture="*", gradients=True)
    assert logits.shape[-1] == VOCAB
    with torch.no_grad():
        expected, cache = bridge.run_with_cache(IDS, **arguments)
    assert_same(logits, expected, "logits")
    generator = torch.Generator().manual_seed(3)
    changes = {}
    for point, hook in hooks.items():
        expected = theirs_of(point, cache[hook]).expand_as(activations[point])
        assert_same(activations[point].detach().clamp(min=LOWEST), expected, point)
        if family == "bert" and point.endswith("weights"):
            continue  # computed beside the forward pass
        other = activations[point] + torch.randn(activations[point].shape, generator=generator)
        replaced = run(replace={point: other}).logits
        name, value = hook_to_replace(hook, theirs_of(point, other).contiguous(), cache)
        with torch.no_grad():
            replacing = [(name, lambda _, hook, value=value: value)]
            assert_same(replaced, bridge.run_with_hooks(IDS, fwd_hooks=replacing, **arguments), point)
        assert (replaced - logits).abs().max() > 1e-3, point
        changes[point] = (name, torch.zeros_like(value, requires_grad=True))
    direction = torch.randn(logits.shape, generator=generator)
    adding = [(name, lambda value, hook, zero=zero: value + zero) for name, zero in changes.values()]
    output = bridge.run_with_hooks(IDS, fwd_hooks=adding, **arguments)
    expected = torch.autograd.grad((output * direction).sum(), [zero for _, zero in changes.values()])
    found = torch.autograd.grad((logits * direction).sum(), [activations[point] for point in changes])
    for point, gradient, other in zip(changes, found, expected, strict=True):
        assert_same(gradient, theirs_of(point, other), f"gradient of {point}")
