"""Our encoders compute what models of Hugging Face's transformers do with the same random weights.

GPT-2, BERT, Llama, Mistral, T5, BART and Marian are compared in tests/interop.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from interop.models import NEOX, VOCAB
from interop.models import theirs as random_model
from torch import Tensor, nn

from nn.model_cases import BLOCKS
from nn.variants import CAUSAL, error
from tinyformer.nn import (
    Attention,
    Encoder,
    FeedForward,
    GatedFeedForward,
    LatentAttention,
    LayerNorm,
    PreNormBlock,
    RelativePosition,
    RMSNorm,
    RotaryPosition,
    TokenReadout,
    Transformer,
    by_layer,
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


def qwen3() -> Twins:
    """Queries and keys are normalised before they are rotated."""
    theirs = hugging_face("Qwen3", **LLAMA_SIZES, **GROUPED)
    ours = make(**LLAMA, **GROUPS, position=ROTARY, qk_norm=True)
    return theirs, renamed(theirs, LLAMA_NAMES), ours


def qwen2() -> Twins:
    """Queries, keys and values have biases, the output has none."""
    theirs = hugging_face("Qwen2", **LLAMA_SIZES, **GROUPED)
    return theirs, renamed(theirs, LLAMA_NAMES), make(**LLAMA, **GROUPS, position=ROTARY, bias="qkv")


def gpt_neo() -> Twins:
    """Only the output has a bias; scores are not scaled, and every other layer is local; without its positions."""
    sizes = {"hidden_size": D_MODEL, "intermediate_size": D_FF, "num_layers": LAYERS, "num_heads": 6}
    types = [[["global", "local"], 1], [["global"], 1]]
    theirs = hugging_face("GPTNeo", **sizes, attention_types=types, window_size=WINDOW, max_position_embeddings=SEQ)
    torch.nn.init.zeros_(theirs.wpe.weight)
    names = r"attn\.attention attention out_proj o_proj ln_1 attention_norm ln_2 feed_forward_norm mlp\.c_fc"
    names += r" feed_forward.up_proj mlp\.c_proj feed_forward.down_proj ln_f final_norm wte token_embedding ^h layers"
    weights = renamed(theirs, names)
    del weights["wpe.weight"]
    parts = {"norm": LayerNorm, "feed_forward": partial(FeedForward, D_MODEL, D_FF, "gelu_tanh", bias=True)}
    return theirs, weights, make(**parts, num_heads=6, scale=1.0, bias="o", window=[None, WINDOW])


def smollm3() -> Twins:
    """Every third layer has no position."""
    theirs = hugging_face("SmolLM3", **LLAMA_SIZES, **GROUPED, no_rope_layer_interval=3)
    kinds = partial(by_layer, ["rotary", "rotary", "none"], {"rotary": ROTARY, "none": RelativePosition})
    return theirs, renamed(theirs, LLAMA_NAMES), make(**LLAMA, **GROUPS, position=kinds)


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


def parallel(family: str, activation: str, block: str, **config: Any) -> Twins:
    """Attention and feed-forward network side by side: with a norm each in GPT-NeoX, with one norm in Phi."""
    theirs = hugging_face(family, **NEOX | {"num_hidden_layers": LAYERS, "max_position_embeddings": SEQ + 2, **config})
    names = """
        embed_in token_embedding ^final_layer_?norm final_norm dense_h_to_4h|fc1 up_proj dense_4h_to_h|fc2 down_proj
        dense o_proj query_key_value qkv
    """
    weights = renamed(theirs, names + LLAMA_NAMES)
    qkv = ["q_proj", "k_proj", "v_proj"]
    split(weights, "qkv", qkv, lambda w: [*w.unflatten(0, (7, 3, -1)).transpose(0, 1).flatten(1, 2)])
    feed_forward = partial(FeedForward, D_MODEL, D_FF, activation, bias=True)
    options = {"bias": True, "position": ROTARY, "num_heads": 7, "block": BLOCKS[block]}
    return theirs, weights, make(norm=LayerNorm, feed_forward=feed_forward, **options)


def gemma2() -> Twins:
    """Norms before and after each sublayer, whose weights are stored minus 1; the embeddings are scaled."""
    cap = {"query_pre_attn_scalar": HEAD_DIM, "attn_logit_softcapping": 0.5, "sliding_window": WINDOW}
    theirs = hugging_face("Gemma2", **LLAMA_SIZES, **GROUPED, **cap)
    names = "post_(.*)_layernorm \\1_output_norm pre_feedforward_layernorm feed_forward_norm feedforward feed_forward"
    weights = renamed(theirs, names + LLAMA_NAMES)
    weights |= {name: 1 + weight for name, weight in weights.items() if "norm" in name}
    weights["token_embedding.weight"] *= D_MODEL**0.5
    options = {"softcap": 0.5, "window": [WINDOW, None], "position": ROTARY, "block": BLOCKS["sandwich"]}
    feed_forward = partial(GatedFeedForward, D_MODEL, D_FF, "gelu_tanh")
    return theirs, weights, make(feed_forward=feed_forward, norm=RMSNorm, **GROUPS, **options)


def olmo2() -> Twins:
    """Norms of outputs alone; theirs of queries and keys, over all heads at once, are left out."""
    theirs = hugging_face("Olmo2", **LLAMA_SIZES, **GROUPED)
    for layer in theirs.layers:
        layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()
    names = "post_attention_layernorm attention_norm post_feedforward_layernorm feed_forward_norm"
    parts: dict[str, Any] = LLAMA | {"norm": partial(RMSNorm, eps=1e-5), "block": BLOCKS["reordered"]}
    return theirs, renamed(theirs, names + LLAMA_NAMES), make(**parts, **GROUPS, position=ROTARY)


def states_and_gradient(embedding: nn.Module, forward: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The last hidden states, and the gradient of the embedded tokens."""
    embedded: list[Tensor] = []
    hook = embedding.register_forward_hook(lambda module, args, output: embedded.append(output))
    states = forward(torch.randint(VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(1)))
    hook.remove()
    upstream = torch.randn(states.shape, generator=torch.Generator().manual_seed(2))
    return states.detach(), torch.autograd.grad(states, embedded[0], upstream)[0]


