"""Peers for training and generation: the same transformer in other libraries.

Each peer is made for a `Shape`, with tied embeddings, no dropout and its fused attention, and takes over the weights
of our network. So both compute the same function, which a test checks, and losses differ only by rounding, a peer's
biases and its activation; with each library's own initialisation they would differ by chance.
"""

import importlib.util
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tinyformer.nn import Transformer

CLOSE_PARAMETERS = 0.01
"""The largest relative difference between the numbers of parameters."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model and of its batches.

    Args:
        name: the name in the table.
        num_layers: number of blocks.
        d_model: width of the residual stream.
        num_heads: number of attention heads.
        seq_len: sequence length in tokens.
        batch_size: number of sequences.
    """

    name: str
    num_layers: int
    d_model: int
    num_heads: int
    seq_len: int
    batch_size: int

    @property
    def overrides(self) -> list[str]:
        """The same in our config."""
        return [
            f"model.num_layers={self.num_layers}",
            f"model.d_model={self.d_model}",
            f"model.num_heads={self.num_heads}",
            f"model.max_seq_len={self.seq_len}",
            f"data.batch_size={self.batch_size}",
        ]

    def __str__(self) -> str:
        return f"{self.num_layers} x {self.d_model}, T {self.seq_len}, B {self.batch_size}"


SHAPES = {
    "small": Shape("small", num_layers=4, d_model=128, num_heads=4, seq_len=64, batch_size=12),
    "mid": Shape("mid", num_layers=6, d_model=384, num_heads=6, seq_len=256, batch_size=16),
}
QUICK = Shape("quick", num_layers=2, d_model=128, num_heads=2, seq_len=32, batch_size=4)
"""A shape with which everything can be tried out in seconds."""

GPT: tuple[str, ...] = ("position=learned", "norm=layer_norm", "feed_forward=gelu")
LLAMA: tuple[str, ...] = ("position=rotary", "norm=rms_norm", "feed_forward=swiglu")
"""Overrides that make our network the same kind as a peer's."""


ATTENTION = tuple(f"encoder.layers.{{i}}.attention.{name}_proj.weight" for name in "qkv")
OURS = {
    "tokens": ("encoder.token_embedding.weight",),
    "positions": ("encoder.position.embedding.weight",),
    "attention_norm": ("encoder.layers.{i}.attention_norm.weight",),
    **dict(zip("qkv", ((name,) for name in ATTENTION), strict=True)),
    "qkv": ATTENTION,
    "output": ("encoder.layers.{i}.attention.o_proj.weight",),
    "feed_forward_norm": ("encoder.layers.{i}.feed_forward_norm.weight",),
    "gate": ("encoder.layers.{i}.feed_forward.gate_proj.weight",),
    "up": ("encoder.layers.{i}.feed_forward.up_proj.weight",),
    "down": ("encoder.layers.{i}.feed_forward.down_proj.weight",),
    "final_norm": ("encoder.final_norm.weight",),
}
"""Our weights by short names: a weight of layer `i`, or several that a peer holds in one matrix."""


@dataclass(frozen=True)
class Peer:
    """A library's transformer.

    Args:
        name: the name in the table.
        package: the package that has to be installed.
        like: overrides that make our network the same kind.
        make: makes the model, given a shape and the size of the vocabulary.
        logits: the logits of the model for a batch of tokens.
        weights: from its parameters' names to names in `OURS`; `{i}` is the layer, and `{even}` and `{odd}` are the
            sublayers of a model that numbers attention and feed-forward separately. Only biases may be left out: they
            are 0.
        generates: whether it generates with a cache.
        exact: whether it then computes exactly our function, not one close to it.
        as_it_comes: whether its settings are the library's own; only such peers are compared at defaults.
    """

    name: str
    package: str
    like: tuple[str, ...]
    make: Callable[[Shape, int], nn.Module]
    logits: Callable[[nn.Module, Tensor], Tensor]
    weights: Mapping[str, str]
    generates: bool = False
    exact: bool = True
    as_it_comes: bool = True

    @property
    def is_installed(self) -> bool:
        """Return True if its package is installed."""
        return importlib.util.find_spec(self.package) is not None

    def build(self, shape: Shape, ours: Transformer) -> nn.Module:
        """Make the model, with the weights of our network."""
        model = self.make(shape, ours.encoder.vocab_size).train()
        self._take_weights(model, ours)
        require_equal_parameters(self.name, num_parameters(model), ours.num_parameters())
        return model

    @torch.no_grad()
    def _take_weights(self, model: nn.Module, ours: Transformer) -> None:
        given, missing = ours.state_dict(), dict(model.named_parameters())
        for layer in range(len(ours.encoder.layers)):
            places = {"i": layer, "even": 2 * layer, "odd": 2 * layer + 1}
            for theirs, short in self.weights.items():
                name = theirs.format(**places)
                if name in missing:
                    weight = torch.cat([given[our.format(**places)] for our in OURS[short]])
                    module = model.get_submodule(name.rpartition(".")[0])
                    weight = weight.T if type(module).__name__ == "Conv1D" else weight
                    # A norm of x-transformers stores the difference of its weight from 1.
                    missing.pop(name).copy_(weight - float(getattr(module, "unit_offset", 0)))
        for name, bias in missing.items():
            assert name.endswith("bias"), name
            nn.init.zeros_(bias)


