"""The model: plain PyTorch, without Lightning, Hydra or text.

In the order of a forward pass: `encoder` embeds tokens (`position`) and stacks `block`s; a block is an `attention` and
a `feed_forward`, each with a `norm` and a `residual`; attention compares queries with keys under a `mask`, by one of
several `backends`; the `readout` turns vectors into scores.
"""

from tinyformer.nn.attention import Attention, HeadGate
from tinyformer.nn.backends import BACKENDS, AttentionCase, attention_weights, select_backend
from tinyformer.nn.block import PostNormBlock, PreNormBlock
from tinyformer.nn.encoder import Encoder
from tinyformer.nn.feed_forward import FeedForward, GatedFeedForward
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.norm import LayerNorm, RMSNorm
from tinyformer.nn.position import LearnedPosition, RotaryPosition, SinusoidalPosition
from tinyformer.nn.readout import TokenReadout
from tinyformer.nn.residual import Residual
from tinyformer.nn.transformer import Transformer

__all__ = [
    "BACKENDS",
    "Attention",
    "AttentionCase",
    "AttentionMask",
    "Encoder",
    "FeedForward",
    "GatedFeedForward",
    "HeadGate",
    "LayerNorm",
    "LearnedPosition",
    "PostNormBlock",
    "PreNormBlock",
    "RMSNorm",
    "Residual",
    "RotaryPosition",
    "SinusoidalPosition",
    "TokenReadout",
    "Transformer",
    "attention_weights",
    "select_backend",
]
