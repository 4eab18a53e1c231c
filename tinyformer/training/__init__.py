"""Training: the Lightning module, optimizers, schedules, callbacks and loggers."""

from tinyformer.training.callbacks import AttentionTelemetry, FiniteCheck, TrainingScores
from tinyformer.training.loggers import RunCSVLogger, RunWandbLogger
from tinyformer.training.module import TrainingModule
from tinyformer.training.optimizers import AdamW, CombinedOptimizer, MuonWithAdamW
from tinyformer.training.schedules import InverseSquareRoot, WarmupCosine, WarmupStableDecay

__all__ = [
    "AdamW",
    "AttentionTelemetry",
    "CombinedOptimizer",
    "FiniteCheck",
    "InverseSquareRoot",
    "MuonWithAdamW",
    "RunCSVLogger",
    "RunWandbLogger",
    "TrainingModule",
    "TrainingScores",
    "WarmupCosine",
    "WarmupStableDecay",
]
