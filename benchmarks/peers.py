"""What our training and generation are compared with: the same transformer in other libraries.

Each peer is made for a `Shape`, with tied embeddings, no dropout, its fused attention, and weights drawn as ours are
(`init_like_ours`): with each library's own scheme the losses of the first steps would be the scheme's, not the model's.
"""

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of its batches.

    Args:
        name: for the table.
        num_layers: number of blocks.
        d_model: width of the residual stream.
        num_heads: of each attention.
        seq_len: T, in tokens.
        batch_size: sequences.
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
QUICK = Shape("quick", num_layers=2, d_model=64, num_heads=2, seq_len=32, batch_size=4)
"""With which everything is tried out, in seconds."""

GPT: tuple[str, ...] = ("position=learned", "norm=layer_norm", "feed_forward=gelu")
LLAMA: tuple[str, ...] = ("position=rotary", "norm=rms_norm", "feed_forward=swiglu")
"""Overrides that make our network the same kind as a peer's."""


@dataclass(frozen=True)
class Peer:
    """A library's transformer.

    Args:
        name: for the table.
        package: that has to be installed.
        like: overrides that make our network the same kind; a key of the comparison, too.
        make: makes it, given a shape and the size of the vocabulary.
        logits: its scores of a batch of tokens.
        residual_projections: parts of the names of the matrices whose output is added to the residual stream.
        generates: whether it generates with a cache.
    """

    name: str
    package: str
    like: tuple[str, ...]
    make: Callable[[Shape, int], nn.Module]
    logits: Callable[[nn.Module, Tensor], Tensor]
    residual_projections: tuple[str, ...]
    generates: bool = False

    @property
    def is_installed(self) -> bool:
        """Whether it can be compared with here."""
        return importlib.util.find_spec(self.package) is not None

    def build(self, shape: Shape, vocab_size: int, seed: int = 0) -> nn.Module:
        """The model, its weights drawn as ours are."""
        torch.manual_seed(seed)
        model = self.make(shape, vocab_size).train()
        init_like_ours(model, shape.num_layers, self.residual_projections)
        return model


@torch.no_grad()
def init_like_ours(model: nn.Module, num_layers: int, residual_projections: Sequence[str], std: float = 0.02) -> None:
    """GPT-2's scheme, as `tinyformer.nn.init`: N(0, std²), over √(2 num_layers) for residual projections, biases 0."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            is_residual = any(part in name for part in residual_projections)
            nn.init.normal_(parameter, std=std / math.sqrt(2 * num_layers) if is_residual else std)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


def gpt2(shape: Shape, vocab_size: int, activation: str = "gelu_new") -> nn.Module:
    """`transformers.GPT2LMHeadModel`, with biases, as GPT-2 has them.

    Args:
        shape: its sizes.
        vocab_size: number of tokens.
        activation: GPT-2's own is a tanh that approximates GELU, here in Python; "gelu" is ours, exact and one kernel.
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
    """The same with the activation that we have."""
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
    from x_transformers import Decoder, TransformerWrapper

    return TransformerWrapper(
        num_tokens=vocab_size,
        max_seq_len=shape.seq_len,
        tie_embedding=True,
        attn_layers=Decoder(
            dim=shape.d_model,
            depth=shape.num_layers,
            heads=shape.num_heads,
            attn_dim_head=shape.d_model // shape.num_heads,
            attn_flash=True,
        ),
    )


class TorchTransformer(nn.Module):
    """`torch.nn.TransformerEncoder` with embeddings of tokens and positions and a tied readout.

    Args:
        shape: its sizes.
        vocab_size: number of tokens.
    """

    def __init__(self, shape: Shape, vocab_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, shape.d_model)
        self.positions = nn.Embedding(shape.seq_len, shape.d_model)
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

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next token."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.encoder(self.tokens(tokens) + self.positions(positions), mask=self.mask, is_causal=True)
        return x @ self.tokens.weight.T


def called(model: nn.Module, tokens: Tensor) -> Tensor:
    """The scores of a model that returns them."""
    return model(tokens)


def of_transformers(model: nn.Module, tokens: Tensor) -> Tensor:
    """The scores of a model of `transformers`, which would fill a cache in training, too."""
    result: Any = model(input_ids=tokens, use_cache=False)
    return result.logits


PEERS = (
    Peer("transformers GPT-2", "transformers", GPT, gpt2, of_transformers, ("c_proj",), generates=True),
    Peer("transformers GPT-2, exact GELU", "transformers", GPT, gpt2_exact_gelu, of_transformers, ("c_proj",)),
    Peer("x-transformers", "x_transformers", GPT, x_transformer, called, ("to_out", "ff.2")),
    Peer("torch.nn.TransformerEncoder", "torch", GPT, TorchTransformer, called, ("out_proj", "linear2")),
    Peer(
        "transformers Llama", "transformers", LLAMA, llama, of_transformers, ("o_proj", "down_proj"), generates=True
    ),
)
"""All of them; a plain PyTorch loop of our own network is made from the network itself, see `measure`."""