TWINS = {of.__name__: of for of in (qwen2, qwen3, smollm3, gpt_neo, gpt_oss, gemma2, olmo2)}
TWINS |= {f"mla-{rank}": partial(deepseek_v2, rank) for rank in (None, 11)}
TWINS["gpt_neox"] = partial(parallel, "GPTNeoX", "gelu", "parallel", use_parallel_residual=True)
TWINS["phi"] = partial(parallel, "Phi", "gelu_tanh", "shared", hidden_act="gelu_new")


@pytest.mark.parametrize("twins", TWINS.values(), ids=TWINS)
def test_hidden_states_and_gradients_are_theirs(twins: Callable[[], Twins]) -> None:
    theirs, weights, ours = twins()
    ours.load_state_dict(weights)  # strict about names and shapes
    assert theirs.config._attn_implementation == "eager"
    expected = states_and_gradient(theirs.get_input_embeddings(), lambda ids: theirs(ids).last_hidden_state)
    actual = states_and_gradient(ours.eval().token_embedding, lambda ids: ours(ids, CAUSAL))
    for state_or_gradient, reference in zip(actual, expected, strict=True):
        assert error(state_or_gradient, reference) <= 1e-5


def olmo2_layer(eps: float) -> tuple[nn.Module, nn.Module, Weights, dict[str, Any]]:
    """Queries and keys are normalised over all heads at once."""
    theirs = hugging_face("Olmo2", **LLAMA_SIZES, **GROUPED, rms_norm_eps=eps)
    layer = theirs.layers[1].self_attn
    return layer, theirs.rotary_emb, layer.state_dict(), {"position": ROTARY, "qk_norm": "projection"}


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


@pytest.mark.parametrize("twins", [olmo2_layer, qwen3_next_layer])
def test_a_layer_of_attention_is_theirs(twins: Callable[[float], tuple[nn.Module, nn.Module, Weights, Any]]) -> None:
    layer, rotary, weights, options = twins(1e-2)
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
