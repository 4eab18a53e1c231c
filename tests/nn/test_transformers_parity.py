"""Our encoders compute what models of Hugging Face's transformers do with the same random weights.

The families that can be imported are compared in tests/interop.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from interop.models import VOCAB
from interop.models import theirs as random_model
from torch import Tensor, nn

from nn.variants import CAUSAL, error
from tinyformer.nn import (
    Attention,
    Encoder,
    GatedFeedForward,
    LatentAttention,
    PreNormBlock,
    RMSNorm,
    RotaryPosition,
    TokenReadout,
    Transformer,
)

LAYERS, D_MODEL, D_FF, SEQ = 3, 42, 50, 37
# Sequences are longer than windows, and no number is round.
WINDOW, BASE, HEAD_DIM = 8, 700.0, 10
ROTARY = partial(RotaryPosition, SEQ + 2, base=BASE)

Weights = dict[str, Tensor]
Twins = tuple[nn.Module, Weights, Encoder]
"""Their model; its weights under our names; and our encoder, still without them."""


def hugging_face(family: str, **config: Any) -> nn.Module:
    """A model of theirs with random weights, without a readout."""
    return random_model(family, f"{family}Model", attn_implementation="eager", use_cache=False, **config)


def renamed(model: nn.Module, pairs: str) -> Weights:
    """The weights with regular expressions in their names replaced, one after the other: "old new old new"."""
    words, weights = pairs.split(), {}
    for name, weight in model.named_parameters():
        for old, ours in zip(words[::2], words[1::2], strict=True):
            name = re.sub(old, ours, name)  # noqa: PLW2901
        weights[name] = weight.detach().clone()
    return weights


def split(weights: Weights, fused: str, parts: Sequence[str], cut: Callable[[Tensor], Sequence[Tensor]]) -> None:
    """Replace each weight of a name by the parts that `cut` makes of it."""
    for name in [name for name in weights if f".{fused}." in name]:
        for part, piece in zip(parts, cut(weights.pop(name)), strict=True):
            weights[name.replace(f".{fused}.", f".{part}.")] = piece


def make(
    *,
    feed_forward: Callable[..., nn.Module],
    norm: Callable[..., nn.Module],
    attention: Any = Attention,
    block: Callable[..., nn.Module] = PreNormBlock,
    scaled_embedding: bool = False,
    **options: Any,
) -> Encoder:
    """An encoder with eager attention, which equals all other backends; `options` are those of the attention."""
    attention = partial(attention, D_MODEL, backend="eager", **options)
    made = partial(block, D_MODEL, attention, feed_forward, norm)
    return Encoder(VOCAB, LAYERS, D_MODEL, SEQ + 2, made, norm, scaled_embedding=scaled_embedding)


class OnlyStates(nn.Module):
    """Experts without their router's outputs."""

    def __init__(self, sublayer: nn.Module) -> None:
        super().__init__()
        self.sublayer = sublayer

    def forward(self, x: Tensor) -> Tensor:
        return self.sublayer(x)[0]


LLAMA_SIZES = {
    "hidden_size": D_MODEL,
    "intermediate_size": D_FF,
    "num_hidden_layers": LAYERS,
    "rope_parameters": {"rope_type": "default", "rope_theta": BASE},
}
GROUPED = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": HEAD_DIM}
LLAMA_NAMES = """
    embed_tokens token_embedding ^norm final_norm input_layernorm attention_norm
    post_attention_layernorm feed_forward_norm self_attn attention mlp feed_forward
"""
LLAMA: dict[str, Any] = {"norm": RMSNorm, "feed_forward": partial(GatedFeedForward, D_MODEL, D_FF)}
GROUPS: dict[str, Any] = {"num_heads": 6, "num_kv_heads": 2, "head_dim": HEAD_DIM}


