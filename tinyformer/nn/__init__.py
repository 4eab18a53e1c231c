"""The model: plain PyTorch, without Lightning, Hydra or text.

To read it from the inside out: `attention` projects tokens to queries, keys and values, and back (`latent` and
`differential` are other ways to do so); `kernels.eager` opens with the definition, softmax(q kᵀ / √head_dim) v;
`softmax` holds the options that change it, a `mask`, a `score`, a relative `position`, and calls one of the `kernels`,
which `resolve` selects before training. A `cache` keeps keys and values for decoding, a `gate` scales heads, and
`prune` removes them (`heads`). A `block` is attention and `feed_forward`, each with a `norm` and a `residual`
connection; the `encoder` embeds tokens and stacks blocks, a `readout` turns their output into scores of tokens
(`vocabulary`) or, after `pooling`, of classes; the `transformer` is both, initialised by `init`. In an
`encoder_decoder`, a `decoder` attends to the encoder's output by cross-attention; what both have is a `network`.
"""

from tinyformer.batch import IGNORED
from tinyformer.nn.attention import QKV, Attention, AttentionCall, BaseAttention
from tinyformer.nn.block import Context, PostNormBlock, PreNormBlock
from tinyformer.nn.cache import Cache, LayerCache
from tinyformer.nn.decoder import Decoder
from tinyformer.nn.differential import DifferentialAttention
from tinyformer.nn.encoder import Encoder
from tinyformer.nn.encoder_decoder import EncoderDecoder
from tinyformer.nn.feed_forward import FeedForward, GatedFeedForward
from tinyformer.nn.gate import HeadGate, OutputGate
from tinyformer.nn.kernels.case import AttentionCase, Feature
from tinyformer.nn.kernels.eager import AttentionMaps, attention_weights
from tinyformer.nn.kernels.support import BACKENDS, LACKS, select_backend
from tinyformer.nn.latent import LatentAttention
from tinyformer.nn.mask import AttentionMask
from tinyformer.nn.network import Network
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
from tinyformer.nn.readout import ClassReadout, MaskedTokenReadout, SpanReadout, TokenReadout
from tinyformer.nn.residual import Residual
from tinyformer.nn.resolve import backend_refusal, kernel_of_layer, resolve_backend
from tinyformer.nn.score import SCORES, ScaledDotScore, ScoreMod, Scoring
from tinyformer.nn.transformer import Transformer
from tinyformer.nn.vocabulary import vocabulary_cross_entropy

__all__ = [
    "BACKENDS",
    "IGNORED",
    "LACKS",
    "POOLINGS",
    "QKV",
    "SCORES",
    "ALiBi",
    "Attention",
    "AttentionCall",
    "AttentionCase",
    "AttentionMaps",
    "AttentionMask",
    "BaseAttention",
    "Cache",
    "ClassReadout",
    "Context",
    "Decoder",
    "DifferentialAttention",
    "Encoder",
    "EncoderDecoder",
    "Feature",
    "FeedForward",
    "GatedFeedForward",
    "HeadGate",
    "LatentAttention",
    "LayerCache",
    "LayerNorm",
    "LearnedPosition",
    "MaskedTokenReadout",
    "Network",
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
    "SpanReadout",
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