def num_parameters(model: nn.Module) -> int:
    """The number of trainable parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def require_equal_parameters(name: str, theirs: int, ours: int) -> None:
    """A comparison of models of different sizes would be none."""
    assert abs(theirs / ours - 1) <= CLOSE_PARAMETERS, f"{name} has {theirs:,} parameters, ours {ours:,}"


def gpt2(shape: Shape, vocab_size: int, activation: str = "gelu_new") -> nn.Module:
    """`transformers.GPT2LMHeadModel`, with biases, as GPT-2 has them.

    Args:
        shape: its sizes.
        vocab_size: number of tokens.
        activation: GPT-2's own is the tanh approximation of GELU, here in Python; "gelu" is ours, exact and one kernel.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocab_size,
            n_positions=shape.seq_len,
            n_embd=shape.d_model,
            n_layer=shape.num_layers,
            n_head=shape.num_heads,
            activation_function=activation,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=None,
            attn_implementation="sdpa",
        )
    )


def gpt2_exact_gelu(shape: Shape, vocab_size: int) -> nn.Module:
    """The same with our activation."""
    return gpt2(shape, vocab_size, "gelu")


def llama(shape: Shape, vocab_size: int) -> nn.Module:
    """`transformers.LlamaForCausalLM`, its feed-forward network as wide as ours: 8/3 d_model, up to a multiple of 8."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            max_position_embeddings=shape.seq_len,
            hidden_size=shape.d_model,
            intermediate_size=-(-8 * shape.d_model // 24) * 8,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=None,
            attn_implementation="sdpa",
        )
    )


def x_transformer(shape: Shape, vocab_size: int) -> nn.Module:
    """`x_transformers.TransformerWrapper` around its `Decoder`, with flash attention."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit.script, while it is imported
        from x_transformers import Decoder, TransformerWrapper

    model = TransformerWrapper(
        num_tokens=vocab_size,
        max_seq_len=shape.seq_len,
        tie_embedding=True,
        tie_embedding_scale=1.0,
        attn_layers=Decoder(
            dim=shape.d_model,
            depth=shape.num_layers,
            heads=shape.num_heads,
            attn_dim_head=shape.d_model // shape.num_heads,
            attn_flash=True,
        ),
    )
    # Like the scale above, as all others have it; its own 1 / √d_model costs as much time.
    model.pos_emb.scale = 1.0
    return model


class TiedTransformer(nn.Module):
    """Embeddings of tokens and positions, and a readout tied to the former; a subclass encodes between them.

    Args:
        shape: its sizes.
        vocab_size: number of tokens.
    """

    def __init__(self, shape: Shape, vocab_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, shape.d_model)
        self.positions = nn.Embedding(shape.seq_len, shape.d_model)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the next token."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return nn.functional.linear(self.encode(self.tokens(tokens) + self.positions(positions)), self.tokens.weight)


class TorchTransformer(TiedTransformer):
    """Around `torch.nn.TransformerEncoder`."""

    def __init__(self, shape: Shape, vocab_size: int) -> None:
        super().__init__(shape, vocab_size)
        layer = nn.TransformerEncoderLayer(
            shape.d_model,
            shape.num_heads,
            4 * shape.d_model,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
            bias=False,
        )
        norm = nn.LayerNorm(shape.d_model, bias=False)
        self.encoder = nn.TransformerEncoder(layer, shape.num_layers, norm, enable_nested_tensor=False)
        mask = nn.Transformer.generate_square_subsequent_mask(shape.seq_len)
        self.register_buffer("mask", mask)

    def encode(self, x: Tensor) -> Tensor:
        """The encoder under a causal mask."""
        return self.encoder(x, mask=self.mask, is_causal=True)


class PlainGPT(TiedTransformer):
    """GPT-2 as short training scripts write it: plain modules, one projection to queries, keys and values."""

    def __init__(self, shape: Shape, vocab_size: int) -> None:
        super().__init__(shape, vocab_size)
        self.blocks = nn.Sequential(*(PlainBlock(shape.d_model, shape.num_heads) for _ in range(shape.num_layers)))
        self.norm = nn.LayerNorm(shape.d_model, bias=False)

    def encode(self, x: Tensor) -> Tensor:
        """Block after block, then a norm."""
        return self.norm(self.blocks(x))