def gpt_oss() -> Twins:
    """Sinks, windows in every other layer, biases; our feed-forward network is replaced by their experts."""
    experts = {"experts_implementation": "eager", "num_local_experts": 4, "num_experts_per_tok": 2}
    theirs = hugging_face("GptOss", **LLAMA_SIZES, **GROUPED, **experts, sliding_window=WINDOW)
    weights = renamed(theirs, r"self_attn\.sinks self_attn.sink mlp\. mlp.sublayer." + LLAMA_NAMES)
    mlps = iter(layer.mlp for layer in theirs.layers)
    parts = {"norm": partial(RMSNorm, eps=1e-5), "feed_forward": lambda: OnlyStates(next(mlps))}
    ours = make(**parts, **GROUPS, bias=True, position=ROTARY, sink=True, window=[WINDOW, None])
    return theirs, weights, ours


def deepseek_v2(q_rank: int | None) -> Twins:
    """Latent attention; no layer is a mixture of experts."""
    num_heads, rope_dim, kv_rank = 3, 6, 14
    ranks = {"kv_lora_rank": kv_rank, "q_lora_rank": q_rank, "first_k_dense_replace": LAYERS}
    dims = {"qk_nope_head_dim": HEAD_DIM, "v_head_dim": HEAD_DIM, "qk_rope_head_dim": rope_dim}
    theirs = hugging_face("DeepseekV2", **LLAMA_SIZES, **ranks, **dims, num_attention_heads=num_heads)

    def rope_in_halves(weight: Tensor) -> Tensor:
        """Our rotary pairs are halves; theirs are neighbours."""
        return torch.cat([weight[:-rope_dim], weight[-rope_dim::2], weight[1 - rope_dim :: 2]])

    def queries(weight: Tensor) -> Sequence[Tensor]:
        return [torch.cat([rope_in_halves(head) for head in weight.chunk(num_heads)])]

    def keys_and_values(weight: Tensor) -> Sequence[Tensor]:
        return [part.flatten(0, 1) for part in weight.unflatten(0, (num_heads, -1)).chunk(2, dim=1)]

    names = "kv_a_layernorm kv_latent_norm q_a_layernorm q_latent_norm q_a_proj q_down_proj" + LLAMA_NAMES
    weights = renamed(theirs, names)
    split(weights, "q_b_proj" if q_rank else "q_proj", ["q_proj"], queries)
    split(weights, "kv_b_proj", ["k_proj", "v_proj"], keys_and_values)
    from_input = ["kv_down_proj", "k_rope_proj"]
    split(weights, "kv_a_proj_with_mqa", from_input, lambda w: rope_in_halves(w).split([kv_rank, rope_dim]))
    sizes = {"num_heads": num_heads, "head_dim": HEAD_DIM, "rope_head_dim": rope_dim}
    latent = {"attention": LatentAttention, "kv_rank": kv_rank, "q_rank": q_rank}
    return theirs, weights, make(**LLAMA, **sizes, **latent, position=ROTARY)


