from .attention import Attention, BaseAttention
from .block import Block, Context, ParallelBlock, PostNormBlock, PreNormBlock, ReorderedBlock, SandwichBlock
from .cache import Cache, LayerCache
from .differential import DifferentialAttention
from .heads import HeadGate, OutputGate, prune_heads
from .kernels.choose import BACKENDS, LACKS, Feature, KernelRequirements, select_backend
from .kernels.eager import AttentionMaps, attention_weights
from .latent import LatentAttention
from .layers import FeedForward, GatedFeedForward, LayerNorm, Residual, RMSNorm
from .maps import QKV, AttentionInputs
from .mask import AttentionMask
from .mixers import LSTM, BaseConv, TokenMixer
from .network import Decoder, Encoder, Network, kernel_of_layer, resolve_backend
from .pattern import by_layer
from .position import (
    ALiBi,
    LearnedPosition,
    RelativePosition,
    RotaryPosition,
    Shared,
    ShawPosition,
    SinusoidalPosition,
    T5Position,
)
from .readout import ClassReadout, MaskedTokenReadout, SpanReadout, StateReadout, TokenReadout, vocabulary_cross_entropy
from .score import SCORES, ScaledDotScore, ScoreMod, Scoring
from .side_inputs import SideInputs, ValueEmbedding, ValueResidual
from .softmax import AttentionOptions
from .transformer import EncoderDecoder, Transformer

__all__ = [
    "BACKENDS",
    "LACKS",
    "LSTM",
    "QKV",
    "SCORES",
    "ALiBi",
    "Attention",
    "AttentionInputs",
    "AttentionMaps",
    "AttentionMask",
    "AttentionOptions",
    "BaseAttention",
    "BaseConv",
    "Block",
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
    "KernelRequirements",
    "LatentAttention",
    "LayerCache",
    "LayerNorm",
    "LearnedPosition",
    "MaskedTokenReadout",
    "Network",
    "OutputGate",
    "ParallelBlock",
    "PostNormBlock",
    "PreNormBlock",
    "RMSNorm",
    "RelativePosition",
    "ReorderedBlock",
    "Residual",
    "RotaryPosition",
    "SandwichBlock",
    "ScaledDotScore",
    "ScoreMod",
    "Scoring",
    "Shared",
    "ShawPosition",
    "SideInputs",
    "SinusoidalPosition",
    "SpanReadout",
    "StateReadout",
    "T5Position",
    "TokenMixer",
    "TokenReadout",
    "Transformer",
    "ValueEmbedding",
    "ValueResidual",
    "attention_weights",
    "by_layer",
    "kernel_of_layer",
    "prune_heads",
    "resolve_backend",
    "select_backend",
    "vocabulary_cross_entropy",
]
