"""The model: plain PyTorch, without Lightning, Hydra or text.

In the order of a forward pass: `encoder` embeds tokens (`position`) and stacks `block`s; a block is an `attention` and
a `feed_forward`, each with a `norm` and a `residual`; attention (`multi_head`, `latent` or `differential`)
compares queries with keys under a `mask` by a `score`, which gives `weights`, on one of several `backends` (`support`
says which can, `resolve` settles on one), remembers them in a `cache`, and passes its heads through a `gate`, until
someone takes heads away (`prune`); the `readout` turns vectors into scores, of tokens (`vocabulary`) or, after
`pooling`, of classes.
"""

from tinyformer.batch import IGNORED
from tinyformer.nn.attention import BaseAttention
from tinyformer.nn.block import PostNormBlock, PreNormBlock
from tinyformer.nn.cache import Cache, LayerCache
from tinyformer.nn.differential import DifferentialAttention
from tinyformer.nn.encoder import Encoder
from tinyformer.nn.feed_forward import FeedForward, GatedFeedForward
from tinyformer.nn.gate import HeadGate, OutputGate
from tinyformer.nn.latent import LatentAttention
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.multi_head import Attention
from tinyformer.nn.norm import LayerNorm, RMSNorm
from tinyformer.nn.pooling import POOLINGS
from tinyformer.nn.position import (
    ALiBi,
    LearnedPosition,
    RelativePosition,
    RotaryPosition,
    Shared,
    ShawPosition,
    SinusoidalPosition,
    T5Position,
)
from tinyformer.nn.prune import prune_heads
from tinyformer.nn.readout import ClassReadout, MaskedTokenReadout, TokenReadout
from tinyformer.nn.residual import Residual
from tinyformer.nn.resolve import backend_refusal, kernel_of_layer, resolve_backend
from tinyformer.nn.score import SCORES, ScaledDotScore, ScoreMod, Scoring
from tinyformer.nn.support import BACKENDS, LACKS, AttentionCase, Feature, select_backend
from tinyformer.nn.transformer import Transformer
from tinyformer.nn.vocabulary import vocabulary_cross_entropy
from tinyformer.nn.weights import AttentionMaps, attention_weights

__all__ = [
    "BACKENDS",
    "IGNORED",
    "LACKS",
    "POOLINGS",
    "SCORES",
    "ALiBi",
    "Attention",
    "AttentionCase",
    "AttentionMaps",
    "AttentionMask",
    "BaseAttention",
    "Cache",
    "ClassReadout",
    "DifferentialAttention",
    "Encoder",
    "Feature",
    "FeedForward",
    "GatedFeedForward",
    "HeadGate",
    "LatentAttention",
    "LayerCache",
    "LayerNorm",
    "LearnedPosition",
    "MaskedTokenReadout",
    "OutputGate",
    "PostNormBlock",
    "PreNormBlock",
    "RMSNorm",
    "RelativePosition",
    "Residual",
    "RotaryPosition",
    "ScaledDotScore",
    "ScoreMod",
    "Scoring",
    "Shared",
    "ShawPosition",
    "SinusoidalPosition",
    "T5Position",
    "TokenReadout",
    "Transformer",
    "attention_weights",
    "backend_refusal",
    "kernel_of_layer",
    "prune_heads",
    "resolve_backend",
    "select_backend",
    "vocabulary_cross_entropy",
]