class PlainBlock(nn.Module):
    """A block of `PlainGPT`.

    Args:
        d_model: width of the residual stream.
        num_heads: number of attention heads.
    """

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(d_model, bias=False), nn.LayerNorm(d_model, bias=False)
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model, bias=False), nn.Linear(d_model, d_model, bias=False)
        self.up, self.down = nn.Linear(d_model, 4 * d_model, bias=False), nn.Linear(4 * d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then a feed-forward network."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def called(model: nn.Module, tokens: Tensor) -> Tensor:
    """The logits of a model that returns them."""
    return model(tokens)


def of_transformers(model: nn.Module, tokens: Tensor) -> Tensor:
    """The logits of a model of `transformers`, without the cache that it would fill even in training."""
    result: Any = model(input_ids=tokens, use_cache=False)
    return result.logits


GPT2_WEIGHTS = {
    "transformer.wte.weight": "tokens",
    "transformer.wpe.weight": "positions",
    "transformer.h.{i}.ln_1.weight": "attention_norm",
    "transformer.h.{i}.attn.c_attn.weight": "qkv",
    "transformer.h.{i}.attn.c_proj.weight": "output",
    "transformer.h.{i}.ln_2.weight": "feed_forward_norm",
    "transformer.h.{i}.mlp.c_fc.weight": "up",
    "transformer.h.{i}.mlp.c_proj.weight": "down",
    "transformer.ln_f.weight": "final_norm",
}
LLAMA_WEIGHTS = {
    "model.embed_tokens.weight": "tokens",
    "model.layers.{i}.input_layernorm.weight": "attention_norm",
    "model.layers.{i}.self_attn.q_proj.weight": "q",
    "model.layers.{i}.self_attn.k_proj.weight": "k",
    "model.layers.{i}.self_attn.v_proj.weight": "v",
    "model.layers.{i}.self_attn.o_proj.weight": "output",
    "model.layers.{i}.post_attention_layernorm.weight": "feed_forward_norm",
    "model.layers.{i}.mlp.gate_proj.weight": "gate",
    "model.layers.{i}.mlp.up_proj.weight": "up",
    "model.layers.{i}.mlp.down_proj.weight": "down",
    "model.norm.weight": "final_norm",
}
X_WEIGHTS = {
    "token_emb.emb.weight": "tokens",
    "pos_emb.emb.weight": "positions",
    "attn_layers.layers.{even}.0.0.gamma": "attention_norm",
    "attn_layers.layers.{even}.1.to_q.weight": "q",
    "attn_layers.layers.{even}.1.to_k.weight": "k",
    "attn_layers.layers.{even}.1.to_v.weight": "v",
    "attn_layers.layers.{even}.1.to_out.weight": "output",
    "attn_layers.layers.{odd}.0.0.gamma": "feed_forward_norm",
    "attn_layers.layers.{odd}.1.ff.0.0.weight": "up",
    "attn_layers.layers.{odd}.1.ff.2.weight": "down",
    "attn_layers.final_norm.gamma": "final_norm",
}
TORCH_WEIGHTS = {
    "tokens.weight": "tokens",
    "positions.weight": "positions",
    "encoder.layers.{i}.norm1.weight": "attention_norm",
    "encoder.layers.{i}.self_attn.in_proj_weight": "qkv",
    "encoder.layers.{i}.self_attn.out_proj.weight": "output",
    "encoder.layers.{i}.norm2.weight": "feed_forward_norm",
    "encoder.layers.{i}.linear1.weight": "up",
    "encoder.layers.{i}.linear2.weight": "down",
    "encoder.norm.weight": "final_norm",
}

PLAIN_WEIGHTS = {
    "tokens.weight": "tokens",
    "positions.weight": "positions",
    "blocks.{i}.norm1.weight": "attention_norm",
    "blocks.{i}.qkv.weight": "qkv",
    "blocks.{i}.out.weight": "output",
    "blocks.{i}.norm2.weight": "feed_forward_norm",
    "blocks.{i}.up.weight": "up",
    "blocks.{i}.down.weight": "down",
    "norm.weight": "final_norm",
}

PEERS = (
    Peer("transformers GPT-2", "transformers", GPT, gpt2, of_transformers, GPT2_WEIGHTS, generates=True, exact=False),
    Peer(
        "transformers GPT-2, exact GELU",
        "transformers",
        GPT,
        gpt2_exact_gelu,
        of_transformers,
        GPT2_WEIGHTS,
        as_it_comes=False,
    ),
    Peer("x-transformers", "x_transformers", GPT, x_transformer, called, X_WEIGHTS),
    Peer("torch.nn.TransformerEncoder", "torch", GPT, TorchTransformer, called, TORCH_WEIGHTS),
    Peer("transformers Llama", "transformers", LLAMA, llama, of_transformers, LLAMA_WEIGHTS, generates=True),
)
"""All of them but a plain PyTorch loop of our own network, which `measure` makes from the network itself."""

GPU_PEERS = (Peer("plain GPT", "torch", GPT, PlainGPT, called, PLAIN_WEIGHTS), PEERS[1])
"""The peers that `gpu.py` trains beside ours, compiled: a plain script, and `transformers`."""