def states_and_gradient(embedding: nn.Module, forward: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The last hidden states, and the gradient of the embedded tokens."""
    embedded: list[Tensor] = []
    hook = embedding.register_forward_hook(lambda module, args, output: embedded.append(output))
    states = forward(torch.randint(VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(1)))
    hook.remove()
    upstream = torch.randn(states.shape, generator=torch.Generator().manual_seed(2))
    return states.detach(), torch.autograd.grad(states, embedded[0], upstream)[0]


TWINS = {"gpt_oss": gpt_oss, **{f"mla-{rank}": partial(deepseek_v2, rank) for rank in (None, 11)}}


@pytest.mark.parametrize("twins", TWINS.values(), ids=TWINS)
def test_hidden_states_and_gradients_are_theirs(twins: Callable[[], Twins]) -> None:
    theirs, weights, ours = twins()
    ours.load_state_dict(weights)  # strict about names and shapes
    assert theirs.config._attn_implementation == "eager"
    expected = states_and_gradient(theirs.get_input_embeddings(), lambda ids: theirs(ids).last_hidden_state)
    actual = states_and_gradient(ours.eval().token_embedding, lambda ids: ours(ids, CAUSAL))
    for state_or_gradient, reference in zip(actual, expected, strict=True):
        assert error(state_or_gradient, reference) <= 1e-5


def qwen3_next_layer(eps: float) -> tuple[nn.Module, nn.Module, Weights, dict[str, Any]]:
    """Each element of the output has a gate; 0.4 of each head rotates, and norms are stored minus 1."""
    rotated = {"rope_parameters": LLAMA_SIZES["rope_parameters"] | {"partial_rotary_factor": 0.4}}
    types = {"layer_types": ["full_attention"] * LAYERS, "num_experts": 0, "mlp_only_layers": [*range(LAYERS)]}
    theirs = hugging_face("Qwen3Next", **LLAMA_SIZES | rotated, **GROUPED, **types, rms_norm_eps=eps)
    layer = theirs.layers[1].self_attn
    weights = {name: 1 + weight if "norm" in name else weight for name, weight in layer.state_dict().items()}
    q_proj, gate = weights["q_proj.weight"].unflatten(0, (6, 2, -1)).unbind(1)
    weights |= {"q_proj.weight": q_proj.flatten(0, 1), "output_gate.proj.weight": gate.flatten(0, 1)}
    weights["output_gate.proj.bias"] = torch.zeros(6 * HEAD_DIM)
    options = {"position": partial(ROTARY, fraction=0.4), "qk_norm": True, "gate": "elementwise"}
    return layer, theirs.rotary_emb, weights, options


def test_a_layer_of_qwen3_next_is_theirs() -> None:
    layer, rotary, weights, options = qwen3_next_layer(1e-2)
    ours = Attention(D_MODEL, **GROUPS, **options, qk_norm_eps=1e-2, backend="eager")
    ours.load_state_dict(weights)
    x, upstream = torch.randn(2, 2, SEQ, D_MODEL, generator=torch.Generator().manual_seed(1))
    rotation, hidden = rotary(x, torch.arange(SEQ)[None]), torch.full((SEQ, SEQ), -torch.inf).triu(1)
    expected, _ = layer(x.requires_grad_(), rotation, hidden[None, None])
    outputs = ours(x, CAUSAL), expected
    assert error(*outputs) <= 1e-5
    assert error(*(torch.autograd.grad(output, x, upstream)[0] for output in outputs)) <= 1e-5


def test_embeddings_are_scaled_and_logits_capped_as_in_gemma2() -> None:
    """The layers add nothing to the stream; the weights of their norms are 1 + w."""
    sizes = {**LLAMA_SIZES, **GROUPED, "final_logit_softcapping": 1.5}
    theirs = random_model("Gemma2", "Gemma2ForCausalLM", attn_implementation="eager", **sizes)
    encoder, ids = make(**LLAMA, **GROUPS, scaled_embedding=True), torch.arange(2 * SEQ).view(2, SEQ) % VOCAB
    ours = Transformer(encoder, partial(TokenReadout, softcap=1.5))
    with torch.no_grad():
        for layer, own in zip(theirs.model.layers, encoder.layers, strict=True):
            own.attention_residual.branch = own.feed_forward_residual.branch = 0
            layer.post_attention_layernorm.weight.fill_(-1)
            layer.post_feedforward_layernorm.weight.fill_(-1)
        encoder.token_embedding.weight.copy_(theirs.model.embed_tokens.weight)
        encoder.final_norm.weight.copy_(1 + theirs.model.norm.weight)
    expected, loss = theirs(ids, labels=ids), ours(ids[:, :-1], CAUSAL, targets=ids[:, 1:])
    (gradient,) = torch.autograd.grad(loss, encoder.token_embedding.weight)
    (reference,) = torch.autograd.grad(expected.loss, theirs.model.embed_tokens.weight)
    assert error(ours(ids, CAUSAL), expected.logits) <= 1e-5
    assert max(error(loss, expected.loss), error(gradient, reference)) <= 1e-5
